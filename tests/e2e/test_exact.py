"""In float32 a request gives the tokens that transformers gives, wherever and beside whatever it runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from benchmarks.serving import Client, Trace, cluster_config, serving_cluster
from cluster.live.local_processes import ClusterHandle
from tests.e2e.conftest import DECODE, PATIENT, PREFILL, assert_nothing_left, run
from tests.support.soak import ALL_PROMPTS, share_of

MAX_TOKENS = 64
SHORT_ALONE = 6
FULL_ALONE_EVERY = 8
SEEDED = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.1, "max_tokens": 32}


def _check(prompts: list[dict[str, Any]], traces: list[Trace], max_tokens: list[int] | None = None) -> None:
    limits = max_tokens or [MAX_TOKENS] * len(prompts)
    wrong = [
        prompt["name"]
        for prompt, trace, limit in zip(prompts, traces, limits, strict=True)
        if trace.token_ids != prompt["output_ids"][:limit] or trace.positions != list(range(len(trace.token_ids)))
    ]
    assert wrong == []


async def _alone(client: Client, prompts: list[dict[str, Any]], max_tokens: list[int]) -> list[Trace]:
    return [
        await client.generate(prompt["prompt_ids"], cache_salt="alone", temperature=0, max_tokens=limit)
        for prompt, limit in zip(prompts, max_tokens, strict=True)
    ]


async def _together(client: Client, prompts: list[dict[str, Any]]) -> list[Trace]:
    ids = [prompt["prompt_ids"] for prompt in prompts]
    return await client.generate_all(ids, cache_salt="together", temperature=0, max_tokens=MAX_TOKENS)


def test_the_reference_set_is_as_large_and_varied_as_it_must_be(reference: dict[str, Any]) -> None:
    lengths = {len(prompt["prompt_ids"]) for prompt in reference["prompts"]}
    assert len(reference["prompts"]) >= 60
    assert lengths >= {1, 2, 15, 16, 17, 31, 32, 33, 64, 255, 256, 257, 512, 2048}


@pytest.mark.bad_day(22)
@pytest.mark.timeout(900)
def test_alone_through_one_prefill_and_one_decode_worker(
    pair_float32: ClusterHandle, reference: dict[str, Any]
) -> None:
    # One after the other takes minutes; what the answers' ends would add is shown by those that run together.
    prompts = share_of(reference["prompts"], 4)
    is_whole = [ALL_PROMPTS or number % FULL_ALONE_EVERY == 0 for number in range(len(prompts))]
    max_tokens = [MAX_TOKENS if whole else SHORT_ALONE for whole in is_whole]
    traces = run(pair_float32, lambda client: _alone(client, prompts, max_tokens))
    _check(prompts, traces, max_tokens)
    for prompt, trace in zip(prompts, traces, strict=True):
        assert trace.done is not None
        assert trace.done.prefill_worker == "prefill-0" and trace.done.decode_worker == "decode-0"
        if len(prompt["output_ids"]) > 1:
            assert trace.done.kv.bytes > 0 and trace.done.kv.transport == "shm"
        if len(prompt["prompt_ids"]) == 2048:
            # Eight chunks: when the last one has been computed seven have been pushed, and most layers of its own.
            assert trace.done.kv.early_bytes >= 0.9 * trace.done.kv.bytes
            assert trace.done.timeline.push_ms < trace.done.timeline.first_token_ms


@pytest.mark.timeout(600)
def test_all_at_once_through_one_prefill_and_one_decode_worker(
    pair_float32: ClusterHandle, reference: dict[str, Any]
) -> None:
    _check(reference["prompts"], run(pair_float32, lambda client: _together(client, reference["prompts"])))
    assert_nothing_left(pair_float32)


@pytest.mark.timeout(600)
def test_all_at_once_through_two_prefill_and_two_decode_workers(reference: dict[str, Any]) -> None:
    pools = [{**PREFILL, "replicas": 2}, {**DECODE, "replicas": 2}]
    prompts = share_of(reference["prompts"], 2)
    with serving_cluster(cluster_config(pools, dtype="float32", coordinator=PATIENT)) as cluster:
        traces = run(cluster, lambda client: _together(client, prompts))
        assert_nothing_left(cluster)
    _check(prompts, traces)
    served = {(trace.done.prefill_worker, trace.done.decode_worker) for trace in traces if trace.done is not None}
    assert {prefill for prefill, _ in served} == {"prefill-0", "prefill-1"}
    assert {decode for _, decode in served} == {"decode-0", "decode-1"}


@pytest.mark.timeout(600)
def test_seeded_sampling_is_the_same_in_two_processes_and_in_one(
    pair_float32: ClusterHandle, single_float32: ClusterHandle, reference: dict[str, Any]
) -> None:
    prompts = [prompt for prompt in reference["prompts"] if len(prompt["prompt_ids"]) <= 257][::3]

    async def sample(client: Client) -> list[Trace]:
        requests = [
            client.generate(prompt["prompt_ids"], cache_salt="seeded", seed=1000 + number, **SEEDED)
            for number, prompt in enumerate(prompts)
        ]
        return list(await asyncio.gather(*requests))

    apart, single = run(pair_float32, sample), run(single_float32, sample)
    assert [trace.token_ids for trace in apart] == [trace.token_ids for trace in single]
    assert all(trace.done is not None and trace.done.prefill_worker == "" for trace in single)
    assert len({tuple(trace.token_ids) for trace in apart}) > len(prompts) // 2, "hardly anything was sampled"


@pytest.mark.skipif(not ALL_PROMPTS, reason="only in soak-exact; tests/integration has it with a small model")
@pytest.mark.timeout(600)
def test_whichever_way_a_request_takes(reference: dict[str, Any]) -> None:
    """Short prompts are read by decode, long ones pushed; and while decode writes all that it may, they stay."""
    short = [prompt for prompt in reference["prompts"] if len(prompt["prompt_ids"]) <= 40][::8]
    long = [prompt for prompt in reference["prompts"] if 40 < len(prompt["prompt_ids"]) <= 257][::8]
    pools = [PREFILL, {**DECODE, "max_running": 1}]
    rules = {"local_prefill": 40, "stay": "auto"}

    async def serve(client: Client) -> list[list[Trace]]:
        alone = [await _alone(client, prompts, [MAX_TOKENS] * len(prompts)) for prompts in (short, long)]
        other = Trace(sent_s=0.0)
        ids = long[0]["prompt_ids"]
        writing = asyncio.create_task(
            client.generate(ids, trace=other, cache_salt="o", max_tokens=2000, ignore_eos=True)
        )
        while len(other.token_ids) < 2:
            await asyncio.sleep(0.01)
        stayed = await _alone(client, long, [MAX_TOKENS] * len(long))
        assert not writing.done()
        writing.cancel()
        return [*alone, stayed]

    with serving_cluster(cluster_config(pools, dtype="float32", disaggregation=rules)) as cluster:
        served = run(cluster, serve)
        assert_nothing_left(cluster)
    for prompts, traces, route in zip((short, long, long), served, ("local", "pushed", "stayed"), strict=True):
        _check(prompts, traces)
        # One that comes before the coordinator has heard of the last one's end finds decode full.
        assert route in {trace.done.route for trace in traces if trace.done is not None}
