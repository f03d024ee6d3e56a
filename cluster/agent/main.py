"""Command line of a worker that is started as a plain process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cluster.agent.exit_status import AGAIN, EXIT_AGAIN, EXIT_ENDED, EXIT_LEFT
from cluster.agent.process import WorkerEndedError, run_worker
from cluster.agent.settings import RoleProfile, WorkerSettings
from cluster.core.config import CHECKSUMS, DEVICES, DTYPES, MAX_SECONDS, TRANSPORTS
from cluster.core.drain_orders import AfterDrain, Leave
from cluster.core.ids import WorkerId
from cluster.wire.channels import LOOPBACK, PortInUseError
from engine.model.safetensors_file import ModelWeightsError
from kv_transfer.protocol.sampling import Checksums
from kv_transfer.transport.base import TransportError

logger = logging.getLogger(__name__)

PARENT_CHECK_S = 1.0
"""How often a worker started with --with-parent looks whether its parent is still there."""


def main(profile: RoleProfile, arguments: Sequence[str] | None = None) -> int:
    """Runs a worker of that role until it is asked to stop (SIGTERM, SIGINT). Returns the exit status, if at all."""
    parent_pid = os.getppid()
    options = _parser(profile).parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = _settings(profile, options)
    try:
        asyncio.run(_run(settings, profile, parent_pid if options.with_parent else None))
    except (WorkerEndedError, ModelWeightsError, PortInUseError, TransportError, OSError, ValueError) as error:
        logger.error("worker %s: %s", settings.worker, error)
        return EXIT_ENDED
    return 0


async def _run(settings: WorkerSettings, profile: RoleProfile, parent_pid: int | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    watching = asyncio.create_task(_stop_with_parent(parent_pid, stop)) if parent_pid is not None else None
    try:
        await run_worker(settings, profile, on_ready=_announce, on_closed=_leave, stop=stop)
    finally:
        if watching is not None:
            watching.cancel()


def _announce(address: str) -> None:
    print(f"ready {address}", flush=True)


def _leave(error: BaseException | None, order: Leave | None) -> None:
    """Everything is closed but the control stream, whose end would have the coordinator kill this process."""
    if error is not None:
        logger.error("the worker ends: %s", error, exc_info=None if isinstance(error, WorkerEndedError) else error)
    is_again = error is None and order is not None and order.then is not AfterDrain.STOP
    if is_again and order is not None:
        print(f"{AGAIN}{order.pool}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_AGAIN if is_again else EXIT_LEFT if error is None else EXIT_ENDED)


async def _stop_with_parent(parent_pid: int, stop: asyncio.Event) -> None:
    while os.getppid() == parent_pid:
        await asyncio.sleep(PARENT_CHECK_S)
    logger.warning("the process that started this worker has ended")
    stop.set()


def _settings(profile: RoleProfile, options: argparse.Namespace) -> WorkerSettings:
    incarnation = options.incarnation or time.time_ns() // 1_000_000
    return WorkerSettings(
        worker=WorkerId(options.name, incarnation),
        pool=options.pool,
        role=profile.role,
        coordinator_address=options.coordinator,
        model_dir=options.model,
        dtype=options.dtype,
        num_blocks=options.kv_blocks,
        num_host_blocks=options.host_cache_blocks,
        num_disk_blocks=options.disk_cache_blocks,
        disk_cache_dir=options.disk_cache_dir,
        block_size=options.block_size,
        max_model_tokens=options.max_model_tokens,
        revision=options.revision,
        device=options.device,
        threads=options.threads,
        cores=options.cores,
        host=options.host,
        max_step_tokens=options.max_step_tokens,
        prefill_chunk_tokens=options.prefill_chunk_tokens,
        max_running=options.max_running,
        transport=options.transport,
        checksums=Checksums(options.checksums),
        coordinator_grace_s=options.coordinator_grace,
        metrics_host=options.metrics_host,
        metrics_port=options.metrics_port,
    )


def _parser(profile: RoleProfile) -> argparse.ArgumentParser:
    role = profile.role.value
    parser = argparse.ArgumentParser(
        prog=f"python -m {role}_worker",
        description=f"A {role} worker as a process of its own: registers with a coordinator and serves until SIGTERM.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--coordinator", required=True, metavar="HOST:PORT", help="the coordinator's control address")
    add("--model", required=True, type=Path, metavar="DIR", help="a Hugging Face model directory")
    add("--kv-blocks", required=True, type=int, metavar="N", help="size of the KV pool")
    add("--host-cache-blocks", type=int, default=0, metavar="N", help="evicted blocks that are kept in host memory")
    add("--disk-cache-blocks", type=int, default=0, metavar="N", help="and in files, by way of host memory")
    add("--disk-cache-dir", type=Path, metavar="DIR", help="where: in a directory of the worker's name")
    add("--name", required=True, help="the worker's name, unique in the cluster")
    add("--pool", default=role, help="the pool that the worker belongs to")
    add("--incarnation", type=int, metavar="N", help="higher than in every earlier life; by default the time in ms")
    add("--dtype", choices=DTYPES, default="float32")
    add("--block-size", type=int, default=16, metavar="TOKENS")
    add("--max-model-tokens", type=int, metavar="N", help="longest sequence; by default the model's context")
    add("--revision", default="", help="tells checkpoints of one shape apart")
    add("--device", choices=DEVICES, default="cpu", help="what to compute with; cuda takes whole requests only")
    add("--threads", type=int, default=1, metavar="N", help="CPU threads to compute with")
    add("--cores", type=_core_list, metavar="I,J", help="core ids to be pinned to; by default none")
    add("--host", default=LOOPBACK, help="where the token stream listens, and is advertised")
    add("--max-step-tokens", type=int, default=512, metavar="N", help="tokens a step")
    add(
        "--prefill-chunk-tokens",
        type=int,
        default=profile.prefill_chunk_tokens,
        metavar="N",
        help="of these, the most that go to prompts",
    )
    add("--max-running", type=int, default=64, metavar="N", help="sequences that may run at once")
    add("--transport", choices=TRANSPORTS, default="auto", help="how KV is pushed")
    add("--checksums", choices=CHECKSUMS, default="full", help="which pushed blocks are verified")
    add(
        "--coordinator-grace",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="end when without a coordinator for so long",
    )
    add("--metrics-host", default=LOOPBACK, help="where the Prometheus page is served")
    add("--metrics-port", type=int, default=0, metavar="PORT", help="of that page; 0 takes any free one")
    add("--with-parent", action="store_true", help="end when the process that started this one has ended")
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most {MAX_SECONDS:.0f}")
    return seconds


def _core_list(text: str) -> tuple[int, ...]:
    return tuple(int(core) for core in text.split(","))
