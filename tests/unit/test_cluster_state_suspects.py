"""ClusterState and requests that may be what ended a worker: suspected, tried one by one, convicted or cleared."""

from __future__ import annotations

import pytest

from cluster.core.commands import Reserve, RunLocal
from cluster.core.effects import ReportPoison
from cluster.core.ids import AttemptId, Blame, Outcome, WorkerId
from cluster.core.limits import MAX_APART_NS, MAX_STEP_NS, MAX_TRIAL_NS, MAX_UNCLEAR_NS
from cluster.core.messages import (
    AttemptFailed,
    Committed,
    EndRequest,
    Heartbeat,
    LegFailed,
    LegSurvived,
    PeerFenced,
    PrefillDone,
    ReserveRefused,
    Resubmit,
)
from tests.support.coordinator import D0, D1, MS, P0, P1, TIMELINE, Bench, make_config, make_load, only

P2, D2 = WorkerId("p2", 1), WorkerId("d2", 1)
BEAT_MS = 1_000


def local_bench(*workers: WorkerId, **limits: float) -> Bench:
    """Decode workers that read prompts themselves."""
    bench = Bench(make_config(with_prefill=False, **limits))
    bench.connect()
    bench.join(*workers)
    return bench


def started(bench: Bench, worker: WorkerId) -> list[RunLocal]:
    return [command for command in bench.commands(worker) if isinstance(command, RunLocal)]


def resubmit(bench: Bench, name: str, failed_attempt: int = 1) -> None:
    bench.front_says(Resubmit(request_id=name, failed_attempt=failed_attempt, num_delivered=0))


def reports(bench: Bench) -> list[ReportPoison]:
    return [effect for effect in bench.effects if isinstance(effect, ReportPoison)]


def ends(bench: Bench) -> list[tuple[str, Outcome]]:
    return [(message.request_id, message.outcome) for message in bench.said() if isinstance(message, EndRequest)]


def is_waiting(bench: Bench, name: str) -> bool:
    view = bench.state.request(name, bench.now_ns)
    return view is not None and view.phase == "queued" and "kept apart" in view.why


def two_suspects(*workers: WorkerId, **limits: float) -> Bench:
    """`a` and `b` were computed on d0, which has died. Both have asked for another attempt; `workers` are left."""
    bench = local_bench(D0, **limits)
    bench.submit("a")
    bench.submit("b")
    bench.join(*workers)
    bench.worker_gone(D0)
    assert [type(message) for message in bench.said()] == [AttemptFailed, AttemptFailed]
    resubmit(bench, "a")
    assert only([c for w in workers for c in started(bench, w)]) == RunLocal(attempt=AttemptId("a", 2), is_trial=True)
    resubmit(bench, "b")
    return bench


def test_suspects_are_tried_one_after_the_other_on_a_worker_and_at_once_on_two() -> None:
    bench = two_suspects(D1)
    assert is_waiting(bench, "b")
    bench.worker_says(D1, LegSurvived(attempt=AttemptId("a", 2)))
    assert started(bench, D1) == [RunLocal(attempt=AttemptId("b", 2), is_trial=True)]
    bench = two_suspects(D1, D2)
    assert [bench.num_legs(D1), bench.num_legs(D2)] == [1, 1]


def test_a_worker_that_dies_in_a_trial_convicts_its_suspect_and_nobody_else() -> None:
    bench = two_suspects(D1)
    bench.worker_says(D1, LegSurvived(attempt=AttemptId("a", 2)))
    bench.worker_gone(D1)  # with `a`, which has come through its own trial, and `b`
    assert ends(bench) == [("b", Outcome.INTERNAL)]
    report = only(reports(bench))
    assert report.request_id == "b" and "d0#1, d1#1" in report.reason and "stream ended" in report.reason
    bench.join(D2)
    resubmit(bench, "a", failed_attempt=2)
    assert started(bench, D2) == [RunLocal(attempt=AttemptId("a", 3))], "the culprit is known"
    assert bench.state.status(bench.now_ns).num_poison == 1


