"""The only queue: requests that wait for a place. Tenants take turns by what they have been given; of one tenant's
requests those of a higher priority come first, then those that were admitted first.

A full queue makes room for a tenant that has less than its share of it: the last request of the one that is furthest
above its own has to go (the longest queue drops, McKenney, "Stochastic Fairness Queueing", 1990).
"""

from __future__ import annotations

import heapq
from typing import Final

from cluster.core.fair_share import FairShare
from cluster.core.lane import Lane, QueueEntry, Waiting

_STALE_SHARE: Final = 2
_MIN_COMPACTED: Final = 64


class RequestQueue:
    """Its bound (`limit`) is for new requests: one that has been admitted may always come back.

    Costs O(log n), but for `ahead_of` (tenants that wait) and `displaced_by` (those, and one tenant's requests).
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._share = FairShare()
        self._tenants: dict[str, str] = {}
        """Of each request that waits."""
        self._lanes: dict[str, Lane] = {}
        self._turns: list[tuple[float, str]] = []
        """A heap of (counter, tenant). An entry counts while it agrees with the tenant's counter."""

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tenants

    @property
    def num_tokens(self) -> int:
        """Tokens to be read for all that wait."""
        return int(sum(lane.total().num_tokens for lane in self._lanes.values()))

    def num_of(self, tenant: str) -> int:
        """How many of that tenant wait."""
        lane = self._lanes.get(tenant)
        return 0 if lane is None else len(lane)

    # ---- coming and going ----

    def push(self, entry: QueueEntry, weight: float = 1.0) -> None:
        """`weight`: its tenant's."""
        assert entry.request_id not in self._tenants, f"{entry.request_id} waits already"
        lane = self._lanes.get(entry.tenant)
        if lane is None:
            lane = self._lanes[entry.tenant] = Lane(weight)
            self._share.enter(entry.tenant)
            self._take_turn(entry.tenant)
        lane.push(entry)
        self._tenants[entry.request_id] = entry.tenant

    def head(self) -> str | None:
        """The request whose turn it is; it stays in the queue."""
        while self._turns:
            counter, tenant = self._turns[0]
            if tenant in self._lanes and self._share.counter(tenant) == counter:
                return self._lanes[tenant].head().request_id
            heapq.heappop(self._turns)
        return None

    def serve(self, request_id: str) -> None:
        """The head has a place: it leaves, and its tenant is charged."""
        tenant = self._tenants[request_id]
        lane = self._lanes[tenant]
        self._share.serve(tenant, lane.entries[request_id].cost_tokens, lane.weight)
        self.remove(request_id)
        if tenant in self._lanes:
            self._take_turn(tenant)

    def remove(self, request_id: str) -> None:
        """It leaves without a place."""
        tenant = self._tenants.pop(request_id)
        lane = self._lanes[tenant]
        lane.remove(request_id)
        if not len(lane):
            del self._lanes[tenant]
            self._share.leave(tenant)

    def correct(self, tenant: str, num_tokens: int, weight: float) -> None:
        """The tenant has been given so many tokens more than it was charged for; fewer, where negative."""
        self._share.correct(tenant, num_tokens, weight)
        if tenant in self._lanes:
            self._take_turn(tenant)

    # ---- for decisions on new requests ----

    def ahead_of(self, tenant: str, priority: int, weight: float) -> Waiting:
        """What is expected to have its turn before a new request: of its own tenant, and of the others that wait now
        what they have a claim to until then, as they will go on asking."""
        lane = self._lanes.get(tenant)
        ahead = Waiting() if lane is None else lane.before(priority)
        turn = self._share.counter(tenant) + ahead.cost_tokens / weight
        for name, other in self._lanes.items():
            if name == tenant:
                continue
            claim_tokens = (turn - self._share.counter(name)) * other.weight
            if claim_tokens > 0:
                total = other.total()
                ahead.add(total, claim_tokens / total.cost_tokens)
        return ahead

    def displaced_by(self, tenant: str, priority: int, weight: float) -> str | None:
        """The request that has to go if a new one is to come in; None if the new one may not displace any.

        That is the last one of the tenant that is furthest above its share of the queue. If it is the new one's own, a
        lower priority has to go.
        """
        own = (self.num_of(tenant) + 1) / weight
        longest = max(self._lanes, key=lambda name: (len(self._lanes[name]) / self._lanes[name].weight, name))
        if longest != tenant and len(self._lanes[longest]) / self._lanes[longest].weight <= own:
            return None
        last = self._lanes[longest].last()
        if last is None or (longest == tenant and -last.neg_priority >= priority):
            return None
        return last.request_id

    def check_invariants(self) -> None:
        self._share.check_invariants()
        for tenant, lane in self._lanes.items():
            lane.check_invariants()
            assert all(entry.tenant == self._tenants[entry.request_id] == tenant for entry in lane.entries.values())
            assert (self._share.counter(tenant), tenant) in self._turns, f"{tenant!r} would never have its turn"
        assert sum(len(lane) for lane in self._lanes.values()) == len(self._tenants)
        assert len(self._turns) <= _STALE_SHARE * len(self._lanes) + _MIN_COMPACTED + 1

    def _take_turn(self, tenant: str) -> None:
        """Its counter has changed."""
        heapq.heappush(self._turns, (self._share.counter(tenant), tenant))
        if len(self._turns) > _STALE_SHARE * len(self._lanes) + _MIN_COMPACTED:
            self._turns = [(self._share.counter(name), name) for name in self._lanes]
            heapq.heapify(self._turns)
