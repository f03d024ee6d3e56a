"""ClusterState: a front loses its stream and comes back while its requests are on their way. Found by the simulator."""

from __future__ import annotations

from cluster.core.events import Tick
from cluster.core.ids import AttemptId
from cluster.core.messages import EndRequest, FrontHello, FrontWelcome, LiveRequest, RunLocal
from tests.support.coordinator import D0, FRONT, MS, Bench, make_config, only


def test_a_request_that_was_never_placed_is_not_ended_when_its_front_announces_it() -> None:
    """The front submits it again once it is welcome; an EndRequest would cross that Submit and leave it orphaned."""
    bench = Bench()
    placed = LiveRequest(request_id="placed", attempt=2, num_delivered=1)
    waiting = LiveRequest(request_id="waiting", attempt=0, num_delivered=0)
    bench.front_says(FrontHello(front=FRONT, address="f:1", live=(placed, waiting)))
    welcome, *ends = bench.said()
    assert isinstance(welcome, FrontWelcome)
    assert [end.request_id for end in ends if isinstance(end, EndRequest)] == ["placed"]


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
