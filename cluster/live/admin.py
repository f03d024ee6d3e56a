"""The coordinator's views as protobuf."""

from __future__ import annotations

from typing import Final

from baton.v1 import admin_pb2
from cluster.core.config import ClusterConfig, PoolConfig
from cluster.core.drain_orders import AfterDrain, DrainOrder
from cluster.core.ids import Role
from cluster.core.limits import NS_PER_S
from cluster.core.links import Link
from cluster.core.messages import BlockCounts
from cluster.core.views import (
    AdmissionView,
    ClusterView,
    DrainView,
    LeaseView,
    PoolView,
    PressureView,
    RoutesView,
    TenantView,
    WorkerView,
)

STATE_DOWN: Final = "down"
"""A worker that should be there and is not: it has not registered yet, or its last life was given up."""
STATE_DRAINED: Final = "drained"
"""A worker that an operator has had drained, and that is gone."""


def drain_order(request: admin_pb2.DrainRequest) -> DrainOrder:
    return DrainOrder(
        worker=request.worker,
        then=AfterDrain.RESTART if request.restart else AfterDrain.STOP,
        migrate=request.migrate,
        deadline_ms=request.deadline_ms if request.HasField("deadline_ms") else None,
    )


def flip_order(request: admin_pb2.FlipRequest) -> DrainOrder:
    return DrainOrder(
        worker=request.worker,
        then=AfterDrain.FLIP,
        pool=request.pool,
        migrate=request.migrate,
        deadline_ms=request.deadline_ms if request.HasField("deadline_ms") else None,
    )


def incarnation_of(drain: DrainView) -> int:
    """Of the life that is being drained, 0 while the next one is waited for."""
    return 0 if drain.life is None else drain.life.incarnation


def status_response(
    config: ClusterConfig, view: ClusterView, uptime_ns: int, metrics_address: str = ""
) -> admin_pb2.GetStatusResponse:
    return admin_pb2.GetStatusResponse(
        cluster=view.name,
        model=_model_name(config, view),
        epoch=view.epoch,
        pools=[_pool_status(planned, pool, view) for planned, pool in zip(config.pools, view.pools, strict=True)],
        num_queued=view.num_queued,
        num_running=view.num_running,
        num_fronts=len(view.fronts),
        uptime_s=uptime_ns / NS_PER_S,
        links=[_link_status(link) for link in view.links],
        routes=_routes_status(view.routes) if any(pool.role is Role.PREFILL for pool in config.pools) else None,
        metrics_address=metrics_address,
        num_poison=view.num_poison,
        admission=_admission_status(view.admission),
        pressure=_pressure_status(view.pressure),
    )


def _pressure_status(view: PressureView) -> admin_pb2.PressureStatus:
    return admin_pb2.PressureStatus(
        prefill=view.prefill,
        decode=view.decode,
        push=view.push,
        limiting_role="" if view.limiting is None else view.limiting.value,
    )


def _admission_status(view: AdmissionView) -> admin_pb2.AdmissionStatus:
    return admin_pb2.AdmissionStatus(
        queue_limit=view.queue_limit,
        num_queued_tokens=view.num_queued_tokens,
        refusals=[admin_pb2.RefusalCount(cause=cause.value, count=count) for cause, count in view.refusals],
        tenants=[_tenant_status(tenant) for tenant in view.tenants],
        slo_ttft_ms=view.slo_ttft_ms,
        slo_tpot_ms=view.slo_tpot_ms,
    )


def _tenant_status(tenant: TenantView) -> admin_pb2.TenantStatus:
    status = admin_pb2.TenantStatus(
        name=tenant.name,
        weight=tenant.weight,
        num_queued=tenant.num_queued,
        num_running=tenant.num_running,
        num_ended=tenant.num_ended,
        num_refused=tenant.num_refused,
        num_prompt_tokens=tenant.num_prompt_tokens,
        num_output_tokens=tenant.num_output_tokens,
        expected_output_tokens=tenant.expected_output_tokens,
    )
    if tenant.quota is not None:
        status.quota.tokens_per_s = tenant.quota.tokens_per_s
        status.quota.burst_tokens = tenant.quota.burst_tokens
        status.quota.level_tokens = tenant.quota.level_tokens
    return status


def leases_response(leases: tuple[LeaseView, ...]) -> admin_pb2.GetLeasesResponse:
    return admin_pb2.GetLeasesResponse(leases=[_lease_status(lease) for lease in leases])


