"""The only queue: requests that wait for a place, by priority and then by order of admission."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

_STALE_SHARE: Final = 2
_MIN_COMPACTED: Final = 64


@dataclass(frozen=True, slots=True, order=True)
class QueueEntry:
    """Ordered as the queue is: high priority first, then low rank (the order of admission).

    A request that comes back after a failed attempt keeps its rank, so it stands before all that were admitted later.
    """

    neg_priority: int
    rank: int
    request_id: str
    num_tokens: int


class RequestQueue:
    """Its bound (`limit`) is for new requests: one that has been admitted may always come back."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: dict[str, QueueEntry] = {}
        self._heap: list[QueueEntry] = []
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all that wait."""
        return self._num_tokens

    def push(self, request_id: str, *, priority: int, rank: int, num_tokens: int) -> None:
        assert request_id not in self._entries, f"{request_id} waits already"
        entry = QueueEntry(-priority, rank, request_id, num_tokens)
        self._entries[request_id] = entry
        self._num_tokens += num_tokens
        heapq.heappush(self._heap, entry)

    def head(self) -> str | None:
        """The request whose turn it is; it stays in the queue."""
        while self._heap and self._entries.get(self._heap[0].request_id) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0].request_id if self._heap else None

    def remove(self, request_id: str) -> None:
        entry = self._entries.pop(request_id)
        self._num_tokens -= entry.num_tokens
        if len(self._heap) > _STALE_SHARE * len(self._entries) + _MIN_COMPACTED:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def check_invariants(self) -> None:
        assert self._num_tokens == sum(entry.num_tokens for entry in self._entries.values())
        heaped = {id(entry) for entry in self._heap}
        assert all(id(entry) in heaped for entry in self._entries.values()), "an entry is not in the heap"
        assert len(self._heap) <= _STALE_SHARE * len(self._entries) + _MIN_COMPACTED + 1 or not self._entries
