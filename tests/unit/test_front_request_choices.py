"""FrontRequest with several answers, and with log-probabilities of the prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.core.ids import AttemptId, Outcome
from cluster.core.messages import RequestDone, Resubmit, StreamLost, Submit
from cluster.core.token_messages import PROMPT_CHOICE
from cluster.front import request_events as events
from cluster.front.request import Phase
from cluster.front.request_effects import (
    Deliver,
    DeliverScores,
    Effect,
    EndChoice,
    ForgetWorker,
    ToCoordinator,
    WatchWorker,
)
from engine.core.request import RequestBody, Sibling
from tests.support.front_driver import BODY, D, Driver, P, delivered, end, sent

THREE = replace(BODY, siblings=(Sibling(choice=1), Sibling(choice=2)))
SCORED = replace(THREE, sampling=replace(BODY.sampling, prompt_logprobs=2))
LENGTH, STOP = Outcome.LENGTH, Outcome.STOP


def placed(body: RequestBody = THREE, *, has_stop_strings: bool = False) -> Driver:
    driver = Driver(body=body, has_stop_strings=has_stop_strings)
    driver.start()
    driver.place()
    return driver


def watched(effects: list[Effect]) -> list[tuple[str, int, int]]:
    """Worker, choice and position."""
    return [
        (effect.ref.worker.name, effect.watch.choice, effect.watch.next_position)
        for effect in effects
        if isinstance(effect, WatchWorker)
    ]


def forgotten(effects: list[Effect]) -> list[tuple[str, int | None]]:
    return [(effect.worker.name, effect.choice) for effect in effects if isinstance(effect, ForgetWorker)]


def ended(effects: list[Effect]) -> list[tuple[int, Outcome]]:
    return [(effect.choice, effect.outcome) for effect in effects if isinstance(effect, EndChoice)]


def resubmitted(effects: list[Effect]) -> tuple[Resubmit, RequestBody]:
    (effect,) = [effect for effect in effects if isinstance(effect, ToCoordinator)]
    assert isinstance(effect.message, Resubmit) and effect.body is not None
    return effect.message, effect.body


def test_all_answers_are_watched_on_both_workers() -> None:
    driver = Driver(body=THREE)
    (submit,) = sent(driver.start())
    assert isinstance(submit, Submit) and submit.num_choices == 3
    expected = [(name, choice, 0) for name in "pd" for choice in range(3)]
    assert watched(driver.place()) == expected


def test_answers_end_one_by_one_and_the_request_with_the_last() -> None:
    driver = placed()
    for choice in range(3):
        effects = driver.run(P, 0, 10 + choice, choice=choice, leg_done=True)
        assert delivered(effects) == [(0, (10 + choice,))]
        assert forgotten(effects) == ([("p", None)] if choice == 2 else [])
    effects = driver.run(D, 1, 21, choice=1, finish=LENGTH, leg_done=True)
    assert ended(effects) == [(1, LENGTH)] and sent(effects) == [] and forgotten(effects) == []
    assert driver.run(D, 1, 21, 99, choice=1) == [], "it has ended"
    assert delivered(driver.run(D, 1, 31, choice=2)) == [(1, (31,))]
    assert ended(driver.run(D, 2, 32, choice=2, finish=STOP, leg_done=True)) == [(2, STOP)]
    effects = driver.run(D, 1, 41, 42, choice=0, finish=STOP, leg_done=True)
    assert ended(effects) == [(0, STOP)]
    assert sent(effects) == [RequestDone(request_id="r", outcome=LENGTH, num_output_tokens=2 + 3 + 3)]
    assert forgotten(effects) == [("d", None)]
    assert end(effects).outcome is LENGTH, "one was cut"
    assert end(effects).report.num_output_tokens == 8


def test_an_answer_may_end_at_its_first_token() -> None:
    driver = placed()
    assert ended(driver.run(P, 0, 2, choice=0, finish=STOP, leg_done=True)) == [(0, STOP)]
    driver.run(P, 0, 11, choice=1, leg_done=True)
    assert forgotten(driver.run(P, 0, 12, choice=2, leg_done=True)) == [("p", None)]
    assert driver.run(D, 0, 2, choice=0, finish=STOP, leg_done=True) == [], "decode says it as well"
    assert driver.request.phase is Phase.RUNNING


def test_positions_of_one_answer_are_not_those_of_another() -> None:
    driver = placed()
    driver.run(P, 0, 10, choice=0)
    assert watched(driver.run(D, 1, 21, choice=1)) == [("d", 1, 0)], "a gap"
    assert driver.run(D, 2, 22, choice=1) == [], "asked for once"
    assert watched(driver.run(D, 2, 12, choice=0)) == [("d", 0, 1)]
    assert delivered(driver.run(D, 0, 20, 21, 22, choice=1)) == [(0, (20, 21, 22))]
    assert driver.run(D, 0, 5, choice=7) == [], "nobody asked for that one"


def test_a_failed_attempt_is_resubmitted_with_what_each_answer_has() -> None:
    driver = placed()
    driver.run(D, 0, 10, 11, 12, 13, choice=0)
    driver.run(D, 0, 20, 21, choice=1, finish=STOP)
    driver.run(D, 0, 30, 31, choice=2)
    message, body = resubmitted(driver.fail(1))
    assert (message.num_delivered, message.num_choices, message.num_unshared) == (2, 2, 2)
    assert (body.choice, body.delivered_ids) == (2, (30, 31)), "the one with least leads"
    assert body.siblings == (Sibling(choice=0, delivered_ids=(10, 11, 12, 13)),), "what has ended is not written again"
    assert watched(driver.place(2)) == [
        (name, choice, position) for name in "pd" for choice, position in ((0, 4), (2, 2))
    ]
    assert delivered(driver.run(P, 2, 32, choice=2, attempt=2)) == [(2, (32,))]
    assert delivered(driver.run(D, 4, 14, choice=0, attempt=2)) == [(4, (14,))]
    driver.run(D, 5, 15, choice=0, attempt=2, finish=STOP)
    effects = driver.run(D, 3, 33, choice=2, attempt=2, finish=STOP)
    assert end(effects).outcome is STOP and end(effects).report.num_output_tokens == 6 + 2 + 4


def test_an_attempt_that_goes_on_from_elsewhere_is_refused() -> None:
    driver = placed()
    driver.run(P, 0, 10, choice=1)
    message, body = resubmitted(driver.place(2))
    assert message.failed_attempt == 2 and body.siblings[0] == Sibling(choice=1, delivered_ids=(10,))


def test_prefill_must_be_heard_until_anything_has_come() -> None:
    driver = placed()
    driver.handle(events.WorkerStreamLost(worker=P.worker, reason="cut"), 10)
    assert driver.request.next_deadline_ns() is not None
    driver.run(D, 0, 10, choice=2)
    assert driver.request.next_deadline_ns() is None
    assert watched(driver.handle(events.WorkerStreamRestored(worker=P.worker), 20)) == [
        ("p", 0, 0),
        ("p", 1, 0),
        ("p", 2, 1),
    ]


def test_max_latency_is_met_by_the_first_token_of_any_answer() -> None:
    driver = Driver(body=THREE, max_latency_ms=30)
    driver.start()
    driver.place()
    driver.run(P, 0, 10, choice=2, at_ms=20)
    assert driver.request.next_deadline_ns() is None


def test_the_hand_over_gap_is_that_of_the_answer_that_came_first() -> None:
    driver = placed()
    driver.run(P, 0, 10, choice=1, leg_done=True, at_ms=10)
    driver.run(P, 0, 10, choice=0, leg_done=True, at_ms=11)
    for index, at_ms in enumerate((40, 50, 60)):
        driver.run(D, 1 + index, 5, choice=0, at_ms=at_ms - 5)
        driver.run(D, 1 + index, 5, choice=1, at_ms=at_ms)
    effects = driver.handle(events.ClientGone(reason="x"), 70)
    assert end(effects).report.handover_gap_ms == 30.0 - 10.0
    assert end(effects).report.num_output_tokens == 8


# ---- stop strings ------------------------------------------------------------------------------------------------


def test_a_stop_string_ends_its_answer_alone_and_decode_is_told() -> None:
    driver = placed(has_stop_strings=True)
    for choice in range(3):
        driver.run(P, 0, 10, choice=choice, leg_done=True)
    driver.run(D, 1, 11, 12, choice=1)
    effects = driver.handle(events.StopMatched(choice=1, num_tokens=2))
    assert ended(effects) == [(1, STOP)] and forgotten(effects) == [("d", 1)] and sent(effects) == []
    assert driver.run(D, 3, 13, choice=1) == []
    for choice in (0, 2):
        (deliver,) = driver.run(D, 1, 11, choice=choice, finish=LENGTH)
        assert isinstance(deliver, Deliver) and deliver.last
    assert driver.request.phase is Phase.CHECKING
    assert ended(driver.handle(events.NoStopMatched(choice=2))) == [(2, LENGTH)]
    effects = driver.handle(events.StopMatched(choice=0, num_tokens=1))
    assert ended(effects) == [(0, STOP)] and end(effects).report.num_output_tokens == 1 + 2 + 2


def test_an_answer_whose_text_is_checked_does_not_keep_the_others_from_going_on() -> None:
    driver = placed(has_stop_strings=True)
    (deliver,) = driver.run(D, 0, 10, 11, choice=0, finish=LENGTH)
    assert isinstance(deliver, Deliver) and deliver.last and driver.request.phase is Phase.RUNNING
    _, body = resubmitted(driver.fail(1))
    assert body.choices == (1, 2)
    assert ended(driver.handle(events.NoStopMatched(choice=0))) == [(0, LENGTH)]
    driver.place(2)
    assert delivered(driver.run(D, 0, 20, choice=1, attempt=2)) == [(0, (20,))]


def test_an_end_found_while_the_request_waits_is_told_when_it_is_placed() -> None:
    driver = placed(has_stop_strings=True)
    driver.run(D, 0, 10, 11, choice=0)
    driver.fail(1)
    assert ended(driver.handle(events.StopMatched(choice=0, num_tokens=1))) == [(0, STOP)]
    effects = driver.place(2)
    assert watched(effects) == [(name, choice, 0) for name in "pd" for choice in (1, 2)]
    assert forgotten(effects) == [("d", 0)]
    assert driver.run(D, 2, 12, choice=0, attempt=2) == []


def test_an_end_that_is_still_checked_is_told_where_the_coordinator_placed_anew_unasked() -> None:
    driver = placed(has_stop_strings=True)
    driver.run(D, 0, 10, 11, choice=0, finish=LENGTH)
    effects = driver.place(2)
    assert watched(effects) == [(name, choice, 0) for name in "pd" for choice in (1, 2)]
    assert forgotten(effects)[-1] == ("d", 0), "its last tokens have come, only their text is still searched"
    assert ended(driver.handle(events.StopMatched(choice=0, num_tokens=1))) == [(0, STOP)]


# ---- log-probabilities of the prompt -----------------------------------------------------------------------------


def scores(driver: Driver, position: int, count: int, **options: int | bool) -> list[Effect]:
    return driver.run(P, position, *range(position, position + count), choice=PROMPT_CHOICE, **options)  # type: ignore[arg-type]


def positions(effects: list[Effect]) -> list[tuple[int, int]]:
    return [(effect.position, len(effect.tokens)) for effect in effects if isinstance(effect, DeliverScores)]


def test_scores_come_before_the_answers_are_watched() -> None:
    driver = Driver(body=SCORED)
    driver.start()
    assert watched(driver.place()) == [("p", PROMPT_CHOICE, 1)]
    assert positions(scores(driver, 1, 30)) == [(1, 30)]
    assert driver.run(P, 0, 10, choice=0, leg_done=True) == [], "it was not asked for yet"
    effects = scores(driver, 31, 9, leg_done=True)
    assert positions(effects) == [(31, 9)]
    assert watched(effects) == [(name, choice, 0) for name in "pd" for choice in range(3)]
    for choice in range(3):
        effects = driver.run(P, 0, 10, choice=choice, leg_done=True)
        assert delivered(effects) == [(0, (10,))]
    assert forgotten(effects) == [("p", None)]


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    driver = Driver(body=replace(SCORED, prompt_ids=(5,)))
    driver.start()
    assert (("p", 0, 0) in watched(driver.place())) and driver.request.phase is Phase.RUNNING


def test_decode_is_asked_for_scores_where_it_reads_the_prompt() -> None:
    driver = Driver(body=SCORED)
    driver.start()
    assert watched(driver.place(prefill=None)) == [("d", PROMPT_CHOICE, 1)]


@pytest.mark.parametrize("num_known", [0, 20])
def test_a_retry_computes_scores_again_and_shows_what_is_missing(num_known: int) -> None:
    driver = placed(SCORED)
    if num_known:
        scores(driver, 1, num_known)
    _, body = resubmitted(driver.fail(1))
    assert body == SCORED
    assert watched(driver.place(2)) == [("p", PROMPT_CHOICE, 1 + num_known)]
    assert positions(scores(driver, 1, 39, attempt=2)) == [(1 + num_known, 39 - num_known)]


def test_a_retry_after_all_scores_does_without_them() -> None:
    driver = placed(SCORED)
    scores(driver, 1, 39, leg_done=True)
    driver.run(D, 0, 10, choice=1)
    _, body = resubmitted(driver.fail(1))
    assert body.sampling.prompt_logprobs is None and body.choices == (0, 1, 2)
    assert watched(driver.place(2))[0] == ("p", 0, 0)
    assert scores(driver, 1, 39, attempt=2) == []


def test_a_gap_in_the_scores_is_asked_for_again() -> None:
    driver = placed(SCORED)
    assert watched(scores(driver, 11, 5)) == [("p", PROMPT_CHOICE, 1)]
    assert watched(driver.handle(events.WorkerStreamRestored(worker=P.worker), 20)) == [("p", PROMPT_CHOICE, 1)]
    assert watched(driver.handle(events.WorkerStreamRestored(worker=D.worker), 20)) == []


def test_prefill_is_missed_while_it_has_scores_to_send() -> None:
    driver = placed(SCORED)
    scores(driver, 1, 30)
    driver.handle(events.WorkerStreamLost(worker=P.worker, reason="cut"), 10)
    (lost,) = sent(driver.handle(events.Tick(), 60))
    assert lost == StreamLost(attempt=AttemptId("r", 1), worker=P.worker, reason="cut")
