"""The native CPU backend: hands torch tensors' addresses to the compiled kernels."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import torch

from engine.attention import native_structs as structs
from engine.attention.base import Activation, Rows
from engine.attention.batch import StepBatch
from engine.attention.native_library import ISA_NAMES, best_isa, load_kernels, supported_isas
from engine.attention.native_structs import BFLOAT16, FLOAT32, OpKind, OpStruct
from engine.attention.recording import RecordedStep, Recording

_DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
_ACTIVATIONS: dict[Activation, int] = {"silu": structs.SILU, "gelu_tanh": structs.GELU_TANH}
_NUM_ROWS_OFFSETS = {
    Rows.TOKENS: structs.StepStruct.num_tokens.offset,
    Rows.SELECTED: structs.StepStruct.num_selected.offset,
}


class NativeCpuBackend:
    """Implements `Backend` with the compiled kernels.

    While `compile` runs a body, its operations are recorded; at any other time they are run at once, on the rows of
    the step that is running or ran last.

    Args:
        num_threads: how many threads a kernel may use, the calling one included.
        isa: an instruction set of ISA_NAMES; the fastest that the machine has, if not given.

    Raises:
        KernelsUnavailableError: the kernels are not built.
        ValueError: the instruction set is unknown or not supported here.
    """

    def __init__(self, num_threads: int, isa: str | None = None) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        library = load_kernels()
        supported = supported_isas(library)
        self.isa = isa or best_isa(library)
        if self.isa not in supported:
            raise ValueError(f"isa {self.isa!r} is not supported here; supported: {', '.join(supported)}")
        self.name = f"cpu_{self.isa}"
        self._isa_index = ISA_NAMES.index(self.isa)
        self._run_program: Any = library.baton_run
        self._team = library.baton_team_create(num_threads)
        weakref.finalize(self, library.baton_team_destroy, self._team)
        self._step = structs.StepStruct()
        self._step_address = ctypes.addressof(self._step)
        self._batch: StepBatch | None = None
        """Whose addresses stand in `_step`."""
        self._num_all_rows = ctypes.c_int32()
        self._single_op = (OpStruct * 1)()
        self._recording: Recording | None = None
        self._argmax_logits: torch.Tensor | None = None
        """Whose address stands in `_argmax_args`."""
        self._argmax_args = structs.ArgmaxStruct()
        self._num_argmax_rows = ctypes.c_int32()
        self._argmax_ids = (ctypes.c_int64 * 0)()
        self._argmax_values = (ctypes.c_float * 0)()

    def compile(self, body: Callable[[], None]) -> RecordedStep:
        """Record `body`, which is called once, now."""
        assert self._recording is None, "a sequence is being recorded already"
        self._recording = recording = Recording()
        try:
            body()
        finally:
            self._recording = None
        return RecordedStep(recording, self._bind, self._run_ops)

    def call(self, function: Callable[[StepBatch], None]) -> None:
        assert self._recording is not None, "call is for recorded sequences"
        self._recording.add_call(function)

    def layer_written(self, layer: int) -> None:
        assert self._recording is not None, "layer_written is for recorded sequences"
        self._recording.add_layer(layer)

    def stop_without_rows(self) -> None:
        assert self._recording is not None, "stop_without_rows is for recorded sequences"
        self._recording.stop_without_rows()

    def embed(self, table_VE: torch.Tensor, scale: float, residual_NE: torch.Tensor) -> None:
        _check_matrix(table_VE, residual_NE)
        assert residual_NE.dtype == torch.float32 and residual_NE.shape[1] == table_VE.shape[1]
        self._limit(Rows.TOKENS, residual_NE)
        args = structs.EmbedStruct(
            table=table_VE.data_ptr(),
            residual=residual_NE.data_ptr(),
            size=table_VE.shape[1],
            dtype=_DTYPES[table_VE.dtype],
            scale=scale,
        )
        self._add(OpKind.EMBED, args, table_VE, residual_NE)

    def select_rows(self, source_NX: torch.Tensor, target_NX: torch.Tensor) -> None:
        self._limit(Rows.TOKENS, source_NX)
        self._limit(Rows.SELECTED, target_NX)
        self._add(OpKind.SELECT_ROWS, _row_copies(source_NX, target_NX), source_NX, target_NX)

    def place_rows(self, source_NX: torch.Tensor, target_NX: torch.Tensor) -> None:
        self._limit(Rows.SELECTED, source_NX)
        self._limit(Rows.TOKENS, target_NX)
        self._add(OpKind.PLACE_ROWS, _row_copies(source_NX, target_NX), source_NX, target_NX)

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
        _check_matrix(residual_NE, out_NE)
        assert residual_NE.dtype == torch.float32 and residual_NE.shape[1] == out_NE.shape[1]
        _check_float32_vectors(out_NE.shape[1], norm_E, x_norm_E)
        if x_NE is not None:
            _check_matrix(x_NE)
            assert x_NE.dtype == out_NE.dtype and x_NE.shape[1] == out_NE.shape[1]
        args = structs.AddNormStruct(
            num_rows=self._limit(rows, out_NE, residual_NE, x_NE),
            x=_address(x_NE),
            x_norm=_address(x_norm_E),
            residual=residual_NE.data_ptr(),
            norm=norm_E.data_ptr(),
            out=out_NE.data_ptr(),
            size=out_NE.shape[1],
            dtype=_DTYPES[out_NE.dtype],
            eps=eps,
        )
        self._add(OpKind.ADD_NORM, args, x_NE, x_norm_E, residual_NE, norm_E, out_NE)

    def linear(
        self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, out_NO: torch.Tensor, rows: Rows
    ) -> None:
        self._add_product(x_NI, weight_OI, bias_O, structs.NO_ACTIVATION, out_NO, rows)

    def gated_linear(
        self,
        x_NI: torch.Tensor,
        weight_XI: torch.Tensor,
        bias_X: torch.Tensor | None,
        activation: Activation,
        out_NF: torch.Tensor,
        rows: Rows,
    ) -> None:
        self._add_product(x_NI, weight_XI, bias_X, _ACTIVATIONS[activation], out_NF, rows)

    def _add_product(
        self,
        x_NI: torch.Tensor,
        weight_XI: torch.Tensor,
        bias_X: torch.Tensor | None,
        activation: int,
        out_NO: torch.Tensor,
        rows: Rows,
    ) -> None:
        """With an activation the weight has two rows an output, else one."""
        num_weight_rows, num_inputs = weight_XI.shape
        num_outputs = out_NO.shape[1]
        _check_matrix(weight_XI)
        assert x_NI.stride(1) == out_NO.stride(1) == 1 and x_NI.dtype == weight_XI.dtype
        assert x_NI.shape[1] == num_inputs
        assert num_weight_rows == (num_outputs if activation == structs.NO_ACTIVATION else 2 * num_outputs)
        _check_float32_vectors(num_weight_rows, bias_X)
        args = structs.LinearStruct(
            num_rows=self._limit(rows, out_NO, x_NI),
            x=x_NI.data_ptr(),
            weight=weight_XI.data_ptr(),
            bias=_address(bias_X),
            out=out_NO.data_ptr(),
            x_stride=x_NI.stride(0),
            out_stride=out_NO.stride(0),
            num_inputs=num_inputs,
            num_outputs=num_outputs,
            dtype=_DTYPES[weight_XI.dtype],
            out_dtype=_DTYPES[out_NO.dtype],
            activation=activation,
        )
        self._add(OpKind.LINEAR, args, x_NI, weight_XI, bias_X, out_NO)

    def rotary_write(
        self,
        qkv_NX: torch.Tensor,
        cos_sin_PD: torch.Tensor | None,
        q_norm_D: torch.Tensor | None,
        k_norm_D: torch.Tensor | None,
        eps: float,
        layer_BKCSD: torch.Tensor,
    ) -> None:
        kv = _layer_struct(layer_BKCSD)
        head_dim = kv.head_dim
        assert qkv_NX.dtype == layer_BKCSD.dtype and qkv_NX.stride(1) == 1
        _check_float32_vectors(head_dim, q_norm_D, k_norm_D)
        if cos_sin_PD is not None:
            _check_matrix(cos_sin_PD)
            assert cos_sin_PD.dtype == torch.float32 and cos_sin_PD.shape[1] == head_dim
        self._limit(Rows.TOKENS, qkv_NX)
        args = structs.RotaryWriteStruct(
            kv=kv,
            qkv=qkv_NX.data_ptr(),
            cos_sin=_address(cos_sin_PD),
            q_norm=_address(q_norm_D),
            k_norm=_address(k_norm_D),
            token_stride=qkv_NX.stride(0),
            num_heads=qkv_NX.shape[1] // head_dim - 2 * kv.num_kv_heads,
            eps=eps,
        )
        self._add(OpKind.ROTARY_WRITE, args, qkv_NX, cos_sin_PD, q_norm_D, k_norm_D, layer_BKCSD)

    def attend(
        self,
        qkv_NX: torch.Tensor,
        layer_BKCSD: torch.Tensor,
        scale: float,
        window: int,
        out_NX: torch.Tensor,
        rows: Rows = Rows.TOKENS,
    ) -> None:
        kv = _layer_struct(layer_BKCSD)
        num_heads = out_NX.shape[1] // kv.head_dim
        assert qkv_NX.dtype == out_NX.dtype == layer_BKCSD.dtype
        assert qkv_NX.stride(1) == out_NX.stride(1) == 1
        assert qkv_NX.shape[1] >= num_heads * kv.head_dim and num_heads % kv.num_kv_heads == 0
        self._limit(Rows.TOKENS, qkv_NX, out_NX)
        args = structs.AttentionStruct(
            kv=kv,
            q=qkv_NX.data_ptr(),
            out=out_NX.data_ptr(),
            q_token_stride=qkv_NX.stride(0),
            out_token_stride=out_NX.stride(0),
            num_heads=num_heads,
            window=window,
            scale=scale,
            selected_only=rows is Rows.SELECTED,
        )
        self._add(OpKind.ATTENTION, args, qkv_NX, layer_BKCSD, out_NX)

    def argmax(self, logits_RV: torch.Tensor) -> tuple[list[int], list[float]]:
        assert self._recording is None
        if logits_RV is not self._argmax_logits:  # a step after the other has the same
            self._prepare_argmax(logits_RV)
        self._add(OpKind.ARGMAX, self._argmax_args)
        num_rows = self._num_argmax_rows.value
        return self._argmax_ids[:num_rows], self._argmax_values[:num_rows]

    def _prepare_argmax(self, logits_RV: torch.Tensor) -> None:
        _check_matrix(logits_RV)
        assert logits_RV.dtype == torch.float32
        num_rows, size = logits_RV.shape
        if num_rows > len(self._argmax_ids):
            self._argmax_ids, self._argmax_values = (ctypes.c_int64 * num_rows)(), (ctypes.c_float * num_rows)()
        self._argmax_logits = logits_RV
        self._num_argmax_rows.value = num_rows
        self._argmax_args = structs.ArgmaxStruct(
            num_rows=ctypes.addressof(self._num_argmax_rows),
            logits=logits_RV.data_ptr(),
            ids=ctypes.addressof(self._argmax_ids),
            values=ctypes.addressof(self._argmax_values),
            size=size,
        )

    def _bind(self, batch: StepBatch) -> None:
        if batch is self._batch:  # its tensors may hold other numbers now, but they are where they were
            return
        self._batch = batch
        step = self._step
        step.ids = batch.ids_T.data_ptr()
        step.positions = batch.positions_T.data_ptr()
        step.slots = batch.slots_T.data_ptr()
        step.query_starts = batch.query_starts_S1.data_ptr()
        step.context_starts = batch.context_starts_S.data_ptr()
        step.table_starts = batch.table_starts_S.data_ptr()
        step.block_tables = batch.block_tables.data_ptr()
        step.rows = batch.rows_R.data_ptr()
        step.num_tokens = batch.num_tokens
        step.num_selected = batch.num_selected
        step.num_sequences = batch.num_sequences

    def _limit(self, rows: Rows, *tensors: torch.Tensor | None) -> int:
        """The address of the number of rows, which must not exceed any of the tensors'."""
        num_present = min(tensor.shape[0] for tensor in tensors if tensor is not None)
        if self._recording is not None:
            self._recording.limit_rows(rows, num_present)
        elif rows is Rows.ALL:
            self._num_all_rows.value = num_present
            return ctypes.addressof(self._num_all_rows)
        else:
            step = self._step
            assert num_present >= (step.num_tokens if rows is Rows.TOKENS else step.num_selected)
        return self._step_address + _NUM_ROWS_OFFSETS[rows]

    def _add(self, kind: OpKind, args: ctypes.Structure, *tensors: torch.Tensor | None) -> None:
        if self._recording is not None:
            self._recording.add(kind, args, tensors)
        else:
            op = self._single_op[0]
            op.args = ctypes.addressof(args)
            op.kind = kind
            self._run_ops(self._single_op, 0, 1)

    def _run_ops(self, ops: ctypes.Array[OpStruct], begin: int, end: int) -> None:
        self._run_program(self._team, ops, begin, end, self._step, self._isa_index)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check_matrix(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert tensor.dim() == 2 and tensor.is_contiguous()


def _check_float32_vectors(size: int, *tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        assert tensor is None or (tensor.dtype == torch.float32 and tensor.shape == (size,) and tensor.is_contiguous())


def _row_copies(source_NX: torch.Tensor, target_NX: torch.Tensor) -> structs.SelectRowsStruct:
    assert source_NX.stride(1) == target_NX.stride(1) == 1
    assert source_NX.dtype == target_NX.dtype and source_NX.shape[1] == target_NX.shape[1]
    item_size_bytes = source_NX.element_size()
    return structs.SelectRowsStruct(
        source=source_NX.data_ptr(),
        target=target_NX.data_ptr(),
        source_stride_bytes=source_NX.stride(0) * item_size_bytes,
        target_stride_bytes=target_NX.stride(0) * item_size_bytes,
        row_size_bytes=source_NX.shape[1] * item_size_bytes,
    )


def _layer_struct(layer_BKCSD: torch.Tensor) -> structs.KVLayerStruct:
    block_stride, head_stride, kv_stride, slot_stride, dim_stride = layer_BKCSD.stride()
    assert dim_stride == 1
    _, num_kv_heads, _, block_size, head_dim = layer_BKCSD.shape
    return structs.KVLayerStruct(
        data=layer_BKCSD.data_ptr(),
        block_stride=block_stride,
        head_stride=head_stride,
        kv_stride=kv_stride,
        slot_stride=slot_stride,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        dtype=_DTYPES[layer_BKCSD.dtype],
    )
