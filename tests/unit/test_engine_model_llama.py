"""The forward pass of small random models: against transformers, over chunks and batches, with and without kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.kv_cache import KVCache, KVLayout
from engine.attention.torch_reference import TorchReferenceBackend
from engine.model.config import ModelConfig, RopeConfig
from engine.model.linear import Linear, can_pack, padded_num_rows
from engine.model.llama import LlamaModel
from engine.model.rope import inverse_frequencies
from engine.model.weights import load_weights
from engine.runner import Runner
from tests.support.engine_model import TINY_CONFIG, GreedyLoop, write_tiny_model

PROMPT_LENGTHS = [1, 2, 7, 8, 9, 16, 23, 40, 64, 65]
MAX_TOKENS = 24

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied_one_kv_head": {"tie_word_embeddings": False, "num_key_value_heads": 1},
    "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    "odd_sizes": {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 12},
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 96, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def make_runner(model_dir: Path, dtype: str = "float32", num_blocks: int = 64) -> Runner:
    return Runner.from_directory(model_dir, dtype, num_blocks, 8, 1)


def transformers_greedy(model_dir: Path) -> list[list[int]]:
    transformers = pytest.importorskip("transformers")
    raw = json.loads((model_dir / "config.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, config=transformers.LlamaConfig(**raw), dtype=torch.float32
    )
    outputs = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            generated = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0
            )
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_those_of_transformers(tmp_path: Path, variant: str) -> None:
    write_tiny_model(tmp_path, **VARIANTS[variant])
    expected = transformers_greedy(tmp_path)
    assert len({token for output in expected for token in output}) > 10, "the model is not degenerate"
    runner = make_runner(tmp_path)
    alone = [GreedyLoop(runner, chunk_size=256, max_running=1).generate([p], MAX_TOKENS)[0] for p in prompts()]
    assert alone == expected
    loop = GreedyLoop(runner, chunk_size=11, max_running=6)
    assert loop.generate(prompts(), MAX_TOKENS) == expected
    assert loop.max_batch > 3


def test_reference_backend_gives_the_same_tokens(tmp_path: Path) -> None:
    config = write_tiny_model(tmp_path)
    expected = GreedyLoop(make_runner(tmp_path), chunk_size=64, max_running=4).generate(prompts(), MAX_TOKENS)
    model = LlamaModel(config, "float32", load_weights(tmp_path, config, "float32"), TorchReferenceBackend())
    cache = KVCache.allocate(KVLayout.for_model(config, dtype="float32", num_blocks=64, block_size=8))
    loop = GreedyLoop(Runner(model, cache), chunk_size=64, max_running=4)
    assert loop.generate(prompts(), MAX_TOKENS) == expected


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    """Same weights, rounded: logits differ by rounding only."""
    from engine.core.step import StepPlan
    from tests.support.engine_model import make_step

    write_tiny_model(tmp_path)
    prompt = prompts()[-1]
    plan = StepPlan(step_id=0, sequences=[make_step(prompt, 0, range(9))])
    wide = make_runner(tmp_path, "float32").logits(plan)
    narrow = make_runner(tmp_path, "bfloat16").logits(plan)
    assert (narrow - wide).abs().max() < 0.05 * wide.abs().max()
    assert not torch.equal(narrow, narrow.bfloat16().float()), "logits are not rounded"


def test_llama3_rope_blends_between_the_two_limits() -> None:
    rope = RopeConfig(
        kind="llama3", theta=10_000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
    )
    plain = inverse_frequencies(RopeConfig(theta=10_000.0), 64)
    blended = inverse_frequencies(rope, 64)
    assert blended[0] == plain[0]
    assert blended[-1] == pytest.approx(float(plain[-1]) / 4)
    assert bool((blended <= plain).all() and (blended >= plain / 4 * 0.999).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_a_product_for_any_number_of_rows(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(40, 24, generator=generator).to(dtype)
    linear = Linear(weight)
    for num_rows in (1, 2, 9, 33):
        x = torch.randn(num_rows, 24, generator=generator).to(dtype)
        expected = (x.float() @ weight.float().T).to(dtype)
        torch.testing.assert_close(linear(x), expected, atol=1e-4, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.skipif(not can_pack(torch.float32), reason="torch's own products promise no such thing")
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(576, 960), (1536, 576)])
def test_in_float32_a_row_does_not_depend_on_how_many_there_are(num_inputs: int, num_outputs: int) -> None:
    """To the last bit, in shapes of the demo model: else a seed gives other tokens alone than beside others."""
    generator = torch.Generator().manual_seed(7)
    linear = Linear(torch.randn(num_outputs, num_inputs, generator=generator))
    x = torch.randn(64, num_inputs, generator=generator)
    whole = linear(x)
    for num_rows in (1, 2, 3, 8, 20, 48):
        assert torch.equal(linear(x[:num_rows]), whole[:num_rows]), f"{num_rows} rows"


def test_padding_uses_few_sizes_and_wastes_little() -> None:
    padded = [padded_num_rows(count) for count in range(1, 1025)]
    assert all(size >= count for count, size in enumerate(padded, start=1))
    assert all(size - count < max(4, size // 4) for count, size in enumerate(padded, start=1))
    assert len(set(padded)) < 80
    assert padded_num_rows(0) == 0


def test_kv_cache_lives_in_the_callers_buffer() -> None:
    layout = KVLayout.for_model(ModelConfig.from_dict(TINY_CONFIG), dtype="bfloat16", num_blocks=4, block_size=8)
    buffer = bytearray(layout.size_bytes + 64)
    cache = KVCache.from_buffer(buffer, layout)
    cache.pool_BLKCSD[1] = 1.0
    block = layout.block_size_bytes
    assert bytes(buffer[:block]) == bytes(block)
    assert bytes(buffer[block : block + 2]) == b"\x80\x3f"
    assert bytes(buffer[2 * block :]) == bytes(len(buffer) - 2 * block)
    with pytest.raises(ValueError, match="holds 10 bytes"):
        KVCache.from_buffer(bytearray(10), layout)
    with pytest.raises(ValueError, match="writable"):
        KVCache.from_buffer(memoryview(bytes(layout.size_bytes)), layout)
    with pytest.raises(ValueError, match="num_blocks"):
        KVLayout.for_model(ModelConfig.from_dict(TINY_CONFIG), dtype="float32", num_blocks=0, block_size=8)
