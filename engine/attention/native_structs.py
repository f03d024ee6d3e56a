"""The C structs of native/kernels.h, field by field, and their enumerations. What they mean is said there."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

FLOAT32, BFLOAT16 = 0, 1
NO_ACTIVATION, SILU, GELU_TANH = 0, 1, 2


class OpKind(IntEnum):
    EMBED = 0
    SELECT_ROWS = 1
    ADD_NORM = 2
    LINEAR = 3
    ROTARY_WRITE = 4
    ATTENTION = 5
    ARGMAX = 6
    PLACE_ROWS = 7


class OpStruct(ctypes.Structure):
    _fields_ = [("args", c_void_p), ("kind", c_int32)]


class StepStruct(ctypes.Structure):
    _fields_ = [
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_starts", c_void_p),
        ("context_starts", c_void_p),
        ("table_starts", c_void_p),
        ("block_tables", c_void_p),
        ("rows", c_void_p),
        ("num_tokens", c_int32),
        ("num_selected", c_int32),
        ("num_sequences", c_int32),
    ]


class KVLayerStruct(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("kv_stride", c_int64),
        ("slot_stride", c_int64),
        ("num_kv_heads", c_int32),
        ("block_size", c_int32),
        ("head_dim", c_int32),
        ("dtype", c_int32),
    ]


class EmbedStruct(ctypes.Structure):
    _fields_ = [
        ("table", c_void_p),
        ("residual", c_void_p),
        ("size", c_int32),
        ("dtype", c_int32),
        ("scale", c_float),
    ]


class SelectRowsStruct(ctypes.Structure):
    _fields_ = [
        ("source", c_void_p),
        ("target", c_void_p),
        ("source_stride_bytes", c_int64),
        ("target_stride_bytes", c_int64),
        ("row_size_bytes", c_int64),
    ]


class AddNormStruct(ctypes.Structure):
    _fields_ = [
        ("num_rows", c_void_p),
        ("x", c_void_p),
        ("x_norm", c_void_p),
        ("residual", c_void_p),
        ("norm", c_void_p),
        ("out", c_void_p),
        ("size", c_int32),
        ("dtype", c_int32),
        ("eps", c_float),
    ]


class LinearStruct(ctypes.Structure):
    _fields_ = [
        ("num_rows", c_void_p),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        ("num_inputs", c_int32),
        ("num_outputs", c_int32),
        ("dtype", c_int32),
        ("out_dtype", c_int32),
        ("activation", c_int32),
    ]


class RotaryWriteStruct(ctypes.Structure):
    _fields_ = [
        ("kv", KVLayerStruct),
        ("qkv", c_void_p),
        ("cos_sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("token_stride", c_int64),
        ("num_heads", c_int32),
        ("eps", c_float),
    ]


class AttentionStruct(ctypes.Structure):
    _fields_ = [
        ("kv", KVLayerStruct),
        ("q", c_void_p),
        ("out", c_void_p),
        ("q_token_stride", c_int64),
        ("out_token_stride", c_int64),
        ("num_heads", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("selected_only", c_int32),
    ]


class ArgmaxStruct(ctypes.Structure):
    _fields_ = [
        ("num_rows", c_void_p),
        ("logits", c_void_p),
        ("ids", c_void_p),
        ("values", c_void_p),
        ("size", c_int32),
    ]
