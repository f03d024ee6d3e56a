"""Checkpoints in the layouts that transformers writes: shards, experts in one tensor, a model within a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model.config import ModelConfig
from engine.model.weights import ExpertsWeights, ModelWeights, check_weights, load_weights
from tests.support.transformers_models import CASES, make_model, make_model_with_images, save_model

pytest.importorskip("transformers")


def load(model_dir: Path) -> ModelWeights:
    return load_weights(model_dir, ModelConfig.from_directory(model_dir), "float32")


def tensors_of(weights: ModelWeights) -> list[torch.Tensor]:
    """All of them, in a fixed order."""
    tensors = [weights.embedding_VE, weights.final_norm_E, weights.head_VE]
    for layer in weights.layers:
        for part in (layer, layer.mlp):
            values = [getattr(part, name) for name in part.__dataclass_fields__]
            tensors += [value for value in values if isinstance(value, torch.Tensor)]
    return tensors


def assert_same(one: ModelWeights, other: ModelWeights) -> None:
    pairs = list(zip(tensors_of(one), tensors_of(other), strict=True))
    assert len(pairs) > 10
    assert all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.parametrize("case", CASES)
def test_the_configuration_counts_the_parameters(tmp_path: Path, case: str) -> None:
    model = make_model(case, seed=0)
    save_model(model, tmp_path)
    config = ModelConfig.from_directory(tmp_path)
    assert config.num_parameters == model.num_parameters()
    check_weights(tmp_path, config)


def test_shards(tmp_path: Path) -> None:
    model = make_model("qwen3 biases, windows", seed=0)
    save_model(model, tmp_path / "single")
    save_model(model, tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    assert_same(load(tmp_path / "single"), load(tmp_path / "shards"))


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe normalised, some layers dense"])
def test_experts_in_one_tensor_and_each_in_its_own(tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(case, seed=0)
    save_model(model, tmp_path / "each")
    save_model(model, tmp_path / "fused", save_original_format=False)
    each, fused = load(tmp_path / "each"), load(tmp_path / "fused")
    assert any(isinstance(layer.mlp, ExpertsWeights) for layer in each.layers)
    assert_same(each, fused)
    check_weights(tmp_path / "fused", ModelConfig.from_directory(tmp_path / "fused"))
    assert not caplog.records


def test_the_text_part_of_a_model_with_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model_with_images()
    save_model(model, tmp_path / "older")
    save_model(model, tmp_path / "newer", save_original_format=False)
    weights = load(tmp_path / "older")
    language_model = model.model.language_model
    assert torch.equal(weights.embedding_VE, language_model.embed_tokens.weight)
    assert torch.equal(weights.layers[2].q_norm_D, language_model.layers[2].self_attn.q_norm.weight + 1.0)
    assert_same(weights, load(tmp_path / "newer"))
    assert not caplog.records, "the vision tower is not missed"