def _model_name(config: ClusterConfig, view: ClusterView) -> str:
    """As the workers call it; what the file says until one has registered."""
    names = [worker.model for pool in view.pools for worker in pool.workers]
    return names[0] if names else config.model.preset or config.model.path or ""


def _pool_status(planned: PoolConfig, pool: PoolView, view: ClusterView) -> admin_pb2.PoolStatus:
    """The workers that should be, in order, then those that registered under a name of their own, or were flipped."""
    elsewhere = {worker.worker.name for other in view.pools if other.name != pool.name for worker in other.workers}
    names = [name for name in planned.worker_names if name not in elsewhere]
    workers = {name: _missing_worker(name, pool, view) for name in names}
    workers |= {worker.worker.name: _worker_status(worker) for worker in pool.workers}
    for drain in view.drains:
        if drain.order.worker in workers:
            workers[drain.order.worker].drain.CopyFrom(_drain_status(drain))
    return admin_pb2.PoolStatus(
        name=pool.name,
        role=pool.role.value,
        wanted_replicas=pool.num_replicas,
        workers=workers.values(),
    )


def _missing_worker(name: str, pool: PoolView, view: ClusterView) -> admin_pb2.WorkerStatus:
    state = STATE_DRAINED if name in view.drained else STATE_DOWN
    return admin_pb2.WorkerStatus(name=name, role=pool.role.value, state=state)


def _drain_status(drain: DrainView) -> admin_pb2.DrainStatus:
    order = drain.order
    return admin_pb2.DrainStatus(
        then=order.then.value,
        pool=order.pool,
        migrate=order.migrate,
        remaining_ms=drain.remaining_ms,
        waits_for=drain.waits_for,
    )


def _worker_status(worker: WorkerView) -> admin_pb2.WorkerStatus:
    return admin_pb2.WorkerStatus(
        name=worker.worker.name,
        role=worker.role.value,
        state=worker.state,
        incarnation=worker.worker.incarnation,
        pid=worker.pid,
        host=worker.host,
        num_running=worker.load.num_running,
        num_waiting=worker.load.num_waiting,
        blocks=_block_counts(worker.blocks),
        heartbeat_age_ms=worker.silent_ms,
        token_address=worker.token_address,
        transports=worker.transports,
        prefix_cache=admin_pb2.PrefixCacheStatus(
            num_blocks=worker.num_known_blocks,
            query_tokens=worker.load.prefix_query_tokens,
            hit_tokens=worker.load.prefix_hit_tokens,
        ),
        metrics_address=worker.metrics_address,
        engine=worker.engine,
    )


def _link_status(link: Link) -> admin_pb2.LinkStatus:
    return admin_pb2.LinkStatus(
        writer=str(link.writer),
        peer=str(link.peer),
        transport=link.transport,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        median_bytes_per_s=link.median_bytes_per_s,
        is_slow=link.is_slow,
    )


def _routes_status(routes: RoutesView) -> admin_pb2.RoutesStatus:
    return admin_pb2.RoutesStatus(
        counts=[
            admin_pb2.RouteCount(route=route.value, cause=cause.value, count=number)
            for route, cause, number in routes.counts
        ],
        num_recent=routes.num_recent,
        pushed_share=routes.pushed_share,
        local_up_to_tokens=routes.local_up_to_tokens,
        reserve_ms=routes.hand_over.reserve_ms,
        take_over_ms=routes.hand_over.take_over_ms,
        warning="" if routes.few is None else str(routes.few),
    )


def _block_counts(blocks: BlockCounts) -> admin_pb2.BlockCounts:
    return admin_pb2.BlockCounts(
        total=blocks.total,
        free=blocks.free,
        active=blocks.active,
        cached=blocks.cached,
        reserved=blocks.reserved,
        quarantined=blocks.quarantined,
    )


def _lease_status(lease: LeaseView) -> admin_pb2.LeaseStatus:
    return admin_pb2.LeaseStatus(
        lease_id=lease.lease_id,
        request_id=lease.attempt.request_id,
        attempt=lease.attempt.attempt,
        worker=str(lease.holder),
        peer=str(lease.peer),
        side=lease.side,
        num_blocks=lease.num_blocks,
        size_bytes=lease.size_bytes,
        age_ms=lease.age_ms,
        # A lease just granted has not been reported by its holder.
        remaining_ms=lease.remaining_ms or 0,
    )
