"""Loading safetensors: single and sharded, conversion, progress, what is released, and every way to be wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from engine.attention.torch_reference import TorchReferenceBackend
from engine.model.config import ModelConfig
from engine.model.head import OutputHead
from engine.model.safetensors_file import Checkpoint, ModelWeightsError
from engine.model.weights import load_weights
from tests.support.engine_model import TINY_CONFIG, random_tensors, write_safetensors, write_tiny_model

CONFIG = ModelConfig.from_dict(TINY_CONFIG)


def write_shards(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    names = list(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file_name, part in parts.items():
        write_safetensors(directory / file_name, {name: tensors[name] for name in part})
    weight_map = {name: file_name for file_name, part in parts.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_fuses_projections(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    tensors = random_tensors(CONFIG)
    weights = load_weights(tmp_path, CONFIG, "float32")
    x = torch.randn(5, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
    attention = "model.layers.1.self_attn"
    expected = torch.cat([x @ tensors[f"{attention}.{name}_proj.weight"].T for name in ("q", "k", "v")], dim=1)
    torch.testing.assert_close(weights.layers[1].qkv(x), expected, atol=1e-4, rtol=1e-4)
    expected = torch.cat([x @ tensors[f"model.layers.2.mlp.{name}_proj.weight"].T for name in ("gate", "up")], dim=1)
    torch.testing.assert_close(weights.layers[2].gate_up(x), expected, atol=1e-4, rtol=1e-4)
    expected = x @ tensors["model.embed_tokens.weight"].T
    torch.testing.assert_close(weights.head(x, TorchReferenceBackend()), expected, atol=1e-4, rtol=1e-4)


def test_untied_head_is_read(tmp_path: Path) -> None:
    config = write_tiny_model(tmp_path, tie_word_embeddings=False)
    x = torch.randn(2, config.hidden_size, generator=torch.Generator().manual_seed(1))
    expected = x @ random_tensors(config)["lm_head.weight"].T
    head = load_weights(tmp_path, config, "float32").head
    torch.testing.assert_close(head(x, TorchReferenceBackend()), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_gives_float32_for_any_number_of_rows(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(5000, 24, generator=generator).to(dtype)
    head = OutputHead(weight)
    for num_rows in (1, 2, 9, 33):
        x = torch.randn(num_rows, 24, generator=generator).to(dtype)
        torch.testing.assert_close(head(x, TorchReferenceBackend()), x.float() @ weight.float().T, atol=1e-4, rtol=1e-4)


def test_shards_equal_the_single_file(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    single = load_weights(tmp_path, CONFIG, "float32")
    (tmp_path / "model.safetensors").unlink()
    write_shards(tmp_path, random_tensors(CONFIG))
    sharded = load_weights(tmp_path, CONFIG, "float32")
    assert torch.equal(single.embedding_VE, sharded.embedding_VE)
    x = torch.ones(1, CONFIG.hidden_size)
    assert torch.equal(single.layers[2].down(torch.ones(1, 80)), sharded.layers[2].down(torch.ones(1, 80)))
    assert torch.equal(single.layers[0].qkv(x), sharded.layers[0].qkv(x))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_converts_to_the_wanted_dtype(tmp_path: Path, stored: torch.dtype) -> None:
    write_tiny_model(tmp_path)
    tensors = {name: tensor.to(stored) for name, tensor in random_tensors(CONFIG).items()}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    for dtype, torch_dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        weights = load_weights(tmp_path, CONFIG, dtype)  # type: ignore[arg-type]
        assert torch.equal(weights.final_norm_E, tensors["model.norm.weight"].to(torch_dtype))


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    seen: list[tuple[int, int]] = []
    load_weights(tmp_path, CONFIG, "bfloat16", lambda loaded, total: seen.append((loaded, total)))
    assert [loaded for loaded, _ in seen] == sorted({loaded for loaded, _ in seen})
    assert seen[-1] == (CONFIG.weights_size_bytes("float32"), CONFIG.weights_size_bytes("float32"))


def test_nothing_stays_mapped(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    weights = load_weights(tmp_path, CONFIG, "float32")
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert weights.final_norm_E.isfinite().all()


def test_names_the_missing_tensor(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    tensors = random_tensors(CONFIG)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ModelWeightsError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_weights(tmp_path, CONFIG, "float32")
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_names_the_misshapen_tensor(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    tensors = random_tensors(CONFIG)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(31, CONFIG.hidden_size)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ModelWeightsError, match=r"k_proj\.weight .* shape \(31, 48\), expected \(32, 48\)"):
        load_weights(tmp_path, CONFIG, "float32")


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelWeightsError, match="holds neither"):
        load_weights(tmp_path, CONFIG, "float32")


def raw_file(path: Path, header: object, data: bytes = b"") -> None:
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "header is not an object"),
        ({"x": {"dtype": "F32", "shape": [2]}}, "entry of x .* malformed"),
        ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}, "x .* does not fit"),
        ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "x .* truncated"),
        ({"x": {"dtype": "I4", "shape": [2], "data_offsets": [0, 1]}}, "x .* dtype I4"),
    ],
)
def test_damaged_headers(tmp_path: Path, header: object, message: str) -> None:
    raw_file(tmp_path / "model.safetensors", header, b"\0" * 7)
    with pytest.raises(ModelWeightsError, match=message):
        Checkpoint(tmp_path)


def test_truncated_file(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelWeightsError, match="truncated"):
        load_weights(tmp_path, CONFIG, "float32")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not a safetensors index"),
        ('{"weight_map": 3}', "not a safetensors index"),
        ('{"weight_map": {"a": "model-9.safetensors"}}', "model-9.safetensors"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "not in"),
    ],
)
def test_damaged_index(tmp_path: Path, index: str, message: str) -> None:
    write_tiny_model(tmp_path / "m")
    write_safetensors(tmp_path / "model.safetensors", {})
    (tmp_path / "m" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelWeightsError, match=message):
        Checkpoint(tmp_path / "m")
