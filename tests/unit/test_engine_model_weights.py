"""Loading safetensors: single and sharded, conversion, progress, what is released, and every way to be wrong."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch

from engine.model.config import DtypeName, ModelConfig
from engine.model.safetensors_file import Checkpoint, ModelWeightsError, check_files
from engine.model.weights import MlpWeights, check_weights, load_weights
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
    attention, mlp = "model.layers.1.self_attn", weights.layers[2].mlp
    expected = torch.cat([tensors[f"{attention}.{name}_proj.weight"] for name in ("q", "k", "v")])
    assert torch.equal(weights.layers[1].qkv_XE, expected)
    assert isinstance(mlp, MlpWeights)
    expected = torch.cat([tensors[f"model.layers.2.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(mlp.gate_up_XE, expected)
    assert torch.equal(mlp.down_EF, tensors["model.layers.2.mlp.down_proj.weight"])
    assert weights.head_VE is weights.embedding_VE


def test_untied_head_is_read(tmp_path: Path) -> None:
    config = write_tiny_model(tmp_path, tie_word_embeddings=False)
    weights = load_weights(tmp_path, config, "float32")
    assert torch.equal(weights.head_VE, random_tensors(config)["lm_head.weight"])
    assert torch.equal(weights.embedding_VE, random_tensors(config)["model.embed_tokens.weight"])


def test_a_tied_head_that_is_stored_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One copy if it is the same; its own if it differs, which is said; the embedding too where that is missing."""
    write_tiny_model(tmp_path)
    tensors = random_tensors(CONFIG)
    embedding = tensors["model.embed_tokens.weight"]
    write_safetensors(tmp_path / "model.safetensors", {**tensors, "lm_head.weight": embedding.clone()})
    weights = load_weights(tmp_path, CONFIG, "float32")
    assert weights.head_VE is weights.embedding_VE and not caplog.records
    write_safetensors(tmp_path / "model.safetensors", {**tensors, "lm_head.weight": embedding + 1.0})
    weights = load_weights(tmp_path, CONFIG, "float32")
    assert torch.equal(weights.head_VE, embedding + 1.0) and torch.equal(weights.embedding_VE, embedding)
    assert "lm_head.weight is stored and differs" in caplog.text
    del tensors["model.embed_tokens.weight"]
    write_safetensors(tmp_path / "model.safetensors", {**tensors, "lm_head.weight": embedding})
    weights = load_weights(tmp_path, CONFIG, "float32")
    assert torch.equal(weights.embedding_VE, embedding) and weights.head_VE is weights.embedding_VE


def test_names_what_it_does_not_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tiny_model(tmp_path)
    extra = {f"model.layers.0.adapter.{index}": torch.zeros(1) for index in range(7)}
    known = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), "vision_tower.weight": torch.zeros(3)}
    write_safetensors(tmp_path / "model.safetensors", {**random_tensors(CONFIG), **known})
    load_weights(tmp_path, CONFIG, "float32")
    assert not caplog.records
    write_safetensors(tmp_path / "model.safetensors", {**random_tensors(CONFIG), **known, **extra})
    seen: list[tuple[int, int]] = []
    load_weights(tmp_path, CONFIG, "float32", lambda loaded, total: seen.append((loaded, total)))
    (record,) = caplog.records
    assert "7 tensors of" in record.getMessage() and "adapter.4, ..." in record.getMessage()
    assert seen[-1][0] == seen[-1][1]


