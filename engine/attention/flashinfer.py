"""The CUDA backend: products by cuBLAS through torch, attention and fused small operations by FlashInfer.

Thin on purpose: every operation is a few calls into the two libraries, on the rows of the step at hand. What needs no
device (padding, sizes, block tables) is in `cuda_batches`; what a test replaces to run all of it on the host is
`cuda_device` and the library's own entry points. Not yet run on a GPU.

Axes as in `engine.attention.base`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import rms_norm

from engine.attention.base import Activation, LayerWritten, Rows
from engine.attention.batch import StepBatch
from engine.attention.cuda_batches import (
    MAX_GRAPH_ROWS,
    PagedTables,
    graph_size,
    graph_sizes,
    is_decode,
    pad_batch,
    scratch_batch,
)
from engine.attention.cuda_device import CudaDevice
from engine.attention.flashinfer_attention import AttentionShape, PagedAttention
from engine.attention.step_inputs import StepInputs

_FIRST_EAGER_TOKENS = 512


class _Stop(Exception):
    """Ends a sequence of operations early: not an error."""


@dataclass(slots=True, kw_only=True)
class _RunningStep:
    """The step at hand, and what is seen of the sequence that runs in it.

    Attributes:
        row_capacity: rows of the smallest buffer whose rows follow the step.
        calls_host: whether Python functions are called between the operations.
    """

    batch: StepBatch
    inputs: StepInputs
    on_layer_written: LayerWritten | None
    row_capacity: int = MAX_GRAPH_ROWS
    calls_host: bool = False


class FlashInferBackend:
    """Implements `Backend` on one GPU.

    Weights, buffers and pool lie on `device`. The pool has one block more than it gives out: there the rows that pad a
    recorded batch write their keys and values.

    Args:
        library: the module `flashinfer`.
        block_size: tokens a block of the pool.
        scratch_block: the pool's block that belongs to no sequence.
        max_blocks_per_sequence: length of the longest block table.
    """

    name = "flashinfer"

    def __init__(
        self, library: Any, device: CudaDevice, *, block_size: int, scratch_block: int, max_blocks_per_sequence: int
    ) -> None:
        self.device = device
        self._library = library
        self._block_size = block_size
        self._scratch_block = scratch_block
        self._attention = PagedAttention(
            library, device, max_graph_rows=MAX_GRAPH_ROWS, max_blocks_per_sequence=max_blocks_per_sequence
        )
        self._graph_inputs = StepInputs(device, MAX_GRAPH_ROWS)
        self._eager_inputs = StepInputs(device, _FIRST_EAGER_TOKENS)
        self._running: _RunningStep | None = None

    def compile(self, body: Callable[[], None]) -> _GraphedStep:
        return _GraphedStep(self, body)

    @contextmanager
    def running(self, batch: StepBatch, on_layer_written: LayerWritten | None = None) -> Iterator[_RunningStep]:
        """Within it, operations work on the rows of `batch`. `stop_without_rows` leaves it."""
        if batch.num_tokens > self._eager_inputs.max_tokens:
            self._eager_inputs = StepInputs(self.device, 2 * batch.num_tokens)
        with self._begin(batch, self._eager_inputs, None, on_layer_written) as step:
            yield step

    @contextmanager
    def running_padded(self, batch: StepBatch | None, num_rows: int) -> Iterator[_RunningStep]:
        """The same for a decode batch padded to `num_rows`, or for padding alone: what is recorded and replayed."""
        scratch = {"scratch_block": self._scratch_block, "block_size": self._block_size}
        padded = scratch_batch(num_rows, **scratch) if batch is None else pad_batch(batch, num_rows, **scratch)
        with self._begin(padded, self._graph_inputs, num_rows, None) as step:
            yield step

    @contextmanager
    def _begin(
        self, batch: StepBatch, inputs: StepInputs, graph_rows: int | None, on_layer_written: LayerWritten | None
    ) -> Iterator[_RunningStep]:
        assert self._running is None, "a step is running already"
        self.device.wait_for_copies()
        inputs.load(batch, self._block_size)
        self._attention.begin_step(PagedTables.from_batch(batch, self._block_size), graph_rows)
        self.device.mark_copies()
        self._running = _RunningStep(batch=batch, inputs=inputs, on_layer_written=on_layer_written)
        try:
            # Raised where the rest would compute nothing that is used.
            with suppress(_Stop):
                yield self._running
        finally:
            self._running = None

    def call(self, function: Callable[[StepBatch], None]) -> None:
        step = self._step()
        step.calls_host = True
        function(step.batch)

    def layer_written(self, layer: int) -> None:
        on_layer_written = self._step().on_layer_written
        if on_layer_written is not None:
            # What is queued is not written: whoever is told reads the pool from elsewhere.
            self.device.synchronize()
            on_layer_written(layer)

    def stop_without_rows(self) -> None:
        if self._step().batch.num_selected == 0:
            raise _Stop

    def embed(self, table_VE: torch.Tensor, scale: float, residual_NE: torch.Tensor) -> None:
        residual_TE = residual_NE[: self._num_rows(Rows.TOKENS, residual_NE)]
        residual_TE.copy_(table_VE.index_select(0, self._step().inputs.ids_T))
        if scale != 1.0:
            residual_TE.mul_(scale)

    def select_rows(self, source_NX: torch.Tensor, target_NX: torch.Tensor) -> None:
        count = self._num_rows(Rows.SELECTED, target_NX)
        torch.index_select(source_NX, 0, self._step().inputs.rows_R, out=target_NX[:count])

    def place_rows(self, source_NX: torch.Tensor, target_NX: torch.Tensor) -> None:
        count = self._num_rows(Rows.SELECTED, source_NX)
        # Where a padded batch names a row twice, both copies are the same.
        target_NX.index_copy_(0, self._step().inputs.rows_R, source_NX[:count])

    def add_norm(
        self,
        x_NE: torch.Tensor | None,
        x_norm_E: torch.Tensor | None,
        residual_NE: torch.Tensor,
        norm_E: torch.Tensor,
        eps: float,
        out_NE: torch.Tensor,
        rows: Rows,
    ) -> None:
        count = self._num_rows(rows, out_NE)
        residual_NE = residual_NE[:count]
        if x_NE is not None:
            x_NE = x_NE[:count]
            residual_NE.add_(x_NE if x_norm_E is None else _rms_norm(x_NE.float(), x_norm_E, eps))
        out_NE[:count].copy_(_rms_norm(residual_NE, norm_E, eps))

    def linear(
        self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, out_NO: torch.Tensor, rows: Rows
    ) -> None:
        count = self._num_rows(rows, out_NO)
        self._multiply(x_NI[:count], weight_OI, bias_O, out_NO[:count])

    def gated_linear(
        self,
        x_NI: torch.Tensor,
        weight_XI: torch.Tensor,
        bias_X: torch.Tensor | None,
        activation: Activation,
        out_NF: torch.Tensor,
        rows: Rows,
    ) -> None:
        count = self._num_rows(rows, out_NF)
        if count == 0:
            return  # an expert without tokens: a kernel cannot be launched over nothing
        gate_up_NX = x_NI.new_empty(count, len(weight_XI))
        self._multiply(x_NI[:count], weight_XI, bias_X, gate_up_NX)
        function = self._library.silu_and_mul if activation == "silu" else self._library.gelu_tanh_and_mul
        function(gate_up_NX, out=out_NF[:count])

    def rotary_write(
        self,
        qkv_NX: torch.Tensor,
        cos_sin_PD: torch.Tensor | None,
        q_norm_D: torch.Tensor | None,
        k_norm_D: torch.Tensor | None,
        eps: float,
        layer_BKCSD: torch.Tensor,
    ) -> None:
        inputs = self._step().inputs
        qkv_TX = qkv_NX[: self._num_rows(Rows.TOKENS, qkv_NX)]
        q_TX, k_TX, kv_TX = _split(qkv_TX, layer_BKCSD)
        _, num_kv_heads, _, _, head_dim = layer_BKCSD.shape
        _norm_heads(q_TX, q_norm_D, eps, head_dim)
        _norm_heads(k_TX, k_norm_D, eps, head_dim)
        if cos_sin_PD is not None:
            self._library.apply_rope_with_cos_sin_cache_inplace(inputs.positions_T, q_TX, k_TX, head_dim, cos_sin_PD)
        kv_TKCD = kv_TX.view(len(kv_TX), 2, num_kv_heads, head_dim).transpose(1, 2)
        layer_BKCSD[inputs.blocks_T, :, :, inputs.offsets_T] = kv_TKCD

    def attend(
        self,
        qkv_NX: torch.Tensor,
        layer_BKCSD: torch.Tensor,
        scale: float,
        window: int,
        out_NX: torch.Tensor,
        rows: Rows = Rows.TOKENS,
    ) -> None:
        # Of all tokens, whatever the rows: the step's attention is planned once for all layers.
        count = self._num_rows(Rows.TOKENS, out_NX)
        _, num_kv_heads, _, block_size, head_dim = layer_BKCSD.shape
        q_TX, _, _ = _split(qkv_NX[:count], layer_BKCSD)
        q_THD = q_TX.view(count, -1, head_dim)
        shape = AttentionShape(
            num_heads=q_THD.shape[1],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=layer_BKCSD.dtype,
            scale=scale,
            window=window,
        )
        self._attention.run(q_THD, layer_BKCSD, shape, out_NX[:count].view(q_THD.shape))

    def argmax(self, logits_RV: torch.Tensor) -> tuple[list[int], list[float]]:
        largest_R, indices_R = logits_RV.max(dim=-1)  # the first index among equals
        indices, largest = torch.stack([indices_R.double(), largest_R.double()]).tolist()
        return [int(index) for index in indices], largest

    def _multiply(
        self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, out_NO: torch.Tensor
    ) -> None:
        if out_NO.dtype != x_NI.dtype:
            self.device.wide_product(x_NI, weight_OI, out_NO)
            if bias_O is not None:
                out_NO.add_(bias_O)
        elif bias_O is None:
            torch.mm(x_NI, weight_OI.t(), out=out_NO)
        else:
            # In the factors' dtype, so that it is added to the float32 sum and rounding happens once.
            torch.addmm(bias_O.to(x_NI.dtype), x_NI, weight_OI.t(), out=out_NO)

    def _step(self) -> _RunningStep:
        assert self._running is not None, "no step is running"
        return self._running

    def _num_rows(self, rows: Rows, tensor: torch.Tensor) -> int:
        if rows is Rows.ALL:
            return len(tensor)
        step = self._step()
        step.row_capacity = min(step.row_capacity, len(tensor))
        return step.batch.num_tokens if rows is Rows.TOKENS else step.batch.num_selected


class _GraphedStep:
    """Implements `CompiledStep`: decode batches replay recordings, everything else runs operation by operation.

    All sizes are recorded before the first step. Each runs once before, on padding alone, so that kernels are compiled
    and memory is reserved by then. Nothing is recorded if the host has work amid the sequence.
    """

    def __init__(self, backend: FlashInferBackend, body: Callable[[], None]) -> None:
        self._backend = backend
        self._body = body
        self._replays: dict[int, Callable[[], None]] | None = None

    def run(self, batch: StepBatch, on_layer_written: LayerWritten | None = None) -> None:
        if self._replays is None:
            self._replays = self._record()
        size = None
        if on_layer_written is None and is_decode(batch):
            size = graph_size(batch.num_tokens, tuple(self._replays))
        if size is None:
            with self._backend.running(batch, on_layer_written):
                self._body()
        else:
            with self._backend.running_padded(batch, size):
                self._replays[size]()

    def _record(self) -> dict[int, Callable[[], None]]:
        """By size, ascending."""
        with self._backend.running_padded(None, 1) as step:
            self._body()
        sizes = () if step.calls_host else graph_sizes(step.row_capacity)
        replays = {}
        # The largest first: the memory that it takes serves the others.
        for size in reversed(sizes):
            with self._backend.running_padded(None, size):
                self._body()
                replays[size] = self._backend.device.capture(self._body)
        return {size: replays[size] for size in sizes}


def _rms_norm(x_NE: torch.Tensor, norm_E: torch.Tensor, eps: float) -> torch.Tensor:
    """float32, over the last axis."""
    return rms_norm(x_NE, norm_E.shape, norm_E, eps)


def _norm_heads(heads_TX: torch.Tensor, norm_D: torch.Tensor | None, eps: float, head_dim: int) -> None:
    """Each head by its own rms, in place."""
    if norm_D is not None:
        heads_TYD = heads_TX.view(len(heads_TX), -1, head_dim)
        heads_TYD.copy_(_rms_norm(heads_TYD.float(), norm_D, eps))


def _split(qkv_TX: torch.Tensor, layer_BKCSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the queries, of the keys, and of keys and values together."""
    kv_size = layer_BKCSD.shape[1] * layer_BKCSD.shape[4]
    q_size = qkv_TX.shape[1] - 2 * kv_size
    return qkv_TX[:, :q_size], qkv_TX[:, q_size : q_size + kv_size], qkv_TX[:, q_size:]
