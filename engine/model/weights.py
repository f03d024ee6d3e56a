"""Loads a checkpoint into the form that the model computes with.

Projections that read the same input are fused (query, key and value; gate and up), so that a layer makes four
matrix products. Matrices are of the model's dtype, norms and biases float32. Axes: V vocabulary, E hidden size, F
intermediate size, X a fused output, H query heads, K key/value heads, D head dimension, G experts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from engine.attention.kv_cache import TORCH_DTYPES
from engine.model.arena import WeightArena
from engine.model.config import DtypeName, ModelConfig
from engine.model.families import ExpertsConfig, LayerConfig
from engine.model.safetensors_file import Checkpoint, ModelWeightsError, is_finite

LoadProgress = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes there are to read."""

_logger = logging.getLogger(__name__)

_HEAD = "lm_head.weight"
_EMBEDDING_SUFFIX = "embed_tokens.weight"
_PREFIXES = ("model.", "language_model.model.", "model.language_model.")
"""What the names of a text decoder begin with; the second and third within a model that takes images too."""
_MAX_LEFTOVERS_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """gate_up [2F, E]: gate, then up; down [E, F]."""

    gate_up_XE: torch.Tensor
    gate_up_bias_X: torch.Tensor | None
    down_EF: torch.Tensor
    down_bias_E: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsWeights:
    """gate_up [G, 2F, E], down [G, E, F]."""

    router_GE: torch.Tensor
    gate_up_GXE: torch.Tensor
    down_GEF: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. What the family does not have is None."""

    input_norm_E: torch.Tensor
    qkv_XE: torch.Tensor
    qkv_bias_X: torch.Tensor | None
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    attention_output_EX: torch.Tensor
    attention_output_bias_E: torch.Tensor | None
    attention_output_norm_E: torch.Tensor | None
    mlp_norm_E: torch.Tensor
    mlp: MlpWeights | ExpertsWeights
    mlp_output_norm_E: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """A whole model. `head_VE` is the embedding itself where the two are tied."""

    embedding_VE: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_E: torch.Tensor
    head_VE: torch.Tensor


def load_weights(
    model_dir: Path, config: ModelConfig, dtype: DtypeName, progress: LoadProgress | None = None
) -> ModelWeights:
    """Read the checkpoint in `model_dir`, converted to `dtype`. No file stays open or mapped.

    Tensors of the decoder that the configuration has no use for are named in a warning.

    Raises:
        ModelWeightsError: a tensor or file is missing, damaged or of another shape than `config` says, or a weight is
            NaN or infinite in `dtype`; the message names it.
    """
    with Checkpoint(model_dir) as checkpoint:
        dtype_ = TORCH_DTYPES[dtype]
        loader = _Loader(checkpoint, config, WeightArena(dtype_), dtype_, progress or (lambda loaded, total: None))
        weights = loader.load()
        loader.warn_of_leftovers()
        return weights


def check_weights(model_dir: Path, config: ModelConfig) -> None:
    """Finds what `load_weights` would find wrong, as far as the files' headers tell. No weights are read.

    Raises: ModelWeightsError.
    """
    with Checkpoint(model_dir) as checkpoint, torch.device("meta"):
        _Loader(checkpoint, config, _NoArena(), torch.float32, lambda loaded, total: None).load()


class _Arena(Protocol):
    def empty(self, *shape: int) -> torch.Tensor: ...


class _NoArena:
    """Tensors without memory."""

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")


class _Loader:
    """Reads tensors one by one and reports progress. With tensors on torch's device "meta" it only looks for them."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, arena: _Arena, dtype: torch.dtype, progress: LoadProgress
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._dtype = dtype
        self._arena = arena
        self._progress = progress
        found = (prefix for prefix in _PREFIXES if prefix + _EMBEDDING_SUFFIX in checkpoint)
        self._prefix = next(found, _PREFIXES[0])
        self._unread = {name for name in checkpoint.names if self._is_of_decoder(name)}
        self._loaded_bytes = 0
        self._total_bytes = sum(checkpoint.size_bytes(name) for name in self._unread)

    def load(self) -> ModelWeights:
        config = self._config
        embedding_VE, head_VE = self._embedding_and_head()
        layers = tuple(self._layer(f"{self._prefix}layers.{i}", layer) for i, layer in enumerate(config.layers))
        weights = ModelWeights(
            embedding_VE=embedding_VE,
            layers=layers,
            final_norm_E=self._norm(f"{self._prefix}norm", config.hidden_size),
            head_VE=head_VE,
        )
        self._progress(self._total_bytes, self._total_bytes)
        return weights

    def warn_of_leftovers(self) -> None:
        if not self._unread:
            return
        names = ", ".join(sorted(self._unread)[:_MAX_LEFTOVERS_NAMED])
        message = "%d tensors of %s are not used by %s: %s%s"
        more = ", ..." if len(self._unread) > _MAX_LEFTOVERS_NAMED else ""
        directory = self._checkpoint.model_dir
        _logger.warning(message, len(self._unread), directory, self._config.architecture, names, more)

    def _is_of_decoder(self, name: str) -> bool:
        """Vision towers are not, and rotary frequencies, which old checkpoints store, are computed."""
        return name.endswith(_HEAD) or (name.startswith(self._prefix) and not name.endswith("rotary_emb.inv_freq"))

    def _embedding_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the two are tied a checkpoint holds either, or both; if both and they differ, the head is its own.

        That is how transformers reads such a checkpoint, with a warning as here.
        """
        shape = self._config.vocab_size, self._config.hidden_size
        embedding_name = self._prefix + _EMBEDDING_SUFFIX
        head_name = next((name for name in (_HEAD, "language_model." + _HEAD) if name in self._checkpoint), _HEAD)
        if not self._config.tie_word_embeddings:
            return self._matrix(embedding_name, *shape), self._matrix(head_name, *shape)
        if embedding_name not in self._checkpoint and head_name in self._checkpoint:
            embedding_name = head_name
        embedding_VE = self._matrix(embedding_name, *shape)
        if head_name not in self._unread:
            return embedding_VE, embedding_VE
        head_VE = torch.empty(shape, dtype=self._dtype)
        self._read(head_name, head_VE)
        if head_VE.is_meta or torch.equal(head_VE, embedding_VE):
            return embedding_VE, embedding_VE
        _logger.warning("%s is stored and differs from the embedding, so the two are not tied", head_name)
        return embedding_VE, head_VE

    def _layer(self, prefix: str, layer: LayerConfig) -> LayerWeights:
        config = self._config
        hidden, head_dim = config.hidden_size, config.head_dim
        query, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
        attention = f"{prefix}.self_attn"
        qkv = {f"{attention}.q_proj": query, f"{attention}.k_proj": kv, f"{attention}.v_proj": kv}
        output = {f"{attention}.o_proj": hidden}
        mlp_norm, attention_output_norm, mlp_output_norm = "post_attention_layernorm", None, None
        if config.normalises_outputs:
            mlp_norm = "pre_feedforward_layernorm"
            attention_output_norm = self._norm(f"{prefix}.post_attention_layernorm", hidden)
            mlp_output_norm = self._norm(f"{prefix}.post_feedforward_layernorm", hidden)
        return LayerWeights(
            input_norm_E=self._norm(f"{prefix}.input_layernorm", hidden),
            qkv_XE=self._fused(qkv, hidden),
            qkv_bias_X=self._bias(qkv) if config.qkv_bias else None,
            q_norm_D=self._norm(f"{attention}.q_norm", head_dim) if config.normalises_heads else None,
            k_norm_D=self._norm(f"{attention}.k_norm", head_dim) if config.normalises_heads else None,
            attention_output_EX=self._fused(output, query),
            attention_output_bias_E=self._bias(output) if config.output_bias else None,
            attention_output_norm_E=attention_output_norm,
            mlp_norm_E=self._norm(f"{prefix}.{mlp_norm}", hidden),
            mlp=self._experts(prefix, config.experts) if layer.is_routed and config.experts else self._mlp(prefix),
            mlp_output_norm_E=mlp_output_norm,
        )

    def _mlp(self, prefix: str) -> MlpWeights:
        config = self._config
        size = config.intermediate_size
        gate_up = {f"{prefix}.mlp.gate_proj": size, f"{prefix}.mlp.up_proj": size}
        down = {f"{prefix}.mlp.down_proj": config.hidden_size}
        return MlpWeights(
            gate_up_XE=self._fused(gate_up, config.hidden_size),
            gate_up_bias_X=self._bias(gate_up) if config.mlp_bias else None,
            down_EF=self._fused(down, size),
            down_bias_E=self._bias(down) if config.mlp_bias else None,
        )

    def _experts(self, prefix: str, experts: ExpertsConfig) -> ExpertsWeights:
        """Three layouts are in use: all experts in one tensor, or each in its own, under two sets of names."""
        hidden, size, count = self._config.hidden_size, experts.intermediate_size, experts.num_experts
        names = ("gate_proj", "up_proj", "down_proj")
        block = f"{prefix}.mlp"
        if f"{prefix}.block_sparse_moe.gate.weight" in self._checkpoint:
            block, names = f"{prefix}.block_sparse_moe", ("w1", "w3", "w2")
        router_GE = self._matrix(f"{block}.gate.weight", count, hidden)
        if f"{block}.experts.gate_up_proj" in self._checkpoint:
            gate_up_GXE = self._matrix(f"{block}.experts.gate_up_proj", count, 2 * size, hidden)
            down_GEF = self._matrix(f"{block}.experts.down_proj", count, hidden, size)
            return ExpertsWeights(router_GE=router_GE, gate_up_GXE=gate_up_GXE, down_GEF=down_GEF)
        gate_up_GXE = self._arena.empty(count, 2 * size, hidden)
        down_GEF = self._arena.empty(count, hidden, size)
        for index in range(count):
            gate, up, down = (f"{block}.experts.{index}.{name}.weight" for name in names)
            self._read(gate, gate_up_GXE[index, :size])
            self._read(up, gate_up_GXE[index, size:])
            self._read(down, down_GEF[index])
        return ExpertsWeights(router_GE=router_GE, gate_up_GXE=gate_up_GXE, down_GEF=down_GEF)

    def _matrix(self, name: str, *shape: int) -> torch.Tensor:
        target = self._arena.empty(*shape)
        self._read(name, target)
        return target

    def _fused(self, num_outputs: dict[str, int], num_inputs: int) -> torch.Tensor:
        """The weights of the modules named, of [num_outputs, num_inputs] each, one below the other."""
        weight_XI = self._arena.empty(sum(num_outputs.values()), num_inputs)
        for name, part in zip(num_outputs, torch.split(weight_XI, list(num_outputs.values())), strict=True):
            self._read(f"{name}.weight", part)
        return weight_XI

    def _bias(self, num_outputs: dict[str, int]) -> torch.Tensor:
        bias_X = torch.empty(sum(num_outputs.values()))
        for name, part in zip(num_outputs, torch.split(bias_X, list(num_outputs.values())), strict=True):
            self._read(f"{name}.bias", part)
        return bias_X

    def _norm(self, name: str, size: int) -> torch.Tensor:
        norm_E = torch.empty(size)
        self._read(f"{name}.weight", norm_E)
        return norm_E + self._config.norm_offset

    def _read(self, name: str, target: torch.Tensor) -> None:
        self._loaded_bytes += self._checkpoint.read_into(name, target)
        if not target.is_meta and not is_finite(target):
            raise ModelWeightsError(f"{name} in {self._checkpoint.model_dir} holds NaN or infinity as {target.dtype}")
        self._unread.discard(name)
        self._progress(self._loaded_bytes, self._total_bytes)
