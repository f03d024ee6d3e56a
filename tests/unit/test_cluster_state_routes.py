"""Which way requests take, through ClusterState: what workers and fronts are told, what is counted and warned of."""

from __future__ import annotations

import asyncio
import logging
import random
from statistics import median
from typing import Any

import pytest

from cluster.core.commands import Reserve, RunLocal
from cluster.core.disaggregation import ALWAYS_PUSHED, DisaggregationConfig
from cluster.core.effects import WarnOfFewPushes
from cluster.core.ids import AttemptId, Outcome, Route, WorkerId
from cluster.core.limits import MIN_PUSHED_SHARE, NUM_RECENT_ROUTES
from cluster.core.messages import CancelRequest, Committed, Finished, Heartbeat, Placed, PrefillDone, RequestDone
from cluster.core.routes import NUM_SAMPLES, FewPushes, HandOverCosts, RouteRecord
from cluster.core.state import ClusterState
from cluster.live.driver import Driver
from cluster.policy.decision import Cause
from tests.support.coordinator import D0, D1, MS, P0, P1, TIMELINE, Bench, make_config, make_load, only

FIXED = DisaggregationConfig(max_local_tokens=50, may_stay=True)
PUSHED, LOCAL = (Route.PUSHED, Cause.RULE), (Route.LOCAL, Cause.BREAK_EVEN)


def bench_of(*workers: WorkerId, rules: DisaggregationConfig = FIXED, **config: Any) -> Bench:
    bench = Bench(make_config(disaggregation=rules, **config))
    bench.connect()
    bench.join(*workers)
    return bench


def routes(bench: Bench) -> dict[tuple[Route, Cause], int]:
    view = bench.state.status(bench.now_ns).routes
    return {(route, cause): number for route, cause, number in view.counts}


# ---- what is told ---------------------------------------------------------------------------------------------


def test_decode_reads_what_the_file_leaves_to_it_within_a_limit() -> None:
    bench = bench_of(P0, P1, D0, D1)
    bench.beat(D0, D1, decode_base_ms=10.0)
    bench.submit(num_prompt_tokens=50)
    assert only(bench.commands(D0)) == RunLocal(attempt=AttemptId("r", 1), step_limit_ms=15.0)
    placed = only(bench.said())
    assert isinstance(placed, Placed) and placed.prefill is None and placed.route is Route.LOCAL
    assert "50 tokens itself, 50 may be" in placed.why
    bench.submit("s", num_prompt_tokens=51)
    assert isinstance(only(bench.commands(D1)), Reserve)
    assert routes(bench) == {(Route.LOCAL, Cause.FIXED): 1}, "the other one has not started"
    bench.grant(AttemptId("s", 1), D1)
    placed = only(bench.said())
    assert isinstance(placed, Placed) and placed.route is Route.PUSHED and "should write a token" in placed.why
    assert routes(bench) == {(Route.LOCAL, Cause.FIXED): 1, PUSHED: 1}


def push(bench: Bench, request_id: str, *, reserve_ms: int = 0, take_over_ms: int = 0, **fields: int) -> None:
    """A request whose prompt has been read by P0, and that D0 writes."""
    attempt = AttemptId(request_id, 1)
    bench.submit(request_id, num_prompt_tokens=60, **fields)
    bench.now_ns += reserve_ms * MS
    bench.grant(attempt)
    bench.worker_says(P0, PrefillDone(attempt=attempt, outcome=None, timeline=TIMELINE))
    bench.now_ns += take_over_ms * MS
    bench.worker_says(D0, Committed(attempt=attempt, timeline=TIMELINE))
    bench.release(P0, attempt)


def stay(bench: Bench) -> AttemptId:
    """Decode is full; the request is placed on prefill alone."""
    push(bench, "full", num_choices=8)
    bench.submit(num_prompt_tokens=60)
    assert only(bench.commands(P0)) == RunLocal(attempt=AttemptId("r", 1))
    return AttemptId("r", 1)


