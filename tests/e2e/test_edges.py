"""What lies at the edges of a request's life: it ends at once, its client leaves, its worker dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from baton.v1 import inference_pb2
from benchmarks.serving import Client, Trace, cluster_config, serving_cluster
from cluster.live.local_processes import ClusterHandle, LocalProcess
from tests.e2e.conftest import DECODE, PATIENT, PREFILL, assert_nothing_left, run, status, wait_until

EOS = 2
LONG = 2048


def _prompt(reference: dict[str, Any], length: int) -> dict[str, Any]:
    return next(entry for entry in reference["prompts"] if len(entry["prompt_ids"]) == length)


def _outcome(trace: Trace) -> int:
    assert trace.done is not None
    return trace.done.outcome


def test_the_first_token_is_the_end(pair_float32: ClusterHandle, reference: dict[str, Any]) -> None:
    entry = _prompt(reference, 33)
    trace = run(pair_float32, lambda c: c.generate(entry["prompt_ids"], max_tokens=8, logit_bias={EOS: 100.0}))
    assert trace.token_ids == [EOS] and trace.text == ""
    assert _outcome(trace) == inference_pb2.OUTCOME_STOP
    assert_nothing_left(pair_float32)


def test_one_token_is_all_that_is_wanted(pair_float32: ClusterHandle, reference: dict[str, Any]) -> None:
    entry = _prompt(reference, 32)
    trace = run(pair_float32, lambda c: c.generate(entry["prompt_ids"], max_tokens=1))
    assert trace.token_ids == entry["output_ids"][:1]
    assert _outcome(trace) == inference_pb2.OUTCOME_LENGTH
    assert_nothing_left(pair_float32)


def test_the_first_token_completes_a_stop_string(pair_float32: ClusterHandle, reference: dict[str, Any]) -> None:
    entry = next(e for e in reference["prompts"] if e["name"].startswith("chat") and len(e["output_ids"]) > 4)
    first = run(pair_float32, lambda c: c.generate(entry["prompt_ids"], max_tokens=1)).text
    assert first.strip()
    trace = run(pair_float32, lambda c: c.generate(entry["prompt_ids"], max_tokens=8, stop=[first]))
    assert trace.text == "" and _outcome(trace) == inference_pb2.OUTCOME_STOP
    assert trace.done is not None and trace.done.usage.completion_tokens == 1
    assert_nothing_left(pair_float32)


def test_a_stop_string_in_mid_answer_leaves_the_account_whole(
    pair_float32: ClusterHandle, reference: dict[str, Any]
) -> None:
    """The front ends the request; what decode took over it has been told before."""
    entry = next(e for e in reference["prompts"] if e["name"].startswith("chat") and len(e["output_ids"]) > 20)
    whole = run(pair_float32, lambda c: c.generate(entry["prompt_ids"], max_tokens=64, cache_salt="whole"))
    stop = whole.text[len(whole.text) // 2 :][:6]
    trace = run(pair_float32, lambda c: c.generate(entry["prompt_ids"], max_tokens=64, cache_salt="s", stop=[stop]))
    assert trace.text == whole.text[: whole.text.index(stop)] and 1 < len(trace.token_ids) < len(whole.token_ids)
    assert trace.done is not None and whole.done is not None
    assert trace.done.kv == whole.done.kv and trace.done.kv.bytes > 0
    assert trace.done.usage.HasField("cached_tokens") and trace.done.timeline.push_ms > 0
    assert_nothing_left(pair_float32)


@pytest.mark.parametrize("length", [16, 32, 64, 256])
def test_prompts_of_whole_blocks_twice(pair_float32: ClusterHandle, reference: dict[str, Any], length: int) -> None:
    """The second time everything but the last block is cached on both sides, and the answer is the same."""
    entry = _prompt(reference, length)
    for cached in (0, length - 16):
        trace = run(
            pair_float32, lambda c: c.generate(entry["prompt_ids"], cache_salt=f"whole-{length}", max_tokens=20)
        )
        assert trace.token_ids == entry["output_ids"][:20]
        assert trace.done is not None and trace.done.usage.cached_tokens == cached


async def _leave(client: Client, prompt_ids: list[int], after: Callable[[Trace], bool], salt: str) -> Trace:
    """Runs a request and cancels it as soon as `after` says so."""
    trace = Trace(sent_s=time.monotonic())
    call = asyncio.create_task(client.generate(prompt_ids, trace=trace, cache_salt=salt, max_tokens=200))
    while not after(trace) and not call.done():
        await asyncio.sleep(0.002)
    call.cancel()
    await asyncio.wait({call})
    return trace


def _after_s(delay_s: float) -> Callable[[Trace], bool]:
    return lambda trace: time.monotonic() - trace.sent_s >= delay_s


@pytest.mark.parametrize(
    ("phase", "after"),
    [
        ("sent", _after_s(0.0)),
        ("reserving", _after_s(0.003)),
        ("early in the prompt", _after_s(0.1)),
        ("in mid-push", _after_s(0.8)),
        ("first token", lambda trace: len(trace.token_ids) >= 1),
        ("decoding", lambda trace: len(trace.token_ids) >= 10),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_client_that_leaves_frees_everything(
    pair_float32: ClusterHandle, reference: dict[str, Any], phase: str, after: Callable[[Trace], bool]
) -> None:
    prompt_ids = _prompt(reference, LONG)["prompt_ids"]
    trace = run(pair_float32, lambda c: _leave(c, prompt_ids, after, phase))
    assert trace.done is None, "it ended before its client left"
    assert_nothing_left(pair_float32)


def test_clients_that_leave_while_others_stay(pair_float32: ClusterHandle, reference: dict[str, Any]) -> None:
    """Leavers in all phases at once; the answers of those who stay are right."""
    stayers = [entry for entry in reference["prompts"] if len(entry["prompt_ids"]) <= 64][:6]

    async def crowd(client: Client) -> list[Trace]:
        prompt_ids = _prompt(reference, 512)["prompt_ids"]
        leavers = [_leave(client, prompt_ids, _after_s(0.15 * number), f"crowd-{number}") for number in range(12)]
        staying = [client.generate(e["prompt_ids"], cache_salt="crowd", max_tokens=64) for e in stayers]
        results = await asyncio.gather(*staying, *leavers)
        return results[: len(stayers)]

    traces = run(pair_float32, crowd)
    assert [trace.token_ids for trace in traces] == [entry["output_ids"] for entry in stayers]
    assert_nothing_left(pair_float32)


def _hurry(cluster: ClusterHandle, prompt_ids: list[int], timeout_s: float) -> tuple[grpc.StatusCode, int, str]:
    """A call with a deadline, for as long an answer as fits: how it ends, after how many tokens, and why."""

    async def hurry(client: Client) -> tuple[grpc.StatusCode, int, str]:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt_ids),
            sampling=inference_pb2.SamplingParams(max_tokens=4000, ignore_eos=True),
            cache_salt="hurry",
        )
        num_tokens = 0
        try:
            async for reply in client.inference.Generate(request, timeout=timeout_s):
                num_tokens += len(reply.token_ids)
        except grpc.aio.AioRpcError as error:
            return error.code(), num_tokens, error.details() or ""
        return grpc.StatusCode.OK, num_tokens, ""

    found: tuple[grpc.StatusCode, int, str] = run(cluster, hurry)
    return found


def test_a_deadline_ends_the_call_and_frees_everything(pair_float32: ClusterHandle, reference: dict[str, Any]) -> None:
    code, num_tokens, details = _hurry(pair_float32, _prompt(reference, 16)["prompt_ids"], 3.0)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED and 0 < num_tokens < 4000, details
    assert_nothing_left(pair_float32)


def test_a_prompt_that_cannot_be_read_by_its_deadline_is_refused_at_once(
    pair_float32: ClusterHandle, reference: dict[str, Any]
) -> None:
    """By then the cluster has measured what reading costs it."""
    code, num_tokens, details = _hurry(pair_float32, _prompt(reference, LONG)["prompt_ids"], 0.3)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and num_tokens == 0 and "deadline" in details, details
    assert_nothing_left(pair_float32)


def _ready(cluster: ClusterHandle) -> set[str]:
    return {w.name for pool in status(cluster.address).pools for w in pool.workers if w.state == "ready"}


async def _kill_during(
    client: Client, entries: list[dict[str, Any]], when: Callable[[list[Trace]], bool], victim: LocalProcess
) -> list[Trace]:
    """Runs all entries at once and kills the victim as soon as `when` is true of their traces."""
    traces = [Trace(sent_s=time.monotonic()) for _ in entries]
    calls = [
        asyncio.create_task(client.generate(entry["prompt_ids"], trace=trace, temperature=0, max_tokens=64))
        for entry, trace in zip(entries, traces, strict=True)
    ]
    while not when(traces):
        assert not all(call.done() for call in calls), "all ended before the moment came"
        await asyncio.sleep(0.002)
    victim.kill()
    await asyncio.gather(*calls)
    return traces


def _check_continued(entries: list[dict[str, Any]], traces: list[Trace]) -> None:
    for entry, trace in zip(entries, traces, strict=True):
        assert trace.token_ids == entry["output_ids"], entry["name"]
        assert trace.positions == list(range(len(entry["output_ids"]))), "a position was lost or repeated"


@pytest.mark.timeout(300)
def test_a_decode_worker_that_dies_mid_answer(reference: dict[str, Any]) -> None:
    """The streams go on from the other decode worker; then the dead one comes back and serves again."""
    entries = [e for e in reference["prompts"] if 15 <= len(e["prompt_ids"]) <= 64 and len(e["output_ids"]) == 64][:6]
    pools = [PREFILL, {**DECODE, "replicas": 2}]
    with serving_cluster(cluster_config(pools, dtype="float32", coordinator=PATIENT)) as cluster:
        victim = cluster.workers["decode-0"]
        traces = run(
            cluster,
            lambda c: _kill_during(c, entries, lambda ts: min(len(t.token_ids) for t in ts) >= 5, victim),
        )
        _check_continued(entries, traces)
        attempts = [trace.done.num_attempts for trace in traces if trace.done is not None]
        assert max(attempts) == 2 and min(attempts) == 1, attempts
        assert all(
            trace.done is not None and trace.done.decode_worker == "decode-1"
            for trace in traces
            if trace.done and trace.done.num_attempts == 2
        )
        wait_until(lambda: _ready(cluster) == {"prefill-0", "decode-1"}, 10, "the dead worker is known to be gone")
        assert_nothing_left(cluster)
        cluster.start_worker("decode-0")
        cluster.wait_until_ready()
        again = run(cluster, lambda c: c.generate_all([e["prompt_ids"] for e in entries], max_tokens=64))
        _check_continued(entries, again)
        assert_nothing_left(cluster)


@pytest.mark.timeout(300)
def test_a_prefill_worker_that_dies_in_mid_prompt(reference: dict[str, Any]) -> None:
    """Its prompts are read by the other; once that dies as well, decode reads them itself."""
    entries = [entry for entry in reference["prompts"] if len(entry["prompt_ids"]) == LONG]
    pools = [{**PREFILL, "replicas": 2}, DECODE]
    with serving_cluster(cluster_config(pools, dtype="float32", coordinator=PATIENT)) as cluster:
        for name in ("prefill-0", "prefill-1"):
            start_s = time.monotonic()
            traces = run(
                cluster,
                lambda c, name=name, start_s=start_s: _kill_during(
                    c, entries, lambda ts: time.monotonic() - start_s > 1.0, cluster.workers[name]
                ),
            )
            _check_continued(entries, traces)
            assert_nothing_left(cluster)
        alone = run(cluster, lambda c: c.generate(entries[0]["prompt_ids"], cache_salt="alone", max_tokens=64))
        _check_continued(entries[:1], [alone])
        assert alone.done is not None and alone.done.prefill_worker == ""
