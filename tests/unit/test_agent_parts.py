"""The smaller parts of a worker: step costs, the coordinator's link, the job thread."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from cluster.agent.job_thread import JobThread
from cluster.agent.limits import AgentLimits
from cluster.agent.link import CoordinatorLink
from cluster.agent.step_costs import NUM_SAMPLES, NUM_WARM_UP_STEPS, StepCosts
from cluster.core.commands import Command, WorkerWelcome
from cluster.core.ids import WorkerId
from engine.core.sampling import SamplingParams
from engine.core.step import SequenceKey, SequenceStep, StepPlan

MILLISECOND_NS = 1_000_000
WORKER = WorkerId("w", 3)


def plan(*num_tokens: int) -> StepPlan:
    sequences = [
        SequenceStep(
            key=SequenceKey(f"r{index}", 1),
            token_ids=[1] * count,
            start=0,
            block_table=[0],
            sample=True,
            sampling=SamplingParams(),
            position=0,
            prompt_ids=[],
            output_ids=[],
        )
        for index, count in enumerate(num_tokens)
    ]
    return StepPlan(step_id=0, sequences=sequences)


def test_costs_leave_out_the_warm_up_and_outliers() -> None:
    costs = StepCosts()
    for _ in range(NUM_WARM_UP_STEPS):
        costs.add(plan(1, 1), 900 * MILLISECOND_NS)
    assert costs.decode_step_ms == 0.0
    for duration_ms in (10, 10, 500, 12, 11):
        costs.add(plan(1, 1), duration_ms * MILLISECOND_NS)
    assert costs.decode_step_ms == 11.0


def test_prefill_cost_is_what_a_mixed_step_takes_beyond_its_decoding() -> None:
    costs = StepCosts()
    for _ in range(NUM_WARM_UP_STEPS + 1):
        costs.add(plan(1), 10 * MILLISECOND_NS)
    for _ in range(NUM_WARM_UP_STEPS + 1):
        costs.add(plan(1, 100), 60 * MILLISECOND_NS)
    assert costs.prefill_token_ms == 0.5
    for _ in range(40):
        costs.add(plan(64, 64), 128 * MILLISECOND_NS)
    assert costs.prefill_token_ms == 1.0


def test_short_chunks_say_nothing_of_a_tokens_cost() -> None:
    costs = StepCosts()
    for _ in range(NUM_WARM_UP_STEPS + 5):
        costs.add(plan(3), 10 * MILLISECOND_NS)
    assert (costs.prefill_token_ms, costs.decode_step_ms) == (0.0, 0.0)


def decode_plan(*context_tokens: int) -> StepPlan:
    sequences = [
        replace(step, start=count - 1) for step, count in zip(plan(*[1] * 64).sequences, context_tokens, strict=False)
    ]
    return StepPlan(step_id=0, sequences=sequences)


def test_a_decode_steps_cost_is_split_into_its_base_and_its_contexts() -> None:
    costs = StepCosts()
    for index in range(400):
        num_tokens = 100 + 37 * index % 2000
        costs.add(decode_plan(num_tokens, num_tokens), 5 * MILLISECOND_NS + 2 * num_tokens * 1_000)
        if index % 50 == 49:
            costs.add(decode_plan(100), 400 * MILLISECOND_NS)
    predicted_ms = costs.decode_base_ms + 3_000 * costs.context_token_ms
    assert 0.0006 < costs.context_token_ms < 0.0011 and 7.0 < predicted_ms < 9.0
    for _ in range(NUM_SAMPLES):
        costs.add(decode_plan(500, 500), 60 * MILLISECOND_NS)
    assert costs.decode_base_ms > 40.0, "a worker that has become slow shows at once"


def test_contexts_of_one_length_say_nothing_of_their_cost() -> None:
    costs = StepCosts()
    for index in range(50):
        costs.add(decode_plan(1_000 + index), (10 + index % 2) * MILLISECOND_NS)
    assert costs.context_token_ms < 0.001 and 9.0 < costs.decode_base_ms <= 11.0


def test_heartbeats_come_once_a_period_even_after_a_late_tick() -> None:
    link = CoordinatorLink(WORKER, grace_ns=100, now_ns=0)
    link.connected()
    link.welcomed(10, heartbeat_ms=1)
    assert link.next_deadline_ns() == 10 + MILLISECOND_NS
    assert not link.is_heartbeat_due(MILLISECOND_NS)
    assert link.is_heartbeat_due(5 * MILLISECOND_NS)
    assert not link.is_heartbeat_due(5 * MILLISECOND_NS)
    assert link.next_deadline_ns() == 6 * MILLISECOND_NS
    link.check_invariants()


def test_grace_counts_from_the_first_moment_without_registration() -> None:
    link = CoordinatorLink(WORKER, grace_ns=100, now_ns=0)
    assert not link.is_given_up(99) and link.is_given_up(100)
    link.connected()
    assert link.is_given_up(100), "a stream without a welcome is no registration"
    link.welcomed(50, heartbeat_ms=1)
    assert not link.is_given_up(10**9)
    link.lost(200)
    link.lost(290)
    assert not link.is_given_up(299) and link.is_given_up(300)
    link.check_invariants()


@pytest.mark.parametrize(
    ("worker", "epoch", "accepted"),
    [(WORKER, 4, True), (WORKER, 5, True), (WORKER, 3, False), (WorkerId("w", 2), 9, False)],
)
def test_only_commands_of_the_newest_epoch_for_this_life_are_accepted(
    worker: WorkerId, epoch: int, accepted: bool
) -> None:
    link = CoordinatorLink(WORKER, grace_ns=100, now_ns=0)
    assert link.accepts(Command(epoch=4, worker=WORKER, body=WorkerWelcome(heartbeat_ms=1)))
    assert link.accepts(Command(epoch=epoch, worker=worker, body=WorkerWelcome(heartbeat_ms=1))) is accepted
    assert link.num_refused_commands == (not accepted)


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_legs"):
        AgentLimits(max_legs=0)


def test_jobs_run_in_order_on_one_thread_and_report_on_the_loop() -> None:
    async def run() -> tuple[list[int], list[int]]:
        thread = JobThread("test", asyncio.get_running_loop())
        ran_on, reported_on = [], []
        done = asyncio.Event()

        def work(index: int) -> int:
            ran_on.append(threading.get_ident())
            return index

        def report(index: int) -> None:
            reported_on.append(threading.get_ident())
            if index == 4:
                done.set()

        for index in range(5):
            thread.submit(lambda index=index: work(index), report, lambda error: None)  # type: ignore[misc]
        await done.wait()
        assert thread.close(5.0)
        return ran_on, reported_on

    ran_on, reported_on = asyncio.run(run())
    assert len(set(ran_on)) == 1 and ran_on[0] != threading.get_ident()
    assert set(reported_on) == {threading.get_ident()}


def test_job_that_raises_is_reported_and_the_thread_goes_on() -> None:
    async def run() -> int:
        thread = JobThread("test", asyncio.get_running_loop())
        with pytest.raises(ZeroDivisionError):
            await thread.call(lambda: 1 // 0)
        result = await thread.call(lambda: 7)
        thread.close(5.0)
        return result

    assert asyncio.run(run()) == 7