def test_matrices_lie_in_memory_that_asks_for_huge_pages(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    weights = load_weights(tmp_path, CONFIG, "bfloat16")
    layer = weights.layers[0]
    for matrix in (weights.embedding_VE, layer.qkv_XE, layer.attention_output_EX):
        assert matrix.is_contiguous() and matrix.data_ptr() % 64 == 0
        assert "hg" in vm_flags(matrix.data_ptr())


def vm_flags(address: int) -> list[str]:
    """What the kernel says of the mapping that holds `address`."""
    holds = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            holds = begin <= address < end
        elif holds and head == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("no mapping holds the address")


def test_shards_equal_the_single_file(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    single = load_weights(tmp_path, CONFIG, "float32")
    (tmp_path / "model.safetensors").unlink()
    write_shards(tmp_path, random_tensors(CONFIG))
    sharded = load_weights(tmp_path, CONFIG, "float32")
    assert torch.equal(single.embedding_VE, sharded.embedding_VE)
    for one, other in zip(single.layers, sharded.layers, strict=True):
        assert torch.equal(one.qkv_XE, other.qkv_XE) and torch.equal(one.mlp_norm_E, other.mlp_norm_E)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_converts_to_the_wanted_dtype(tmp_path: Path, stored: torch.dtype) -> None:
    write_tiny_model(tmp_path)
    tensors = {name: tensor.to(stored) for name, tensor in random_tensors(CONFIG).items()}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    for dtype, torch_dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        weights = load_weights(tmp_path, CONFIG, dtype)  # type: ignore[arg-type]
        assert torch.equal(weights.embedding_VE, tensors["model.embed_tokens.weight"].to(torch_dtype))
        assert torch.equal(weights.final_norm_E, tensors["model.norm.weight"].float()), "norms keep what they have"


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    seen: list[tuple[int, int]] = []
    load_weights(tmp_path, CONFIG, "bfloat16", lambda loaded, total: seen.append((loaded, total)))
    assert [loaded for loaded, _ in seen] == sorted(loaded for loaded, _ in seen)
    assert len({loaded for loaded, _ in seen}) > 10
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
    with pytest.raises(ModelWeightsError, match=r"layers\.1\.mlp\.up_proj\.weight, of shape \(80, 48\), is missing"):
        load_weights(tmp_path, CONFIG, "float32")
    with pytest.raises(ModelWeightsError, match=r"layers\.1\.mlp\.up_proj\.weight, of shape \(80, 48\), is missing"):
        check_weights(tmp_path, CONFIG)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_names_the_misshapen_tensor(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    tensors = random_tensors(CONFIG)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(31, CONFIG.hidden_size)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ModelWeightsError, match=r"k_proj\.weight .* shape \(31, 48\), expected \(32, 48\)"):
        load_weights(tmp_path, CONFIG, "float32")
    with pytest.raises(ModelWeightsError, match=r"k_proj\.weight .* shape \(31, 48\), expected \(32, 48\)"):
        check_weights(tmp_path, CONFIG)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
)
def test_names_the_tensor_that_is_not_finite(tmp_path: Path, name: str, dtype: DtypeName, value: float) -> None:
    """Also where few tokens meet it: the embedding of one token."""
    write_tiny_model(tmp_path)
    tensors = random_tensors(CONFIG)
    tensors[name].view(-1)[-1] = value
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ModelWeightsError, match=f"{name} .* holds NaN or infinity"):
        load_weights(tmp_path, CONFIG, dtype)


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelWeightsError, match="holds neither"):
        load_weights(tmp_path, CONFIG, "float32")
    with pytest.raises(ModelWeightsError, match="holds neither"):
        check_weights(tmp_path, CONFIG)


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
        ({"x": {"dtype": "F16", "shape": [2], "data_offsets": [0.0, 4.0]}}, "entry of x .* malformed"),
        ({"x": {"dtype": "F16", "shape": [2.0], "data_offsets": [0, 4]}}, "entry of x .* malformed"),
    ],
)
def test_damaged_headers(tmp_path: Path, header: object, message: str) -> None:
    raw_file(tmp_path / "model.safetensors", header, b"\0" * 7)
    with pytest.raises(ModelWeightsError, match=message):
        Checkpoint(tmp_path)


def test_a_header_too_deep_to_read(tmp_path: Path) -> None:
    depth = 100_000
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", depth) + b"[" * depth)
    with pytest.raises(ModelWeightsError, match="not a readable safetensors file"):
        Checkpoint(tmp_path)


def test_of_a_tensor_in_two_shards_the_index_says_which_counts(tmp_path: Path) -> None:
    one, two = {"x": torch.ones(2)}, {"x": torch.full((2,), 2.0), "y": torch.zeros(2)}
    write_safetensors(tmp_path / "a.safetensors", one)
    write_safetensors(tmp_path / "b.safetensors", two)
    for shard, expected in (("a", 1.0), ("b", 2.0)):
        weight_map = {"x": f"{shard}.safetensors", "y": "b.safetensors", "z": "a.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        target = torch.empty(2)
        with Checkpoint(tmp_path) as checkpoint:
            checkpoint.read_into("x", target)
        assert target.tolist() == [expected] * 2


def test_truncated_file(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelWeightsError, match="truncated"):
        load_weights(tmp_path, CONFIG, "float32")
    with pytest.raises(ModelWeightsError, match="truncated"):
        check_weights(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not a safetensors index"),
        ('{"weight_map": 3}', "not a safetensors index"),
        ('{"weight_map": {"a": "model-9.safetensors"}}', "model-9.safetensors"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "not in"),
        ('{"weight_map": {"a": 5}}', "5"),
        ("[" * 100_000, "not a safetensors index"),
    ],
)
def test_damaged_index(tmp_path: Path, index: str, message: str) -> None:
    write_tiny_model(tmp_path / "m")
    write_safetensors(tmp_path / "model.safetensors", {})
    (tmp_path / "m" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelWeightsError, match=message):
        Checkpoint(tmp_path / "m")


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}])
def test_a_check_reads_headers_alone(
    tmp_path: Path, changes: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    """What it says is what loading would say; a tied head that is stored too cannot be told from headers."""
    config = write_tiny_model(tmp_path, **changes)
    path = tmp_path / "model.safetensors"
    extra = {"lm_head.weight": torch.zeros(config.vocab_size, config.hidden_size), "model.x": torch.zeros(1)}
    write_safetensors(path, random_tensors(config) | extra)
    size_bytes = path.stat().st_size
    header_bytes = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    os.truncate(path, header_bytes)
    os.truncate(path, size_bytes)  # now with a hole in place of the data
    check_weights(tmp_path, config)
    assert path.stat().st_blocks * 512 < header_bytes + 8192 and not caplog.records
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_the_files_of_another_reader_are_checked_for_their_extent(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    raw_file(path, {"__metadata__": {}, "x": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, b"\0" * 8)
    check_files(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ModelWeightsError, match=r"x .* truncated"):
        check_files(tmp_path)
    raw_file(path, {"x": 3})
    with pytest.raises(ModelWeightsError, match=r"entry of x .* malformed"):
        check_files(tmp_path)
