"""`baton status` and `baton leases`."""

from __future__ import annotations

from typing import Any

from baton.v1 import admin_pb2
from cluster.cli.admission_status import admission_json, admission_text
from cluster.cli.tables import format_bytes, format_table
from cluster.core.links import slow_link_text

_BLOCK_STATES = ("total", "free", "active", "cached", "reserved", "quarantined")
# Narrow enough for a terminal of 100 columns.
_BLOCK_HEADER = ("BLOCKS", "FREE", "ACTIVE", "CACHED", "RESV", "QUAR")
_LINK_HEADER = ("PUSHES FROM", "TO", "OVER", "GB/S")
_WORKER_HEADER = ("WORKER", "STATE", "INCARNATION", "PID", "HOST", "RUN", "WAIT", *_BLOCK_HEADER, "HIT%")


def status_json(status: admin_pb2.GetStatusResponse) -> dict[str, Any]:
    return {
        "cluster": status.cluster,
        "model": status.model,
        "epoch": status.epoch,
        "uptime_s": round(status.uptime_s, 3),
        "fronts": status.num_fronts,
        "queued": status.num_queued,
        "running": status.num_running,
        "poison_requests": status.num_poison,
        "pools": [
            {
                "name": pool.name,
                "role": pool.role,
                "replicas": pool.wanted_replicas,
                "workers": [_worker_json(worker) for worker in pool.workers],
            }
            for pool in status.pools
        ],
        "links": [
            {
                "writer": link.writer,
                "peer": link.peer,
                "transport": link.transport,
                "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
                "median_bytes_per_s": link.median_bytes_per_s,
                "is_slow": link.is_slow,
            }
            for link in status.links
        ],
        "pressure": {
            "prefill": round(status.pressure.prefill, 3),
            "decode": round(status.pressure.decode, 3),
            "push": round(status.pressure.push, 3),
            "limiting_role": status.pressure.limiting_role or None,
        },
        "routes": _routes_json(status.routes) if status.HasField("routes") else None,
        "metrics_address": status.metrics_address,
        "admission": admission_json(status.admission),
    }


def status_text(status: admin_pb2.GetStatusResponse) -> str:
    # All the same, unless versions differ; a worker that is down tells none.
    engines = dict.fromkeys(worker.engine for pool in status.pools for worker in pool.workers if worker.engine)
    cluster = (
        f"cluster {status.cluster}, model {status.model}, {_engine_part(list(engines))}"
        f"up for {_duration(status.uptime_s)}, "
        f"{status.num_running} running, {status.num_queued} queued"
    )
    rows = [_worker_row(worker) for pool in status.pools for worker in pool.workers]
    # One table, cut where pools begin, so that their columns stand below each other.
    header, *lines = format_table(_WORKER_HEADER, rows).splitlines()
    parts = [cluster]
    if status.num_poison:
        parts.append(f"warning: {status.num_poison} poison requests were ended; the coordinator's log names them")
    for pool in status.pools:
        parts.append("\n".join([_pool_title(pool), header, *lines[: len(pool.workers)]]))
        del lines[: len(pool.workers)]
    if status.pressure.limiting_role:
        parts.append(_pressure_text(status.pressure))
    if drains := _drains_text(status):
        parts.append(drains)
    if status.HasField("routes"):
        parts.append(_routes_text(status.routes))
    parts += admission_text(status)
    if status.links:
        parts.append(_links_text(status))
    return "\n\n".join(parts)


def leases_json(response: admin_pb2.GetLeasesResponse) -> dict[str, Any]:
    return {
        "leases": [
            {
                "lease_id": lease.lease_id,
                "request_id": lease.request_id,
                "attempt": lease.attempt,
                "worker": lease.worker,
                "peer": lease.peer,
                "side": lease.side,
                "blocks": lease.num_blocks,
                "bytes": lease.size_bytes,
                "age_ms": lease.age_ms,
                "remaining_ms": lease.remaining_ms,
            }
            for lease in response.leases
        ]
    }


def leases_text(response: admin_pb2.GetLeasesResponse) -> str:
    if not response.leases:
        return "no leases and no quarantined blocks"
    rows = [
        (
            str(lease.lease_id),
            f"{lease.request_id}/{lease.attempt}",
            lease.side,
            lease.worker,
            lease.peer,
            str(lease.num_blocks),
            format_bytes(lease.size_bytes),
            f"{lease.age_ms / 1e3:.1f}",
            f"{lease.remaining_ms / 1e3:.1f}",
        )
        for lease in response.leases
    ]
    return format_table(("LEASE", "REQUEST", "SIDE", "WORKER", "PEER", "BLOCKS", "SIZE", "AGE S", "LEFT S"), rows)


def _links_text(status: admin_pb2.GetStatusResponse) -> str:
    """One line a link, then a warning for each that is slow."""
    rows = []
    warnings = []
    for link in status.links:
        # Of their lives, whose numbers are long, the workers' own lines tell.
        writer, peer = link.writer.partition("#")[0], link.peer.partition("#")[0]
        rows.append((writer, peer, link.transport, f"{link.bandwidth_bytes_per_s / 1e9:.2f}"))
        if link.is_slow:
            text = slow_link_text(writer, peer, link.transport, link.bandwidth_bytes_per_s, link.median_bytes_per_s)
            warnings.append(f"warning: {text}")
    return "\n".join([format_table(_LINK_HEADER, rows), *warnings])


