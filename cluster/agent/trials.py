"""Attempts that may end the workers that compute them: the coordinator wants to hear of those that did not."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.agent.legs import LegTable
from cluster.core.ids import AttemptId
from engine.core.step import SequenceKey


class Trials:
    """Counts the steps that each of them has taken part in. Entries of legs that have ended go by themselves."""

    def __init__(self, legs: LegTable, num_steps: int) -> None:
        self._legs = legs
        self._num_steps = num_steps
        self._num_left: dict[AttemptId, int] = {}

    def begin(self, attempt: AttemptId) -> None:
        self._num_left[attempt] = self._num_steps

    def step_done(self, drew: Iterable[SequenceKey]) -> list[AttemptId]:
        """A step is over that drew a token for each of these. Returns the attempts that have survived enough."""
        if not self._num_left:
            return []
        took_part = {AttemptId(key.request_id, key.attempt) for key in drew}
        survived = []
        for attempt in list(self._num_left):
            if self._legs.get(attempt) is None:
                del self._num_left[attempt]
            elif attempt in took_part:
                self._num_left[attempt] -= 1
                if self._num_left[attempt] == 0:
                    del self._num_left[attempt]
                    survived.append(attempt)
        return survived

    def check_invariants(self) -> None:
        assert all(0 < num_left <= self._num_steps for num_left in self._num_left.values())
