"""A front as a plain process: `python -m cluster.front --coordinator HOST:PORT --model DIR`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from pathlib import Path

from cluster.front.server import run_front
from cluster.front.settings import FrontSettings
from cluster.wire.channels import LOOPBACK, PortInUseError

FAILED_EXIT_CODE = 1


def main(arguments: list[str] | None = None) -> int:
    """Prints the address once it serves; ends on SIGINT or SIGTERM. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(_run(_settings(arguments)))
    except (PortInUseError, FileNotFoundError, ValueError) as error:
        print(f"front: {error}", file=sys.stderr)
        return FAILED_EXIT_CODE
    return 0


async def _run(settings: FrontSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await run_front(settings, on_ready=lambda address: print(address, flush=True), stop=stop)


def _settings(arguments: list[str] | None) -> FrontSettings:
    parser = argparse.ArgumentParser(prog="python -m cluster.front", description="Serves clients of a Baton cluster.")
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT", help="where the coordinator is")
    parser.add_argument("--model", required=True, metavar="DIR", type=Path, help="model directory")
    parser.add_argument("--model-name", default="", metavar="NAME", help="what clients call it (default: DIR's name)")
    parser.add_argument("--name", default="front", help="of this front, unique in the cluster (default: front)")
    parser.add_argument("--host", default=LOOPBACK, help=f"address to listen on (default: {LOOPBACK})")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    parser.add_argument("--max-model-tokens", type=int, metavar="N", help="longest prompt plus output")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="the cluster's (default: 16)")
    parser.add_argument("--dtype", default="auto", help="what the workers compute in (default: the model's own)")
    parser.add_argument("--revision", default="", help="the cluster's model revision (default: empty)")
    given = parser.parse_args(arguments)
    return FrontSettings(
        coordinator_address=given.coordinator,
        model_dir=given.model,
        model=given.model_name,
        name=given.name,
        # Rises from one start to the next, on any host.
        incarnation=time.time_ns() // 1_000_000,
        host=given.host,
        port=given.port,
        max_model_tokens=given.max_model_tokens,
        block_size=given.block_size,
        dtype=given.dtype,
        revision=given.revision,
    )


if __name__ == "__main__":
    sys.exit(main())
