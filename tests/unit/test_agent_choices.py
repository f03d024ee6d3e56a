"""WorkerState with several answers to one prompt, and with prompts whose tokens are scored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.agent import events as ev
from cluster.agent.translation import block_grants
from cluster.core.ids import AttemptId, Outcome
from cluster.core.messages import ReserveGranted
from cluster.core.token_messages import PROMPT_CHOICE
from engine.core.request import RequestBody, Sibling
from engine.core.sampling import SamplingParams
from kv_transfer.protocol.messages import FirstToken, PushEnd
from tests.support.toy_engine import Undisturbed, scores_of, undisturbed
from tests.support.worker_pair import BLOCK_SIZE, FRONT, Request, World, answer_name, delivered_of

PROMPT = tuple(range(1, 20))
BLOCK_SIZE_BYTES = 64


def body(
    prompt: tuple[int, ...] = PROMPT,
    *,
    choice: int = 0,
    delivered: tuple[int, ...] = (),
    siblings: tuple[Sibling, ...] = (Sibling(choice=1), Sibling(choice=2)),
    max_tokens: int = 6,
    **rest: Any,
) -> RequestBody:
    return RequestBody(
        prompt_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, **rest),
        choice=choice,
        delivered_ids=delivered,
        siblings=siblings,
    )


def whole(request: RequestBody, choice: int) -> Undisturbed:
    forced = list(delivered_of(request)[choice])
    return undisturbed(list(request.prompt_ids), request.sampling, forced_ids=forced, choice=choice)


def check_answers(world: World, request: Request, *but: int) -> None:
    """All of them are whole, but those, and nothing is left of any request anywhere."""
    for choice, delivered in delivered_of(request.body).items():
        if choice in but:
            continue
        expected = whole(request.body, choice)
        request_id = request.attempt.request_id
        assert world.front.token_ids(request_id, choice) == expected.token_ids[len(delivered) :], f"choice {choice}"
        assert world.front.finishes[answer_name(request_id, choice)] is Outcome(expected.finish_reason)
    for other in world.requests.values():
        assert other.legs == {}
        world.forget(other)
    world.check_nothing_left()


def scores(world: World, request_id: str = "r") -> list[float | None]:
    found = world.front.scores[request_id]
    assert sorted(found) == list(range(1, len(found) + 1))
    return [found[position][1] for position in sorted(found)]


@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 8, 15, 16, 33])
def test_three_answers_from_one_push(num_prompt_tokens: int) -> None:
    world = World()
    request = world.submit("r", body(tuple(range(num_prompt_tokens))))
    granted = next(message for _, message in world.messages if isinstance(message, ReserveGranted))
    assert len(block_grants(granted.blocks)) == -(-(num_prompt_tokens + 1) // BLOCK_SIZE) + 2
    world.settle()
    assert request.finished is not None and request.committed is not None
    assert (request.finished.num_output_tokens, request.finished.outcome) == (3 * 6, Outcome.LENGTH)
    assert request.committed.timeline.kv_bytes == BLOCK_SIZE_BYTES * -(-num_prompt_tokens // BLOCK_SIZE)
    assert world.prefill.runner.num_tokens_run == num_prompt_tokens
    # Each has five more tokens to compute; the others first compute what they do not share.
    assert world.decode.runner.num_tokens_run == 3 * 5 + 2 * (num_prompt_tokens % BLOCK_SIZE)
    check_answers(world, request)


def test_three_answers_without_a_push() -> None:
    world = World()
    request = world.submit("r", body(), local=True)
    world.settle()
    assert world.prefill.runner.num_tokens_run == 0
    assert world.decode.runner.num_tokens_run == 19 + 3 * 5 + 2 * 3
    assert request.finished is not None and request.finished.num_output_tokens == 18
    again = world.submit("again", body(), local=True)
    world.settle()
    assert again.finished is not None and again.finished.timeline.num_cached_tokens == 16
    check_answers(world, request)


@pytest.mark.parametrize("local", [False, True])
def test_an_answer_that_ends_at_its_first_token_does_not_end_the_others(local: bool) -> None:
    firsts = [whole(body(), choice).token_ids[0] for choice in range(3)]
    assert len(set(firsts)) == 3
    for ended in ((0,), (1, 2)):
        world = World()
        request = world.submit("r", body(stop_token_ids=tuple(firsts[choice] for choice in ended)), local=local)
        world.settle()
        if not local:
            assert request.prefill_done is not None and request.prefill_done.outcome is None
        assert request.finished is not None
        check_answers(world, request)


def test_prefill_ends_a_request_all_of_whose_answers_end_at_their_first_token() -> None:
    """One of them for its length, so that the whole counts as cut."""
    firsts = [whole(body(), choice).token_ids[0] for choice in range(3)]
    world = World()
    request = world.submit("r", body(max_tokens=1, stop_token_ids=(firsts[2],)))
    world.settle()
    assert request.prefill_done is not None and request.prefill_done.outcome is Outcome.LENGTH
    assert request.committed is None
    assert world.front.finishes == {"r": Outcome.LENGTH, "r/1": Outcome.LENGTH, "r/2": Outcome.STOP}
    world.forget(request)
    world.check_nothing_left()


SECOND_ATTEMPT = {
    "choice": 1,
    "delivered": (7, 8),
    "siblings": (
        Sibling(choice=0, delivered_ids=(7, 8)),
        Sibling(choice=4, delivered_ids=(7, 8, 9, 10, 11)),
        Sibling(choice=5, delivered_ids=(7, 1, 1)),
    ),
}


@pytest.mark.parametrize("local", [False, True])
def test_a_second_attempt_goes_on_where_each_answer_was(local: bool) -> None:
    world = World()
    request = world.submit("r", body(max_tokens=9, **SECOND_ATTEMPT), attempt=2, local=local)
    world.settle()
    if not local:
        firsts = [run for run in world.front.runs if run.leg_done and run.finish is None]
        assert sorted((run.choice, len(run.tokens)) for run in firsts) == [(0, 1), (1, 1), (4, 0), (5, 0)]
        assert world.prefill.runner.num_tokens_run == 19 + 2
    check_answers(world, request)


def test_prefill_that_ends_what_it_drew_leaves_the_rest_to_decode() -> None:
    """The other two have more than the leading one, so decode draws for them; they share the prompt that was pushed."""
    stop = tuple(whole(body(**SECOND_ATTEMPT), choice).token_ids[2] for choice in (0, 1))
    world = World()
    request = world.submit("r", body(stop_token_ids=stop, max_tokens=9, **SECOND_ATTEMPT), attempt=2)
    world.settle()
    assert request.prefill_done is not None and request.prefill_done.outcome is None
    check_answers(world, request)


# ---- one answer, and all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [False, True])
def test_the_front_stops_one_answer_and_the_others_go_on(local: bool) -> None:
    world = World()
    request = world.submit("r", body(max_tokens=20), local=local)
    while len(world.front.token_ids("r", 1)) < 4:
        assert any(host.advance_once() for host in world.hosts())
        world.run_later()
    world.stop_choice(request, 1)
    world.settle()
    assert len(world.front.token_ids("r", 1)) < 7 and "r/1" not in world.front.finishes
    assert request.finished is not None and request.finished.outcome is Outcome.LENGTH
    check_answers(world, request, 1)


def test_an_answer_is_stopped_before_its_kv_has_come() -> None:
    """Its first token, which the front has from prefill, is the end that its text was searched for."""
    world = World()
    request = world.submit("r", body(max_tokens=20))
    while request.prefill_done is None:
        world.prefill.advance_once()
        world.run_later()
    assert request.committed is None
    world.stop_choice(request, 0)
    world.settle()
    assert request.finished is not None and request.finished.num_output_tokens == 1 + 2 * 20
    check_answers(world, request, 0)


def test_all_answers_are_stopped() -> None:
    world = World()
    request = world.submit("r", body(max_tokens=20))
    while len(world.front.token_ids("r", 2)) < 3:
        assert any(host.advance_once() for host in world.hosts())
        world.run_later()
    for choice in (0, 2, 1):
        assert request.finished is None
        world.stop_choice(request, choice)
    assert request.finished is not None and request.finished.outcome is Outcome.STOP
    world.settle()
    check_answers(world, request, 0, 1, 2)


def test_a_word_about_an_answer_that_is_not_here_is_ignored() -> None:
    world = World()
    request = world.submit("r", body(), local=True)
    world.stop_choice(request, 0)  # nothing has been drawn: it cannot have an end
    world.stop_choice(request, 9)
    world.stop_choice(replace(request, attempt=AttemptId("x", 1)), 0)
    world.settle()
    assert request.finished is not None and request.finished.num_output_tokens == 3 * 6
    check_answers(world, request, 0)


@pytest.mark.parametrize("local", [False, True])
def test_cancel_after_any_number_of_events_leaves_nothing(local: bool) -> None:
    for num_events in range(300):
        world = World()
        request = world.submit("r", body(prompt_logprobs=0), local=local)
        for _ in range(num_events):
            if not any(host.advance_once() for host in world.hosts()):
                break
            world.run_later()
        is_finished = request.is_over
        world.cancel(request)
        world.settle()
        assert request.legs == {}, f"after {num_events} events"
        world.forget(request)
        world.check_nothing_left()
        if is_finished:
            return
    raise AssertionError("the request never finished")


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_a_failed_step_fails_the_request_whichever_of_its_answers_was_in_it(num_tokens: int) -> None:
    world = World()
    request = world.submit("r", body(), local=True)
    while len(world.front.token_ids("r")) < num_tokens:
        world.decode.advance_once()
        world.run_later()
    assert world.decode.plan is not None
    world.decode.fail_step()
    world.run_later()
    assert [failure.retryable for failure in request.failures] == [True]
    world.settle()
    assert request.legs == {}
    world.check_nothing_left()


def test_answers_that_do_not_fit_together_are_preempted_one_by_one() -> None:
    world = World(num_blocks=26)
    requests = [world.submit(f"r{index}", body(tuple(range(index, 24)), max_tokens=40)) for index in range(2)]
    world.settle()
    timelines = [request.finished.timeline for request in requests if request.finished is not None]
    assert len(timelines) == 2 and sum(timeline.num_preemptions for timeline in timelines) > 0
    check_answers(world, requests[0])
    check_answers(world, requests[1])


@pytest.mark.parametrize(
    "first_tokens",
    [
        [(0, 0), (1, 0)],
        [(0, 0), (2, 0), (1, 0)],
        [(0, 0), (1, 0), (2, 1)],
        [(0, 0), (1, 0), (2, 0), (3, 0)],
    ],
)
def test_first_tokens_of_other_answers_than_were_asked_for_are_not_taken(first_tokens: list[tuple[int, int]]) -> None:
    world = World()
    request = world.submit("r", body())
    while not any(isinstance(message, PushEnd) for _, message in world.decode.inbox):
        if not world.prefill.advance_once():
            world.decode.advance_once()
        world.run_later()
    tokens = tuple(FirstToken(choice=choice, position=position, token_id=7) for choice, position in first_tokens)
    world.decode.inbox = [
        (peer, replace(message, first_tokens=tokens) if isinstance(message, PushEnd) else message)
        for peer, message in world.decode.inbox
    ]
    world.settle()
    assert request.committed is None
    assert [failure.outcome for failure in request.failures] == [Outcome.TRANSFER_FAILED]
    world.forget(request)
    world.check_nothing_left()


# ---- log-probabilities of the prompt -----------------------------------------------------------------------------


@pytest.mark.parametrize("local", [False, True])
def test_whoever_computes_the_prompt_sends_its_scores_before_the_first_token(local: bool) -> None:
    world = World()
    request = world.submit("r", body(prompt_logprobs=2), local=local)
    world.settle()
    assert scores(world) == scores_of(list(PROMPT))
    runs = [run for run in world.front.runs if run.choice == PROMPT_CHOICE]
    assert len(runs) > 1 and runs[-1].leg_done and runs[-1].finish is None
    first = next(index for index, run in enumerate(world.front.runs) if run.choice == 0 and run.tokens)
    assert all(run in world.front.runs[:first] for run in runs)
    assert world.decode.state.num_token_records() == 3 + local and world.prefill.state.num_token_records() in (0, 4)
    check_answers(world, request)


@pytest.mark.parametrize("local", [False, True])
def test_scores_do_not_come_from_a_cache(local: bool) -> None:
    world = World()
    for name, scored in (("plain", None), ("r", 0), ("again", 0)):
        request = world.submit(name, body(prompt_logprobs=scored), local=local)
        world.settle()
        check_answers(world, request)
    assert scores(world, "r") == scores(world, "again") == scores_of(list(PROMPT))
    assert "plain" not in world.front.scores


def test_decode_takes_pinned_blocks_of_a_prompt_that_prefill_scores() -> None:
    world = World()
    world.submit("plain", body(), local=True)
    world.settle()
    request = world.submit("r", body(prompt_logprobs=0))
    granted = next(message for _, message in world.messages if isinstance(message, ReserveGranted))
    assert granted.num_cached_blocks == 4
    world.settle()
    assert scores(world) == scores_of(list(PROMPT))
    assert request.committed is not None and request.committed.timeline.kv_bytes == BLOCK_SIZE_BYTES
    check_answers(world, request)


def test_a_front_that_comes_back_is_sent_the_scores_from_where_it_was() -> None:
    world = World()
    request = world.submit("r", body(prompt_logprobs=0))
    world.settle()
    world.front.runs.clear()
    world.prefill.handle(ev.FrontDisconnected(front=FRONT))
    world.prefill.handle(ev.FrontConnected(front=FRONT))
    world.watch(world.prefill, request, PROMPT_CHOICE, 12)
    world.run_later()
    assert [(run.position, len(run.tokens)) for run in world.front.runs] == [(12, 7)]
    assert scores(world) == scores_of(list(PROMPT))
    check_answers(world, request)
