"""Blocks are used to the last one, and a worker's memory is its weights, its pool and little more."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import Client, Trace, cluster_config, serving_cluster
from cluster.live.local_processes import ClusterHandle
from tests.e2e.conftest import assert_nothing_left, run, status

BLOCK_SIZE = 16
NUM_REQUESTS = 200
MAX_TOKENS = 12
OVERHEAD_LIMIT_BYTES = 700 * 2**20


@pytest.mark.timeout(600)
def test_two_hundred_requests_through_a_pool_that_holds_ten(reference: dict[str, Any]) -> None:
    entries = [entry for entry in reference["prompts"] if len(entry["prompt_ids"]) <= 64]
    longest_blocks = -(-(64 + MAX_TOKENS) // BLOCK_SIZE)
    pools = [
        {"name": "prefill", "role": "prefill", "kv_blocks": 10 * longest_blocks},
        {"name": "decode", "role": "decode", "kv_blocks": 10 * longest_blocks},
    ]
    config = cluster_config(
        pools, dtype="float32", model={"max_model_tokens": 160}, coordinator={"queue_timeout_s": 300}
    )

    async def crowd(client: Client) -> list[Trace]:
        chosen = [entries[number % len(entries)] for number in range(NUM_REQUESTS)]
        calls = [
            client.generate(entry["prompt_ids"], cache_salt=f"round-{number // len(entries)}", max_tokens=MAX_TOKENS)
            for number, entry in enumerate(chosen)
        ]
        return list(await asyncio.gather(*calls))

    with serving_cluster(config) as cluster:
        traces = run(cluster, crowd)
        assert_nothing_left(cluster)
    for number, trace in enumerate(traces):
        assert trace.token_ids == entries[number % len(entries)]["output_ids"][:MAX_TOKENS]


def _active_blocks(cluster: ClusterHandle, worker_name: str) -> int:
    workers = [worker for pool in status(cluster.address).pools for worker in pool.workers]
    return next(worker.blocks.active for worker in workers if worker.name == worker_name)


def test_waste_is_at_most_one_partly_filled_block_a_sequence(
    pair_float32: ClusterHandle, reference: dict[str, Any]
) -> None:
    """Read off a running worker: active blocks never exceed what the tokens of the moment need."""
    entries = [entry for entry in reference["prompts"] if 15 <= len(entry["prompt_ids"]) <= 64][:5]
    assert_nothing_left(pair_float32)

    async def watch(client: Client) -> list[tuple[int, int]]:
        traces = [Trace(sent_s=0.0) for _ in entries]
        calls = [
            asyncio.create_task(
                client.generate(e["prompt_ids"], trace=t, cache_salt=e["name"], ignore_eos=True, max_tokens=120)
            )
            for e, t in zip(entries, traces, strict=True)
        ]
        seen = []
        while not all(call.done() for call in calls):
            await asyncio.sleep(0.3)
            active = await asyncio.to_thread(_active_blocks, pair_float32, "decode-0")
            # The heartbeat is older than what was counted here, so this is an upper bound of its moment.
            needed = sum(
                -(-(len(e["prompt_ids"]) + len(t.token_ids) + 1) // BLOCK_SIZE)
                for e, t in zip(entries, traces, strict=True)
            )
            seen.append((active, needed))
        await asyncio.gather(*calls)
        return seen

    seen = run(pair_float32, watch)
    assert max(active for active, _ in seen) > len(entries), "no sample fell into the run"
    assert all(active <= needed for active, needed in seen), seen


def _pss_beside_pools_bytes(pid: int) -> int:
    """Proportional set size of everything but KV pools.

    Pools, a worker's own and its peers', are mapped by several processes and would count in part in each: too much
    where a peer's is mapped, too little where a peer maps ours. A pool's size is known from the file.
    """
    total_kb, in_pool = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            in_pool = "/memfd:" in line
        elif line.startswith("Pss:") and not in_pool:
            total_kb += int(line.split()[1])
    return total_kb * 1024


@pytest.mark.parametrize(("dtype", "size_factor"), [("bfloat16", 1), ("float32", 2)])
def test_a_worker_uses_its_weights_its_pool_and_at_most_700_mb(
    demo_model: Path, reference: dict[str, Any], dtype: str, size_factor: int
) -> None:
    """`size_factor`: bytes of the weights against those of the model's directory, which is in bfloat16."""
    pool_blocks = 640
    pools = [
        {"name": "prefill", "role": "prefill", "kv_blocks": pool_blocks},
        {"name": "decode", "role": "decode", "kv_blocks": pool_blocks},
    ]
    weights_bytes = size_factor * (demo_model / "model.safetensors").stat().st_size
    with serving_cluster(cluster_config(pools, dtype=dtype)) as cluster:
        run(cluster, lambda c: c.generate_all([e["prompt_ids"] for e in reference["prompts"][-20:]], max_tokens=16))
        for name, process in cluster.workers.items():
            overhead_bytes = _pss_beside_pools_bytes(process.pid) - weights_bytes
            print(f"{dtype} {name}: {overhead_bytes / 2**20:.0f} MiB beside weights and pool")
            assert overhead_bytes <= OVERHEAD_LIMIT_BYTES, name
