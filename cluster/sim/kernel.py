"""Virtual time: an event heap with deterministic order, and the seeded random streams of one history."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from cluster.sim.trace import Trace

MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000_000_000

Action = Callable[[], None]


class HangError(Exception):
    """The history does not come to rest: it used up its events or its virtual time."""


class Timer:
    """A scheduled action; `cancel` makes it do nothing."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        self.action = None


class Kernel:
    """Runs actions in order of (time, order of scheduling), so equal seeds give equal histories.

    Each concern draws from its own random stream (`stream`), so that e.g. one fault fewer does not change latencies
    drawn before it.
    """

    def __init__(self, seed: int, *, max_events: int, trace: Trace) -> None:
        self.seed = seed
        self.now_ns = 0
        self.num_events = 0
        self.trace = trace
        self._max_events = max_events
        self._heap: list[tuple[int, int, Timer]] = []
        self._num_scheduled = 0

    def stream(self, name: str) -> random.Random:
        """An independent random stream of this seed."""
        return random.Random(f"{self.seed}/{name}")

    def at(self, time_ns: int, action: Action) -> Timer:
        """Runs `action` at `time_ns`, or next where that has passed."""
        timer = Timer(action)
        heapq.heappush(self._heap, (max(time_ns, self.now_ns), self._num_scheduled, timer))
        self._num_scheduled += 1
        return timer

    def after(self, delay_ns: int, action: Action) -> Timer:
        return self.at(self.now_ns + delay_ns, action)

    def run_until(self, end_ns: int, is_done: Callable[[], bool] | None = None) -> bool:
        """Runs events up to `end_ns`; stops early, returning True, once `is_done` holds (asked after each event).

        Raises:
            HangError: more than the history's `max_events` events have run.
        """
        heap = self._heap
        while heap and heap[0][0] <= end_ns:
            time_ns, _, timer = heapq.heappop(heap)
            action = timer.action
            if action is None:
                continue
            self.now_ns = time_ns
            self.num_events += 1
            if self.num_events > self._max_events:
                raise HangError(f"{self._max_events} events did not bring the history to rest")
            action()
            if is_done is not None and is_done():
                return True
        self.now_ns = max(self.now_ns, end_ns)
        return False
