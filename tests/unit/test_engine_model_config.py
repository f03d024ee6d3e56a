"""Reading config.json, and the fingerprint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.model.config import (
    ModelConfig,
    UnsupportedModelError,
    kv_block_size_bytes,
    model_fingerprint,
    resolve_dtype,
)
from engine.model.rope_config import RopeConfig
from tests.support.engine_model import TINY_CONFIG, random_tensors, write_safetensors, write_tiny_model


def test_reads_a_plain_llama() -> None:
    config = ModelConfig.from_dict(TINY_CONFIG)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 6, 2, 16)
    assert config.eos_token_ids == (2,)
    assert {layer.rope for layer in config.layers} == {RopeConfig(theta=10_000.0)}
    assert not any(layer.window or layer.is_routed for layer in config.layers)
    assert (config.attention_scale, config.embedding_scale, config.norm_offset) == (0.25, 1.0, 0.0)
    assert config.dtype == "float32"


def test_defaults_of_older_files() -> None:
    raw = {key: TINY_CONFIG[key] for key in TINY_CONFIG if key not in ("num_key_value_heads", "head_dim", "dtype")}
    config = ModelConfig.from_dict({**raw, "torch_dtype": "bfloat16"})
    assert (config.num_kv_heads, config.head_dim, config.dtype) == (6, 8, "bfloat16")


def test_head_dim_may_be_null() -> None:
    assert ModelConfig.from_dict({**TINY_CONFIG, "head_dim": None}).head_dim == 8


def test_generation_config_decides_the_eos_ids() -> None:
    assert ModelConfig.from_dict(TINY_CONFIG, {"eos_token_id": [7, 3, 7]}).eos_token_ids == (3, 7)
    assert ModelConfig.from_dict(TINY_CONFIG, {}).eos_token_ids == (2,)
    assert ModelConfig.from_dict({**TINY_CONFIG, "eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"architectures": None}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"head_dim": None, "hidden_size": 50}, "hidden_size"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"dtype": "int8"}, "dtype"),
        ({"eos_token_id": 96}, r"eos_token_id must be .* between 0 and 95 \(vocab_size - 1\) in config\.json, got 96"),
        ({"eos_token_id": [2, -1]}, "eos_token_id"),
        ({"hidden_act": ["silu"]}, r"hidden_act in config\.json must be the name of an activation, got \['silu'\]"),
        ({"hidden_act": 3}, "hidden_act"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, r"rope_type in config\.json must be a name, got \['linear'\]"),
        ({"text_config": 3}, "text_config"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 3}, "use_sliding_window"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": "2"},
            "max_window_layers",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
        ({"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": 2}, "mlp_only_layers"),
    ],
)
def test_names_the_field_that_is_malformed(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        ModelConfig.from_dict({**TINY_CONFIG, **change})
    assert not isinstance(caught.value, UnsupportedModelError)


def test_an_end_token_outside_the_vocabulary_is_refused_in_either_file() -> None:
    with pytest.raises(ValueError, match=r"eos_token_id .* in generation_config\.json, got 96"):
        ModelConfig.from_dict(TINY_CONFIG, {"eos_token_id": [2, 96]})
    with pytest.raises(ValueError, match=r"eos_token_id .* in config\.json, got 96"):
        ModelConfig.from_dict({**TINY_CONFIG, "eos_token_id": 96}, {"eos_token_id": 2})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ({"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_names_the_field_that_asks_for_too_much(change: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        ModelConfig.from_dict({**TINY_CONFIG, **change})


def test_both_spellings_of_rope_parameters() -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    older = ModelConfig.from_dict({**TINY_CONFIG, "rope_theta": 5e5, "rope_scaling": llama3})
    newer = ModelConfig.from_dict({**TINY_CONFIG, "rope_theta": None, "rope_parameters": {**llama3, "rope_theta": 5e5}})
    assert older == newer
    rope = older.layers[2].rope
    assert (rope.kind, rope.theta, rope.original_max_position) == ("llama3", 5e5, 128)


def test_where_the_trained_context_is_told() -> None:
    def original(**change: Any) -> int:
        scaling = {"type": "yarn", "factor": 4.0, **change.pop("scaling", {})}
        config = ModelConfig.from_dict({**TINY_CONFIG, "rope_scaling": scaling, **change})
        return config.layers[0].rope.original_max_position

    assert original(scaling={"original_max_position_embeddings": 32}) == 32
    assert original() == 256, "max_position_embeddings"
    both = {"scaling": {"original_max_position_embeddings": 32}, "original_max_position_embeddings": 64}
    assert original(**both) == 64


def test_layers_of_gemma3_in_both_spellings() -> None:
    """Five local layers, then a global one; two rotary embeddings, of which the global one is stretched."""
    gemma = {**TINY_CONFIG, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7, "sliding_window": 16}
    gemma = {key: gemma[key] for key in gemma if key not in ("rope_theta", "hidden_act", "tie_word_embeddings")}
    stretched = {"factor": 8.0, "rope_type": "linear"}
    older = {**gemma, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
    newer = {
        **gemma,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {**stretched, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    config = ModelConfig.from_dict(newer)
    assert ModelConfig.from_dict({**older, "rope_scaling": stretched}) == config
    assert ModelConfig.from_dict({**gemma, "rope_scaling": stretched}) == config, "those are the defaults"
    assert [layer.window for layer in config.layers] == [16, 16, 16, 16, 16, 0, 16]
    assert [layer.rope.theta for layer in config.layers][4:6] == [1e4, 1e6]
    assert (config.activation, config.attention_scale, config.tie_word_embeddings) == ("gelu_tanh", 1 / 16, True)


def test_the_text_part_of_a_model_with_images() -> None:
    text = {key: value for key, value in TINY_CONFIG.items() if key not in ("architectures", "dtype", "hidden_act")}
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "dtype": "bfloat16", "text_config": text}
    config = ModelConfig.from_dict({**raw, "vision_config": {"hidden_size": 1152}})
    assert (config.hidden_size, config.num_layers, config.dtype) == (48, 3, "bfloat16")


def test_windows_of_qwen_begin_at_a_layer() -> None:
    qwen = {**TINY_CONFIG, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "max_window_layers": 2}
    assert [layer.window for layer in ModelConfig.from_dict(qwen).layers] == [0, 0, 0]
    windowed = {**qwen, "use_sliding_window": True}
    assert [layer.window for layer in ModelConfig.from_dict(windowed).layers] == [0, 0, 32]
    everywhere = {**windowed, "max_window_layers": 0}
    assert [layer.window for layer in ModelConfig.from_dict(everywhere).layers] == [32, 32, 32]
    given = {**windowed, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    assert [layer.window for layer in ModelConfig.from_dict(given).layers] == [32, 0, 0]


def test_both_names_of_the_number_of_experts() -> None:
    qwen = {**TINY_CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 24}
    older = ModelConfig.from_dict({**qwen, "num_experts": 16})
    assert older == ModelConfig.from_dict({**qwen, "num_local_experts": 16})
    assert older.experts is not None
    assert (older.experts.num_experts, older.experts.num_per_token, older.experts.normalises) == (16, 8, False)
    sparse = ModelConfig.from_dict({**qwen, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [layer.is_routed for layer in sparse.layers] == [False, True, False, False, False, True]


def test_mixtral_scales_the_weights_of_a_tokens_experts_whatever_the_field_of_qwen_says() -> None:
    """transformers' code for Mixtral does not know the field."""
    raw = {**TINY_CONFIG, "norm_topk_prob": False, "num_local_experts": 4, "moe_intermediate_size": 8}
    raw["num_experts_per_tok"] = 2
    normalises = {}
    for architecture in ("MixtralForCausalLM", "Qwen3MoeForCausalLM"):
        experts = ModelConfig.from_dict({**raw, "architectures": [architecture]}).experts
        assert experts is not None
        normalises[architecture] = experts.normalises
    assert normalises == {"MixtralForCausalLM": True, "Qwen3MoeForCausalLM": False}


