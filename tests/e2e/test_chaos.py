"""Workers are killed and stopped at random under load: every answer that is given is right, and nothing stays."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import grpc
import pytest

from benchmarks.serving import Client, Trace, cluster_config, serving_cluster
from cluster.live.local_processes import ClusterHandle
from tests.e2e.conftest import DECODE, PREFILL, assert_nothing_left, run

SEED = 20
RUN_S = 45.0
CALM_S = 3.0
"""Between two faults."""
NUM_CLIENTS = 6
MAX_TOKENS = 48
HEARTBEAT_TIMEOUT_S = 3.0
LOST = grpc.StatusCode.ABORTED
"""What a client may see instead of an answer: workers were lost more often than a request is tried."""


async def _client(
    client: Client, entries: list[dict[str, Any]], source: random.Random, end_s: float
) -> list[tuple[dict[str, Any], Trace | None]]:
    results: list[tuple[dict[str, Any], Trace | None]] = []
    while time.monotonic() < end_s:
        entry = source.choice(entries)
        salt = str(source.random())
        try:
            trace = await client.generate(entry["prompt_ids"], cache_salt=salt, temperature=0, max_tokens=MAX_TOKENS)
        except grpc.aio.AioRpcError as error:
            assert error.code() is LOST, f"{error.code()}: {error.details()}"
            results.append((entry, None))
        else:
            results.append((entry, trace))
    return results


async def _faults(cluster: ClusterHandle, source: random.Random, end_s: float) -> list[str]:
    """Kills or stops a worker every few seconds. A dead one is started again, as Ray would."""
    done = []
    while time.monotonic() < end_s - CALM_S:
        await asyncio.sleep(CALM_S)
        name = source.choice(sorted(cluster.workers))
        worker = cluster.workers[name]
        if source.random() < 0.7:
            done.append(f"kill {name}")
            worker.kill()
        else:
            # Longer than the heartbeat limit: it is given up, and must not do harm when it wakes.
            done.append(f"stop {name}")
            worker.pause()
            await asyncio.sleep(HEARTBEAT_TIMEOUT_S + 1)
            worker.resume()
            await asyncio.sleep(0.5)
            worker.kill()
        cluster.start_worker(name)
        await asyncio.to_thread(cluster.wait_until_ready)
    return done


@pytest.mark.timeout(400)
def test_killed_and_stopped_workers_under_load(reference: dict[str, Any]) -> None:
    entries = [entry for entry in reference["prompts"] if len(entry["prompt_ids"]) <= 257]
    pools = [{**PREFILL, "replicas": 2, "kv_memory": "256MiB"}, {**DECODE, "replicas": 2, "kv_memory": "256MiB"}]
    coordinator = {"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S, "max_attempts": 5, "queue_timeout_s": 120}
    model = {"max_model_tokens": 512}
    source = random.Random(SEED)
    with serving_cluster(cluster_config(pools, dtype="float32", model=model, coordinator=coordinator)) as cluster:

        async def storm(client: Client) -> tuple[list[str], list[tuple[dict[str, Any], Trace | None]]]:
            end_s = time.monotonic() + RUN_S
            clients = [_client(client, entries, random.Random(SEED + n), end_s) for n in range(NUM_CLIENTS)]
            faults, *results = await asyncio.gather(_faults(cluster, source, end_s), *clients)
            return faults, [result for part in results for result in part]

        faults, results = run(cluster, storm)
        assert_nothing_left(cluster)
    answers = [(entry, trace) for entry, trace in results if trace is not None]
    retried = [trace for _, trace in answers if trace.done is not None and trace.done.num_attempts > 1]
    print(
        f"{len(answers)} answers, {len(retried)} of them over more than one attempt, {len(results)} requests; {faults}"
    )
    for entry, trace in answers:
        assert trace.token_ids == entry["output_ids"][:MAX_TOKENS], entry["name"]
        assert trace.positions == list(range(len(trace.token_ids)))
    assert len(faults) >= 3 and retried, "no fault hit a running request"
    assert len(answers) >= len(results) * 0.9
