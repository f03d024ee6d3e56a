"""Deadlines by key: each key has at most one. Setting, clearing and taking one costs O(log n)."""

from __future__ import annotations

import heapq
from enum import StrEnum
from typing import Final, NamedTuple

_STALE_SHARE: Final = 4
_MIN_COMPACTED: Final = 64


class TimerKind(StrEnum):
    """What a deadline is for."""

    REQUEST = "request"
    RETRY = "retry"
    ATTEMPT = "attempt"
    WORKER = "worker"
    REBUILD = "rebuild"
    DRAIN = "drain"


class TimerKey(NamedTuple):
    """`name` and `number` are those of the request, attempt, worker life or drained worker."""

    kind: TimerKind
    name: str
    number: int = 0


class Timers:
    """A heap with lazy deletion: an entry counts only while it agrees with the key's deadline."""

    def __init__(self) -> None:
        self._deadlines: dict[TimerKey, int] = {}
        self._heap: list[tuple[int, int, TimerKey]] = []
        self._serial = 0

    def set(self, key: TimerKey, deadline_ns: int | None) -> None:
        """Replaces the key's deadline; None clears it."""
        if deadline_ns is None:
            if self._deadlines.pop(key, None) is not None:
                self._compact()
            return
        if self._deadlines.get(key) == deadline_ns:
            return
        self._deadlines[key] = deadline_ns
        self._serial += 1
        heapq.heappush(self._heap, (deadline_ns, self._serial, key))
        self._compact()

    def _compact(self) -> None:
        if len(self._heap) > _STALE_SHARE * len(self._deadlines) + _MIN_COMPACTED:
            self._heap = [entry for entry in self._heap if self._deadlines.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def pop_due(self, now_ns: int) -> TimerKey | None:
        """Removes and returns the key of the earliest deadline at or before now."""
        self._drop_stale()
        if not self._heap or self._heap[0][0] > now_ns:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._deadlines[key]
        self._compact()
        return key

    def next_deadline_ns(self) -> int | None:
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def keys(self) -> tuple[TimerKey, ...]:
        return tuple(self._deadlines)

    def check_invariants(self) -> None:
        live = {(deadline_ns, key) for deadline_ns, _, key in self._heap}
        for key, deadline_ns in self._deadlines.items():
            assert (deadline_ns, key) in live, f"{key} has no heap entry"
        assert len(self._heap) <= _STALE_SHARE * len(self._deadlines) + _MIN_COMPACTED + 1

    def _drop_stale(self) -> None:
        while self._heap and self._deadlines.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
