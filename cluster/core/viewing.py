"""Makes the views of `cluster.core.views` from the parts."""

from __future__ import annotations

from cluster.core.drains import Drain
from cluster.core.handlers.draining import waits_for
from cluster.core.handlers.ending import current_attempt
from cluster.core.ids import Role
from cluster.core.leases import Lease
from cluster.core.limits import HEARTBEATS_PER_TIMEOUT, NS_PER_MS
from cluster.core.parts import Parts
from cluster.core.reports import LeaseInfo
from cluster.core.requests import PLACED_PHASES, Request
from cluster.core.tenants import Tenant
from cluster.core.views import (
    AdmissionView,
    ClusterView,
    DrainView,
    LeaseView,
    PoolView,
    PressureView,
    QuotaView,
    RequestView,
    RoutesView,
    TenantView,
    WorkerView,
)
from cluster.core.workers import Worker
from cluster.policy.bottleneck import decode_pressure, limiting_role, prefill_pressure, push_pressure
from cluster.policy.candidates import candidates_of
from cluster.policy.placement import Candidates, break_even_tokens

_MAX_TENANTS_SHOWN = 100
_SILENT_HEARTBEATS = 3
"""A worker is shown as silent after so many heartbeats should have come."""


def view_cluster(parts: Parts, now_ns: int) -> ClusterView:
    workers = [_view_worker(parts, worker, now_ns) for worker in parts.workers.all()]
    pools = tuple(
        PoolView(
            name=pool.name,
            role=pool.role,
            num_replicas=pool.replicas,
            workers=tuple(worker for worker in workers if worker.pool == pool.name),
        )
        for pool in parts.config.pools
    )
    return ClusterView(
        name=parts.config.name,
        epoch=parts.outbox.epoch,
        pools=pools,
        fronts=tuple(parts.fronts[name] for name in sorted(parts.fronts)),
        num_requests=len(parts.requests),
        num_queued=len(parts.queue),
        num_running=sum(request.phase in PLACED_PHASES for request in parts.requests.all()),
        num_leases=len(parts.leases),
        links=parts.links.all(),
        routes=_view_routes(parts),
        pressure=_view_pressure(parts),
        admission=_view_admission(parts, now_ns),
        num_poison=parts.trials.num_condemned,
        drains=tuple(_view_drain(parts, drain, now_ns) for drain in parts.drains.all()),
        drained=parts.drains.gone(),
    )


def _view_pressure(parts: Parts) -> PressureView:
    prefill, decode = parts.workers.with_role(Role.PREFILL), parts.workers.with_role(Role.DECODE)
    pressures = (
        prefill_pressure(prefill),
        decode_pressure(decode, parts.config.kv.block_size, parts.config.slo.tpot_ms),
        push_pressure(prefill),
    )
    return PressureView(
        prefill=pressures[0], decode=pressures[1], push=pressures[2], limiting=limiting_role(*pressures)
    )


def _view_routes(parts: Parts) -> RoutesView:
    by_role = {role: candidates_of(parts.workers.with_role(role), (), 0) for role in Role}
    candidates = Candidates(
        prefill=by_role[Role.PREFILL],
        decode=by_role[Role.DECODE],
        num_held_blocks={},
        links=parts.links,
        rules=parts.config.disaggregation,
        hand_over=parts.hand_over.usual,
        max_tpot_ms=parts.config.slo.tpot_ms,
    )
    most = parts.workers.max_model_tokens or 0
    routes = parts.routes
    counts = sorted(routes.counts.items(), key=lambda item: (item[0][0].value, item[0][1].value))
    return RoutesView(
        counts=tuple((route, cause, number) for (route, cause), number in counts),
        num_recent=routes.num_recent,
        pushed_share=routes.pushed_share,
        few=routes.few_pushes,
        local_up_to_tokens=break_even_tokens(candidates, parts.config.kv.block_size, most),
        hand_over=parts.hand_over.usual,
    )


def view_requests(parts: Parts, now_ns: int) -> tuple[RequestView, ...]:
    """In order of admission."""
    return tuple(_view_request(parts, request, now_ns) for request in parts.requests.all())


def view_request(parts: Parts, request_id: str, now_ns: int) -> RequestView | None:
    request = parts.requests.get(request_id)
    return None if request is None else _view_request(parts, request, now_ns)


