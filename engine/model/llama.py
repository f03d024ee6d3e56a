"""The Llama forward pass over a flat batch of tokens, with keys and values in the block pool.

Axes: T tokens of the step, P the same padded to a number of rows that is used often (`padded_num_rows`), R rows whose
logits are wanted, E hidden size, F intermediate size, H query heads, K key/value heads, D head dimension, X a fused
output, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.attention.base import AttentionBackend
from engine.attention.batch import AttentionBatch
from engine.attention.kv_cache import TORCH_DTYPES, KVCache
from engine.model.config import DtypeName, ModelConfig
from engine.model.linear import padded_num_rows
from engine.model.rope import cos_sin_table
from engine.model.weights import ModelWeights

LayerWritten = Callable[[int], None]
"""Called with a layer's index when the step's keys and values of that layer are in the pool."""


class LlamaModel:
    """Weights, backend and the activations' buffers. Not thread-safe: one engine thread a model."""

    def __init__(self, config: ModelConfig, dtype: DtypeName, weights: ModelWeights, backend: AttentionBackend) -> None:
        self.config = config
        self._weights = weights
        self._backend = backend
        self._cos_sin = cos_sin_table(config.rope, config.max_position_embeddings, config.head_dim)
        self._buffers = _Buffers(config, TORCH_DTYPES[dtype])

    def forward(
        self,
        ids_T: torch.Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        rows_R: torch.Tensor,
        on_layer_written: LayerWritten | None = None,
    ) -> torch.Tensor:
        """Run the tokens, writing their keys and values to the pool; returns float32 logits [R, V].

        `rows_R` (int64) are the tokens whose logits are wanted; with none the last layer stops at its keys and
        values.
        """
        activations = self._buffers.select(len(ids_T))
        # The first norm overwrites normed_TE: until then it is free to hold the embeddings before they are widened.
        torch.index_select(self._weights.embedding_VE, 0, ids_T, out=activations.normed_TE)
        activations.residual_TE.copy_(activations.normed_TE)
        x_TE: torch.Tensor | None = None
        for index in range(self.config.num_layers):
            last_needs_kv_only = index == self.config.num_layers - 1 and len(rows_R) == 0
            x_TE = self._layer(index, x_TE, activations, batch, cache, on_layer_written, last_needs_kv_only)
        if len(rows_R) == 0:
            return torch.empty(0, self.config.vocab_size)
        assert x_TE is not None
        return self._logits(x_TE, activations.residual_TE, rows_R)

    def _layer(
        self,
        index: int,
        x_TE: torch.Tensor | None,
        activations: _Activations,
        batch: AttentionBatch,
        cache: KVCache,
        on_layer_written: LayerWritten | None,
        kv_only: bool,
    ) -> torch.Tensor | None:
        """One decoder layer. x is the previous layer's output, not yet added to the residual; returns this one's."""
        weights, backend, act = self._weights.layers[index], self._backend, activations
        eps = self.config.rms_norm_eps
        num_tokens = batch.num_tokens
        layer_BKCSD = cache.layer_BKCSD(index)

        backend.rms_norm(x_TE, act.residual_TE, weights.input_norm_E, eps, act.normed_TE)
        qkv_TX = weights.qkv(act.normed_PE)[:num_tokens]
        backend.rotary_write(qkv_TX, self._cos_sin, layer_BKCSD, batch)
        if on_layer_written is not None:
            on_layer_written(index)
        if kv_only:
            return None
        backend.attend(qkv_TX, layer_BKCSD, batch, act.attended_TX)
        x_TE = weights.attention_output(act.attended_PX)[:num_tokens]
        backend.rms_norm(x_TE, act.residual_TE, weights.mlp_norm_E, eps, act.normed_TE)
        backend.silu_mul(weights.gate_up(act.normed_PE)[:num_tokens], act.activated_TF)
        return weights.down(act.activated_PF)[:num_tokens]

    def _logits(self, x_TE: torch.Tensor, residual_TE: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Final norm and output head, for the wanted rows only."""
        x_RE, weights = x_TE[rows_R], self._weights
        normed_RE = torch.empty_like(x_RE)
        self._backend.rms_norm(x_RE, residual_TE[rows_R], weights.final_norm_E, self.config.rms_norm_eps, normed_RE)
        return weights.head(normed_RE, self._backend)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Activations:
    """Views of the buffers for one step: the step's own rows (T), and with them the padding (P).

    The residual is float32, the others are of the model's dtype.
    """

    residual_TE: torch.Tensor
    normed_TE: torch.Tensor
    normed_PE: torch.Tensor
    attended_TX: torch.Tensor
    attended_PX: torch.Tensor
    activated_TF: torch.Tensor
    activated_PF: torch.Tensor


class _Buffers:
    """Activations that every layer and step reuses. They start as zeros, so that padding rows are always finite."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._widths = {
            "residual": config.hidden_size,
            "normed": config.hidden_size,
            "attended": config.num_heads * config.head_dim,
            "activated": config.intermediate_size,
        }
        self._dtype = dtype
        self._num_rows = 0
        self._buffers: dict[str, torch.Tensor] = {}

    def select(self, num_tokens: int) -> _Activations:
        """Room for a step of so many tokens. Growing forgets what was in the buffers."""
        num_padded = padded_num_rows(num_tokens)
        if num_padded > self._num_rows:
            self._num_rows = max(num_padded, 2 * self._num_rows)
            self._buffers = {
                name: torch.zeros(self._num_rows, width, dtype=torch.float32 if name == "residual" else self._dtype)
                for name, width in self._widths.items()
            }
        buffers = self._buffers
        return _Activations(
            residual_TE=buffers["residual"][:num_tokens],
            normed_TE=buffers["normed"][:num_tokens],
            normed_PE=buffers["normed"][:num_padded],
            attended_TX=buffers["attended"][:num_tokens],
            attended_PX=buffers["attended"][:num_padded],
            activated_TF=buffers["activated"][:num_tokens],
            activated_PF=buffers["activated"][:num_padded],
        )
