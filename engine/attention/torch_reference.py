"""The reference backend: plain torch, written to be obviously right. Slow: it gathers each sequence's KV.

Used where the native kernels cannot be built, and by the tests as what the kernels are compared with. It computes in
float32 and rounds each result once, as the kernels do. It works on whatever device the buffers are. Axes as in
`engine.attention.base`; Y heads of queries, keys or values; P positions a sequence can see, G query heads a key/value
head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from engine.attention.base import Activation, LayerWritten, Rows
from engine.attention.batch import StepBatch

_WIDENED_ELEMENTS = 1 << 22
"""Of a weight, this many elements are widened to float32 at a time: 16 MiB."""


class _Stop(Exception):
    """Ends a sequence of operations early: not an error."""


class TorchReferenceBackend:
    """Implements `Backend`: each operation is computed where it is called, and a compiled step calls its body."""

    name = "torch_reference"

    def __init__(self) -> None:
        self._batch: StepBatch | None = None
        self._on_layer_written: LayerWritten | None = None

    def compile(self, body: Callable[[], None]) -> _EagerStep:
        return _EagerStep(self, body)

    def run(self, body: Callable[[], None], batch: StepBatch, on_layer_written: LayerWritten | None = None) -> None:
        """Call `body` with its operations working on the rows of `batch`."""
        assert self._batch is None, "a step is running already"
        self._batch, self._on_layer_written = batch, on_layer_written
        try:
            with contextlib.suppress(_Stop):  # raised where nothing is left to do
                body()
        finally:
            self._batch, self._on_layer_written = None, None

    def call(self, function: Callable[[StepBatch], None]) -> None:
        function(self._running())

    def layer_written(self, layer: int) -> None:
        if self._on_layer_written is not None:
            self._on_layer_written(layer)

    def stop_without_rows(self) -> None:
        if self._running().num_selected == 0:
            raise _Stop

    def embed(self, table_VE: torch.Tensor, scale: float, residual_NE: torch.Tensor) -> None:
        ids_T = self._running().ids_T.to(table_VE.device)
        residual_NE[: len(ids_T)] = table_VE[ids_T].float() * scale

    def select_rows(self, source_NX: torch.Tensor, target_NX: torch.Tensor) -> None:
        rows_R = self._running().rows_R.to(source_NX.device)
        target_NX[: len(rows_R)] = source_NX[rows_R]

    def place_rows(self, source_NX: torch.Tensor, target_NX: torch.Tensor) -> None:
        rows_R = self._running().rows_R.to(source_NX.device)
        target_NX[rows_R] = source_NX[: len(rows_R)]

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
            x_NE = x_NE[:count].float()
            residual_NE += x_NE if x_norm_E is None else _rms_norm(x_NE, x_norm_E, eps)
        out_NE[:count] = _rms_norm(residual_NE, norm_E, eps)

    def linear(
        self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, out_NO: torch.Tensor, rows: Rows
    ) -> None:
        count = self._num_rows(rows, out_NO)
        _multiply(x_NI[:count], weight_OI, bias_O, out_NO[:count])

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
        gate_up_NX = torch.empty(count, len(weight_XI), device=x_NI.device)
        _multiply(x_NI[:count], weight_XI, bias_X, gate_up_NX)
        gate_NF, up_NF = gate_up_NX.chunk(2, dim=-1)
        if activation == "silu":
            activated_NF = torch.nn.functional.silu(gate_NF)
        else:
            activated_NF = torch.nn.functional.gelu(gate_NF, approximate="tanh")
        out_NF[:count] = activated_NF * up_NF

    def rotary_write(
        self,
        qkv_NX: torch.Tensor,
        cos_sin_PD: torch.Tensor | None,
        q_norm_D: torch.Tensor | None,
        k_norm_D: torch.Tensor | None,
        eps: float,
        layer_BKCSD: torch.Tensor,
    ) -> None:
        batch = self._running()
        q_THD, k_TKD, v_TKD = _split_heads(qkv_NX[: batch.num_tokens], layer_BKCSD)
        cos_sin_T1D = None
        if cos_sin_PD is not None:
            cos_sin_T1D = cos_sin_PD[batch.positions_T.to(cos_sin_PD.device)].unsqueeze(1)
        q_THD.copy_(_norm_and_rotate(q_THD, q_norm_D, cos_sin_T1D, eps))
        slots_T, block_size = batch.slots_T.to(layer_BKCSD.device), layer_BKCSD.shape[3]
        blocks_T, offsets_T = slots_T // block_size, slots_T % block_size
        layer_BKCSD[blocks_T, :, 0, offsets_T] = _norm_and_rotate(k_TKD, k_norm_D, cos_sin_T1D, eps)
        layer_BKCSD[blocks_T, :, 1, offsets_T] = v_TKD

    def attend(
        self,
        qkv_NX: torch.Tensor,
        layer_BKCSD: torch.Tensor,
        scale: float,
        window: int,
        out_NX: torch.Tensor,
        rows: Rows = Rows.TOKENS,
    ) -> None:
        # Of all tokens, whatever the rows.
        batch = self._running()
        q_THD, _, _ = _split_heads(qkv_NX[: batch.num_tokens], layer_BKCSD)
        out_THD = out_NX[: batch.num_tokens].view(q_THD.shape)
        for sequence in range(batch.num_sequences):
            begin, end = batch.query_starts_S1[sequence : sequence + 2].tolist()
            context_start = int(batch.context_starts_S[sequence])
            k_PKD, v_PKD = _gather(layer_BKCSD, batch, sequence, context_start + end - begin)
            out_THD[begin:end] = _attend_sequence(q_THD[begin:end], k_PKD, v_PKD, context_start, scale, window)

    def argmax(self, logits_RV: torch.Tensor) -> tuple[list[int], list[float]]:
        largest_R, indices_R = logits_RV.max(dim=-1)  # the first index among equals
        return indices_R.tolist(), largest_R.tolist()

    def _running(self) -> StepBatch:
        assert self._batch is not None, "no step is running"
        return self._batch

    def _num_rows(self, rows: Rows, tensor: torch.Tensor) -> int:
        if rows is Rows.ALL:
            return len(tensor)
        batch = self._running()
        return batch.num_tokens if rows is Rows.TOKENS else batch.num_selected


class _EagerStep:
    """Implements `CompiledStep` by running the body anew each time."""

    def __init__(self, backend: TorchReferenceBackend, body: Callable[[], None]) -> None:
        self._backend = backend
        self._body = body

    def run(self, batch: StepBatch, on_layer_written: LayerWritten | None = None) -> None:
        self._backend.run(self._body, batch, on_layer_written)


def _multiply(x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, out_NO: torch.Tensor) -> None:
    num_outputs, num_inputs = weight_OI.shape
    wide_NI = x_NI.float()
    piece_size = max(1, _WIDENED_ELEMENTS // num_inputs)
    for begin in range(0, num_outputs, piece_size):
        piece = slice(begin, begin + piece_size)
        product_NO = wide_NI @ weight_OI[piece].float().T
        out_NO[:, piece] = product_NO if bias_O is None else product_NO + bias_O[piece]


def _rms_norm(x_NE: torch.Tensor, norm_E: torch.Tensor, eps: float) -> torch.Tensor:
    """float32, over the last axis."""
    return x_NE * torch.rsqrt(x_NE.square().mean(dim=-1, keepdim=True) + eps) * norm_E


def _split_heads(qkv_TX: torch.Tensor, layer_BKCSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of queries [T, H, D], keys and values [T, K, D]."""
    _, num_kv_heads, _, _, head_dim = layer_BKCSD.shape
    heads_TYD = qkv_TX.view(len(qkv_TX), -1, head_dim)
    num_heads = heads_TYD.shape[1] - 2 * num_kv_heads
    q_THD, k_TKD, v_TKD = torch.split(heads_TYD, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    return q_THD, k_TKD, v_TKD


def _norm_and_rotate(
    x_TYD: torch.Tensor, norm_D: torch.Tensor | None, cos_sin_T1D: torch.Tensor | None, eps: float
) -> torch.Tensor:
    wide_TYD = x_TYD.float()
    if norm_D is not None:
        wide_TYD = _rms_norm(wide_TYD, norm_D, eps)
    if cos_sin_T1D is not None:
        cos_T1h, sin_T1h = cos_sin_T1D.chunk(2, dim=-1)
        low_TYh, high_TYh = wide_TYD.chunk(2, dim=-1)
        wide_TYD = torch.cat([low_TYh * cos_T1h - high_TYh * sin_T1h, high_TYh * cos_T1h + low_TYh * sin_T1h], dim=-1)
    return wide_TYD.to(x_TYD.dtype)


def _gather(
    layer_BKCSD: torch.Tensor, batch: StepBatch, sequence: int, context_end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions 0 .. context_end - 1 of one sequence, copied together: [P, K, D] each."""
    block_size = layer_BKCSD.shape[3]
    table_start = int(batch.table_starts_S[sequence])
    num_blocks = (context_end + block_size - 1) // block_size
    blocks = batch.block_tables[table_start : table_start + num_blocks].long().to(layer_BKCSD.device)
    kv_CPKD = layer_BKCSD[blocks].permute(2, 0, 3, 1, 4).flatten(1, 2)[:, :context_end]
    return kv_CPKD[0], kv_CPKD[1]


def _attend_sequence(
    q_THD: torch.Tensor, k_PKD: torch.Tensor, v_PKD: torch.Tensor, context_start: int, scale: float, window: int
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = q_THD.shape
    num_positions, num_kv_heads, _ = k_PKD.shape
    q_TKGD = q_THD.float().view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores_KGTP = torch.einsum("tkgd,pkd->kgtp", q_TKGD, k_PKD.float()) * scale
    query_positions_T1 = torch.arange(context_start, context_start + num_tokens, device=q_THD.device).unsqueeze(1)
    key_positions_P = torch.arange(num_positions, device=q_THD.device)
    hidden_TP = key_positions_P > query_positions_T1
    if window:
        hidden_TP |= key_positions_P <= query_positions_T1 - window
    weights_KGTP = scores_KGTP.masked_fill(hidden_TP, float("-inf")).softmax(dim=-1)
    out_TKGD = torch.einsum("kgtp,pkd->tkgd", weights_KGTP, v_PKD.float())
    return out_TKGD.reshape(num_tokens, num_heads, head_dim).to(q_THD.dtype)
