"""The rebuild window: the first seconds of a coordinator that is not the first one.

It opens when somebody comes who has known an earlier life, within a named time of the first word that anybody says,
and is over at the end of that time, or once everybody is back who is expected. While it is open, what workers say they
have is kept here until a front claims it; nothing is placed, and what nobody has claimed yet is left alone.
"""

from __future__ import annotations

import dataclasses

from cluster.core.ids import AttemptId, LegStage, WorkerId
from cluster.core.limits import MAX_LATE_TICK_NS, REBUILD_WINDOW_NS
from cluster.core.reports import HeldLeg


class RebuildWindow:
    """The legs that nobody has claimed, by attempt and worker, in the order in which they were told of."""

    def __init__(self) -> None:
        self._end_ns: int | None = None
        self.has_begun = False
        self.is_open = False
        self._held: dict[AttemptId, dict[WorkerId, HeldLeg]] = {}
        self._abandoned: dict[AttemptId, None] = {}

    def begin(self, now_ns: int) -> None:
        """Somebody says something; the first word sets the window's end."""
        assert not self.has_begun
        self.has_begun = True
        self._end_ns = now_ns + REBUILD_WINDOW_NS

    def open(self, now_ns: int) -> int | None:
        """Somebody has known an earlier life. Returns the window's end if that opens it."""
        if self.is_open or self._end_ns is None or now_ns >= self._end_ns:
            return None
        self.is_open = True
        return self._end_ns

    def is_late(self, now_ns: int) -> bool:
        """Whether its end is noticed so late that the coordinator must have been away."""
        assert self._end_ns is not None
        return now_ns - self._end_ns > MAX_LATE_TICK_NS

    def extend(self, now_ns: int) -> int:
        """Gives everybody the whole time again. Returns the new end."""
        self._end_ns = now_ns + REBUILD_WINDOW_NS
        return self._end_ns

    def close(self) -> None:
        """It is over and does not open again. Nothing may be left in it."""
        assert not self._held and not self._abandoned
        self.is_open = False
        self._end_ns = -1

    # ---- what workers have ----

    def keep(self, worker: WorkerId, leg: HeldLeg) -> None:
        assert self.is_open
        self._held.setdefault(leg.attempt, {})[worker] = leg

    def held(self, attempt_id: AttemptId) -> dict[WorkerId, HeldLeg]:
        """Not to be changed."""
        return self._held.get(attempt_id, {})

    def attempts(self) -> tuple[AttemptId, ...]:
        return tuple(self._held)

    def move(self, worker: WorkerId, attempt_id: AttemptId, stage: LegStage | None) -> bool:
        """The worker's leg has got there, or is gone (None). False if it has no unclaimed one."""
        legs = self._held.get(attempt_id)
        if legs is None or worker not in legs:
            return False
        if stage is None:
            self._drop(worker, attempt_id)
        else:
            legs[worker] = dataclasses.replace(legs[worker], stage=stage)
        return True

    def take(self, attempt_id: AttemptId) -> dict[WorkerId, HeldLeg]:
        """They are claimed, or nobody's."""
        self._abandoned.pop(attempt_id, None)
        return self._held.pop(attempt_id, {})

    def forget_worker(self, worker: WorkerId) -> None:
        """That life is lost."""
        for attempt_id in [attempt_id for attempt_id, legs in self._held.items() if worker in legs]:
            self._drop(worker, attempt_id)

    # ---- what nobody will claim ----

    def abandon(self, attempt_id: AttemptId) -> None:
        """Its request has ended: nobody will claim it."""
        if attempt_id in self._held:
            self._abandoned[attempt_id] = None

    def abandoned(self) -> tuple[AttemptId, ...]:
        return tuple(self._abandoned)

    def check_invariants(self) -> None:
        assert self.is_open or not self._held, "legs are kept for nobody"
        assert not self.is_open or self._end_ns is not None
        for attempt_id, legs in self._held.items():
            assert legs and all(leg.attempt == attempt_id for leg in legs.values())
        assert all(attempt_id in self._held for attempt_id in self._abandoned)

    def _drop(self, worker: WorkerId, attempt_id: AttemptId) -> None:
        legs = self._held[attempt_id]
        del legs[worker]
        if not legs:
            del self._held[attempt_id]
            self._abandoned.pop(attempt_id, None)
