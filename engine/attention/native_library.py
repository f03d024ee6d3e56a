"""Loads the compiled kernels and declares their entry points."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int32, c_void_p
from pathlib import Path

from engine.attention.build import BUILD_DIR, library_name
from engine.attention.native_structs import OpStruct, StepStruct

ISA_NAMES = ("generic", "avx2", "avx512", "avx512_bf16", "amx", "avx512_mixed")
"""The index is the number that the library knows it by."""


class KernelsUnavailableError(Exception):
    """The library for the present sources has not been built, or does not load on this machine."""


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
    library.baton_isa_supported.argtypes = (c_int32,)
    library.baton_isa_supported.restype = c_int32
    library.baton_best_isa.argtypes = ()
    library.baton_best_isa.restype = c_int32
    library.baton_team_create.argtypes = (c_int32,)
    library.baton_team_create.restype = c_void_p
    library.baton_team_destroy.argtypes = (c_void_p,)
    library.baton_team_destroy.restype = None
    library.baton_run.argtypes = (c_void_p, POINTER(OpStruct), c_int32, c_int32, POINTER(StepStruct), c_int32)
    library.baton_run.restype = None
    return library


def supported_isas(library: ctypes.CDLL) -> list[str]:
    """Names of the instruction sets that this build has and this machine runs, in the order of ISA_NAMES."""
    return [name for index, name in enumerate(ISA_NAMES) if library.baton_isa_supported(index)]


def best_isa(library: ctypes.CDLL) -> str:
    """The one that is fastest on processors of this machine's kind."""
    return ISA_NAMES[library.baton_best_isa()]
