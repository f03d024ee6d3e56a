"""Several answers to one prompt, and the prompt's log-probabilities: real processes, the real model, float32."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.v1 import inference_pb2
from benchmarks.serving import Client, cluster_config, serving_cluster
from cluster.live.local_processes import ClusterHandle
from tests.e2e.conftest import DECODE, PREFILL, assert_nothing_left, run

SEEDED = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "max_tokens": 24, "seed": 4711}
TOLERANCE = 1e-3
"""Of a log-probability: transformers adds in another order."""


@dataclass
class Reply:
    """All that came of one request, by choice."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, int] = field(default_factory=dict)
    score_ids: list[int] = field(default_factory=list)
    scores: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    done: inference_pb2.Done = field(default_factory=inference_pb2.Done)

    def take(self, message: inference_pb2.GenerateResponse) -> None:
        assert not self.done.outcome, "nothing follows the end"
        if message.HasField("prompt_logprobs"):
            assert not self.token_ids and message.prompt_logprobs.position == 1 + len(self.scores)
            self.score_ids += message.prompt_logprobs.token_ids
            self.scores += message.prompt_logprobs.logprobs
        if message.token_ids or message.finish:
            token_ids = self.token_ids.setdefault(message.choice, [])
            assert message.choice not in self.finishes and message.position == len(token_ids)
            token_ids += message.token_ids
        if message.finish:
            self.finishes[message.choice] = message.finish
        if message.HasField("done"):
            self.done = message.done


async def ask(client: Client, prompt_ids: list[int], *, reply: Reply | None = None, **options: Any) -> Reply:
    cache_salt = options.pop("cache_salt", "")
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt_ids),
        sampling=inference_pb2.SamplingParams(**options),
        cache_salt=cache_salt,
    )
    reply = reply or Reply()
    async for message in client.inference.Generate(request):
        reply.take(message)
    return reply


def prompts_of(reference: dict[str, Any], *lengths: int) -> list[dict[str, Any]]:
    """One of each length."""
    return [next(p for p in reference["prompts"] if len(p["prompt_ids"]) == length) for length in lengths]


@pytest.mark.timeout(600)
def test_seeded_answers_are_the_same_apart_and_in_one_process(
    pair_float32: ClusterHandle, single_float32: ClusterHandle, reference: dict[str, Any]
) -> None:
    entries = prompts_of(reference, 1, 15, 16, 33, 64, 257)

    async def sample(client: Client) -> tuple[list[Reply], list[Reply]]:
        ids = [entry["prompt_ids"] for entry in entries]
        three = await asyncio.gather(*(ask(client, i, num_choices=3, cache_salt="three", **SEEDED) for i in ids))
        one = await asyncio.gather(*(ask(client, i, cache_salt="one", **SEEDED) for i in ids))
        return list(three), list(one)

    (apart, apart_one), (local, local_one) = run(pair_float32, sample), run(single_float32, sample)
    assert [reply.token_ids for reply in apart] == [reply.token_ids for reply in local]
    assert [reply.token_ids for reply in apart_one] == [reply.token_ids for reply in local_one]
    for three, one in zip(apart, apart_one, strict=True):
        assert sorted(three.token_ids) == sorted(three.finishes) == [0, 1, 2]
        assert three.token_ids[0] == one.token_ids[0], "the first answer is that of a request for one"
        assert len({tuple(token_ids) for token_ids in three.token_ids.values()}) == 3
        assert three.done.prefill_worker == "prefill-0" and three.done.decode_worker == "decode-0"
        assert three.done.kv.bytes == one.done.kv.bytes, "the prompt was pushed once"
        assert three.done.usage.completion_tokens == sum(map(len, three.token_ids.values()))
    assert all(reply.done.prefill_worker == "" for reply in local)
    assert_nothing_left(pair_float32)
    assert_nothing_left(single_float32)


@pytest.mark.timeout(600)
def test_greedy_answers_are_all_that_of_transformers(pair_float32: ClusterHandle, reference: dict[str, Any]) -> None:
    entries = prompts_of(reference, 2, 16, 31, 64, 255)

    async def generate(client: Client) -> list[Reply]:
        return await asyncio.gather(*(ask(client, e["prompt_ids"], num_choices=4, max_tokens=64) for e in entries))

    for entry, reply in zip(entries, run(pair_float32, generate), strict=True):
        assert [reply.token_ids[choice] for choice in range(4)] == [entry["output_ids"]] * 4, entry["name"]
        is_cut = len(entry["output_ids"]) == 64
        outcome = inference_pb2.OUTCOME_LENGTH if is_cut else inference_pb2.OUTCOME_STOP
        assert set(reply.finishes.values()) == {outcome} == {reply.done.outcome}
    assert_nothing_left(pair_float32)


