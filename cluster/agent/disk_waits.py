"""Prompts that wait, for a short time, for blocks of theirs that are being read from files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.block_pool import BlockPool
from engine.core.scheduler import Scheduler
from engine.core.step import SequenceKey


@dataclass(frozen=True, slots=True)
class _Wait:
    hashes: tuple[bytes, ...]
    deadline_ns: int


class DiskWaits:
    """Begins to read what a new sequence has in files, and holds it back until that has come or its time is up."""

    def __init__(self, pool: BlockPool, scheduler: Scheduler, *, max_wait_ns: int) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._max_wait_ns = max_wait_ns
        self._waits: dict[SequenceKey, _Wait] = {}

    def added(self, now_ns: int, key: SequenceKey, hashes: Sequence[bytes]) -> None:
        """The scheduler has that sequence now; `hashes` are of its blocks that may be found."""
        reading = self._pool.read_ahead(hashes)
        if reading:
            self._waits[key] = _Wait(reading, now_ns + self._max_wait_ns)
            self._scheduler.hold_back(key, is_held_back=True)

    def settle(self, now_ns: int) -> None:
        """Lets go of those that have what they wait for, or have waited long enough."""
        for key, wait in list(self._waits.items()):
            if now_ns >= wait.deadline_ns or not any(map(self._pool.is_reading, wait.hashes)):
                del self._waits[key]
                self._scheduler.hold_back(key, is_held_back=False)

    def next_deadline_ns(self) -> int | None:
        return min((wait.deadline_ns for wait in self._waits.values()), default=None)

    def check_invariants(self) -> None:
        assert all(wait.hashes for wait in self._waits.values()), "somebody waits for nothing"
