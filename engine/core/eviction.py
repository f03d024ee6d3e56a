"""The order in which idle blocks are evicted."""

from __future__ import annotations

import heapq

_MIN_COMPACTION_SIZE = 64
"""Below this many heap entries, stale ones are not worth removing."""


class LruQueue:
    """Block ids by last use, oldest first. Every operation costs O(log n), amortised.

    A binary heap with lazy deletion: removed entries stay in the heap until they surface, or until they outnumber
    the live ones and the heap is rebuilt.
    """

    __slots__ = ("_heap", "_last_used")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._last_used: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._last_used)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._last_used

    def add(self, block_id: int, last_used: int) -> None:
        """Adds a block that is not in the queue. `last_used` is a logical time; equal times go by block id."""
        assert block_id not in self._last_used, f"block {block_id} is queued already"
        self._last_used[block_id] = last_used
        heapq.heappush(self._heap, (last_used, block_id))
        if len(self._heap) > max(_MIN_COMPACTION_SIZE, 2 * len(self._last_used)):
            self._heap = [(last_used, block_id) for block_id, last_used in self._last_used.items()]
            heapq.heapify(self._heap)

    def remove(self, block_id: int) -> int:
        """Takes a block out of the order and returns when it was last used."""
        return self._last_used.pop(block_id)

    def pop_oldest(self) -> int:
        """Takes out the block that was used longest ago. The queue must not be empty."""
        while True:
            last_used, block_id = heapq.heappop(self._heap)
            if self._last_used.get(block_id) == last_used:
                del self._last_used[block_id]
                return block_id

    def check_invariants(self) -> None:
        entries = set(self._heap)
        for block_id, last_used in self._last_used.items():
            assert (last_used, block_id) in entries, f"block {block_id} is live but not in the heap"
