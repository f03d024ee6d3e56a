"""Memory for weights: large pieces that the kernel is asked to back with huge pages.

A decode step reads every weight once, and is bound by that. With pages of 4 KiB a fifth of the bandwidth is lost to
address translation.
"""

from __future__ import annotations

import contextlib
import mmap
from math import prod

import torch

_CHUNK_SIZE_BYTES = 64 << 20
_HUGE_PAGE_SIZE_BYTES = 2 << 20
_ALIGNMENT_BYTES = 64  # a cache line, and the widest vector register


class WeightArena:
    """Hands out tensors, one after the other in the same pieces of memory; a piece lives as long as its tensors."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._chunk: mmap.mmap | None = None
        self._used_bytes = 0

    def empty(self, *shape: int) -> torch.Tensor:
        """A contiguous tensor, aligned to a cache line. It holds zeros."""
        size_bytes = _round_up(prod(shape) * self._dtype.itemsize, _ALIGNMENT_BYTES)
        if self._chunk is None or self._used_bytes + size_bytes > len(self._chunk):
            self._chunk = _map_huge(max(_CHUNK_SIZE_BYTES, _round_up(size_bytes, _HUGE_PAGE_SIZE_BYTES)))
            self._used_bytes = 0
        tensor = torch.frombuffer(self._chunk, dtype=self._dtype, count=prod(shape), offset=self._used_bytes)
        self._used_bytes += size_bytes
        return tensor.view(shape)


def _map_huge(size_bytes: int) -> mmap.mmap:
    # Private, because huge pages of shared memory are another setting, which is commonly off.
    chunk = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without huge pages refuses the advice: then the memory is as good as any other.
    with contextlib.suppress(OSError):
        chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk


def _round_up(size_bytes: int, granularity_bytes: int) -> int:
    return -(-size_bytes // granularity_bytes) * granularity_bytes