def test_from_directory_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a Hugging Face model directory"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ValueError, match="not valid JSON"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="JSON object"):
        ModelConfig.from_directory(tmp_path)


def test_num_parameters_counts_the_checkpoint() -> None:
    for tied in (True, False):
        config = ModelConfig.from_dict({**TINY_CONFIG, "tie_word_embeddings": tied})
        assert config.num_parameters == sum(tensor.numel() for tensor in random_tensors(config).values())
    assert config.weights_size_bytes("bfloat16") * 2 == config.weights_size_bytes("float32")


def test_kv_block_size() -> None:
    config = ModelConfig.from_dict(TINY_CONFIG)
    assert kv_block_size_bytes(config, "float32", 16) == 3 * 2 * 2 * 16 * 16 * 4
    assert kv_block_size_bytes(config, "bfloat16", 16) == 3 * 2 * 2 * 16 * 16 * 2
    with pytest.raises(ValueError, match="block_size"):
        kv_block_size_bytes(config, "float32", 0)


def test_resolve_dtype() -> None:
    config = ModelConfig.from_dict(TINY_CONFIG)
    assert resolve_dtype("auto", config) == "float32"
    assert resolve_dtype("bfloat16", config) == "bfloat16"
    with pytest.raises(ValueError, match="dtype"):
        resolve_dtype("float16", config)


def test_fingerprint_follows_config_headers_and_revision(tmp_path: Path) -> None:
    config = write_tiny_model(tmp_path / "a")
    write_tiny_model(tmp_path / "same", seed=1)
    fingerprint = model_fingerprint(tmp_path / "a")
    assert len(fingerprint) == 32
    assert model_fingerprint(tmp_path / "same") == fingerprint, "the weights' bytes are not read"
    assert model_fingerprint(tmp_path / "a", "r2") != fingerprint
    write_tiny_model(tmp_path / "other", rms_norm_eps=1e-6)
    assert model_fingerprint(tmp_path / "other") != fingerprint
    tensors = random_tensors(config)
    tensors["extra"] = tensors["model.norm.weight"]
    write_safetensors(tmp_path / "same" / "model.safetensors", tensors)
    assert model_fingerprint(tmp_path / "same") != fingerprint


def test_fingerprint_errors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    with pytest.raises(FileNotFoundError, match="safetensors"):
        model_fingerprint(tmp_path)
    for content in (b"\x01", b"\xff" * 8, (1000).to_bytes(8, "little") + b"{}"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"truncated|not a safetensors file"):
            model_fingerprint(tmp_path)
