"""The lease ledger: every block in the cluster that is kept for a push, by holder and by peer.

A disaggregated attempt opens two entries under one lease id: `reserved` at the decode worker, whose peer may write
into it, and `held` at the prefill worker, whose blocks are being read. The ledger says whom to tell when a worker is
lost. What the holders report with their heartbeats is kept beside it as a cross-check.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cluster.core.ids import AttemptId, WorkerId
from cluster.core.reports import LeaseInfo


class Side(StrEnum):
    """Which half of a push an entry is about."""

    RESERVED = "reserved"
    HELD = "held"


LeaseKey = tuple[int, Side]


@dataclass(slots=True, kw_only=True)
class Lease:
    """Blocks that `holder` keeps for a push with `peer`. `num_blocks` is an estimate until decode has granted."""

    lease_id: int
    side: Side
    attempt_id: AttemptId
    holder: WorkerId
    peer: WorkerId
    num_blocks: int
    opened_ns: int

    @property
    def key(self) -> LeaseKey:
        return (self.lease_id, self.side)


class LeaseLedger:
    """Open leases. Every operation is O(1), or O(leases of the worker concerned)."""

    def __init__(self) -> None:
        self._leases: dict[LeaseKey, Lease] = {}
        self._by_holder: dict[WorkerId, dict[LeaseKey, None]] = {}
        self._by_peer: dict[WorkerId, dict[LeaseKey, None]] = {}
        self._reported: dict[WorkerId, dict[int, LeaseInfo]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, lease: Lease) -> None:
        key = lease.key
        assert key not in self._leases
        self._leases[key] = lease
        self._by_holder.setdefault(lease.holder, {})[key] = None
        self._by_peer.setdefault(lease.peer, {})[key] = None

    def get(self, lease_id: int, side: Side) -> Lease | None:
        return self._leases.get((lease_id, side))

    def close(self, lease_id: int, side: Side) -> None:
        """The holder keeps nothing under this lease any more. Does nothing if it is closed already."""
        key = (lease_id, side)
        lease = self._leases.pop(key, None)
        if lease is not None:
            _drop(self._by_holder, lease.holder, key)
            _drop(self._by_peer, lease.peer, key)
            self._reported.get(lease.holder, {}).pop(lease_id, None)

    def close_reserved_from(self, holder: WorkerId, peer: WorkerId) -> None:
        """That life of the peer can write nothing to the holder any more."""
        for key in tuple(self._by_holder.get(holder, {})):
            if self._leases[key].peer == peer and key[1] is Side.RESERVED:
                self.close(*key)

    def forget_holder(self, holder: WorkerId) -> None:
        """The holder is lost, and its memory with it."""
        for key in tuple(self._by_holder.get(holder, {})):
            self.close(*key)
        self._reported.pop(holder, None)

    def holders_paired_with(self, peer: WorkerId) -> tuple[WorkerId, ...]:
        """Workers with a lease whose other side is that life, each once, in order of their first such lease."""
        keys = self._by_peer.get(peer, {})
        return tuple(dict.fromkeys(self._leases[key].holder for key in keys))

    def num_of(self, worker: WorkerId) -> int:
        """Leases of which that life is either side, and what it has last reported besides."""
        keys = {*self._by_holder.get(worker, {}), *self._by_peer.get(worker, {})}
        known = {lease_id for lease_id, _ in keys}
        return len(keys) + sum(lease_id not in known for lease_id in self._reported.get(worker, {}))

    def report(self, holder: WorkerId, leases: tuple[LeaseInfo, ...]) -> None:
        """Replaces what the holder says of itself."""
        self._reported[holder] = {info.lease_id: info for info in leases}

    def reported(self) -> dict[tuple[WorkerId, int], LeaseInfo]:
        """What all holders say of themselves, by holder and lease id."""
        return {
            (holder, lease_id): info for holder, infos in self._reported.items() for lease_id, info in infos.items()
        }

    def all(self) -> tuple[Lease, ...]:
        return tuple(self._leases.values())

    def check_invariants(self) -> None:
        for index in (self._by_holder, self._by_peer):
            assert sum(len(keys) for keys in index.values()) == len(self._leases)
            assert all(keys for keys in index.values()), "an empty index entry is kept"
        for key, lease in self._leases.items():
            assert lease.key == key and lease.holder != lease.peer
            assert key in self._by_holder[lease.holder] and key in self._by_peer[lease.peer]


def _drop(index: dict[WorkerId, dict[LeaseKey, None]], worker: WorkerId, key: LeaseKey) -> None:
    keys = index[worker]
    del keys[key]
    if not keys:
        del index[worker]
