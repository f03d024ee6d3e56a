"""What operators are shown of the coordinator's state: copies, made when asked for."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.ids import AttemptId, FrontId, RefusalCause, Role, WorkerId
from cluster.core.links import Link
from cluster.core.messages import BlockCounts, WorkerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A registered worker. `state` is `ready`, or `silent` where heartbeats are missing.

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
class QuotaView:
    """A tenant's token bucket; `level_tokens` is below zero while it has a debt."""

    tokens_per_s: int
    burst_tokens: int
    level_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantView:
    """What a tenant has, and has had, as `cluster.core.tenants.Tenant`. `expected_output_tokens`: of an answer."""

    name: str
    weight: float
    num_queued: int
    num_running: int
    num_ended: int
    num_refused: int
    num_prompt_tokens: int
    num_output_tokens: int
    expected_output_tokens: int
    quota: QuotaView | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionView:
    """`num_queued_tokens` are to be read for what waits; `refusals` has the causes that there were."""

    queue_limit: int
    num_queued_tokens: int
    slo_ttft_ms: int | None
    refusals: tuple[tuple[RefusalCause, int], ...]
    tenants: tuple[TenantView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """`num_running` counts requests with a place; the rest of `num_requests` waits, for a place or for a front.

    `links`: by writer and peer.
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
    admission: AdmissionView

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
