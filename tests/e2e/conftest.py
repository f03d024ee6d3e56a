"""Clusters of real processes with the real model, and the check that nothing is left after each test."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import admin_pb2, admin_pb2_grpc
from benchmarks.serving import Client, cluster_config, serving_cluster
from cluster.live.environment import read_environment
from cluster.live.local_processes import ClusterHandle
from cluster.wire.channels import make_sync_channel
from engine.model.importer import import_model
from engine.model.packaged_models import SMOLLM2

REFERENCE = Path(__file__).parents[1] / "reference" / "smollm2_float32_greedy.json"
SETTLE_TIMEOUT_S = 15.0
PREFILL: dict[str, Any] = {"name": "prefill", "role": "prefill", "kv_memory": "640MiB"}
DECODE: dict[str, Any] = {"name": "decode", "role": "decode", "kv_memory": "1GiB"}


PATIENT: dict[str, Any] = {"queue_timeout_s": 600}
"""The coordinator's section: what many requests at once take depends on the machine."""


@pytest.fixture(scope="session", autouse=True)
def demo_model() -> Path:
    """The demo model, converted once into the user's cache, as `baton model import` does it."""
    environment = read_environment(os.environ)
    return import_model(SMOLLM2.name, environment.models_dir)


@pytest.fixture(scope="session")
def reference() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(REFERENCE.read_text())
    return content


def status(address: str) -> admin_pb2.GetStatusResponse:
    with make_sync_channel(address) as channel:
        return admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=5)


def leases(address: str) -> list[admin_pb2.LeaseStatus]:
    with make_sync_channel(address) as channel:
        return list(admin_pb2_grpc.AdminStub(channel).GetLeases(admin_pb2.GetLeasesRequest(), timeout=5).leases)


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Polls the condition until it is true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def leftovers(address: str) -> list[str]:
    """What is still held, as the workers' heartbeats tell it."""
    found = [f"lease {lease.lease_id} of {lease.request_id} at {lease.worker}" for lease in leases(address)]
    now = status(address)
    if now.num_queued or now.num_running:
        found.append(f"{now.num_queued} queued, {now.num_running} running")
    for pool in now.pools:
        for worker in pool.workers:
            blocks = worker.blocks
            if worker.state == "ready" and (blocks.active or blocks.reserved or blocks.quarantined):
                found.append(f"{worker.name}: {blocks}")
    return found


def assert_nothing_left(cluster: ClusterHandle) -> None:
    """Within a few heartbeats every block is free or cached, and no lease or request is known."""
    wait_until(lambda: not leftovers(cluster.address), SETTLE_TIMEOUT_S, "; ".join(leftovers(cluster.address)))


def run(cluster: ClusterHandle, work: Callable[[Client], Any]) -> Any:
    """Runs `work(client)`, a coroutine function, against the cluster's front."""

    async def main() -> Any:
        async with Client(cluster.address) as client:
            return await work(client)

    return asyncio.run(main())


@pytest.fixture(scope="module")
def pair_float32() -> Iterator[ClusterHandle]:
    """1 prefill + 1 decode worker in float32."""
    with serving_cluster(cluster_config([PREFILL, DECODE], dtype="float32", coordinator=PATIENT)) as cluster:
        yield cluster
        assert_nothing_left(cluster)


@pytest.fixture(scope="module")
def single_float32() -> Iterator[ClusterHandle]:
    """One decode worker that reads prompts itself."""
    with serving_cluster(cluster_config([DECODE], dtype="float32", coordinator=PATIENT)) as cluster:
        yield cluster
        assert_nothing_left(cluster)
