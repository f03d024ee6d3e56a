"""What waits of one tenant: by priority, then by order of admission."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final, NamedTuple

_STALE_SHARE: Final = 2
_MIN_COMPACTED: Final = 64


class QueueEntry(NamedTuple):
    """Ordered as a lane is: high priority first, then low rank (the order of admission).

    A request that comes back after a failed attempt keeps its rank, so it stands before all that were admitted later.

    Attributes:
        num_tokens: that are to be read for it. cost_tokens: what its tenant is charged for its place.
        is_fixed: it has been placed before, and may not be displaced by others.
    """

    neg_priority: int
    rank: int
    request_id: str
    tenant: str
    num_tokens: int
    cost_tokens: int
    is_fixed: bool


@dataclass(slots=True)
class Waiting:
    """Sums over requests that wait."""

    num_requests: float = 0
    num_tokens: float = 0
    cost_tokens: float = 0

    def count(self, entry: QueueEntry, times: int) -> None:
        self.num_requests += times
        self.num_tokens += times * entry.num_tokens
        self.cost_tokens += times * entry.cost_tokens

    def add(self, other: Waiting, share: float = 1.0) -> None:
        self.num_requests += share * other.num_requests
        self.num_tokens += share * other.num_tokens
        self.cost_tokens += share * other.cost_tokens


class Lane:
    """Never empty but before the first `push`. `weight`: the tenant's."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self._entries: dict[str, QueueEntry] = {}
        self._heap: list[QueueEntry] = []
        self._by_priority: dict[int, Waiting] = {}
        """Sums, by negated priority."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> dict[str, QueueEntry]:
        """By request id; not to be changed."""
        return self._entries

    def push(self, entry: QueueEntry) -> None:
        self._entries[entry.request_id] = entry
        heapq.heappush(self._heap, entry)
        sums = self._by_priority.get(entry.neg_priority)
        if sums is None:
            sums = self._by_priority[entry.neg_priority] = Waiting()
        sums.count(entry, 1)

    def head(self) -> QueueEntry:
        while self._entries.get(self._heap[0].request_id) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0]

    def remove(self, request_id: str) -> None:
        entry = self._entries.pop(request_id)
        sums = self._by_priority[entry.neg_priority]
        sums.count(entry, -1)
        if not sums.num_requests:
            del self._by_priority[entry.neg_priority]
        if len(self._heap) > _STALE_SHARE * len(self._entries) + _MIN_COMPACTED:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def last(self) -> QueueEntry | None:
        """The one that would come last of those that may be displaced. Costs O(entries)."""
        return max((entry for entry in self._entries.values() if not entry.is_fixed), default=None)

    def before(self, priority: int) -> Waiting:
        """Those that come before a new one of that priority."""
        sums = Waiting()
        for neg_priority, waiting in self._by_priority.items():
            if neg_priority <= -priority:
                sums.add(waiting)
        return sums

    def total(self) -> Waiting:
        sums = Waiting()
        for waiting in self._by_priority.values():
            sums.add(waiting)
        return sums

    def check_invariants(self) -> None:
        assert self._entries, "an empty lane is kept"
        heaped = {id(entry) for entry in self._heap}
        assert all(id(entry) in heaped for entry in self._entries.values()), "an entry is not in the heap"
        assert len(self._heap) <= _STALE_SHARE * len(self._entries) + _MIN_COMPACTED + 1
        for neg_priority, waiting in self._by_priority.items():
            sums = Waiting()
            for entry in self._entries.values():
                if entry.neg_priority == neg_priority:
                    sums.count(entry, 1)
            assert waiting == sums
        assert sum(sums.num_requests for sums in self._by_priority.values()) == len(self._entries)
