"""Which ways placed attempts take, whether enough of them are still pushed, and what a push costs besides reading."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from cluster.core.ids import Route
from cluster.core.limits import MIN_PUSHED_SHARE, NUM_RECENT_ROUTES
from cluster.policy.break_even import HandOver
from cluster.policy.decision import Cause

NUM_SAMPLES: Final = 33
"""Of the last so many pushes the medians are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewPushes:
    """Hardly anything is disaggregated any more. `causes`: of the others among the last `num_recent`, the commonest
    first."""

    num_pushed: int
    num_recent: int
    causes: tuple[tuple[Cause, int], ...]

    def __str__(self) -> str:
        others = ", ".join(f"{number} {cause.value}" for cause, number in self.causes)
        return (
            f"of the last {self.num_recent} requests {self.num_pushed} were pushed from prefill to decode, although "
            f"both pools are whole; the others by cause: {others}"
        )


class RouteRecord:
    """Counts placements: all of this life of the coordinator, and the last NUM_RECENT_ROUTES."""

    def __init__(self) -> None:
        self.counts: dict[tuple[Route, Cause], int] = {}
        self._recent: deque[tuple[Route, Cause]] = deque(maxlen=NUM_RECENT_ROUTES)
        self._num_pushed = 0
        self._is_low = False

    @property
    def num_recent(self) -> int:
        return len(self._recent)

    @property
    def pushed_share(self) -> float | None:
        """Of the last placements; None before the first."""
        return self._num_pushed / len(self._recent) if self._recent else None

    @property
    def few_pushes(self) -> FewPushes | None:
        """What is to be said while too few are pushed."""
        if not self._is_low:
            return None
        others = Counter(cause for route, cause in self._recent if route is not Route.PUSHED)
        causes = tuple(sorted(others.items(), key=lambda item: (-item[1], item[0].value)))
        return FewPushes(num_pushed=self._num_pushed, num_recent=len(self._recent), causes=causes)

    def add(self, route: Route, cause: Cause, *, are_pools_whole: bool) -> FewPushes | None:
        """An attempt has started. Returns what operators are to be told, each time that the share has dropped."""
        if len(self._recent) == NUM_RECENT_ROUTES:
            self._num_pushed -= self._recent[0][0] is Route.PUSHED
        self.counts[route, cause] = self.counts.get((route, cause), 0) + 1
        self._recent.append((route, cause))
        self._num_pushed += route is Route.PUSHED
        if self._num_pushed >= 2 * MIN_PUSHED_SHARE * NUM_RECENT_ROUTES or not are_pools_whole:
            self._is_low = False
        elif not self._is_low and len(self._recent) == NUM_RECENT_ROUTES:
            self._is_low = self._num_pushed < MIN_PUSHED_SHARE * NUM_RECENT_ROUTES
            return self.few_pushes
        return None

    def check_invariants(self) -> None:
        assert self._num_pushed == sum(route is Route.PUSHED for route, _ in self._recent)
        assert sum(self.counts.values()) >= len(self._recent)
        assert not self._is_low or len(self._recent) == NUM_RECENT_ROUTES


class HandOverCosts:
    """Medians over the last pushes."""

    def __init__(self) -> None:
        self._reserve_ms = _Samples()
        self._take_over_ms = _Samples()

    def reserved(self, duration_ms: float) -> None:
        self._reserve_ms.add(duration_ms)

    def taken_over(self, duration_ms: float) -> None:
        self._take_over_ms.add(duration_ms)

    @property
    def usual(self) -> HandOver:
        return HandOver(reserve_ms=self._reserve_ms.median(), take_over_ms=self._take_over_ms.median())


class _Samples:
    """The last NUM_SAMPLES durations, also kept in order."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, duration_ms: float) -> None:
        if len(self._latest) == NUM_SAMPLES:
            del self._ordered[bisect_left(self._ordered, self._latest.popleft())]
        self._latest.append(duration_ms)
        insort(self._ordered, duration_ms)

    def median(self) -> float:
        """0 before the first."""
        middle = len(self._ordered) // 2
        if not self._ordered:
            return 0.0
        if len(self._ordered) % 2:
            return self._ordered[middle]
        return (self._ordered[middle - 1] + self._ordered[middle]) / 2