def test_newcomers_keep_away_from_a_trial_and_a_trial_from_newcomers() -> None:
    bench = two_suspects(D1)
    bench.worker_says(D1, LegSurvived(attempt=AttemptId("a", 2)))
    bench.submit("new")
    assert bench.phase("new") == "queued" and bench.num_legs(D1) == 2
    bench.worker_says(D1, LegSurvived(attempt=AttemptId("b", 2)))
    assert started(bench, D1) == [RunLocal(attempt=AttemptId("new", 1))]
    # A newcomer is being read on the worker that is left: a suspect waits until heartbeats say that it has been.
    bench = local_bench(D0, D1)
    bench.submit("a")
    bench.submit("new")
    assert [bench.num_legs(D0), bench.num_legs(D1)] == [1, 1]
    bench.worker_gone(D0)
    resubmit(bench, "a")
    assert is_waiting(bench, "a")
    bench.beat(D1, waiting_prefill_tokens=9)
    assert is_waiting(bench, "a")
    bench.beat(D1)
    assert started(bench, D1) == [RunLocal(attempt=AttemptId("a", 2), is_trial=True)]


def test_no_wait_for_a_trial_is_without_an_end_and_what_happens_in_company_convicts_nobody() -> None:
    bench = local_bench(D0, D1, heartbeat_timeout_s=60)
    bench.submit("a")
    bench.submit("new")
    bench.worker_gone(D0)
    resubmit(bench, "a")
    bench.wait_ms(MAX_APART_NS // MS - 1)
    assert is_waiting(bench, "a")
    bench.wait_ms(1)
    assert started(bench, D1) == [RunLocal(attempt=AttemptId("a", 2), is_trial=True)]
    bench.worker_gone(D1)
    assert ends(bench) == [] and not reports(bench)


def test_a_trial_does_not_keep_others_away_for_ever() -> None:
    bench = two_suspects(D1, heartbeat_timeout_s=60)
    bench.wait_ms(MAX_TRIAL_NS // MS)
    bench.beat(D1)
    assert bench.num_legs(D1) == 2, "the other suspect is beside it now"
    bench.worker_gone(D1)
    assert ends(bench) == []


def test_a_worker_that_is_only_silent_convicts_if_it_was_heard_since_it_was_given_the_request() -> None:
    for was_heard in (False, True):
        bench = two_suspects(D1)
        if was_heard:
            bench.beat(D1)
        bench.wait_ms(12_000)
        assert bench.given_up() == [D1]
        assert ends(bench) == ([("a", Outcome.INTERNAL)] if was_heard else [])


def test_a_worker_that_was_asked_to_leave_makes_nobody_suspect() -> None:
    bench = local_bench(D0)
    bench.submit("a")
    bench.worker_says(D0, Heartbeat(load=make_load(100), is_leaving=True))
    bench.join(D1)
    bench.worker_gone(D0)
    resubmit(bench, "a")
    assert started(bench, D1) == [RunLocal(attempt=AttemptId("a", 2))]


@pytest.mark.parametrize("dies_in", ["reading", "reserved", "decoding", "pushed"])
def test_who_counts_as_computed(dies_in: str) -> None:
    """Prefill until it has read the prompt, decode since it has its KV."""
    bench = Bench()
    bench.connect()
    bench.join(P0, D0)
    attempt = AttemptId("r", 1)
    bench.submit()
    bench.grant(attempt)
    if dies_in in ("decoding", "pushed"):
        bench.worker_says(P0, PrefillDone(attempt=attempt, outcome=None, timeline=TIMELINE))
    if dies_in == "decoding":
        bench.worker_says(D0, Committed(attempt=attempt, timeline=TIMELINE))
    bench.join(P1, D1)
    bench.worker_gone(D0 if dies_in in ("reserved", "decoding") else P0)
    resubmit(bench, "r")
    (reserve,) = [c for worker in (D0, D1) for c in bench.commands(worker) if isinstance(c, Reserve)]
    assert reserve.is_trial is (dies_in in ("reading", "decoding"))


def test_the_end_of_a_push_that_is_heard_before_the_senders_own_end_hides_nothing() -> None:
    bench = Bench()
    bench.connect()
    bench.join(P0, P1, D0)
    for number, sender in ((1, P0), (2, P1)):
        attempt = AttemptId("r", number)
        bench.submit() if number == 1 else resubmit(bench, "r")
        assert any(isinstance(command, Reserve) for command in bench.commands(D0))
        bench.grant(attempt)
        failed = LegFailed(attempt=attempt, outcome=Outcome.TRANSFER_FAILED, reason="peer exited", retryable=True)
        bench.worker_says(D0, failed)
        bench.worker_says(D0, PeerFenced(peer=sender)) if number == 1 else bench.worker_gone(sender)
        bench.release(D0, attempt)
    assert bench.phase() is None, "convicted"


@pytest.mark.parametrize("then", ["released", "lost", "nothing"])
def test_after_a_failed_push_it_is_first_heard_whether_the_sender_lives(then: str) -> None:
    """Else a request that ends workers could be given to a third while the news of the second is on its way."""
    bench = Bench()
    bench.connect()
    bench.join(P0, P1, D0)
    attempt = AttemptId("r", 1)
    bench.submit()
    bench.grant(attempt)
    failed = LegFailed(attempt=attempt, outcome=Outcome.TRANSFER_FAILED, reason="peer exited", retryable=True)
    bench.worker_says(D0, failed)
    bench.release(D0, attempt)
    resubmit(bench, "r")
    assert bench.phase() == "queued"
    if then == "released":
        bench.release(P0, attempt)
    elif then == "lost":
        bench.worker_gone(P0)
    else:
        bench.wait_ms(MAX_UNCLEAR_NS // MS)
    reserve = only([command for command in bench.commands(D0) if isinstance(command, Reserve)])
    assert reserve.is_trial is (then == "lost")


def test_a_step_that_raises_is_the_fault_of_one_of_those_in_it() -> None:
    bench = local_bench(D0)
    bench.submit("a")
    attempt = AttemptId("a", 1)
    blamed = LegFailed(attempt=attempt, outcome=Outcome.INTERNAL, reason="raised", retryable=True, blame=Blame.SHARED)
    bench.worker_says(D0, blamed)
    bench.release(D0, attempt)
    resubmit(bench, "a")
    attempt = AttemptId("a", 2)
    assert started(bench, D0) == [RunLocal(attempt=attempt, is_trial=True)]
    again = LegFailed(attempt=attempt, outcome=Outcome.INTERNAL, reason="raised", retryable=True, blame=Blame.SHARED)
    bench.worker_says(D0, again)
    assert ends(bench) == [("a", Outcome.INTERNAL)] and len(reports(bench)) == 1
    bench.release(D0, attempt)
    bench.assert_nothing_left()


def test_what_nothing_usable_is_computed_for_is_tried_elsewhere_once() -> None:
    bench = local_bench(D0, D1)
    bench.submit("a")
    for number, worker in ((1, D0), (2, D1)):
        attempt = AttemptId("a", number)
        assert started(bench, worker) == [RunLocal(attempt=attempt)]
        bench.worker_says(
            worker,
            LegFailed(attempt=attempt, outcome=Outcome.INTERNAL, reason="not finite", retryable=True, blame=Blame.OWN),
        )
        bench.release(worker, attempt) if number == 1 else None
        if number == 1:
            resubmit(bench, "a")
    assert ends(bench) == [("a", Outcome.INTERNAL)]
    assert "in 2 attempts" in only(reports(bench)).reason
    assert bench.given_up() == []


@pytest.mark.parametrize(("ms_per_token", "limit_ns"), [(0.0, MAX_STEP_NS), (1.0, MAX_STEP_NS), (40.0, 163_840 * MS)])
def test_a_worker_whose_step_never_ends_is_given_up_although_its_heartbeats_go_on(
    ms_per_token: float, limit_ns: int
) -> None:
    """A full step of 512 tokens at 40 ms each takes 20 s: such a worker has eight times that."""
    bench = local_bench(D0, D1)
    bench.submit("a")
    bench.beat(D0, step_age_ms=limit_ns // MS, step_ms_per_token=ms_per_token)
    assert bench.given_up() == []
    bench.beat(D0, step_age_ms=limit_ns // MS + 1, step_ms_per_token=ms_per_token)
    assert bench.given_up() == [D0]
    assert "a step of its engine has been running for" in only(bench.said()).reason  # type: ignore[union-attr]
    resubmit(bench, "a")
    assert started(bench, D1) == [RunLocal(attempt=AttemptId("a", 2), is_trial=True)]


def test_a_trial_that_no_worker_reserves_for_goes_on_waiting_for_the_next() -> None:
    bench = Bench()
    bench.connect()
    bench.join(P0, P1, D0)
    bench.submit()
    bench.grant(AttemptId("r", 1))
    bench.worker_gone(P0)
    bench.release(D0, AttemptId("r", 1))
    resubmit(bench, "r")
    assert only([c for c in bench.commands(D0) if isinstance(c, Reserve)]).is_trial
    bench.worker_says(D0, ReserveRefused(attempt=AttemptId("r", 2), reason="full"))
    assert bench.phase() == "queued"
    bench.wait_ms(60)
    assert only([c for c in bench.commands(D0) if isinstance(c, Reserve)]).attempt == AttemptId("r", 3)