def test_a_request_stays_on_prefill_to_its_end() -> None:
    bench = bench_of(P0, D0)
    attempt = stay(bench)
    placed = only(bench.said())
    assert isinstance(placed, Placed) and placed.route is Route.STAYED
    assert (placed.prefill, placed.decode.worker) == (None, P0)
    finished = Finished(attempt=attempt, outcome=Outcome.LENGTH, num_output_tokens=8, timeline=TIMELINE)
    bench.worker_says(P0, finished)
    assert bench.num_legs(P0) == 0 and bench.phase() == "finished"
    bench.front_says(RequestDone(request_id="r", outcome=Outcome.LENGTH, num_output_tokens=8))
    assert bench.phase() is None


def test_what_stays_counts_against_the_next_that_would() -> None:
    bench = bench_of(P0, D0)
    stay(bench)
    bench.submit("s", num_prompt_tokens=60)
    assert bench.phase("s") == "queued", "prefill has 60 tokens to read"
    bench.beat(P0)
    assert bench.phase("s") == "local", "it has read them"


def test_the_loss_of_the_prefill_worker_is_another_attempt() -> None:
    bench = bench_of(P0, D0)
    stay(bench)
    bench.worker_gone(P0)
    assert bench.phase() == "waiting_front"


def test_a_client_that_leaves_frees_what_stayed() -> None:
    bench = bench_of(P0, D0)
    attempt = stay(bench)
    bench.front_says(CancelRequest(request_id="r", outcome=Outcome.CANCELLED, reason="left"))
    bench.release(P0, attempt)
    assert bench.num_legs(P0) == 0 and bench.phase() is None


def test_a_prefill_worker_that_has_been_reading_keeps_no_answer() -> None:
    """Of the time between two heartbeats, it has read for nearly all."""
    bench = bench_of(P0, D0)
    push(bench, "full", num_choices=8)
    for number in range(1, 8):
        bench.now_ns += 1_000 * MS
        bench.worker_says(D0, Heartbeat(load=make_load(100)))
        bench.worker_says(P0, Heartbeat(load=make_load(100, reading_ms=900 * number)))
    bench.submit(num_prompt_tokens=60)
    assert bench.phase() == "queued"
    for _ in range(8):
        bench.now_ns += 1_000 * MS
        bench.worker_says(D0, Heartbeat(load=make_load(100)))
        bench.worker_says(P0, Heartbeat(load=make_load(100, reading_ms=6300)))
    assert bench.phase() == "local"


# ---- what is measured -----------------------------------------------------------------------------------------


def test_what_a_push_costs_besides_reading_is_measured() -> None:
    bench = bench_of(P0, D0, rules=ALWAYS_PUSHED)
    push(bench, "r", reserve_ms=3, take_over_ms=7)
    usual = bench.state.status(bench.now_ns).routes.hand_over
    assert (usual.reserve_ms, usual.take_over_ms) == (3.0, 7.0)


def test_medians_are_taken() -> None:
    costs = HandOverCosts()
    for duration_ms in (3.0, 100.0, 5.0):
        costs.taken_over(duration_ms)
    assert (costs.usual.reserve_ms, costs.usual.take_over_ms) == (0.0, 5.0)


def test_medians_are_of_the_last_pushes_only() -> None:
    """Also where durations come several times, as they do with coarse clocks."""
    rng, costs, durations_ms = random.Random(0), HandOverCosts(), []
    for _ in range(4 * NUM_SAMPLES):
        durations_ms.append(float(rng.randrange(9)))
        costs.reserved(durations_ms[-1])
        assert costs.usual.reserve_ms == median(durations_ms[-NUM_SAMPLES:])


def test_the_break_even_is_shown_as_it_is_now() -> None:
    bench = bench_of(P0, P1, D0, D1, rules=DisaggregationConfig())
    assert bench.state.status(bench.now_ns).routes.local_up_to_tokens == 0, "nothing is measured"
    bench.beat(P0, P1, step_ms_per_token=1.0)
    bench.beat(D0, D1, decode_base_ms=20.0, chunk_token_ms=0.8)
    assert bench.state.status(bench.now_ns).routes.local_up_to_tokens == 0, "nothing has been pushed yet"
    push(bench, "first", reserve_ms=3, take_over_ms=7)
    limit = bench.state.status(bench.now_ns).routes.local_up_to_tokens
    assert 0 < limit < 100
    bench.submit("r", num_prompt_tokens=limit)
    assert isinstance(only(bench.commands(D1)), RunLocal)
    bench.release(D1, AttemptId("r", 1))
    bench.submit("s", num_prompt_tokens=limit + 1)
    assert isinstance(only(bench.commands(D1)), Reserve)


