"""`baton status` and `baton leases`."""

from __future__ import annotations

from typing import Any

from baton.v1 import admin_pb2
from cluster.cli.tables import format_bytes, format_table

_BLOCK_STATES = ("total", "free", "active", "cached", "reserved", "quarantined")


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
    }


def status_text(status: admin_pb2.GetStatusResponse) -> str:
    lines = [
        f"cluster {status.cluster}, model {status.model}, up for {_duration(status.uptime_s)}, "
        f"{status.num_running} running, {status.num_queued} queued"
    ]
    rows = []
    for pool in status.pools:
        ready = sum(worker.state == "ready" for worker in pool.workers)
        for worker in pool.workers:
            rows.append(_worker_row(pool.name, worker))
        if ready < pool.wanted_replicas:
            lines.append(f"pool {pool.name}: {ready} of {pool.wanted_replicas} workers ready")
    header = ("POOL", "WORKER", "ROLE", "STATE", "INCARNATION", "PID", "HOST", "RUNNING", "WAITING")
    lines.append("")
    lines.append(format_table((*header, *(name.upper() for name in _BLOCK_STATES)), rows))
    return "\n".join(lines)


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


def _worker_json(worker: admin_pb2.WorkerStatus) -> dict[str, Any]:
    return {
        "name": worker.name,
        "role": worker.role,
        "state": worker.state,
        "incarnation": worker.incarnation,
        "pid": worker.pid,
        "host": worker.host,
        "running": worker.num_running,
        "waiting": worker.num_waiting,
        "blocks": {name: getattr(worker.blocks, name) for name in _BLOCK_STATES},
    }


def _worker_row(pool: str, worker: admin_pb2.WorkerStatus) -> tuple[str, ...]:
    return (
        pool,
        worker.name,
        worker.role,
        worker.state,
        str(worker.incarnation),
        str(worker.pid),
        worker.host,
        str(worker.num_running),
        str(worker.num_waiting),
        *(str(getattr(worker.blocks, name)) for name in _BLOCK_STATES),
    )


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole // 3600} h"