@pytest.mark.timeout(300)
def test_answers_go_on_elsewhere_when_their_decode_worker_dies(
    single_float32: ClusterHandle, reference: dict[str, Any]
) -> None:
    (entry,) = prompts_of(reference, 33)
    sampling = {**SEEDED, "num_choices": 3, "max_tokens": 48, "ignore_eos": True}
    undisturbed = run(single_float32, lambda client: ask(client, entry["prompt_ids"], **sampling))

    async def kill_one(client: Client) -> Reply:
        reply = Reply()
        call = asyncio.create_task(ask(client, entry["prompt_ids"], reply=reply, **sampling))
        while not all(len(reply.token_ids.get(choice, ())) >= 8 for choice in range(3)):
            assert not call.done(), "it ended before the moment came"
            await asyncio.sleep(0.002)
        cluster.workers["decode-0"].kill()
        return await call

    with serving_cluster(cluster_config([PREFILL, {**DECODE, "replicas": 2}], dtype="float32")) as cluster:
        reply = run(cluster, kill_one)
        assert_nothing_left(cluster)
    assert reply.done.num_attempts == 2 and reply.done.decode_worker == "decode-1"
    assert reply.token_ids == undisturbed.token_ids


# ---- log-probabilities of prompts --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logprobs_of_transformers(demo_model: Path, reference: dict[str, Any]) -> dict[int, torch.Tensor]:
    """[tokens - 1, vocabulary] for a prompt of each length, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32, attn_implementation="eager")
    found = {}
    for entry in prompts_of(reference, 2, 16, 33, 255):
        ids = torch.tensor([entry["prompt_ids"]])
        with torch.inference_mode():
            found[ids.shape[1]] = model(ids).logits[0, :-1].double().log_softmax(-1)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["apart", "local"])
def test_prompt_log_probabilities_are_those_of_transformers(
    kind: str,
    pair_float32: ClusterHandle,
    single_float32: ClusterHandle,
    reference: dict[str, Any],
    logprobs_of_transformers: dict[int, torch.Tensor],
) -> None:
    """The second time as well, when every block of the prompts is in the caches; and the answer is the usual one."""
    cluster = pair_float32 if kind == "apart" else single_float32
    entries = prompts_of(reference, *logprobs_of_transformers)

    async def score(client: Client) -> list[Reply]:
        requests = [ask(client, e["prompt_ids"], prompt_logprobs=20, logprobs=0, max_tokens=4) for e in entries]
        return await asyncio.gather(*requests)

    for replies in (run(cluster, score), run(cluster, score)):
        for entry, reply in zip(entries, replies, strict=True):
            prompt_ids = entry["prompt_ids"]
            assert reply.score_ids == prompt_ids[1:]
            assert reply.token_ids[0] == entry["output_ids"][:4]
            check_scores(prompt_ids, reply.scores, logprobs_of_transformers[len(prompt_ids)])
    assert_nothing_left(cluster)


def check_scores(prompt_ids: list[int], scores: list[inference_pb2.TokenLogprobs], logprobs: torch.Tensor) -> None:
    for token_id, entry, row in zip(prompt_ids[1:], scores, logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
        assert len(entry.top) == 20
        assert [top.logprob for top in entry.top] == pytest.approx(row.topk(20).values.tolist(), abs=TOLERANCE)
        for top in entry.top:
            assert top.logprob == pytest.approx(float(row[top.token_id]), abs=TOLERANCE)


@pytest.mark.timeout(300)
def test_scores_of_a_long_prompt_arrive_in_parts_beside_another_answer(
    pair_float32: ClusterHandle, reference: dict[str, Any]
) -> None:
    long, short = prompts_of(reference, 2048, 64)

    async def both(client: Client) -> list[Reply]:
        scored = ask(client, long["prompt_ids"], prompt_logprobs=20, num_choices=2, max_tokens=8, cache_salt="scored")
        return await asyncio.gather(scored, ask(client, short["prompt_ids"], max_tokens=64, cache_salt="scored"))

    scored, other = run(pair_float32, both)
    assert scored.score_ids == long["prompt_ids"][1:] and len(scored.scores) == 2047
    assert scored.token_ids == {0: long["output_ids"][:8], 1: long["output_ids"][:8]}
    assert other.token_ids[0] == short["output_ids"]
    assert_nothing_left(pair_float32)
