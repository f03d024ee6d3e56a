"""ClusterState: a front loses its stream and comes back while its requests are on their way. Found by the simulator."""

from __future__ import annotations

from cluster.core.commands import RunLocal
from cluster.core.events import Tick
from cluster.core.ids import AttemptId, Outcome
from cluster.core.messages import AttemptFailed, CancelRequest, EndRequest, Finished, Resubmit
from tests.support.coordinator import D0, MS, P0, TIMELINE, Bench, make_config, only


def test_attempts_of_a_request_submitted_again_go_on_counting() -> None:
    """Workers may still hold, or have forbidden, what they were given under the earlier numbers."""
    bench = Bench(make_config(with_prefill=False))
    bench.connect()
    bench.join(D0)
    bench.submit("r")
    assert bench.commands(D0) == [RunLocal(attempt=AttemptId("r", 1))]
    bench.front_gone()
    bench.release(D0, AttemptId("r", 1))
    bench.connect()
    bench.submit("r")
    command = only(bench.commands(D0))
    assert isinstance(command, RunLocal) and command.attempt == AttemptId("r", 2)


def test_a_late_tick_gives_every_worker_its_time_again() -> None:
    """The coordinator was away, not the worker; one that stays silent after that is given up as ever."""
    bench = Bench(make_config(with_prefill=False, heartbeat_timeout_s=1.0))
    bench.join(D0)
    bench.now_ns += 60_000 * MS
    assert bench.handle(Tick()) == []
    bench.wait_ms(999)
    assert bench.given_up() == []
    bench.wait_ms(1)
    assert bench.given_up() == [D0]


AWAY_MS = 60_000


def come_back(bench: Bench, away_ms: int = AWAY_MS) -> None:
    """The coordinator was stopped for so long; its clock is looked at before what was said meanwhile is read."""
    bench.now_ns += away_ms * MS
    bench.handle(Tick())


def test_what_a_front_answered_while_the_coordinator_was_away_is_heard() -> None:
    bench = Bench(make_config(with_prefill=False, heartbeat_timeout_s=1.0))
    bench.connect()
    bench.join(D0)
    bench.submit("r")
    bench.worker_gone(D0)
    assert isinstance(only(bench.said()), AttemptFailed)
    come_back(bench)
    assert bench.said() == [] and bench.phase() == "waiting_front"
    bench.front_says(Resubmit(request_id="r", failed_attempt=1, num_delivered=0))
    assert bench.phase() == "queued"


def test_a_front_that_has_not_answered_has_had_its_time_soon_after() -> None:
    bench = Bench(make_config(with_prefill=False, heartbeat_timeout_s=1.0))
    bench.connect()
    bench.join(D0)
    bench.submit("r")
    bench.worker_gone(D0)
    come_back(bench)
    bench.wait_ms(1_000)
    ended = only(bench.said())
    assert isinstance(ended, EndRequest) and ended.outcome is Outcome.INTERNAL


def test_a_clients_deadline_is_not_put_off() -> None:
    bench = Bench(make_config(with_prefill=False, heartbeat_timeout_s=1.0))
    bench.connect()
    bench.join(D0)
    bench.submit("r", deadline_ms=30_000)
    bench.worker_gone(D0)
    come_back(bench)
    ended = only(bench.said())
    assert isinstance(ended, EndRequest) and ended.outcome is Outcome.DEADLINE_EXCEEDED


def test_a_leg_that_was_released_while_the_coordinator_was_away_costs_nobody_his_life() -> None:
    bench = Bench(make_config(with_prefill=False, heartbeat_timeout_s=1.0))
    bench.connect()
    bench.join(D0)
    bench.submit("r")
    bench.front_says(CancelRequest(request_id="r", outcome=Outcome.CANCELLED, reason="gone"))
    come_back(bench)
    assert bench.given_up() == []
    bench.beat(D0)
    bench.release(D0, AttemptId("r", 1))
    bench.assert_nothing_left()
    bench.wait_ms(999)
    assert bench.given_up() == []


def test_a_reservation_that_was_granted_while_the_coordinator_was_away_counts() -> None:
    bench = Bench(make_config(heartbeat_timeout_s=1.0))
    bench.connect()
    bench.join(P0, D0)
    bench.submit("r")
    come_back(bench)
    assert bench.phase() == "reserving" and bench.commands(D0) == []
    bench.grant(AttemptId("r", 1))
    assert bench.phase() == "prefilling"


def test_last_tokens_that_do_not_reach_the_front_are_computed_again() -> None:
    """The worker keeps them for a time only; a front that was cut off for longer must not wait for ever."""
    bench = Bench(make_config(with_prefill=False, heartbeat_timeout_s=1000.0))
    bench.connect()
    bench.join(D0)
    bench.submit("r")
    first = AttemptId("r", 1)
    bench.worker_says(D0, Finished(attempt=first, outcome=Outcome.LENGTH, num_output_tokens=8, timeline=TIMELINE))
    bench.wait_ms(60_000)
    failed = only(bench.said())
    assert isinstance(failed, AttemptFailed) and failed.attempt == first
    bench.front_says(Resubmit(request_id="r", failed_attempt=1, num_delivered=7))
    command = only(bench.commands(D0))
    assert isinstance(command, RunLocal) and command.attempt == AttemptId("r", 2)
