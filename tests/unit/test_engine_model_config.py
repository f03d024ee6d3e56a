"""Reading config.json, and the fingerprint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.model.config import ModelConfig, RopeConfig, kv_block_size_bytes, model_fingerprint, resolve_dtype
from tests.support.engine_model import TINY_CONFIG, random_tensors, write_safetensors, write_tiny_model


def test_reads_a_plain_llama() -> None:
    config = ModelConfig.from_dict(TINY_CONFIG)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 6, 2, 16)
    assert config.eos_token_ids == (2,)
    assert config.rope == RopeConfig(theta=10_000.0)
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
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"head_dim": None, "hidden_size": 50}, "hidden_size"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"dtype": "int8"}, "dtype"),
        ({"eos_token_id": 96}, "eos_token_id"),
        ({"eos_token_id": [2, -1]}, "eos_token_id"),
    ],
)
def test_refuses_by_the_fields_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        ModelConfig.from_dict({**TINY_CONFIG, **change})


def test_both_spellings_of_rope_parameters() -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    older = ModelConfig.from_dict({**TINY_CONFIG, "rope_theta": 5e5, "rope_scaling": llama3}).rope
    newer = ModelConfig.from_dict({**TINY_CONFIG, "rope_theta": None, "rope_parameters": {**llama3, "rope_theta": 5e5}})
    assert older == newer.rope
    assert (older.kind, older.theta, older.original_max_position) == ("llama3", 5e5, 128)


def test_from_directory_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a Hugging Face model directory"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
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
