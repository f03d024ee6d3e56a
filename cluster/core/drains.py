"""The drains that are going on, and the names of workers that were drained and are gone."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.core.drain_orders import AfterDrain, DrainOrder
from cluster.core.ids import WorkerId
from cluster.core.limits import HAND_OVER_NS, MAX_LOST_NAMES, NS_PER_MS


@dataclass(slots=True, kw_only=True)
class Drain:
    """One order that is being carried out.

    Attributes:
        life: that is being drained, None while the worker's next life is waited for (it was lost before its time).
        deadline_ns: when whatever is left goes on elsewhere. migrate_ns: from when running answers do. None for never.
        handing_over: requests that left it and have not been taken over elsewhere; it may be needed as their source.
        is_told_to_leave: nothing is left of it. has_left: it has said so.
    """

    order: DrainOrder
    life: WorkerId | None
    deadline_ns: int | None = None
    migrate_ns: int | None = None
    handing_over: dict[str, None] = field(default_factory=dict)
    is_told_to_leave: bool = False
    has_left: bool = False

    def schedule(self, now_ns: int) -> None:
        """Sets the times that follow from the order, which is taken to be of now."""
        if self.order.deadline_ms is None:
            self.deadline_ns = self.migrate_ns = None
        else:
            left_ns = self.order.deadline_ms * NS_PER_MS
            self.deadline_ns = now_ns + left_ns
            self.migrate_ns = self.deadline_ns - min(HAND_OVER_NS, left_ns // 2)
        if self.order.migrate:
            self.migrate_ns = now_ns

    def is_migrating(self, now_ns: int) -> bool:
        return self.migrate_ns is not None and now_ns >= self.migrate_ns

    def is_due(self, now_ns: int) -> bool:
        return self.deadline_ns is not None and now_ns >= self.deadline_ns

    def next_ns(self, now_ns: int) -> int | None:
        """When the next of its times comes."""
        times = (time_ns for time_ns in (self.migrate_ns, self.deadline_ns) if time_ns is not None)
        return min((time_ns for time_ns in times if time_ns > now_ns), default=None)


class DrainTable:
    """At most one drain a name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Drain] = {}
        self._gone: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def open(self, drain: Drain) -> None:
        assert drain.order.worker not in self._by_name
        self._by_name[drain.order.worker] = drain

    def named(self, name: str) -> Drain | None:
        return self._by_name.get(name)

    def of(self, worker: WorkerId) -> Drain | None:
        """The drain of that very life."""
        drain = self._by_name.get(worker.name)
        return drain if drain is not None and drain.life == worker else None

    def all(self) -> tuple[Drain, ...]:
        """Ordered by name."""
        return tuple(self._by_name[name] for name in sorted(self._by_name))

    def close(self, name: str) -> None:
        """The order has been carried out, or is given up."""
        drain = self._by_name.pop(name)
        if drain.order.then is AfterDrain.STOP:
            self._gone[name] = None
            if len(self._gone) > MAX_LOST_NAMES:
                del self._gone[next(iter(self._gone))]

    def returned(self, name: str) -> None:
        """A life of that name is there."""
        self._gone.pop(name, None)

    def gone(self) -> tuple[str, ...]:
        """Names of drained workers of which no life has come since, the latest ones up to a limit."""
        return tuple(self._gone)

    def check_invariants(self) -> None:
        for name, drain in self._by_name.items():
            assert drain.order.worker == name and name not in self._gone
            assert drain.life is None or drain.life.name == name
            assert drain.life is not None or not (drain.is_told_to_leave or drain.has_left or drain.handing_over)
            assert drain.is_told_to_leave or not drain.has_left, f"{name} left unasked"