# ---- bad day 29 -----------------------------------------------------------------------------------------------


@pytest.mark.bad_day(29)
def test_that_hardly_anything_is_pushed_any_more_is_warned_of_once() -> None:
    record = RouteRecord()
    low = int(MIN_PUSHED_SHARE * NUM_RECENT_ROUTES)
    told = [record.add(*PUSHED, are_pools_whole=True) for _ in range(NUM_RECENT_ROUTES)]
    told += [record.add(*LOCAL, are_pools_whole=True) for _ in range(NUM_RECENT_ROUTES)]
    warnings = [few for few in told if few is not None]
    assert warnings == [FewPushes(num_pushed=low - 1, num_recent=200, causes=((Cause.BREAK_EVEN, 201 - low),))]
    assert "of the last 200 requests 19 were pushed" in str(warnings[0]) and "181 break_even" in str(warnings[0])
    assert record.few_pushes is not None and record.few_pushes.num_pushed == 0, "it is shown for as long as it is so"
    assert record.pushed_share == 0 and record.num_recent == NUM_RECENT_ROUTES
    # A few more do not make it anew; twice as many do.
    told = [record.add(*way, are_pools_whole=True) for way in (PUSHED,) * (low + 1) + (LOCAL,) * NUM_RECENT_ROUTES]
    assert told == [None] * len(told)
    told = [record.add(*way, are_pools_whole=True) for way in (PUSHED,) * 2 * low + (LOCAL,) * NUM_RECENT_ROUTES]
    assert sum(few is not None for few in told) == 1
    record.check_invariants()


def test_no_warning_before_there_is_enough_to_count_or_while_workers_are_missing() -> None:
    record = RouteRecord()
    assert all(record.add(*LOCAL, are_pools_whole=True) is None for _ in range(NUM_RECENT_ROUTES - 1))
    assert record.add(*LOCAL, are_pools_whole=False) is None
    assert record.few_pushes is None
    assert record.add(*LOCAL, are_pools_whole=True) is not None


def test_the_state_warns_while_both_pools_are_whole() -> None:
    """Of two of each; what is short is read by decode."""
    bench = bench_of(P0, P1, D0)
    assert place_many(bench) == [], "a decode worker is missing"
    bench.join(D1)
    warning = only(place_many(bench))
    assert warning.few.causes == ((Cause.FIXED, NUM_RECENT_ROUTES),)
    assert bench.state.status(bench.now_ns).routes.few == warning.few
    assert place_many(bench) == [], "once"


def place_many(bench: Bench) -> list[WarnOfFewPushes]:
    warnings = []
    for _ in range(NUM_RECENT_ROUTES):
        bench.submit(num_prompt_tokens=10)
        warnings += [effect for effect in bench.effects if isinstance(effect, WarnOfFewPushes)]
        attempts = [command.attempt for worker in (D0, D1) for command in bench.commands(worker)]  # type: ignore[union-attr]
        bench.front_says(CancelRequest(request_id="r", outcome=Outcome.CANCELLED, reason="left"))
        for worker in (D0, D1):
            for attempt in attempts:
                bench.release(worker, attempt)
    return warnings


def test_the_driver_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    async def carry_out() -> None:
        driver = Driver(ClusterState(make_config(), epoch=1), lambda worker, reason: None)
        driver._carry_out(WarnOfFewPushes(few=FewPushes(num_pushed=1, num_recent=200, causes=())))

    with caplog.at_level(logging.WARNING):
        asyncio.run(carry_out())
    assert "few pushes: of the last 200 requests 1 were pushed" in caplog.text
