"""Chooses what computes a model: a family of Baton's own, or transformers where there is none."""

from __future__ import annotations

from pathlib import Path

from engine.model.config import ModelConfig
from engine.model.config_fields import UnsupportedModelError
from engine.model.transformers_config import TransformersConfig


def read_model(model_dir: Path | str) -> ModelConfig | TransformersConfig:
    """Read the shape of the model in a Hugging Face directory, without loading torch or any weights.

    Raises:
        FileNotFoundError: there is no config.json.
        UnsupportedModelError: neither can compute it; says why of both.
        ValueError: a field is missing or malformed.
    """
    try:
        return ModelConfig.from_directory(model_dir)
    except UnsupportedModelError as native_error:
        try:
            return TransformersConfig.from_directory(model_dir)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{native_error}; nor by way of transformers: {error}") from error
