"""Whose turn it is among several that wait: virtual counters of the tokens that each has been given.

Start-time fair queueing (Goyal, Vin, Cheng 1996) over tenants, in tokens, as the virtual token counter does it for
language models (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): whoever has the lowest counter
is next, and what is given raises the counter by tokens over weight. The system's virtual time is the counter of the
last one served. A tenant that begins to wait is lifted to it, so nobody saves up a claim by being idle, and nobody pays
for what was given while no one else wanted it. Answers' lengths are guessed when they begin, and put right when they
end.
"""

from __future__ import annotations

from typing import Final

MAX_IDLE_COUNTERS: Final = 4096
"""Tenants whose counters are kept while they do not wait; the longest untouched are forgotten, and lose their lead."""


class FairShare:
    """Counters by tenant. One that does not wait and is not remembered stands at the virtual time."""

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self._waiting: dict[str, float] = {}
        self._idle: dict[str, float] = {}

    def counter(self, tenant: str) -> float:
        """Where it stands, or would if it began to wait now."""
        counter = self._waiting.get(tenant)
        return max(self._idle.get(tenant, 0.0), self.virtual_time) if counter is None else counter

    def enter(self, tenant: str) -> None:
        """It begins to wait."""
        assert tenant not in self._waiting
        self._waiting[tenant] = self.counter(tenant)
        self._idle.pop(tenant, None)

    def leave(self, tenant: str) -> None:
        """Nothing of it waits any more."""
        self._set_idle(tenant, self._waiting.pop(tenant))

    def serve(self, tenant: str, num_tokens: int, weight: float) -> None:
        """It was the waiting tenant's turn, and it was given so many tokens."""
        start = self._waiting[tenant]
        self.virtual_time = max(self.virtual_time, start)
        self._waiting[tenant] = start + num_tokens / weight

    def correct(self, tenant: str, num_tokens: int, weight: float) -> None:
        """It has been given so many more than it was charged for; fewer, where negative."""
        change = num_tokens / weight
        if tenant in self._waiting:
            self._waiting[tenant] = max(0.0, self._waiting[tenant] + change)
        else:
            self._set_idle(tenant, max(0.0, self._idle.get(tenant, self.virtual_time) + change))

    def check_invariants(self) -> None:
        assert len(self._idle) <= MAX_IDLE_COUNTERS and not self._idle.keys() & self._waiting.keys()

    def _set_idle(self, tenant: str, counter: float) -> None:
        self._idle.pop(tenant, None)
        self._idle[tenant] = counter
        if len(self._idle) > MAX_IDLE_COUNTERS:
            del self._idle[next(iter(self._idle))]
