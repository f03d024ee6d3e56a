"""What a worker makes of an engine that fails for one sequence, for all of them, or not at all on trial."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.agent import events as ev
from cluster.agent.limits import AgentLimits
from cluster.core.commands import RunLocal
from cluster.core.ids import AttemptId, Blame, Outcome
from cluster.core.messages import Finished, Heartbeat, LegSurvived
from engine.core.request import RequestBody
from engine.core.sampling import SamplingParams
from tests.support.worker_pair import BLOCK_SIZE, SECOND_NS, Host, World

PROMPT = tuple(range(1, 20))


def body(first: int = 1, max_tokens: int = 6) -> RequestBody:
    return RequestBody(prompt_ids=(first, *PROMPT), sampling=SamplingParams(max_tokens=max_tokens))


def end_step(host: Host, *unusable: str) -> None:
    """The step is over, and for these requests of those in it nothing usable was computed."""
    plan, host.plan, host.layer_marks = host.plan, None, []
    assert plan is not None
    result = host.runner.run(plan)
    failed = [index for index, step in enumerate(plan.sequences) if step.key.request_id in unusable]
    tokens = [() if index in failed else drawn for index, drawn in enumerate(result.tokens)]
    failures = dict.fromkeys(failed, "not finite")
    host.handle(ev.StepDone(result=replace(result, tokens=tokens, failures=failures), duration_ns=1_000_000))


@pytest.mark.parametrize("local", [True, False])
def test_a_sequence_without_a_usable_result_fails_alone(local: bool) -> None:
    world = World()
    good, bad = (world.submit(name, body(first), local=local) for name, first in (("good", 1), ("bad", 2)))
    host = world.decode if local else world.prefill
    while host.plan is None or len(host.plan.sequences) < 2:
        host.advance_once()
        world.run_later()
    end_step(host, "bad")
    world.settle()
    (failure,) = bad.failures
    assert (failure.outcome, failure.retryable, failure.blame) == (Outcome.INTERNAL, True, Blame.OWN)
    assert "not finite" in failure.reason
    assert good.finished is not None and good.finished.outcome is Outcome.LENGTH and bad.legs == {}
    world.forget(good)
    world.check_nothing_left()
    assert host.state.pool.num_indexed == (len(PROMPT) + 1 + (5 if local else 0)) // BLOCK_SIZE, "only the good one's"


def test_a_failed_step_is_the_fault_of_one_of_those_in_it() -> None:
    world = World()
    request = world.submit("r", body(), local=True)
    world.decode.fail_step()
    world.run_later()
    assert [failure.blame for failure in request.failures] == [Blame.SHARED]


def test_an_engine_that_computes_nothing_usable_for_anybody_ends_the_worker() -> None:
    """Otherwise it would be the idlest worker of its pool, and every request would come to it and fail."""
    world = World(limits=AgentLimits(max_failed_sequences=4))
    for index in range(3):
        world.submit(f"r{index}", body(), local=True)
        end_step(world.decode, f"r{index}")
        world.run_later()
    assert world.decode.shutdown_reason is None
    world.submit("good", body(max_tokens=1), local=True)
    world.settle()
    for index in range(3, 7):
        assert world.decode.shutdown_reason is None
        world.submit(f"r{index}", body(), local=True)
        end_step(world.decode, f"r{index}")
        world.run_later()
    assert world.decode.shutdown_reason == "the engine computed nothing usable for 4 sequences in a row"


@pytest.mark.parametrize("max_tokens", [30, 2])
def test_an_attempt_on_trial_is_said_to_have_survived_a_few_steps(max_tokens: int) -> None:
    world = World()
    attempt = AttemptId("r", 1)
    world.submit("other", body(9, max_tokens=40), local=True)
    world.decode.command(RunLocal(attempt=attempt, is_trial=True), body(max_tokens=max_tokens))
    said = []
    for _ in range(60):
        if world.decode.plan is None:
            break
        world.decode.end_step()
        said = [message for _, message in world.messages if isinstance(message, LegSurvived | Finished)]
        if said:
            break
    assert len(said) == 1 and said[0].attempt == attempt
    assert isinstance(said[0], LegSurvived if max_tokens == 30 else Finished)


def test_heartbeats_tell_how_long_the_step_under_way_has_been_running() -> None:
    world = World()
    world.submit("r1", body(), local=True)
    for seconds in (0, 3):
        world.advance(3 * SECOND_NS)
        beats = [message for host, message in world.messages if isinstance(message, Heartbeat)]
        assert seconds * 1000 < beats[-1].load.step_age_ms <= (seconds + 3) * 1000
    world.decode.end_step()
    world.settle()
    world.advance(3 * SECOND_NS)
    beats = [message for host, message in world.messages if isinstance(message, Heartbeat)]
    assert beats[-1].load.step_age_ms == 0
