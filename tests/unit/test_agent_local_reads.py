"""Prompts that a worker reads beside running answers: how long its steps may take meanwhile, and what it measures."""

from __future__ import annotations

import pytest

from cluster.agent.step_costs import NUM_WARM_UP_STEPS, StepCosts
from cluster.core.commands import CancelLeg, RunLocal
from cluster.core.ids import AttemptId
from engine.core.request import RequestBody
from engine.core.sampling import SamplingParams
from tests.support.toy_engine import undisturbed
from tests.support.worker_pair import BLOCK_SIZE, MILLISECOND_NS, Request, World
from tests.unit.test_agent_parts import decode_plan, plan

CHUNK_TOKENS = 8
"""What the toy worker reads in a step."""


def body(num_tokens: int, max_tokens: int) -> RequestBody:
    prompt = tuple(1 + index % 90 for index in range(num_tokens))
    return RequestBody(prompt_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def local(world: World, request_id: str, num_tokens: int, max_tokens: int, limit_ms: float = 0.0) -> Request:
    attempt = AttemptId(request_id, 1)
    request = Request(attempt=attempt, body=body(num_tokens, max_tokens), is_local=True)
    world.requests[attempt] = request
    request.legs[world.decode.worker] = None
    world._watch(world.decode, request)
    world.decode.command(RunLocal(attempt=attempt, step_limit_ms=limit_ms), request.body)
    return request


def read_per_step(world: World) -> list[int]:
    """Of each step until all is done, the tokens beyond one for each answer."""
    numbers = []
    while world.decode.plan is not None:
        numbers.append(sum(len(step.token_ids) for step in world.decode.plan.sequences if len(step.token_ids) > 1))
        world.decode.end_step(10 * MILLISECOND_NS)
        world.run_later()
    return numbers


def answering(max_tokens: int = 60) -> World:
    """A worker that writes one answer; what it took to read has been measured, and so has a step: 10 ms."""
    world = World()
    local(world, "running", 3, max_tokens)
    for _ in range(20):
        world.decode.end_step(10 * MILLISECOND_NS)
        world.run_later()
    return world


def test_beside_running_answers_a_step_reads_a_block_where_more_would_take_too_long() -> None:
    world = answering()
    request = local(world, "new", 30, 2, limit_ms=15.0)
    world.decode.end_step(10 * MILLISECOND_NS)
    numbers = [number for number in read_per_step(world) if number]
    assert numbers == [BLOCK_SIZE] * 7 + [30 - 7 * BLOCK_SIZE]
    expected = undisturbed(list(request.body.prompt_ids), request.body.sampling).token_ids
    assert world.front.token_ids("new") == expected


def test_without_a_limit_or_without_answers_it_reads_as_much_as_it_may() -> None:
    world = answering()
    local(world, "new", 30, 2)
    world.decode.end_step(10 * MILLISECOND_NS)
    assert [number for number in read_per_step(world) if number][:3] == [CHUNK_TOKENS] * 3
    idle = World()
    local(idle, "new", 30, 2, limit_ms=15.0)
    assert [number for number in read_per_step(idle) if number][:3] == [CHUNK_TOKENS] * 3


def test_the_limit_ends_with_the_reading_however_that_ends() -> None:
    world = answering()
    request = local(world, "cancelled", 30, 2, limit_ms=15.0)
    world.decode.command(CancelLeg(attempt=request.attempt, reason="left"))
    request.is_cancelled = True
    local(world, "new", 30, 2)
    world.decode.end_step(10 * MILLISECOND_NS)
    assert [number for number in read_per_step(world) if number][:3] == [CHUNK_TOKENS] * 3


# ---- what is measured -----------------------------------------------------------------------------------------


def measured() -> StepCosts:
    costs = StepCosts()
    for _ in range(NUM_WARM_UP_STEPS + 5):
        costs.add(decode_plan(100, 100), 20 * MILLISECOND_NS)
    return costs


def test_what_a_prompts_token_adds_to_a_step_is_measured_with_and_without_answers() -> None:
    costs = measured()
    for _ in range(NUM_WARM_UP_STEPS + 1):
        costs.add(plan(1, 40), 40 * MILLISECOND_NS)
    assert costs.chunk_token_ms == pytest.approx(0.5)
    alone = measured()
    for _ in range(NUM_WARM_UP_STEPS + 1):
        alone.add(plan(40), 40 * MILLISECOND_NS)
    assert alone.chunk_token_ms == pytest.approx(0.5), "the fixed part of a step is that of one that writes"
    assert alone.prefill_token_ms == 1.0, "which one that only reads has as well"
    assert alone.reading_ms == 40 * (NUM_WARM_UP_STEPS + 1)


def test_a_worker_that_never_writes_does_not_know_the_fixed_part() -> None:
    costs = StepCosts()
    for _ in range(NUM_WARM_UP_STEPS + 1):
        costs.add(plan(40), 40 * MILLISECOND_NS)
    assert (costs.chunk_token_ms, costs.prefill_token_ms) == (0.0, 1.0)


def test_what_was_measured_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.agent.step_costs.MAX_CHUNK_AGE_STEPS", 20)
    costs = measured()
    for _ in range(NUM_WARM_UP_STEPS + 1):
        costs.add(plan(1, 40), 40 * MILLISECOND_NS)
    for _ in range(20):
        costs.add(decode_plan(100), 20 * MILLISECOND_NS)
    assert costs.chunk_token_ms > 0
    costs.add(decode_plan(100), 20 * MILLISECOND_NS)
    assert costs.chunk_token_ms == 0
