"""Admission: who may wait, who is refused at once, why, and when to come back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.core.ids import Outcome, RefusalCause
from cluster.policy.admission import (
    MAX_RETRY_AFTER_MS,
    MIN_RETRY_AFTER_MS,
    UNMEASURED_RETRY_AFTER_MS,
    Admit,
    Arrival,
    Refuse,
    Situation,
    StartLimit,
    admit,
)
from cluster.policy.first_token import Ahead, Capacity, predict
from tests.support.fake_workers import FakeWorker, make_worker

NOBODY = Capacity(num_readers=0, readers=(), num_writers=0, writers=(), usual_output_tokens=20.0, block_size=16)
SITUATION = Situation(
    num_queued=0,
    queue_limit=4,
    can_displace=False,
    num_live=0,
    max_live=100,
    max_model_tokens=1024,
    max_prompt_blocks=50,
    block_size=16,
    slo_ttft_ms=None,
    ahead=Ahead(),
    capacity=NOBODY,
)
ARRIVAL = Arrival(num_prompt_tokens=100, max_tokens=8)


def _with(
    *readers: FakeWorker, writers: tuple[FakeWorker, ...] = (), ahead: Ahead | None = None, **changes: Any
) -> Situation:
    capacity = replace(NOBODY, num_readers=len(readers), readers=readers, num_writers=len(writers), writers=writers)
    return replace(SITUATION, capacity=capacity, ahead=ahead or Ahead(), **changes)


def _refusal(arrival: Arrival, situation: Situation) -> Refuse:
    decision = admit(arrival, situation)
    assert isinstance(decision, Refuse)
    return decision


def test_what_fits_is_admitted() -> None:
    assert admit(ARRIVAL, SITUATION) == Admit()
    unknown = replace(SITUATION, max_model_tokens=None, max_prompt_blocks=None)
    assert admit(replace(ARRIVAL, num_prompt_tokens=10**6), unknown) == Admit(), "nobody is there yet to say no"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_prompt_tokens": 1024}, "1024 tokens, at most 1023"),
        ({"num_prompt_tokens": 800}, "needs 51 KV blocks, the largest worker has 50"),
        ({"num_prompt_tokens": 0}, "at least one prompt token"),
        ({"max_tokens": 0}, "at least 1"),
        ({"num_choices": 17}, "17 choices"),
        ({"num_choices": 0}, "0 choices"),
    ],
)
def test_what_can_never_run_is_invalid(changes: dict[str, Any], reason: str) -> None:
    refusal = _refusal(replace(ARRIVAL, **changes), SITUATION)
    assert refusal.outcome is Outcome.REJECTED_INVALID and reason in refusal.reason
    assert refusal.retry_after_ms is None and refusal.cause is RefusalCause.INVALID


@pytest.mark.parametrize(
    ("changes", "reason"), [({"num_queued": 4}, "4 requests wait"), ({"num_live": 100}, "100 requests are served")]
)
def test_limits_refuse_for_now(changes: dict[str, Any], reason: str) -> None:
    refusal = _refusal(ARRIVAL, replace(SITUATION, **changes))
    assert refusal.outcome is Outcome.REJECTED_OVERLOAD and reason in refusal.reason
    assert refusal.retry_after_ms == UNMEASURED_RETRY_AFTER_MS and refusal.cause is RefusalCause.TOO_MANY


def test_a_full_queue_takes_what_displaces_another() -> None:
    assert admit(ARRIVAL, replace(SITUATION, num_queued=4, can_displace=True)) == Admit()


def test_a_used_up_quota_says_when_there_is_more() -> None:
    refusal = _refusal(replace(ARRIVAL, quota_wait_ms=750), SITUATION)
    assert (refusal.cause, refusal.retry_after_ms) == (RefusalCause.QUOTA, 750)
    assert refusal.outcome is Outcome.REJECTED_OVERLOAD and "quota" in refusal.reason


@pytest.mark.parametrize(
    ("num_tokens", "retry_after_ms"), [(10, MIN_RETRY_AFTER_MS), (1_000, 1_000), (10**6, MAX_RETRY_AFTER_MS)]
)
def test_retry_after_follows_the_queue(num_tokens: int, retry_after_ms: int) -> None:
    readers = (make_worker("p0", ms_per_token=2.0), make_worker("p1"))
    full = _with(*readers, num_queued=4, ahead=Ahead(num_requests=4, num_tokens=num_tokens))
    assert _refusal(ARRIVAL, full).retry_after_ms == retry_after_ms


# ---- limits on the first token --------------------------------------------------------------------------------


def test_a_latency_limit_that_cannot_be_met_is_refused_at_once() -> None:
    idle = _with(make_worker("p0", ms_per_token=2.0))
    start = StartLimit(within_ms=0.0, cause=RefusalCause.MAX_LATENCY, limit_ms=200)
    assert admit(replace(ARRIVAL, max_latency_ms=200), idle) == Admit(start=start)
    never = _refusal(replace(ARRIVAL, max_latency_ms=199), idle)
    assert never.outcome is Outcome.REJECTED_OVERLOAD and never.retry_after_ms is None, "not even when idle"
    busy = _with(make_worker("p0", ms_per_token=2.0, backlog_tokens=50), ahead=Ahead(num_requests=3, num_tokens=300))
    later = _refusal(replace(ARRIVAL, max_latency_ms=300), busy)
    assert later.retry_after_ms == 700 and "900 to 1600 ms, max_latency_ms is 300" in later.reason
    assert later.cause is RefusalCause.MAX_LATENCY
    unmeasured = _with(make_worker("p0"))
    start = StartLimit(within_ms=1.0, cause=RefusalCause.MAX_LATENCY, limit_ms=1)
    assert admit(replace(ARRIVAL, max_latency_ms=1), unmeasured) == Admit(start=start), "it may at least try"


def test_what_is_cached_need_not_be_read() -> None:
    idle = _with(make_worker("p0", ms_per_token=2.0))
    assert isinstance(admit(replace(ARRIVAL, max_latency_ms=100, num_cached_tokens=64), idle), Admit)


def test_the_clusters_own_limit_refuses_what_would_have_to_wait() -> None:
    """Not what is too long for it on an idle cluster: nobody would be served better for that."""
    idle = _with(make_worker("p0", ms_per_token=4.0), slo_ttft_ms=300)
    assert isinstance(admit(ARRIVAL, idle), Admit)
    busy = _with(make_worker("p0", ms_per_token=4.0, backlog_tokens=10), slo_ttft_ms=300)
    refusal = _refusal(ARRIVAL, busy)
    assert (refusal.cause, refusal.retry_after_ms) == (RefusalCause.SLO, MIN_RETRY_AFTER_MS)
    assert "expected in 440 to 480 ms, the cluster's slo.ttft_ms is 300" in refusal.reason
    assert isinstance(admit(replace(ARRIVAL, num_prompt_tokens=55), busy), Admit)


def test_a_deadline_before_the_first_token_is_refused() -> None:
    busy = _with(make_worker("p0", ms_per_token=2.0, backlog_tokens=100))
    refusal = _refusal(replace(ARRIVAL, deadline_ms=450), busy)
    assert (refusal.cause, refusal.retry_after_ms) == (RefusalCause.DEADLINE, 150)


def test_the_tightest_limit_says_how_long_it_may_wait() -> None:
    idle = _with(make_worker("p0", ms_per_token=2.0), slo_ttft_ms=500)
    limited = replace(ARRIVAL, max_latency_ms=900, deadline_ms=400)
    start = StartLimit(within_ms=200.0, cause=RefusalCause.DEADLINE, limit_ms=400)
    assert admit(limited, idle) == Admit(start=start)


# ---- waiting for a place on decode ----------------------------------------------------------------------------


def _writer(name: str, **values: float) -> FakeWorker:
    return make_worker(name, decode_base_ms=10.0, **values)


def _waits_ms(arrival: Arrival, *writers: FakeWorker, num_ahead: int = 0) -> float:
    ahead = Ahead(num_requests=num_ahead)
    situation = _with(make_worker("p0", ms_per_token=0.01), writers=writers, ahead=ahead)
    first = predict(1, arrival.num_blocks, ahead, situation.capacity)
    assert first is not None
    return first.wait_ms


def test_a_request_waits_for_as_many_ends_as_it_needs_places() -> None:
    """An answer takes 20 tokens of 10 ms; with 8 at once, one ends every 25 ms."""
    full = _writer("d0", num_sequences=8, num_promised_blocks=40)
    assert _waits_ms(ARRIVAL, _writer("d0", num_sequences=7, num_promised_blocks=40)) == 0
    assert _waits_ms(ARRIVAL, full) == 25
    assert _waits_ms(ARRIVAL, full, num_ahead=7) == 200
    assert _waits_ms(ARRIVAL, full, full, num_ahead=7) == 100
    assert _waits_ms(ARRIVAL, full, _writer("d1", num_sequences=4), num_ahead=3) == 0


def test_blocks_count_as_places_do() -> None:
    tight = _writer("d0", num_sequences=4, num_promised_blocks=95)
    assert _waits_ms(replace(ARRIVAL, num_blocks=5), tight) == 0
    assert _waits_ms(replace(ARRIVAL, num_blocks=6), tight) == 50
    assert _waits_ms(replace(ARRIVAL, num_blocks=101), _writer("d0")) == 0, "an idle worker takes anything"


def test_unmeasured_writers_keep_nobody_out() -> None:
    assert _waits_ms(ARRIVAL, make_worker("d0", num_sequences=8), num_ahead=50) == 0


def test_who_keeps_answers_few_for_their_speed_makes_others_wait() -> None:
    """Room for all, but with a limit on the time per token there is a place for two more, then for none."""
    writer = make_worker(
        "d0", num_sequences=2, num_promised_blocks=10, decode_base_ms=10.0, decode_context_token_ms=0.0625
    )  # 20 ms a token; an answer of ten blocks makes it 10 ms more
    reader = make_worker("p0", ms_per_token=1.0)
    limited = replace(ARRIVAL, max_latency_ms=150, num_blocks=10)

    def decide(max_tpot_ms: float | None, num_ahead: int) -> Admit | Refuse:
        situation = _with(reader, writers=(writer,), ahead=Ahead(num_requests=num_ahead))
        return admit(limited, replace(situation, capacity=replace(situation.capacity, max_tpot_ms=max_tpot_ms)))

    assert isinstance(decide(None, 2), Admit)
    assert isinstance(decide(40.0, 1), Admit) and isinstance(decide(40.0, 2), Refuse)
    assert isinstance(decide(39.0, 0), Admit) and isinstance(decide(39.0, 1), Refuse)
    assert isinstance(decide(15.0, 0), Refuse), "it is too slow already"
