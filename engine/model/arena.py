"""Memory for weights: large pieces on huge pages, because a decode step is bound by reading every weight once."""

from __future__ import annotations

import mmap
from math import prod

import torch

from engine.huge_pages import HUGE_PAGE_SIZE_BYTES, map_huge

_CHUNK_SIZE_BYTES = 64 << 20
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
            self._chunk = map_huge(max(_CHUNK_SIZE_BYTES, _round_up(size_bytes, HUGE_PAGE_SIZE_BYTES)))
            self._used_bytes = 0
        tensor = torch.frombuffer(self._chunk, dtype=self._dtype, count=prod(shape), offset=self._used_bytes)
        self._used_bytes += size_bytes
        return tensor.view(shape)


def _round_up(size_bytes: int, granularity_bytes: int) -> int:
    return -(-size_bytes // granularity_bytes) * granularity_bytes
