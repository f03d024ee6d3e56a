"""The prefill worker as a coroutine, for whoever holds its process (a Ray actor, a test)."""

from __future__ import annotations

import asyncio

from cluster.agent.process import OnReady, run_worker
from cluster.agent.settings import WorkerSettings
from cluster.core.drain_orders import Leave
from prefill_worker.profile import PROFILE


async def run(
    settings: WorkerSettings, *, on_ready: OnReady | None = None, stop: asyncio.Event | None = None
) -> Leave | None:
    """See cluster.agent.process.run_worker."""
    return await run_worker(settings, PROFILE, on_ready=on_ready, stop=stop)
