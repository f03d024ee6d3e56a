"""The native CPU backend: hands torch tensors' addresses to the compiled kernels.

The kernels read the block table in place. Their argument structs are made once and refilled, because a decode step
makes some hundred and fifty calls and each must cost microseconds. Not thread-safe: one engine thread a backend.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from engine.attention.batch import AttentionBatch
from engine.attention.native_library import (
    BFLOAT16,
    FLOAT32,
    ISA_NAMES,
    AttentionStruct,
    LogitsStruct,
    RmsNormStruct,
    RotaryWriteStruct,
    SiluMulStruct,
    load_kernels,
    supported_isas,
)

_DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


class NativeCpuBackend:
    """Implements `AttentionBackend` with the compiled kernels.

    Args:
        num_threads: how many threads a kernel may use, the calling one included.
        isa: an instruction set of ISA_NAMES; the best that the machine has, if not given.

    Raises:
        KernelsUnavailableError: the kernels are not built.
        ValueError: the instruction set is unknown or not supported here.
    """

    def __init__(self, num_threads: int, isa: str | None = None) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        library = load_kernels()
        supported = supported_isas(library)
        self.isa = isa or supported[-1]
        if self.isa not in supported:
            raise ValueError(f"isa {self.isa!r} is not supported here; supported: {', '.join(supported)}")
        self.name = f"cpu_{self.isa}"
        self._isa_index = ISA_NAMES.index(self.isa)
        self._num_threads = num_threads
        self._library = library
        self._attention = AttentionStruct()
        self._rotary_write = RotaryWriteStruct()
        self._rms_norm = RmsNormStruct()
        self._silu_mul = SiluMulStruct()
        self._logits = LogitsStruct()

    def rotary_write(
        self, qkv_TX: torch.Tensor, cos_sin_PD: torch.Tensor, layer_BKCSD: torch.Tensor, batch: AttentionBatch
    ) -> None:
        args = self._rotary_write
        _fill_layer(args.kv, layer_BKCSD)
        num_kv_heads, head_dim = args.kv.num_kv_heads, args.kv.head_dim
        assert qkv_TX.dtype == layer_BKCSD.dtype and qkv_TX.stride(1) == 1
        assert cos_sin_PD.dtype == torch.float32 and cos_sin_PD.is_contiguous() and cos_sin_PD.shape[1] == head_dim
        args.qkv = qkv_TX.data_ptr()
        args.cos_sin = cos_sin_PD.data_ptr()
        args.positions = batch.positions_T.data_ptr()
        args.slots = batch.slots_T.data_ptr()
        args.token_stride = qkv_TX.stride(0)
        args.num_tokens = batch.num_tokens
        args.num_heads = qkv_TX.shape[1] // head_dim - 2 * num_kv_heads
        self._call(self._library.baton_rotary_write, args)

    def attend(
        self, qkv_TX: torch.Tensor, layer_BKCSD: torch.Tensor, batch: AttentionBatch, out_TX: torch.Tensor
    ) -> None:
        args = self._attention
        _fill_layer(args.kv, layer_BKCSD)
        head_dim = args.kv.head_dim
        assert qkv_TX.dtype == out_TX.dtype == layer_BKCSD.dtype
        assert qkv_TX.stride(1) == out_TX.stride(1) == 1
        args.q = qkv_TX.data_ptr()
        args.out = out_TX.data_ptr()
        args.query_starts = batch.query_starts_S1.data_ptr()
        args.context_starts = batch.context_starts_S.data_ptr()
        args.table_starts = batch.table_starts_S.data_ptr()
        args.block_tables = batch.block_tables.data_ptr()
        args.q_token_stride = qkv_TX.stride(0)
        args.out_token_stride = out_TX.stride(0)
        args.num_sequences = batch.num_sequences
        args.num_heads = out_TX.shape[1] // head_dim
        args.scale = head_dim**-0.5
        self._call(self._library.baton_attention, args)

    def rms_norm(
        self,
        x_TE: torch.Tensor | None,
        residual_TE: torch.Tensor,
        weight_E: torch.Tensor,
        eps: float,
        out_TE: torch.Tensor,
    ) -> None:
        args = self._rms_norm
        assert residual_TE.dtype == torch.float32 and residual_TE.is_contiguous() and out_TE.is_contiguous()
        assert x_TE is None or x_TE.is_contiguous()
        args.x = None if x_TE is None else x_TE.data_ptr()
        args.residual = residual_TE.data_ptr()
        args.weight = weight_E.data_ptr()
        args.out = out_TE.data_ptr()
        args.num_tokens, args.size = out_TE.shape
        args.dtype = _DTYPES[out_TE.dtype]
        args.eps = eps
        self._call(self._library.baton_rms_norm, args)

    def silu_mul(self, gate_up_TX: torch.Tensor, out_TF: torch.Tensor) -> None:
        args = self._silu_mul
        assert gate_up_TX.is_contiguous() and out_TF.is_contiguous()
        args.gate_up = gate_up_TX.data_ptr()
        args.out = out_TF.data_ptr()
        args.num_tokens, args.size = out_TF.shape
        args.dtype = _DTYPES[out_TF.dtype]
        self._call(self._library.baton_silu_mul, args)

    def logits(self, x_RE: torch.Tensor, weight_VE: torch.Tensor, out_RV: torch.Tensor) -> None:
        args = self._logits
        assert x_RE.dtype == weight_VE.dtype == torch.bfloat16 and out_RV.dtype == torch.float32
        assert x_RE.is_contiguous() and weight_VE.is_contiguous() and out_RV.is_contiguous()
        args.x = x_RE.data_ptr()
        args.weight = weight_VE.data_ptr()
        args.out = out_RV.data_ptr()
        args.num_rows, args.size = x_RE.shape
        args.vocab_size = len(weight_VE)
        self._call(self._library.baton_logits, args)

    def _call(self, function: Any, args: ctypes.Structure) -> None:
        function(args, self._isa_index, self._num_threads)


def _fill_layer(kv: Any, layer_BKCSD: torch.Tensor) -> None:
    kv.data = layer_BKCSD.data_ptr()
    kv.block_stride, kv.head_stride, kv.kv_stride, kv.slot_stride, dim_stride = layer_BKCSD.stride()
    assert dim_stride == 1
    _, kv.num_kv_heads, _, kv.block_size, kv.head_dim = layer_BKCSD.shape
    kv.dtype = _DTYPES[layer_BKCSD.dtype]
