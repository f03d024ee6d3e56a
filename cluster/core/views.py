"""What operators are shown of the coordinator's state: copies, made when asked for."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.drain_orders import DrainOrder
from cluster.core.ids import AttemptId, FrontId, Role, WorkerId
from cluster.core.links import Link
from cluster.core.messages import BlockCounts, WorkerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainView:
    """A drain that is going on. `waits_for`: in words. `remaining_ms`: until its deadline, None if it has none."""

    order: DrainOrder
    life: WorkerId | None
    waits_for: str
    remaining_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A registered worker. `state` is `ready`, `silent` where heartbeats are missing, or `draining` where it is to get
    no new work.

    `num_legs` counts what the coordinator has given it and not seen released; `load` is from its last heartbeat;
    `num_known_blocks` are those that prompts can hit there.
    """

    worker: WorkerId
    pool: str
    role: Role
    state: str
    host: str
    pid: int
    model: str
    engine: str
    token_address: str
    transports: tuple[str, ...]
    metrics_address: str
    silent_ms: int
    num_legs: int
    num_known_blocks: int
    load: WorkerLoad

    @property
    def blocks(self) -> BlockCounts:
        return self.load.blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """`num_replicas` is what the cluster file asks for; `workers` are those registered, by name."""

    name: str
    role: Role
    num_replicas: int
    workers: tuple[WorkerView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """`num_running` counts requests with a place; the rest of `num_requests` waits, for a place or for a front.

    `links`: by writer and peer. `drains`: by name. `drained`: names of workers that were drained and are gone.
    """

    name: str
    epoch: int
    pools: tuple[PoolView, ...]
    fronts: tuple[FrontId, ...]
    num_requests: int
    num_queued: int
    num_running: int
    num_leases: int
    links: tuple[Link, ...]
    drains: tuple[DrainView, ...] = ()
    drained: tuple[str, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Whether every replica the cluster file asks for is registered."""
        return all(len(pool.workers) >= pool.num_replicas for pool in self.pools)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """Blocks kept for a push. side: `reserved`, `held` or `quarantined`.

    `remaining_ms` is None until the holder has reported the lease; `known` is False where only the holder knows it.
    """

    lease_id: int
    attempt: AttemptId
    side: str
    holder: WorkerId
    peer: WorkerId
    num_blocks: int
    size_bytes: int
    age_ms: int
    remaining_ms: int | None
    known: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """A request that has not ended. `why` says what it waits for, or why it was placed where it is."""

    request_id: str
    front: FrontId
    phase: str
    attempt: int
    prefill: WorkerId | None
    decode: WorkerId | None
    age_ms: int
    why: str
