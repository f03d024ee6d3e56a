"""Sends requests when they are due, whatever has become of those before them, and keeps each one's times."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence

import grpc

from benchmarks.goodput_parts.attainment import Served
from benchmarks.goodput_parts.sides import Side
from benchmarks.goodput_parts.traffic import Arrival, Lengths
from benchmarks.serving import Client, Trace, serving_cluster

VOCABULARY = range(100, 40_000)
WARM_UP = Lengths(num_prompt_tokens=256, num_output_tokens=8)
NUM_WARM_UP_ROUNDS, WARM_UP_BATCH = 4, 4
REFUSALS = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED)
"""What an overloaded cluster answers. Anything else is a defect, and ends the measurement."""

Run = Callable[[Client], Awaitable[list[Served]]]


def measure_open_loop(side: Side, arrivals: Sequence[Arrival], *, cores: Sequence[int], seed: int) -> list[Served]:
    """A fresh cluster takes all arrivals. The answer is in their order."""
    prompts = _prompts([arrival.lengths for arrival in arrivals], seed)

    async def run(client: Client) -> list[Served]:
        start_s = time.monotonic()
        tasks = []
        for arrival, prompt_ids in zip(arrivals, prompts, strict=True):
            due_s = start_s + arrival.at_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            # Waiting counts from when it was due: a client that is late would otherwise hide a slow cluster.
            tasks.append(asyncio.create_task(_serve(client, prompt_ids, arrival.lengths.num_output_tokens, due_s)))
        return list(await asyncio.gather(*tasks))

    return _with_cluster(side, cores, run)


def measure_unloaded(side: Side, lengths: Sequence[Lengths], *, cores: Sequence[int], seed: int) -> list[Served]:
    """A fresh cluster takes one request after the other."""
    prompts = _prompts(lengths, seed)

    async def run(client: Client) -> list[Served]:
        return [
            await _serve(client, prompt_ids, one.num_output_tokens, time.monotonic())
            for prompt_ids, one in zip(prompts, lengths, strict=True)
        ]

    return _with_cluster(side, cores, run)


def _with_cluster(side: Side, cores: Sequence[int], run: Run) -> list[Served]:
    async def warm_up_and_run(address: str) -> list[Served]:
        async with Client(address) as client:
            for number in range(NUM_WARM_UP_ROUNDS):
                prompts = _prompts([WARM_UP] * WARM_UP_BATCH, -1 - number)
                await client.generate_all(prompts, max_tokens=WARM_UP.num_output_tokens, ignore_eos=True)
            return await run(client)

    with serving_cluster(side.config(cores)) as cluster:
        return asyncio.run(warm_up_and_run(cluster.address))


async def _serve(client: Client, prompt_ids: Sequence[int], num_output_tokens: int, due_s: float) -> Served:
    trace = Trace(sent_s=due_s)
    try:
        await client.generate(prompt_ids, trace=trace, max_tokens=num_output_tokens, ignore_eos=True)
    except grpc.aio.AioRpcError as error:
        if error.code() not in REFUSALS:
            raise
        return Served(ttft_s=None, tpot_s=None)
    writing_s = trace.arrivals_s[-1] - trace.arrivals_s[0]
    return Served(ttft_s=trace.ttft_s, tpot_s=writing_s / (num_output_tokens - 1))


def _prompts(lengths: Sequence[Lengths], seed: int) -> list[list[int]]:
    """No two begin alike, so that no prefix cache helps either side."""
    source = random.Random(seed)
    return [source.choices(VOCABULARY, k=one.num_prompt_tokens) for one in lengths]
