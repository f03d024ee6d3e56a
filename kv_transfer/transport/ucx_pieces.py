"""How the ranges of a write become messages, alike at both ends: neighbours merged, long ones cut, short ones packed.

A message costs some ten microseconds at each end, whatever its size. Short pieces that follow each other in a write
therefore share one: they are gathered at the sender and scattered at the receiver, which costs a copy at each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv_transfer.checksum import Memory
from kv_transfer.protocol.plan import Copy, merge_copies
from kv_transfer.transport.shm_copier import copy_ranges

MAX_PIECE_BYTES = 3 << 20
"""Longer ranges are cut, so that a cancelled write ends soon, and since they are slower over TCP: what one end writes
into the kernel is then no longer in the cache where the other reads it. Shorter pieces cost more messages."""
PACKED_BELOW_BYTES = 64 << 10
MAX_PACKED_BYTES = 512 << 10
"""Of a message of several pieces."""
MAX_SPARE_BUFFERS = 64

Table = npt.NDArray[np.uint64]


def cut_pieces(copies: Sequence[Copy]) -> Table:
    """[num_pieces, 3]: source offset, target offset, size in bytes."""
    pieces = [
        (copy.source_bytes + start, copy.target_bytes + start, min(MAX_PIECE_BYTES, copy.size_bytes - start))
        for copy in merge_copies(copies)
        for start in range(0, copy.size_bytes, MAX_PIECE_BYTES)
    ]
    return np.array(pieces, dtype=np.uint64)


def group_pieces(sizes: Table) -> list[tuple[int, int, int]]:
    """Messages: the first piece, one beyond the last, and all their bytes. Their order is the pieces'."""
    messages: list[tuple[int, int, int]] = []
    first = packed_bytes = 0
    for position, size_bytes in enumerate(sizes.tolist()):
        is_short = size_bytes < PACKED_BELOW_BYTES
        if packed_bytes and not (is_short and packed_bytes + size_bytes <= MAX_PACKED_BYTES):
            messages.append((first, position, packed_bytes))
            packed_bytes = 0
        if not is_short:
            messages.append((position, position + 1, size_bytes))
            continue
        if not packed_bytes:
            first = position
        packed_bytes += size_bytes
    if packed_bytes:
        messages.append((first, len(sizes), packed_bytes))
    return messages


class Staging:
    """Buffers for packed messages, used over and over: a fresh one would be faulted in page by page."""

    def __init__(self) -> None:
        self._spare: list[Memory] = []

    def take(self) -> Memory:
        return self._spare.pop() if self._spare else np.empty(MAX_PACKED_BYTES, dtype=np.uint8)

    def give_back(self, buffer: Memory) -> None:
        """Only when UCX has let go of it."""
        if len(self._spare) < MAX_SPARE_BUFFERS:
            self._spare.append(buffer)


def gather(buffer: Memory, memory: Memory, offsets: Table, sizes: Table) -> None:
    """Puts ranges of `memory` one behind the other into `buffer`."""
    copy_ranges(buffer, memory, _table(offsets, _starts(sizes), sizes), checksum=False)


def scatter(memory: Memory, buffer: Memory, offsets: Table, sizes: Table) -> None:
    """The reverse of `gather`."""
    copy_ranges(memory, buffer, _table(_starts(sizes), offsets, sizes), checksum=False)


def _table(sources: Table, targets: Table, sizes: Table) -> Table:
    return np.ascontiguousarray(np.stack((sources, targets, sizes), axis=1))


def _starts(sizes: Table) -> Table:
    return np.cumsum(sizes, dtype=np.uint64) - sizes
