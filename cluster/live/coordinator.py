"""The coordinator's process: ClusterState behind its gRPC services.

Runs in a Ray actor (cluster.live.actors), or as a plain process that prints `ready HOST:PORT` once it serves:
`python -m cluster.live.coordinator -f FILE [--port PORT]`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import logging
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.v1 import admin_pb2, admin_pb2_grpc, control_pb2, control_pb2_grpc
from cluster.core.config import ClusterConfig
from cluster.core.errors import ConfigError
from cluster.core.state import ClusterState
from cluster.live.config_file import read_cluster_file
from cluster.live.driver import Driver
from cluster.live.environment import DISTRIBUTION
from cluster.live.hosted_loop import OnReady
from cluster.live.journal import Journal, JournalSettings, latest_epoch
from cluster.live.metrics import CoordinatorMetrics
from cluster.live.program_host import log_to_stderr
from cluster.live.services import AdminService, ControlService
from cluster.live.worker_reaper import EndRemote, RetireWorker, WorkerReaper
from cluster.wire.channels import LOOPBACK, PortInUseError, bind, make_server
from cluster.wire.metrics_server import MetricsServer

logger = logging.getLogger(__name__)

STOP_GRACE_S: Final = 0.5
"""How long open streams may take to end when the coordinator stops."""
EXIT_FAILED: Final = 1
GC_THRESHOLDS: Final = (100_000, 20, 100)
"""The state has few cycles and many long-lived objects: looking for garbage as often as usual costs a tenth of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """Attributes:
    config: the whole cluster's configuration.
    epoch: rises with every life of the coordinator. Where the journal knows one as high it is raised above that: the
        clock, which it mostly comes from, may have been set back, or another life begun in the same second.
    host, port: where to listen; port 0 takes any free one.
    journal_dir: where the journal goes, None for nowhere; its sizes are in the configuration.
    """

    config: ClusterConfig
    epoch: int
    host: str = LOOPBACK
    port: int = 0
    journal_dir: Path | None = None


async def run_coordinator(
    settings: CoordinatorSettings,
    on_ready: OnReady,
    stop: asyncio.Event,
    end_remote: EndRemote | None = None,
    retire: RetireWorker | None = None,
) -> None:
    """Serves until `stop` is set.

    Args:
        on_ready: called once with the address (host:port) on which it serves.
        end_remote: ends workers of other hosts that were given up; None: nobody does.
        retire: sees to what follows a worker that was drained; None: whoever runs it does, by its exit status.

    Raises:
        PortInUseError: host:port, or that of the metrics page, cannot be listened on.
        Exception: what ClusterState raised, which is a bug; the process should end and start anew.
    """
    gc.set_threshold(*GC_THRESHOLDS)
    settings = _above_earlier_lives(settings)
    reaper = WorkerReaper() if end_remote is None else WorkerReaper(end_remote)
    state = ClusterState(settings.config, epoch=settings.epoch)
    driver = Driver(
        state,
        reaper.end,
        journal=_open_journal(settings, state),
        retire_worker=retire or (lambda worker, order: reaper.end_here(worker)),
    )
    metrics = MetricsServer(settings.config.metrics.host, settings.config.metrics.coordinator_port)
    server = make_server()
    control_pb2_grpc.add_CoordinatorServicer_to_server(ControlService(driver, reaper, settings.epoch), server)
    admin_pb2_grpc.add_AdminServicer_to_server(AdminService(driver, settings.config, metrics.address), server)
    health_service = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    service_names = [file.services_by_name[name].full_name for file, name in _SERVICES]
    reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        port = bind(server, settings.host, settings.port)
        await server.start()
        await metrics.start(CoordinatorMetrics(driver).measure)
        for name in ["", *service_names]:
            await health_service.set(name, health_pb2.HealthCheckResponse.SERVING)
        on_ready(f"{settings.host}:{port}")
        await _until_stopped(stop, driver.failure)
    finally:
        await metrics.close()
        driver.close()
        await server.stop(STOP_GRACE_S)
        reaper.close()


def _above_earlier_lives(settings: CoordinatorSettings) -> CoordinatorSettings:
    """Two lives of one epoch would write the same journal files, the later one over the earlier one's."""
    if settings.journal_dir is None:
        return settings
    return dataclasses.replace(settings, epoch=max(settings.epoch, 1 + latest_epoch(settings.journal_dir)))


def _open_journal(settings: CoordinatorSettings, state: ClusterState) -> Journal | None:
    if settings.journal_dir is None:
        return None
    config = settings.config.journal
    journal = JournalSettings(
        directory=settings.journal_dir,
        file_size_bytes=config.file_size_bytes,
        max_files=config.max_files,
        release=metadata.version(DISTRIBUTION),
    )
    return Journal(journal, state, settings.epoch, time.monotonic_ns)


_SERVICES = ((control_pb2.DESCRIPTOR, "Coordinator"), (admin_pb2.DESCRIPTOR, "Admin"))


async def _until_stopped(stop: asyncio.Event, failure: asyncio.Future[None]) -> None:
    stopping = asyncio.create_task(stop.wait())
    waited: set[asyncio.Future[Any]] = {stopping, failure}
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
    if failure.done():
        failure.result()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a coordinator until SIGTERM or SIGINT. Returns the exit status."""
    options = _parser().parse_args(arguments)
    log_to_stderr()
    try:
        asyncio.run(_run(options))
    except (ConfigError, PortInUseError) as error:
        logger.error("%s", error)
        return EXIT_FAILED
    return 0


async def _run(options: argparse.Namespace) -> None:
    settings = CoordinatorSettings(
        config=read_cluster_file(options.file).config,
        epoch=options.epoch or int(time.time()),
        host=options.host,
        port=options.port,
        journal_dir=options.journal,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await run_coordinator(settings, lambda address: print(f"ready {address}", flush=True), stop)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cluster.live.coordinator", description="A coordinator as a process of its own, without Ray."
    )
    parser.add_argument("-f", "--file", type=Path, required=True, help="the cluster file")
    parser.add_argument("--host", default=LOOPBACK, help=f"where to listen (default: {LOOPBACK})")
    parser.add_argument("--port", type=int, default=0, help="0 (the default) takes any free one")
    parser.add_argument("--journal", type=Path, metavar="DIR", help="write the journal there (default: nowhere)")
    parser.add_argument("--epoch", type=int, help="higher than in every earlier life; by default the time in seconds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
