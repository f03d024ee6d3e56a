"""The host tier's bytes: slots of one block each, and the copies between them and the pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from engine.attention.kv_cache import KVCache
from engine.core.tiers import BlockCopy
from engine.huge_pages import map_huge


class HostCache:
    """`num_slots` slots in host memory. It is taken from the system as slots are first written, except for a pool on a
    GPU, for which it is page-locked at once.

    Not thread-safe for slots and blocks that are in use by another call.
    """

    def __init__(self, cache: KVCache, num_slots: int) -> None:
        """`cache` is the pool; num_slots at least 1."""
        pool_BLKCSD = cache.pool_BLKCSD
        self._pool_BE = pool_BLKCSD.view(len(pool_BLKCSD), -1)  # E: a block's elements
        self._is_on_host = pool_BLKCSD.device.type == "cpu"
        shape = (num_slots, self._pool_BE.shape[1])
        if self._is_on_host:
            memory = map_huge(num_slots * cache.layout.block_size_bytes)
            self._slots_SE = torch.frombuffer(memory, dtype=pool_BLKCSD.dtype).view(shape)
        else:
            self._slots_SE = torch.empty(shape, dtype=pool_BLKCSD.dtype, pin_memory=True)

    def slot_bytes(self, slot: int) -> memoryview:
        """A slot's bytes, to be read or written while no copy uses it."""
        return self._slots_SE[slot].view(torch.uint8).numpy().data

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Makes these copies in their order, neighbours together. On a GPU they are queued on the current stream, in
        front of the step that needs them, and the host does not wait."""
        for is_load, block_id, slot, count in _runs(copies):
            blocks, slots = self._pool_BE[block_id : block_id + count], self._slots_SE[slot : slot + count]
            target, source = (blocks, slots) if is_load else (slots, blocks)
            target.copy_(source, non_blocking=not self._is_on_host)


def _runs(copies: Sequence[BlockCopy]) -> Iterator[tuple[bool, int, int, int]]:
    """Direction, first block, first slot and length of runs of copies whose blocks and slots follow each other."""
    start = 0
    for end in range(1, len(copies) + 1):
        first, count = copies[start], end - start
        follows = end < len(copies) and copies[end] == BlockCopy(
            block_id=first.block_id + count, slot=first.slot + count, is_load=first.is_load
        )
        if not follows:
            yield first.is_load, first.block_id, first.slot, count
            start = end
