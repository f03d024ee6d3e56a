"""Loads a Llama checkpoint into the form that the model computes with.

Projections that read the same input are fused (query, key and value; gate and up), so that a layer makes four
matrix products. Axes: V vocabulary, E hidden size, F intermediate size, X a fused output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention.kv_cache import TORCH_DTYPES
from engine.model.config import DtypeName, ModelConfig
from engine.model.head import OutputHead
from engine.model.linear import Linear
from engine.model.safetensors_file import Checkpoint

LoadProgress = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes there are to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer."""

    input_norm_E: torch.Tensor
    qkv: Linear
    attention_output: Linear
    mlp_norm_E: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """A whole model. `head` is made from the embedding where the two are tied."""

    embedding_VE: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_E: torch.Tensor
    head: OutputHead


def load_weights(
    model_dir: Path, config: ModelConfig, dtype: DtypeName, progress: LoadProgress | None = None
) -> ModelWeights:
    """Read the checkpoint in `model_dir`, converted to `dtype`. No file stays open or mapped.

    Raises:
        ModelWeightsError: a tensor or file is missing, damaged or of another shape than `config` says; the message
            names it.
    """
    with Checkpoint(model_dir) as checkpoint:
        loader = _Loader(checkpoint, config, TORCH_DTYPES[dtype], progress or (lambda loaded, total: None))
        return loader.load()


class _Loader:
    """Reads tensors one by one and reports progress."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, progress: LoadProgress) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._dtype = dtype
        self._progress = progress
        self._loaded_bytes = 0
        self._total_bytes = sum(checkpoint.size_bytes(name) for name in tensor_names(config))

    def load(self) -> ModelWeights:
        config = self._config
        embedding_VE = self._tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = tuple(self._layer(f"model.layers.{index}") for index in range(config.num_layers))
        final_norm_E = self._tensor("model.norm.weight", config.hidden_size)
        if config.tie_word_embeddings:
            head = OutputHead(embedding_VE)
        else:
            head = OutputHead(self._tensor("lm_head.weight", config.vocab_size, config.hidden_size))
        return ModelWeights(embedding_VE=embedding_VE, layers=layers, final_norm_E=final_norm_E, head=head)

    def _layer(self, prefix: str) -> LayerWeights:
        config = self._config
        hidden, mlp = config.hidden_size, config.intermediate_size
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention = f"{prefix}.self_attn"
        qkv_names = [f"{attention}.{name}_proj.weight" for name in ("q", "k", "v")]
        gate_up_names = [f"{prefix}.mlp.{name}_proj.weight" for name in ("gate", "up")]
        return LayerWeights(
            input_norm_E=self._tensor(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._linear(qkv_names, [query, kv, kv], hidden),
            attention_output=self._linear([f"{attention}.o_proj.weight"], [hidden], query),
            mlp_norm_E=self._tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self._linear(gate_up_names, [mlp, mlp], hidden),
            down=self._linear([f"{prefix}.mlp.down_proj.weight"], [hidden], mlp),
        )

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        target = torch.empty(shape, dtype=self._dtype)
        self._read(name, target)
        return target

    def _linear(self, names: list[str], num_outputs: list[int], num_inputs: int) -> Linear:
        """The weights `names`, of [num_outputs[i], num_inputs] each, one below the other."""
        weight_XI = torch.empty(sum(num_outputs), num_inputs, dtype=self._dtype)
        for name, part in zip(names, torch.split(weight_XI, num_outputs), strict=True):
            self._read(name, part)
        return Linear(weight_XI)

    def _read(self, name: str, target: torch.Tensor) -> None:
        self._loaded_bytes += self._checkpoint.read_into(name, target)
        self._progress(self._loaded_bytes, self._total_bytes)


def tensor_names(config: ModelConfig) -> Iterable[str]:
    """The names of all tensors that a checkpoint of this configuration must hold."""
    yield "model.embed_tokens.weight"
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        yield from (f"{prefix}.{name}_layernorm.weight" for name in ("input", "post_attention"))
        yield from (f"{prefix}.self_attn.{name}_proj.weight" for name in ("q", "k", "v", "o"))
        yield from (f"{prefix}.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    yield "model.norm.weight"
    if not config.tie_word_embeddings:
        yield "lm_head.weight"
