"""Which workers are kept to one request for a while, because it may be what ended the workers that computed it before.

The rules are in `cluster.core.handlers.suspecting`.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.ids import AttemptId, WorkerId


@dataclass(frozen=True, slots=True)
class Trial:
    """The attempt that a worker is kept to, and until when at the latest."""

    attempt_id: AttemptId
    until_ns: int


class TrialTable:
    """At most one trial a worker.

    Attributes:
        num_condemned: requests that were ended for what they did to workers, in this life of the coordinator.
    """

    def __init__(self) -> None:
        self._by_worker: dict[WorkerId, Trial] = {}
        self.num_condemned = 0

    def __bool__(self) -> bool:
        return bool(self._by_worker)

    def open(self, worker: WorkerId, trial: Trial) -> None:
        assert worker not in self._by_worker
        self._by_worker[worker] = trial

    def get(self, worker: WorkerId) -> Trial | None:
        return self._by_worker.get(worker)

    def close(self, worker: WorkerId) -> Trial | None:
        """Others may come. Returns what is over with it."""
        return self._by_worker.pop(worker, None)

    def workers(self) -> tuple[WorkerId, ...]:
        return tuple(self._by_worker)