def view_leases(parts: Parts, now_ns: int) -> tuple[LeaseView, ...]:
    """The ledger, with what the holders last said of each lease; then what only the holders know of."""
    reported = parts.leases.reported()
    views = []
    for lease in parts.leases.all():
        info = reported.pop((lease.holder, lease.lease_id), None)
        views.append(_view_lease(parts, lease, info, now_ns))
    for (holder, _), info in reported.items():
        views.append(
            LeaseView(
                lease_id=info.lease_id,
                attempt=info.attempt,
                side=info.side,
                holder=holder,
                peer=info.peer,
                num_blocks=info.num_blocks,
                size_bytes=info.size_bytes,
                age_ms=info.age_ms,
                remaining_ms=info.remaining_ms,
                known=False,
            )
        )
    return tuple(views)


def _view_lease(parts: Parts, lease: Lease, info: LeaseInfo | None, now_ns: int) -> LeaseView:
    holder = parts.workers.get(lease.holder)
    assert holder is not None, "a worker's loss closes its leases"
    num_blocks = lease.num_blocks if info is None else info.num_blocks
    return LeaseView(
        lease_id=lease.lease_id,
        attempt=lease.attempt_id,
        side=lease.side.value if info is None else info.side,
        holder=lease.holder,
        peer=lease.peer,
        num_blocks=num_blocks,
        size_bytes=num_blocks * holder.hello.block_size_bytes,
        age_ms=(now_ns - lease.opened_ns) // NS_PER_MS,
        remaining_ms=None if info is None else info.remaining_ms,
        known=True,
    )


def _view_request(parts: Parts, request: Request, now_ns: int) -> RequestView:
    attempt = current_attempt(parts, request)
    prefill = None if attempt is None or attempt.prefill is None else attempt.prefill.worker
    return RequestView(
        request_id=request.request_id,
        front=request.front,
        phase=request.phase.value,
        attempt=request.attempt,
        prefill=prefill,
        decode=None if attempt is None else attempt.decode.worker,
        age_ms=(now_ns - request.submitted_ns) // NS_PER_MS,
        why=request.waiting_for if attempt is None else attempt.why,
    )


def _view_drain(parts: Parts, drain: Drain, now_ns: int) -> DrainView:
    remaining_ms = None if drain.deadline_ns is None else max(0, drain.deadline_ns - now_ns) // NS_PER_MS
    return DrainView(order=drain.order, life=drain.life, waits_for=waits_for(parts, drain), remaining_ms=remaining_ms)


def _view_admission(parts: Parts, now_ns: int) -> AdmissionView:
    return AdmissionView(
        queue_limit=parts.queue.limit,
        num_queued_tokens=parts.queue.num_tokens,
        slo_ttft_ms=parts.config.slo.ttft_ms,
        slo_tpot_ms=parts.config.slo.tpot_ms,
        refusals=tuple((cause, count) for cause, count in parts.tenants.refusals.items() if count),
        tenants=tuple(_view_tenant(parts, tenant, now_ns) for tenant in parts.tenants.all()[:_MAX_TENANTS_SHOWN]),
    )


def _view_tenant(parts: Parts, tenant: Tenant, now_ns: int) -> TenantView:
    bucket, num_queued = tenant.bucket, parts.queue.num_of(tenant.name)
    quota = None
    if bucket is not None:
        quota = QuotaView(
            tokens_per_s=bucket.tokens_per_s,
            burst_tokens=bucket.burst_tokens,
            level_tokens=bucket.level_tokens(now_ns),
        )
    return TenantView(
        name=tenant.name,
        weight=tenant.weight,
        num_queued=num_queued,
        num_running=tenant.num_live - num_queued,
        num_ended=tenant.num_ended,
        num_refused=tenant.num_refused,
        num_prompt_tokens=tenant.num_prompt_tokens,
        num_output_tokens=tenant.num_output_tokens,
        expected_output_tokens=tenant.output.num_tokens,
        quota=quota,
    )


def _view_worker(parts: Parts, worker: Worker, now_ns: int) -> WorkerView:
    hello = worker.hello
    silent_ns = now_ns - worker.last_heard_ns
    is_silent = silent_ns * HEARTBEATS_PER_TIMEOUT > parts.heartbeat_timeout_ns * _SILENT_HEARTBEATS
    return WorkerView(
        worker=worker.id,
        pool=hello.pool,
        role=hello.role,
        state="silent" if is_silent else "draining" if worker.is_leaving else "ready",
        host=hello.host,
        pid=hello.pid,
        model=hello.model,
        engine=hello.engine,
        token_address=hello.ref.token_address,
        transports=tuple(dict.fromkeys(endpoint.transport for endpoint in hello.ref.endpoints)),
        metrics_address=hello.metrics_address,
        silent_ms=silent_ns // NS_PER_MS,
        num_legs=worker.num_legs,
        num_known_blocks=parts.prefixes.num_blocks_of(worker.id),
        load=worker.load,
    )
