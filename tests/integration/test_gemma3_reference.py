"""Gemma 3 with its real weights: the import, the tokenizer, and the committed tokens of transformers in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors import safe_open

from cluster.front.settings import FrontSettings, load_model
from cluster.front.tokenizer import TextTokenizer
from engine.model.config import ModelConfig, model_fingerprint
from engine.model.packaged_models import GEMMA3, assemble_gguf, find_gguf_pieces
from engine.runner import Runner
from tests.support.engine_model import GreedyLoop, real_model_dir, reference

WINDOW = 512
VOCAB_SIZE = 262_144
TOKENS_PATH = Path(__file__).parents[1] / "reference" / "gemma3_sentencepiece.json"
# Parts of a layer in the GGUF file, and in the checkpoint that is made of it.
PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@pytest.fixture(scope="module")
def model_dir() -> Path:
    directory, reason = real_model_dir(GEMMA3)
    if directory is None:
        pytest.skip(reason)
    return directory


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> Iterator[Runner]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield Runner.from_directory(model_dir, "float32", 300, 16, 2)
    torch.set_num_threads(num_threads)


def prompts() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = reference(GEMMA3)["prompts"]
    return entries


def test_every_weight_is_that_of_the_packaged_file(model_dir: Path, tmp_path: Path) -> None:
    """Dequantised by the gguf package, rounded to bfloat16; the file has the norms' weights plus 1.

    Of the embedding, every hundredth row.
    """
    tensors = gguf.GGUFReader(assemble_gguf(GEMMA3, find_gguf_pieces(GEMMA3), tmp_path)).tensors
    with safe_open(model_dir / "model.safetensors", "pt") as checkpoint:
        assert len(checkpoint.keys()) == len(tensors) == 2 + 18 * len(PARTS)
        for tensor in tensors:
            every = 100 if len(tensor.data) == VOCAB_SIZE else 1
            packaged = torch.from_numpy(gguf.dequantize(tensor.data[::every], tensor.tensor_type).copy())
            if "norm" in tensor.name:
                packaged = packaged - 1.0
            imported = checkpoint.get_tensor(checkpoint_name(tensor.name))[::every]
            assert torch.equal(imported, packaged.bfloat16()), tensor.name


def checkpoint_name(name: str) -> str:
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in whole:
        return whole[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{PARTS[part]}.weight"


def test_the_imported_model_is_the_references(model_dir: Path) -> None:
    config = ModelConfig.from_directory(model_dir)
    assert config.eos_token_ids == tuple(reference(GEMMA3)["eos_token_ids"]) == (1,)
    assert [layer.window for layer in config.layers] == [0 if index % 6 == 5 else WINDOW for index in range(18)]
    assert model_fingerprint(model_dir) == reference(GEMMA3)["model_fingerprint"]


def test_texts_are_cut_as_sentencepiece_does(model_dir: Path) -> None:
    tokenizer = TextTokenizer.from_directory(model_dir)
    cases = json.loads(TOKENS_PATH.read_text(encoding="utf-8"))
    assert len(cases) > 250
    for case in cases:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]
        assert tokenizer.encode(case["text"]) == [2, *case["ids"]]


def test_texts_come_back_token_by_token(model_dir: Path) -> None:
    tokenizer = TextTokenizer.from_directory(model_dir)
    for case in json.loads(TOKENS_PATH.read_text(encoding="utf-8")):
        detokenizer = tokenizer.detokenizer()
        pieces = [detokenizer.push([token_id]) for token_id in case["ids"]]
        assert "".join(pieces) + detokenizer.flush() == case["text"]


def test_a_front_serves_it_without_a_chat_template(model_dir: Path) -> None:
    served = load_model(FrontSettings(coordinator_address="", model_dir=model_dir, incarnation=1))
    assert (served.vocab_size, served.max_model_tokens, served.dtype) == (VOCAB_SIZE, 32_768, "bfloat16")
    assert not served.tokenizer.has_chat_template


def test_the_set_is_the_one_that_is_asked_for() -> None:
    entries = prompts()
    long_enough = [entry for entry in entries if len(entry["output_ids"]) >= 32]
    assert len(long_enough) >= 24
    assert all(len(entry["output_ids"]) == 40 or entry["output_ids"][-1] == 1 for entry in entries)
    lengths = {len(entry["prompt_ids"]) for entry in entries}
    assert {WINDOW - 1, WINDOW, WINDOW + 1} <= lengths and max(lengths) > 2 * WINDOW
    # Answers that leave the window while they are written.
    assert any(length < WINDOW < length + 40 for length in lengths)
    assert {entry["name"].split("_")[0] for entry in entries} == {"length", "chat", "language", "code"}


def test_alone(runner: Runner) -> None:
    """Some prompts of every kind, each by itself and in one chunk."""
    others = [entry for entry in prompts() if not entry["name"].startswith("length_")]
    around_window = [entry for entry in prompts() if entry["name"] in ("length_490_seed_0", "length_513_seed_0")]
    for entry in [*around_window, *others[::4]]:
        loop = GreedyLoop(runner, chunk_size=2048, max_running=1)
        assert loop.generate([entry["prompt_ids"]], 40) == [entry["output_ids"]], entry["name"]


@pytest.mark.timeout(900)
def test_all_at_once_in_chunks(runner: Runner) -> None:
    """All prompts through a pool that holds some of them, prompts in chunks beside decoding sequences."""
    loop = GreedyLoop(runner, chunk_size=200, max_running=16)
    outputs = loop.generate([entry["prompt_ids"] for entry in prompts()], 40)
    assert loop.max_batch == 16
    pairs = zip(prompts(), outputs, strict=True)
    assert [entry["name"] for entry, output in pairs if output != entry["output_ids"]] == []
