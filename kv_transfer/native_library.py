"""Loads the native copy kernel (built by `python -m kv_transfer.build`) and calls it through ctypes.

ctypes releases the GIL for the length of a call. Without the library everything works, slower: `load` says so once.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import time
from collections.abc import Sequence
from enum import IntEnum
from math import inf
from mmap import mmap

import numpy as np
import numpy.typing as npt

from kv_transfer.build import library_path

_log = logging.getLogger(__name__)


class Walk(IntEnum):
    """How the kernel goes through memory (native/copy.cpp)."""

    PLAIN = 0
    STRAIGHT = 1
    INTERLEAVED = 2
    PREFETCHED = 3


TRIAL_BYTES = 16 << 20
NUM_TRIALS = 5
"""Of each walk, the fastest of which counts: what disturbs it can only make it slower. All take some 50 ms."""


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
        """In the whole process. Raises: ValueError if this processor cannot go this way."""
        if not self.try_walk(walk):
            raise ValueError(f"walk: this processor cannot do {walk.name}")

    def try_walk(self, walk: Walk) -> bool:
        """As `set_walk`; returns whether this processor can go this way, and changes nothing where it cannot."""
        return bool(self._set_walk(walk))

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
        addresses = (target.ctypes.data, source.ctypes.data, copies.ctypes.data)
        if not checksum:
            self._copy(*addresses, len(copies), None)
            return []
        sums = np.empty(len(copies), dtype=np.uint64)
        self._copy(*addresses, len(copies), sums.ctypes.data)
        return [int(value) for value in sums]

    def checksums(self, memory: npt.NDArray[np.uint8], ranges: Sequence[tuple[int, int]]) -> list[int]:
        """One sum a range (offset, size) in bytes."""
        table = np.array(ranges, dtype=np.uint64).reshape(-1, 2)
        sums = np.empty(len(table), dtype=np.uint64)
        self._checksums(memory.ctypes.data, table.ctypes.data, len(table), sums.ctypes.data)
        return [int(value) for value in sums]


def measure_walks(library: NativeLibrary) -> dict[Walk, float]:
    """Seconds that a copy takes, by the ways that this processor can go. Leaves the last of them set."""
    # Of whole pages, as pools are: only aligned targets are streamed to. And written, so that their pages are there.
    source, target = (np.frombuffer(mmap(-1, TRIAL_BYTES), dtype=np.uint8) for _ in range(2))
    source.fill(1)
    target.fill(1)
    copies = np.array([[0, 0, TRIAL_BYTES]], dtype=np.uint64)
    walks = [walk for walk in Walk if library.try_walk(walk)]
    seconds = dict.fromkeys(walks, inf)
    for _ in range(NUM_TRIALS):
        for walk in walks:
            library.set_walk(walk)
            start_ns = time.perf_counter_ns()
            library.copy(target, source, copies, checksum=False)
            seconds[walk] = min(seconds[walk], (time.perf_counter_ns() - start_ns) / 1e9)
    return seconds


@functools.cache
def load() -> NativeLibrary | None:
    """The library of the present sources, set to the fastest walk; None (warning once) if it is not built or does not
    load."""
    path = library_path()
    try:
        library = NativeLibrary(str(path))
    except OSError as error:
        # Its text, not itself: whoever keeps the record would keep this call's frames, and the memory that they copy.
        _log.warning("no native copy kernel (%s); transfers are slower: run python -m kv_transfer.build", str(error))
        return None
    seconds = measure_walks(library)
    library.set_walk(min(seconds, key=lambda walk: seconds[walk]))
    return library
