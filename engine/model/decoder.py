"""The forward pass of every family: a flat batch of tokens in, logits out, keys and values in the block pool.

It is written in terms of a backend's operations, over buffers with room for many rows, and compiled once; a step only
says which rows count. Axes: T tokens of the step, R rows whose logits are wanted, N rows of the buffers, E hidden
size, F intermediate size, H query heads, D head dimension, X a fused output, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.base import Backend, CompiledStep, LayerWritten, Rows
from engine.attention.batch import StepBatch
from engine.attention.kv_cache import TORCH_DTYPES, KVCache
from engine.model.config import DtypeName, ModelConfig
from engine.model.experts import run_experts
from engine.model.rope import cos_sin_table
from engine.model.weights import ExpertsWeights, LayerWeights, ModelWeights

_LOGITS_ROWS_STEP = 16
"""Rows that the logits' buffer grows by: 1 MB each for a vocabulary of 262,144."""


class DecoderModel:
    """Weights, block pool, backend, and the activations' buffers. Not thread-safe: one engine thread a model."""

    def __init__(
        self, config: ModelConfig, dtype: DtypeName, weights: ModelWeights, backend: Backend, cache: KVCache
    ) -> None:
        self.config = config
        self.cache = cache
        self.backend = backend
        self._weights = weights
        self._dtype = TORCH_DTYPES[dtype]
        self._device = weights.embedding_VE.device
        # Rounded to the dtype of the embedding, because that is what such models are trained with.
        self._embedding_scale = float(torch.tensor(config.embedding_scale).to(self._dtype))
        # No sequence is longer than the pool.
        num_positions = min(config.max_position_embeddings, cache.layout.num_blocks * cache.layout.block_size)
        self._cos_sin_by_rope = {
            rope: cos_sin_table(rope, num_positions, config.head_dim).to(self._device)
            for rope in dict.fromkeys(layer.rope for layer in config.layers)
        }
        self._buffers: _Buffers | None = None
        self._logits_NV = self._logits_RV = torch.empty(0, config.vocab_size, device=self._device)
        self._max_logits_rows = self._num_logits_rows = 0
        self._step: CompiledStep | None = None
        # As the other, without the head.
        self._hidden_step: CompiledStep | None = None

    def forward(self, batch: StepBatch, on_layer_written: LayerWritten | None = None) -> torch.Tensor:
        """Run the step's tokens, writing their keys and values to the pool.

        Returns float32 logits [R, V], valid until the next call; with R = 0 the last layer stops at its keys and
        values. `on_layer_written` is called with each layer's index when the step's KV of that layer is in the pool.
        """
        num_selected = batch.num_selected
        self._reserve_buffers(batch.num_tokens)
        logits_RV = self._reserve_logits(num_selected)
        if self._step is None:
            self._step = self.backend.compile(self._body_with_head)
        self._step.run(batch, on_layer_written)
        return logits_RV

    def hidden(self, batch: StepBatch, on_layer_written: LayerWritten | None = None) -> torch.Tensor:
        """As `forward`, but returns what the output head reads: [R, E], normalised, valid until the next call."""
        buffers = self._reserve_buffers(batch.num_tokens)
        if self._hidden_step is None:
            self._hidden_step = self.backend.compile(self._body)
        self._hidden_step.run(batch, on_layer_written)
        return buffers.normed_NE[: batch.num_selected]

    def logits(self, normed_RE: torch.Tensor) -> torch.Tensor:
        """float32 [R, V] for rows of `hidden`, valid until the next call.

        Rows of a prompt can be passed piece by piece: the logits of all of a large step might not fit into memory.
        """
        num_rows = len(normed_RE)
        logits_RV = self._reserve_logits(num_rows)
        if num_rows:
            self.backend.linear(normed_RE, self._weights.head_VE, None, logits_RV, Rows.ALL)
        return logits_RV

    def _reserve_buffers(self, num_tokens: int) -> _Buffers:
        buffers = self._buffers
        if buffers is None or num_tokens > buffers.num_rows:
            num_rows = max(num_tokens, 2 * buffers.num_rows if buffers else 0)
            # Given back before the larger ones are taken.
            self._step = self._hidden_step = self._buffers = buffers = None
            self._buffers = buffers = _Buffers.allocate(self.config, self._dtype, self._device, num_rows)
        return buffers

    def _reserve_logits(self, num_rows: int) -> torch.Tensor:
        """The first rows of the buffer: the same view as before, if it has as many."""
        if num_rows > self._max_logits_rows:
            self._step = None
            self._max_logits_rows = -(-num_rows // _LOGITS_ROWS_STEP) * _LOGITS_ROWS_STEP
            self._logits_NV = torch.empty(self._max_logits_rows, self.config.vocab_size, device=self._device)
            self._num_logits_rows = -1
        if num_rows != self._num_logits_rows:
            self._num_logits_rows, self._logits_RV = num_rows, self._logits_NV[:num_rows]
        return self._logits_RV

    def _body_with_head(self) -> None:
        self._body()
        assert self._buffers is not None
        self.backend.linear(self._buffers.normed_NE, self._weights.head_VE, None, self._logits_NV, Rows.SELECTED)

    def _body(self) -> None:
        """The sequence of operations, up to the final norm."""
        backend, config, weights, buffers = self.backend, self.config, self._weights, self._buffers
        assert buffers is not None
        backend.embed(weights.embedding_VE, self._embedding_scale, buffers.residual_NE)
        x_norm_E = None
        for index in range(config.num_layers):
            self._attention(index, buffers, is_first=index == 0, x_norm_E=x_norm_E)
            rows, residual_NE, attended_NX = Rows.TOKENS, buffers.residual_NE, buffers.attended_NX
            if index == config.num_layers - 1:
                # The rest is a matter of each row alone, so that only the wanted ones need it (as they alone needed
                # queries).
                rows, residual_NE, attended_NX = Rows.SELECTED, buffers.selected_residual_NE, buffers.selected_NX
                backend.select_rows(buffers.residual_NE, residual_NE)
                backend.select_rows(buffers.attended_NX, attended_NX)
            layer = weights.layers[index]
            backend.linear(attended_NX, layer.attention_output_EX, layer.attention_output_bias_E, buffers.x_NE, rows)
            backend.add_norm(
                buffers.x_NE,
                layer.attention_output_norm_E,
                residual_NE,
                layer.mlp_norm_E,
                config.rms_norm_eps,
                buffers.normed_NE,
                rows,
            )
            self._mlp(layer, buffers, rows)
            x_norm_E = layer.mlp_output_norm_E
        backend.add_norm(
            buffers.x_NE,
            x_norm_E,
            buffers.selected_residual_NE,
            weights.final_norm_E,
            config.rms_norm_eps,
            buffers.normed_NE,
            Rows.SELECTED,
        )

    def _attention(self, index: int, buffers: _Buffers, *, is_first: bool, x_norm_E: torch.Tensor | None) -> None:
        """From the previous layer's output in x, not yet added to the residual, to the attended heads."""
        backend, config, layer = self.backend, self.config, self._weights.layers[index]
        shape = config.layers[index]
        layer_BKCSD = self.cache.layer_BKCSD(index)
        backend.add_norm(
            None if is_first else buffers.x_NE,
            x_norm_E,
            buffers.residual_NE,
            layer.input_norm_E,
            config.rms_norm_eps,
            buffers.normed_NE,
            Rows.TOKENS,
        )
        is_last = index == config.num_layers - 1
        if is_last:
            self._project_wanted(layer, buffers)
        else:
            backend.linear(buffers.normed_NE, layer.qkv_XE, layer.qkv_bias_X, buffers.qkv_NX, Rows.TOKENS)
        backend.rotary_write(
            buffers.qkv_NX,
            self._cos_sin_by_rope[shape.rope],
            layer.q_norm_D,
            layer.k_norm_D,
            config.rms_norm_eps,
            layer_BKCSD,
        )
        backend.layer_written(index)
        if is_last:
            backend.stop_without_rows()
        rows = Rows.SELECTED if is_last else Rows.TOKENS
        backend.attend(buffers.qkv_NX, layer_BKCSD, config.attention_scale, shape.window, buffers.attended_NX, rows)

    def _project_wanted(self, layer: LayerWeights, buffers: _Buffers) -> None:
        """The last layer's keys and values of all tokens, and queries of the wanted rows: nobody asks for others."""
        backend, bias_X = self.backend, layer.qkv_bias_X
        size = self.config.num_heads * self.config.head_dim
        q_bias_X, kv_bias_X = (None, None) if bias_X is None else (bias_X[:size], bias_X[size:])
        kv_NX = buffers.qkv_NX[:, size:]
        backend.linear(buffers.normed_NE, layer.qkv_XE[size:], kv_bias_X, kv_NX, Rows.TOKENS)
        # x has been added to the residual, and attention has not begun: both buffers are free.
        backend.select_rows(buffers.normed_NE, buffers.x_NE)
        backend.linear(buffers.x_NE, layer.qkv_XE[:size], q_bias_X, buffers.selected_NX, Rows.SELECTED)
        backend.place_rows(buffers.selected_NX, buffers.qkv_NX[:, :size])

    def _mlp(self, layer: LayerWeights, buffers: _Buffers, rows: Rows) -> None:
        """From normed to x."""
        backend, weights = self.backend, layer.mlp
        if isinstance(weights, ExpertsWeights):
            backend.call(lambda batch: self._experts(weights, buffers, batch, rows))
            return
        backend.gated_linear(
            buffers.normed_NE,
            weights.gate_up_XE,
            weights.gate_up_bias_X,
            self.config.activation,
            buffers.activated_NF,
            rows,
        )
        backend.linear(buffers.activated_NF, weights.down_EF, weights.down_bias_E, buffers.x_NE, rows)

    def _experts(self, weights: ExpertsWeights, buffers: _Buffers, batch: StepBatch, rows: Rows) -> None:
        config = self.config
        assert config.experts is not None
        count = batch.num_selected if rows is Rows.SELECTED else batch.num_tokens
        x_NE, out_NE = buffers.normed_NE[:count], buffers.x_NE[:count]
        run_experts(self.backend, config.experts, config.activation, weights, x_NE, out_NE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffers:
    """Activations that every layer and step reuses. Residuals are float32, the others of the model's dtype.

    Those named "selected" hold the wanted rows of the last layer, beside the rows they are taken from.
    """

    num_rows: int
    residual_NE: torch.Tensor
    selected_residual_NE: torch.Tensor
    normed_NE: torch.Tensor
    qkv_NX: torch.Tensor
    attended_NX: torch.Tensor
    selected_NX: torch.Tensor
    x_NE: torch.Tensor
    activated_NF: torch.Tensor

    @classmethod
    def allocate(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device, num_rows: int) -> _Buffers:
        def empty(width: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(num_rows, width, dtype=dtype, device=device)

        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return cls(
            num_rows=num_rows,
            residual_NE=empty(config.hidden_size, torch.float32),
            selected_residual_NE=empty(config.hidden_size, torch.float32),
            normed_NE=empty(config.hidden_size),
            qkv_NX=empty(query + 2 * kv),
            attended_NX=empty(query),
            selected_NX=empty(query),
            x_NE=empty(config.hidden_size),
            activated_NF=empty(config.intermediate_size),
        )
