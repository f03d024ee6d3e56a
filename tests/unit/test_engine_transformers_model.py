"""Models without a family of Baton's own, run by the code of transformers: its tokens, or the model is refused."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.gpt_neox import modeling_gpt_neox

from engine.attention.base import Backend
from engine.attention.cpu import NativeCpuBackend
from engine.attention.torch_reference import TorchReferenceBackend
from engine.core.step import StepPlan
from engine.model.config_fields import UnsupportedModelError
from engine.model.safetensors_file import ModelWeightsError
from engine.model.select import read_model
from engine.model.transformers_attention import _mask_fault
from engine.model.transformers_config import TransformersConfig
from engine.runner import Runner
from tests.support.engine_model import GreedyLoop, make_step
from tests.support.transformers_models import generate, prompts, randomise, save_model

MAX_TOKENS = 12
IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SHAPE: dict[str, Any] = {
    **IDS,
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
GPT2 = {**IDS, "vocab_size": 96, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256}

# Name of the model's class -> (configuration class, arguments, key/value heads).
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "GPT2LMHeadModel": ("GPT2Config", GPT2, 6),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SHAPE, 6),
    "GPTBigCodeForCausalLM": ("GPTBigCodeConfig", GPT2, 1),
    "PhiForCausalLM": ("PhiConfig", GROUPED, 2),
    "StableLmForCausalLM": ("StableLmConfig", {**GROUPED, "use_qkv_bias": True}, 2),
    "Olmo2ForCausalLM": ("Olmo2Config", GROUPED, 2),
    "Cohere2ForCausalLM": ("Cohere2Config", {**GROUPED, "sliding_window": 9, "sliding_window_pattern": 2}, 2),
    "GraniteForCausalLM": ("GraniteConfig", {**GROUPED, "attention_multiplier": 0.3, "logits_scaling": 3.0}, 2),
    "OlmoeForCausalLM": ("OlmoeConfig", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}, 2),
    # It makes a mask for sliding layers too, of which it has none: one with a window of 0.
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 24},
        2,
    ),
    # A family of Baton's own, but an activation that it does not have.
    "LlamaForCausalLM": ("LlamaConfig", {**GROUPED, "hidden_act": "gelu"}, 2),
}
# Configuration class -> (arguments, why the model is refused).
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "BloomConfig": ({**IDS, "vocab_size": 96, "hidden_size": 48, "n_layer": 2, "n_head": 6}, "Bloom.* has ALiBi"),
    "Gemma2Config": ({**GROUPED, "head_dim": 16}, r"Gemma2.* caps .*attn_logit_softcapping"),
    "GptOssConfig": ({**GROUPED, "head_dim": 16, "num_local_experts": 4}, "GptOss.* takes more .*: s_aux"),
    "Llama4TextConfig": ({**GROUPED, "head_dim": 8, "num_local_experts": 2}, "Llama4.* neither .*: chunked_attention"),
    "Lfm2Config": ({**GROUPED, "layer_types": ["conv", "full_attention", "conv"]}, "Lfm2.* neither full .*: conv"),
    "MambaConfig": ({**IDS, "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2}, "Mamba.*: linear_attention"),
    "DogeConfig": (GROUPED, "Doge.* lays a mask of its own"),
    "DiffLlamaConfig": (GROUPED, "DiffLlama.* more attention layers than the 3"),
    "FalconConfig": (
        {**IDS, "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6},
        "Falcon.* calls the attention function 0 times for 3 layers",
    ),
    "DeepseekV3Config": (
        {**SHAPE, "num_key_value_heads": 6, "n_routed_experts": 4, "kv_lora_rank": 8, "q_lora_rank": 8}
        | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 16},
        r"DeepseekV3.* values \[1, 6, 10, 8\] for 10 tokens, not the 6 key/value heads",
    ),
    "GPTNeoXConfig": (
        {
            **SHAPE,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
        "GPTNeoX.* rope_type 'dynamic'",
    ),
    "T5Config": (
        {"vocab_size": 96, "d_model": 48, "d_kv": 8, "d_ff": 80, "num_layers": 2, "num_heads": 6},
        "T5Config is an encoder-decoder",
    ),
}


def make_model(config_name: str, arguments: dict[str, Any], seed: int) -> Any:
    config = getattr(transformers, config_name)(**arguments)
    automatic = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = automatic.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    with torch.no_grad():
        # A tied model would else repeat the token that it has read, and one with a large last bias say always the same.
        model.get_input_embeddings().weight.mul_(0.3)
        for name, parameter in model.named_parameters():
            if "ln_" in name:
                parameter.copy_(1.0 + parameter if name.endswith("weight") else 0.1 * parameter)
    return model.eval()


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def gpt_neox(tmp_path: Path) -> Path:
    save_model(make_model("GPTNeoXConfig", SHAPE, 1), tmp_path)
    return tmp_path


def load(directory: Path, dtype: str = "float32") -> Runner:
    return Runner.from_directory(directory, dtype, 60, 16, 1)


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Whole and alone, in chunks and alone, and in chunks beside others."""
    config_name, arguments, num_kv_heads = CASES[name]
    model = make_model(config_name, arguments, seed=3)
    save_model(model, tmp_path)
    expected = [generate(model, prompt, MAX_TOKENS) for prompt in prompts()]
    assert len({token for output in expected for token in output}) > 8, "the model says always the same"
    runner = load(tmp_path)
    assert runner.config.engine == f"transformers ({name})"
    assert runner.cache.layout.num_kv_heads == num_kv_heads and runner.cache.layout.head_dim == 8
    for chunk_size, max_running in ((4096, 1), (5, 1), (24, 4)):
        loop = GreedyLoop(runner, chunk_size=chunk_size, max_running=max_running)
        assert loop.generate(prompts(), MAX_TOKENS) == expected, (chunk_size, max_running)


