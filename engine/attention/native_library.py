"""Loads the compiled kernels and mirrors their C interface (native/kernels.h), field by field."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from engine.attention.build import BUILD_DIR, library_name

FLOAT32, BFLOAT16 = 0, 1
ISA_NAMES = ("generic", "avx2", "avx512", "avx512_bf16")
"""Worst first; the index is the number that the library knows it by."""


class KernelsUnavailableError(Exception):
    """The library for the present sources has not been built, or does not load on this machine."""


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


class AttentionStruct(ctypes.Structure):
    _fields_ = [
        ("kv", KVLayerStruct),
        ("q", c_void_p),
        ("out", c_void_p),
        ("query_starts", c_void_p),
        ("context_starts", c_void_p),
        ("table_starts", c_void_p),
        ("block_tables", c_void_p),
        ("q_token_stride", c_int64),
        ("out_token_stride", c_int64),
        ("num_sequences", c_int32),
        ("num_heads", c_int32),
        ("scale", c_float),
    ]


class RotaryWriteStruct(ctypes.Structure):
    _fields_ = [
        ("kv", KVLayerStruct),
        ("qkv", c_void_p),
        ("cos_sin", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("token_stride", c_int64),
        ("num_tokens", c_int32),
        ("num_heads", c_int32),
    ]


class RmsNormStruct(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("residual", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("num_tokens", c_int32),
        ("size", c_int32),
        ("dtype", c_int32),
        ("eps", c_float),
    ]


class SiluMulStruct(ctypes.Structure):
    _fields_ = [
        ("gate_up", c_void_p),
        ("out", c_void_p),
        ("num_tokens", c_int32),
        ("size", c_int32),
        ("dtype", c_int32),
    ]


class LogitsStruct(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("num_rows", c_int32),
        ("size", c_int32),
        ("vocab_size", c_int32),
    ]


KERNEL_ARGUMENTS = {
    "baton_attention": AttentionStruct,
    "baton_rotary_write": RotaryWriteStruct,
    "baton_rms_norm": RmsNormStruct,
    "baton_silu_mul": SiluMulStruct,
    "baton_logits": LogitsStruct,
}


def load_kernels(build_dir: Path = BUILD_DIR) -> ctypes.CDLL:
    """The library, with its functions' argument types declared. Calls release the interpreter's lock.

    Raises:
        KernelsUnavailableError: it is not there or does not load; the message says how to build it.
    """
    path = build_dir / library_name()
    if not path.is_file():
        raise KernelsUnavailableError("the native kernels are not built: run python -m engine.attention.build")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailableError(f"the native kernels do not load: {error}") from error
    for name, struct in KERNEL_ARGUMENTS.items():
        function: Any = getattr(library, name)
        function.argtypes = (ctypes.POINTER(struct), c_int32, c_int32)
        function.restype = None
    library.baton_isa_supported.argtypes = (c_int32,)
    library.baton_isa_supported.restype = c_int32
    return library


def supported_isas(library: ctypes.CDLL) -> list[str]:
    """Names of the instruction sets that this build has and this machine runs, worst first."""
    return [name for index, name in enumerate(ISA_NAMES) if library.baton_isa_supported(index)]
