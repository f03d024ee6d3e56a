"""The Llama forward pass over a flat batch of tokens, with keys and values in the block pool.

Axes: T tokens of the step, P the same padded to a number of rows that is used often (`padded_num_rows`), R rows whose
logits are wanted, E hidden size, F intermediate size, H query heads, K key/value heads, D head dimension, X a fused
output, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

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
        num_tokens = len(ids_T)
        buffers = self._buffers
        buffers.reserve(num_tokens)
        residual_TE = buffers.residual_PE[:num_tokens]
        torch.index_select(self._weights.embedding_VE, 0, ids_T, out=residual_TE)
        x_TE: torch.Tensor | None = None
        for index in range(self.config.num_layers):
            last_needs_kv_only = index == self.config.num_layers - 1 and len(rows_R) == 0
            x_TE = self._layer(index, x_TE, residual_TE, batch, cache, on_layer_written, last_needs_kv_only)
        if len(rows_R) == 0:
            return torch.empty(0, self.config.vocab_size)
        assert x_TE is not None
        return self._logits(x_TE, residual_TE, rows_R)

    def _layer(
        self,
        index: int,
        x_TE: torch.Tensor | None,
        residual_TE: torch.Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        on_layer_written: LayerWritten | None,
        kv_only: bool,
    ) -> torch.Tensor | None:
        """One decoder layer. x is the previous layer's output, not yet added to the residual; returns this one's."""
        weights, backend, buffers = self._weights.layers[index], self._backend, self._buffers
        eps = self.config.rms_norm_eps
        num_tokens = len(residual_TE)
        num_padded = padded_num_rows(num_tokens)
        normed_PE = buffers.normed_PE[:num_padded]
        attended_PX = buffers.attended_PX[:num_padded]
        activated_PF = buffers.activated_PF[:num_padded]
        layer_BKCSD = cache.layer_BKCSD(index)

        backend.rms_norm(x_TE, residual_TE, weights.input_norm_E, eps, normed_PE[:num_tokens])
        qkv_TX = weights.qkv(normed_PE)[:num_tokens]
        backend.rotary_write(qkv_TX, self._cos_sin, layer_BKCSD, batch)
        if on_layer_written is not None:
            on_layer_written(index)
        if kv_only:
            return None
        backend.attend(qkv_TX, layer_BKCSD, batch, attended_PX[:num_tokens])
        x_TE = weights.attention_output(attended_PX)[:num_tokens]
        backend.rms_norm(x_TE, residual_TE, weights.mlp_norm_E, eps, normed_PE[:num_tokens])
        gate_up_TX = weights.gate_up(normed_PE)[:num_tokens]
        backend.silu_mul(gate_up_TX, activated_PF[:num_tokens])
        return weights.down(activated_PF)[:num_tokens]

    def _logits(self, x_TE: torch.Tensor, residual_TE: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Final norm and output head, for the wanted rows only."""
        num_rows = len(rows_R)
        normed_PE = torch.zeros(padded_num_rows(num_rows), self.config.hidden_size, dtype=residual_TE.dtype)
        self._backend.rms_norm(
            x_TE[rows_R],
            residual_TE[rows_R],
            self._weights.final_norm_E,
            self.config.rms_norm_eps,
            normed_PE[:num_rows],
        )
        return self._weights.head(normed_PE)[:num_rows].float()


class _Buffers:
    """Activations that every layer reuses. They start as zeros, so that padding rows are always finite."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype
        self._num_rows = 0
        self.reserve(1)

    def reserve(self, num_tokens: int) -> None:
        """Make room for so many tokens, padded; growing forgets what was in the buffers."""
        if padded_num_rows(num_tokens) <= self._num_rows:
            return
        config, num_rows = self._config, max(padded_num_rows(num_tokens), 2 * self._num_rows)
        self.residual_PE = torch.zeros(num_rows, config.hidden_size, dtype=self._dtype)
        self.normed_PE = torch.zeros(num_rows, config.hidden_size, dtype=self._dtype)
        self.attended_PX = torch.zeros(num_rows, config.num_heads * config.head_dim, dtype=self._dtype)
        self.activated_PF = torch.zeros(num_rows, config.intermediate_size, dtype=self._dtype)
        self._num_rows = num_rows