@pytest.mark.parametrize("make_backend", [lambda: NativeCpuBackend(2), TorchReferenceBackend], ids=["native", "torch"])
def test_runs_on_every_backend(
    gpt_neox: Path, make_backend: Callable[[], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.runner.select_backend", lambda num_threads: make_backend())
    model = make_model("GPTNeoXConfig", SHAPE, 1)
    loop = GreedyLoop(load(gpt_neox), chunk_size=24, max_running=4)
    assert loop.generate(prompts(), 4) == [generate(model, prompt, 4) for prompt in prompts()]


def test_runs_in_bfloat16(gpt_neox: Path) -> None:
    """Nearly the logits of float32, from the same weights."""
    plan = StepPlan(step_id=0, sequences=[make_step(prompts()[-1], 0, list(range(5)))])
    wide, narrow = (load(gpt_neox, dtype).logits(plan) for dtype in ("float32", "bfloat16"))
    assert narrow.dtype == torch.float32
    assert float((wide - narrow).norm() / wide.norm()) < 0.1


def test_layers_are_told_in_order_also_when_no_logits_are_wanted(gpt_neox: Path) -> None:
    runner = load(gpt_neox)
    first, second = prompts()[-1][:40], prompts()[-1][40:]
    told: list[tuple[int, float]] = []

    def on_layer_written(layer: int) -> None:
        told.append((layer, float(runner.cache.layer_BKCSD(layer)[4].abs().sum())))

    step = make_step(first, 0, [4, 5, 6, 7, 8], sample=False)
    assert runner.run(StepPlan(step_id=0, sequences=[step]), on_layer_written).tokens == [()]
    assert [layer for layer, _ in told] == [0, 1, 2] and all(written > 0 for _, written in told)
    in_chunks = runner.logits(StepPlan(step_id=1, sequences=[make_step(second, 40, [4, 5, 6, 7, 8])]))
    whole = runner.logits(StepPlan(step_id=2, sequences=[make_step([*first, *second], 0, [9, 10, 11, 12, 13])]))
    torch.testing.assert_close(in_chunks, whole, rtol=1e-4, atol=1e-4)


def test_says_that_transformers_computes_it(gpt_neox: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="engine"):
        load(gpt_neox)
    assert "no code of its own for GPTNeoXForCausalLM: transformers computes it" in caplog.text


def test_the_shape_is_read_without_loading_the_model(gpt_neox: Path) -> None:
    change_config(gpt_neox, eos_token_id=[7, 5], dtype="bfloat16")
    config = read_model(gpt_neox)
    assert isinstance(config, TransformersConfig)
    assert (config.num_layers, config.num_kv_heads, config.head_dim, config.vocab_size) == (3, 6, 8, 96)
    assert (config.max_position_embeddings, config.dtype, config.eos_token_ids) == (256, "bfloat16", (5, 7))
    num_parameters = sum(parameter.numel() for parameter in make_model("GPTNeoXConfig", SHAPE, 1).parameters())
    assert config.num_parameters == num_parameters
    assert config.weights_size_bytes("float32") == 4 * num_parameters


@pytest.mark.parametrize("config_name", REFUSED)
def test_refuses_by_name_what_paged_attention_does_not_compute(config_name: str, tmp_path: Path) -> None:
    arguments, why = REFUSED[config_name]
    save_model(make_model(config_name, arguments, seed=0), tmp_path)
    with pytest.raises(UnsupportedModelError, match=why):
        load(tmp_path)


def test_refuses_queries_that_are_scaled_by_a_position_the_code_makes_up(tmp_path: Path) -> None:
    """The scale is 1 up to position 8191, so that a trial would not show it."""
    arguments = {**GROUPED, "head_dim": 8, "num_local_experts": 2, "layer_types": ["full_attention"] * 3}
    model = make_model("Llama4TextConfig", {**arguments, "no_rope_layers": [1, 1, 0]}, seed=0)
    save_model(model, tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"Llama4.* scales queries .*attn_temperature_tuning"):
        load(tmp_path)
    change_config(tmp_path, attn_temperature_tuning=False)
    load(tmp_path)


def test_refuses_a_model_whose_tokens_meet_outside_attention(gpt_neox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the model's description says so; the trial shows it."""
    forward = modeling_gpt_neox.GPTNeoXMLP.forward

    def shifted(self: Any, hidden_1TE: torch.Tensor) -> torch.Tensor:
        return forward(self, hidden_1TE + 0.3 * hidden_1TE.roll(1, dims=1))

    monkeypatch.setattr(modeling_gpt_neox.GPTNeoXMLP, "forward", shifted)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(
            UnsupportedModelError, match="tokens depend on each other elsewhere than in causal attention"
        ):
            load(gpt_neox, dtype)


def test_refuses_where_transformers_is_not_installed(gpt_neox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find_spec(name))
    with pytest.raises(
        UnsupportedModelError, match=r"GPTNeoXForCausalLM.*-m pip install 'baton-cluster\[transformers\]'"
    ):
        read_model(gpt_neox)


@pytest.mark.parametrize(
    ("change", "native", "fallback"),
    [
        (
            {"hidden_act": "frob"},
            "hidden_act 'frob' in config.json is not supported; supported: silu, swish, gelu_pytorch_tanh",
            "LlamaForCausalLM has hidden_act 'frob' in config.json; known: gelu, ",
        ),
        (
            {"rope_parameters": {"rope_type": "frob", "rope_theta": 1e4}},
            "rope_type 'frob' in config.json is not supported; supported: default, linear, llama3, yarn, dynamic",
            "LlamaForCausalLM has rope_type 'frob' in config.json; known: default, ",
        ),
    ],
)
def test_a_name_that_nobody_knows_is_refused_with_those_that_are_known(
    change: dict[str, Any], native: str, fallback: str, tmp_path: Path
) -> None:
    save_model(make_model("LlamaConfig", GROUPED, seed=0), tmp_path)
    change_config(tmp_path, **change)
    with pytest.raises(UnsupportedModelError) as raised:
        read_model(tmp_path)
    assert str(raised.value).startswith(f"{native}; nor by way of transformers: {fallback}")


def test_a_field_of_another_type_is_refused(gpt_neox: Path) -> None:
    change_config(gpt_neox, hidden_act=3)
    with pytest.raises(UnsupportedModelError, match=r"cannot read it: .*hidden_act"):
        read_model(gpt_neox)


def test_code_that_comes_with_a_checkpoint_is_not_run(gpt_neox: Path) -> None:
    trace = gpt_neox / "trace"
    (gpt_neox / "own.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    automatic = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    change_config(gpt_neox, architectures=["OwnModel"], model_type="own", auto_map=automatic)
    with pytest.raises(UnsupportedModelError, match=r"architectures \['OwnModel'\] is not supported.*cannot read it"):
        load(gpt_neox)
    assert not trace.exists()


def test_broken_weights_are_refused(gpt_neox: Path) -> None:
    """transformers itself would fill in random numbers for what is missing."""
    path = gpt_neox / "model.safetensors"
    whole = path.read_bytes()
    tensors = load_file(path)
    removed = tensors.pop("gpt_neox.layers.1.mlp.dense_4h_to_h.weight")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelWeightsError, match=r"missing tensors .*layers\.1\.mlp\.dense_4h_to_h\.weight"):
        load(gpt_neox)
    damaged = removed.clone()
    damaged[-1, -1] = float("nan")
    save_file({**tensors, "gpt_neox.layers.1.mlp.dense_4h_to_h.weight": damaged}, path, {"format": "pt"})
    with pytest.raises(ModelWeightsError, match=r"layers\.1\.mlp\.dense_4h_to_h\.weight .* NaN or infinity"):
        load(gpt_neox)
    save_file({**tensors, "gpt_neox.layers.1.mlp.dense_4h_to_h.weight": removed[:-1]}, path, {"format": "pt"})
    with pytest.raises((ModelWeightsError, UnsupportedModelError), match=r"GPTNeoXForCausalLM.*size"):
        load(gpt_neox)
    path.write_bytes(whole[:-100])
    with pytest.raises(ModelWeightsError, match="incomplete metadata"):
        load(gpt_neox)


def test_a_pool_too_small_for_the_trial_is_refused(gpt_neox: Path) -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 3, got 2"):
        Runner.from_directory(gpt_neox, "float32", 2, 16, 1)


def test_masks_are_examined() -> None:
    assert not _mask_fault(causal_mask_function, 0)
    assert not _mask_fault(sliding_window_causal_mask_function(8), 8)
    for mask_function, window in (
        (bidirectional_mask_function, 0),
        (causal_mask_function, 8),
        (sliding_window_causal_mask_function(8), 0),
        (sliding_window_causal_mask_function(9), 8),
        (sliding_window_causal_mask_function(7), 8),
        (chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)), 8),
    ):
        assert _mask_fault(mask_function, window).startswith("its mask is not causal")
