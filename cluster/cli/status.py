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
    for pool in status.pools:
        parts.append("\n".join([_pool_title(pool), header, *lines[: len(pool.workers)]]))
        del lines[: len(pool.workers)]
    if status.links:
        parts.append(_links_text(status))
    parts += admission_text(status)
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
    }


def _pool_title(pool: admin_pb2.PoolStatus) -> str:
    num_ready = sum(worker.state == "ready" for worker in pool.workers)
    return f"pool {pool.name}, role {pool.role}: {num_ready} of {pool.wanted_replicas} workers ready"


def _worker_row(worker: admin_pb2.WorkerStatus) -> tuple[str, ...]:
    if worker.state == "down":
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