def _routes_json(routes: admin_pb2.RoutesStatus) -> dict[str, Any]:
    return {
        "counts": [{"route": count.route, "cause": count.cause, "count": count.count} for count in routes.counts],
        "recent": routes.num_recent,
        "pushed_share": routes.pushed_share if routes.HasField("pushed_share") else None,
        "local_up_to_tokens": routes.local_up_to_tokens,
        "reserve_ms": routes.reserve_ms,
        "take_over_ms": routes.take_over_ms,
        "warning": routes.warning or None,
    }


def _routes_text(routes: admin_pb2.RoutesStatus) -> str:
    """How many requests took which way and why, then what decides it now, then the warning if there is one."""
    lines = []
    if routes.counts:
        lines.append("requests: " + ", ".join(_route_part(count) for count in routes.counts))
        lines[0] += f"; of the last {routes.num_recent}, {routes.pushed_share:.0%} pushed"
    else:
        lines.append("requests: none yet")
    if routes.local_up_to_tokens:
        lines.append(f"a prompt of up to {routes.local_up_to_tokens} uncached tokens would be read by decode now")
    else:
        lines.append("every prompt that is cached nowhere would be pushed now")
    if routes.warning:
        lines.append(f"warning: {routes.warning}")
    return "\n".join(lines)


def _route_part(count: admin_pb2.RouteCount) -> str:
    return f"{count.count} {count.route}" if count.cause == "rule" else f"{count.count} {count.route} ({count.cause})"


def _engine_part(engines: list[str]) -> str:
    return f"engine {' and '.join(engines)}, " if engines else ""


def _worker_json(worker: admin_pb2.WorkerStatus) -> dict[str, Any]:
    return {
        "name": worker.name,
        "role": worker.role,
        "state": worker.state,
        "incarnation": worker.incarnation,
        "pid": worker.pid,
        "host": worker.host,
        "engine": worker.engine,
        "running": worker.num_running,
        "waiting": worker.num_waiting,
        "blocks": {name: getattr(worker.blocks, name) for name in _BLOCK_STATES},
        "prefix_cache": {
            "blocks": worker.prefix_cache.num_blocks,
            "query_tokens": worker.prefix_cache.query_tokens,
            "hit_tokens": worker.prefix_cache.hit_tokens,
        },
        "metrics_address": worker.metrics_address,
        **({"drain": _drain_json(worker.drain)} if worker.HasField("drain") else {}),
    }


def _drain_json(drain: admin_pb2.DrainStatus) -> dict[str, Any]:
    return {
        "then": drain.then,
        "pool": drain.pool or None,
        "migrate": drain.migrate,
        "remaining_ms": drain.remaining_ms if drain.HasField("remaining_ms") else None,
        "waits_for": drain.waits_for,
    }


def _drains_text(status: admin_pb2.GetStatusResponse) -> str:
    """A line for each worker that is being drained."""
    lines = []
    for worker in (worker for pool in status.pools for worker in pool.workers if worker.HasField("drain")):
        drain = worker.drain
        then = {"restart": "to be started again, ", "flip": f"to join pool {drain.pool}, "}.get(drain.then, "")
        left = f", {drain.remaining_ms / 1e3:.0f} s left" if drain.HasField("remaining_ms") else ""
        lines.append(f"draining {worker.name}: {then}waiting for {drain.waits_for}{left}")
    return "\n".join(lines)


def _pool_title(pool: admin_pb2.PoolStatus) -> str:
    num_ready = sum(worker.state == "ready" for worker in pool.workers)
    return f"pool {pool.name}, role {pool.role}: {num_ready} of {pool.wanted_replicas} workers ready"


def _pressure_text(pressure: admin_pb2.PressureStatus) -> str:
    if pressure.limiting_role == "prefill":
        to_read = f"{pressure.prefill:.0%} of what they may have to read"
        return f"prefill limits: its workers have {to_read}; decode is {pressure.decode:.0%} full"
    held = f", with {pressure.push:.0%} of prefill's blocks held for it" if pressure.push else ""
    return f"decode limits: it is {pressure.decode:.0%} full{held}; more prefill workers would not help"


def _worker_row(worker: admin_pb2.WorkerStatus) -> tuple[str, ...]:
    if worker.state in ("down", "drained"):
        return (worker.name, worker.state, *("-" for _ in _WORKER_HEADER[2:]))
    return (
        worker.name,
        worker.state,
        str(worker.incarnation),
        str(worker.pid),
        worker.host,
        str(worker.num_running),
        str(worker.num_waiting),
        *(str(getattr(worker.blocks, name)) for name in _BLOCK_STATES),
        _hit_percent(worker.prefix_cache),
    )


def _hit_percent(cache: admin_pb2.PrefixCacheStatus) -> str:
    """Of the prompt tokens looked up in the prefix cache, those found there; `-` before the first one."""
    return f"{100 * cache.hit_tokens / cache.query_tokens:.0f}" if cache.query_tokens else "-"


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole // 3600} h"
