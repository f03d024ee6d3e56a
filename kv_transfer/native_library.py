"""Loads the native copy kernel (built by `python -m kv_transfer.build`) and calls it through ctypes.

ctypes releases the GIL for the length of a call. Without the library everything works, slower: `load` says so once.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kv_transfer.build import library_path

_log = logging.getLogger(__name__)


class Walk(IntEnum):
    """How the kernel goes through memory: it knows which way is fastest on this processor (native/copy.cpp)."""

    PLAIN = 0
    STRAIGHT = 1
    INTERLEAVED = 2


class NativeLibrary:
    """The kernel's functions. Offsets and sizes are not checked here: callers have done so."""

    def __init__(self, path: str) -> None:
        """Raises: OSError if it cannot be loaded."""
        library = ctypes.CDLL(path)
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._copy = library.baton_copy
        self._copy.argtypes = (pointer, pointer, pointer, count, pointer)
        self._copy.restype = None
        self._checksums = library.baton_checksums
        self._checksums.argtypes = (pointer, pointer, count, pointer)
        self._checksums.restype = None
        self._walk = library.baton_walk
        self._walk.restype = count
        self._set_walk = library.baton_set_walk
        self._set_walk.argtypes = (count,)
        self._set_walk.restype = count

    @property
    def walk(self) -> Walk:
        return Walk(self._walk())

    def set_walk(self, walk: Walk) -> None:
        """For tests and measurements, in the whole process. Raises: ValueError if this processor cannot go this way."""
        if not self._set_walk(walk):
            raise ValueError(f"walk: this processor cannot do {walk.name}")

    def copy(
        self,
        target: npt.NDArray[np.uint8],
        source: npt.NDArray[np.uint8],
        copies: npt.NDArray[np.uint64],
        *,
        checksum: bool,
    ) -> list[int]:
        """`copies` is [num_copies, 3]: source offset, target offset, size in bytes. One sum a copy, or none."""
        assert copies.flags.c_contiguous and copies.shape[1:] == (3,)
        sums = np.empty(len(copies) if checksum else 0, dtype=np.uint64)
        sums_address = sums.ctypes.data if checksum else None
        self._copy(target.ctypes.data, source.ctypes.data, copies.ctypes.data, len(copies), sums_address)
        return [int(value) for value in sums]

    def checksums(self, memory: npt.NDArray[np.uint8], ranges: Sequence[tuple[int, int]]) -> list[int]:
        """One sum a range (offset, size) in bytes."""
        table = np.array(ranges, dtype=np.uint64).reshape(-1, 2)
        sums = np.empty(len(table), dtype=np.uint64)
        self._checksums(memory.ctypes.data, table.ctypes.data, len(table), sums.ctypes.data)
        return [int(value) for value in sums]


@functools.cache
def load() -> NativeLibrary | None:
    """The library of the present sources, or None (warning once) if it is not built or does not load."""
    path = library_path()
    try:
        return NativeLibrary(str(path))
    except OSError as error:
        # Its text, not itself: whoever keeps the record would keep this call's frames, and the memory that they copy.
        _log.warning("no native copy kernel (%s); transfers are slower: run python -m kv_transfer.build", str(error))
        return None
