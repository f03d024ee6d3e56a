"""What operators are shown of the coordinator's state: copies, made when asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.core.drain_orders import DrainOrder
from cluster.core.ids import AttemptId, FrontId, RefusalCause, Role, Route, WorkerId
from cluster.core.links import Link
from cluster.core.messages import BlockCounts, WorkerLoad
from cluster.core.routes import FewPushes
from cluster.policy.break_even import HandOver
from cluster.policy.decision import Cause


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
class RoutesView:
    """Which ways placed attempts take.

    Attributes:
        counts: by route and cause, of this life of the coordinator.
        num_recent, pushed_share: the last placements, and the share of them that were pushed; None without any.
        few: set while fewer are pushed than should be.
        local_up_to_tokens: the longest prompt, cached nowhere, that decode would read itself if it came now.
        hand_over: what a push costs besides reading.
    """

    counts: tuple[tuple[Route, Cause, int], ...] = ()
    num_recent: int = 0
    pushed_share: float | None = None
    few: FewPushes | None = None
    local_up_to_tokens: int = 0
    hand_over: HandOver = field(default_factory=HandOver)


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureView:
    """How near the workers of each role are to where they are given nothing more (1), and `push`: prefill workers to
    being full of KV that decode has not taken over. `limiting`: the role that limits the cluster, if one does."""

    prefill: float = 0.0
    decode: float = 0.0
    push: float = 0.0
    limiting: Role | None = None


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
    slo_tpot_ms: float | None
    refusals: tuple[tuple[RefusalCause, int], ...]
    tenants: tuple[TenantView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """`num_running` counts requests with a place; the rest of `num_requests` waits, for a place or for a front.

    `links`: by writer and peer. `num_poison`: requests that were ended for what they did to workers. `drains`: by name.
    `drained`: names of workers that were drained and are gone.
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
    routes: RoutesView = field(default_factory=RoutesView)
    pressure: PressureView = field(default_factory=PressureView)
    num_poison: int = 0
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
