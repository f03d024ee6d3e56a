"""The programs of a cluster's processes, made from its plan. What a program needs is imported when it is made."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from cluster.core.drain_orders import AfterDrain
from cluster.core.ids import Role, WorkerId
from cluster.live.hosted_loop import OnReady, Program
from cluster.live.plan import ClusterPlan, FrontPlan, WorkerPlan
from cluster.live.worker_reaper import EndRemote, RetireWorker

RETIRED_GRACE_S: Final = 60.0
"""A drained worker's actor is ended within, unless the coordinator dies just then: after that the worker comes back."""


def coordinator_program(
    plan: ClusterPlan, *, epoch: int, end_remote: EndRemote | None = None, retire: RetireWorker | None = None
) -> Program:
    """`epoch`: higher than that of any earlier life."""
    from cluster.live.coordinator import CoordinatorSettings, run_coordinator

    settings = CoordinatorSettings(
        config=plan.config,
        epoch=epoch,
        host=plan.host,
        port=plan.coordinator_port,
        journal_dir=plan.journal_dir,
    )

    async def program(on_ready: OnReady, stop: asyncio.Event) -> None:
        await run_coordinator(settings, on_ready, stop, end_remote, retire)

    return program


def worker_program(plan: ClusterPlan, worker: WorkerPlan, *, incarnation: int, host: str) -> Program:
    """`host`: what this machine is called by the others."""
    from cluster.agent.settings import WorkerSettings
    from decode_worker.worker import run as run_decode
    from kv_transfer.protocol.sampling import Checksums
    from prefill_worker.worker import run as run_prefill

    pool = worker.pool
    settings = WorkerSettings(
        worker=WorkerId(worker.name, incarnation),
        pool=pool.name,
        role=pool.role,
        coordinator_address=plan.coordinator_address,
        model_dir=plan.model_dir,
        dtype=plan.config.model.dtype,
        num_blocks=worker.num_blocks,
        num_host_blocks=worker.num_host_blocks,
        num_disk_blocks=worker.num_disk_blocks,
        disk_cache_dir=None if pool.disk_cache_directory is None else Path(pool.disk_cache_directory),
        block_size=plan.config.kv.block_size,
        max_model_tokens=plan.max_model_tokens,
        revision=plan.config.model.revision,
        device=pool.device,
        threads=pool.threads,
        cores=worker.cores,
        host=host,
        max_step_tokens=pool.max_step_tokens,
        prefill_chunk_tokens=pool.prefill_chunk_tokens,
        max_running=pool.max_running,
        transport=plan.config.transport.kind,
        checksums=Checksums(plan.config.transport.checksum),
        metrics_host=plan.config.metrics.host,
        metrics_port=worker.metrics_port,
    )
    run = run_prefill if pool.role is Role.PREFILL else run_decode

    async def program(on_ready: OnReady, stop: asyncio.Event) -> None:
        leave = await run(settings, on_ready=on_ready, stop=stop)
        if leave is not None and leave.then is not AfterDrain.RESTART:
            # The end of this process would have Ray start the next one: the coordinator ends the actor itself.
            await asyncio.sleep(RETIRED_GRACE_S)

    return program


def front_program(plan: ClusterPlan, front: FrontPlan, *, incarnation: int) -> Program:
    from cluster.front.server import run_front
    from cluster.front.settings import FrontSettings

    settings = FrontSettings(
        coordinator_address=plan.coordinator_address,
        model_dir=plan.model_dir,
        name=front.name,
        incarnation=incarnation,
        host=front.host,
        port=front.port,
        max_model_tokens=plan.max_model_tokens,
        dtype=plan.config.model.dtype,
        block_size=plan.config.kv.block_size,
        revision=plan.config.model.revision,
    )

    async def program(on_ready: OnReady, stop: asyncio.Event) -> None:
        await run_front(settings, on_ready=on_ready, stop=stop)

    return program
