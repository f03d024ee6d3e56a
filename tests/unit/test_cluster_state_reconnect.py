"""ClusterState: a front loses its stream and comes back while its requests are on their way. Found by the simulator."""

from __future__ import annotations

from cluster.core.commands import RunLocal
from cluster.core.events import Tick
from cluster.core.ids import AttemptId, Outcome
from cluster.core.messages import AttemptFailed, Finished, Resubmit
from tests.support.coordinator import D0, MS, TIMELINE, Bench, make_config, only


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
