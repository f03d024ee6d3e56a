"""ClusterState: a new life of the coordinator takes over what runs, and neither places nor stops before it knows."""

from __future__ import annotations

from cluster.core.commands import CancelLeg, Reserve, SenderStopped
from cluster.core.ids import AttemptId, FrontId, LegStage, Outcome, Role, WorkerId
from cluster.core.messages import (
    AttemptFailed,
    CancelRequest,
    Committed,
    EndRequest,
    Finished,
    FrontHello,
    FrontWelcome,
    Heartbeat,
    LegReleased,
    Refused,
    Resubmit,
    StreamLost,
    Submit,
)
from cluster.core.reports import HeldLeg, LeaseInfo, LiveRequest
from tests.support.coordinator import D0, FRONT, P0, TIMELINE, Bench, make_config, make_hello, make_load, only

R1 = AttemptId("r", 1)
LEASE = 7
WINDOW_MS = 5_000
RUNNING = HeldLeg(attempt=R1, half=Role.DECODE, stage=LegStage.RUNNING, peer=P0)
RESERVED = HeldLeg(attempt=R1, half=Role.DECODE, stage=LegStage.RESERVED, peer=P0, lease_id=LEASE, num_blocks=3)
READING = HeldLeg(attempt=R1, half=Role.PREFILL, stage=LegStage.READING, peer=D0, lease_id=LEASE, num_blocks=3)
KEPT = HeldLeg(attempt=R1, half=Role.DECODE, stage=LegStage.FINISHED)


def come_back(bench: Bench, worker: WorkerId, *inventory: HeldLeg, fenced: tuple[WorkerId, ...] = ()) -> None:
    """A worker that has known an earlier life."""
    role = Role.PREFILL if worker == P0 else Role.DECODE
    bench.worker_says(worker, make_hello(worker, role, inventory=inventory, fenced=fenced, epoch=2))


def announce(
    bench: Bench, *, attempt: int = 1, is_running: bool = True, front: FrontId = FRONT, num_failures: int = 0
) -> None:
    live = LiveRequest(
        request_id="r",
        attempt=attempt,
        is_running=is_running,
        num_prompt_tokens=40,
        max_tokens=8,
        num_delivered=2,
        num_failures=num_failures,
    )
    bench.front_says(FrontHello(front=front, address="f:1", live=(live,), epoch=2), front)


def test_what_decode_runs_goes_on_and_nobody_hears_of_it() -> None:
    bench = Bench()
    come_back(bench, D0, RUNNING)
    announce(bench)
    assert bench.said() == [FrontWelcome(epoch=3)] and bench.phase() == "decoding"
    bench.wait_ms(WINDOW_MS)
    assert bench.commands(D0) == [] and bench.said() == [] and bench.phase() == "decoding"
    bench.worker_says(D0, Finished(attempt=R1, outcome=Outcome.LENGTH, num_output_tokens=8, timeline=TIMELINE))
    assert bench.phase() == "finished"


def test_a_push_goes_on_where_both_sides_have_it() -> None:
    bench = Bench()
    announce(bench)
    come_back(bench, P0, READING)
    assert bench.phase() == "recovering", "one side is not enough"
    come_back(bench, D0, RESERVED)
    assert bench.phase() == "prefilling"
    bench.worker_says(D0, Committed(attempt=R1, timeline=TIMELINE))
    assert bench.phase() == "decoding" and bench.state.status(bench.now_ns).num_leases == 1, "prefill's own"
    bench.release(P0, R1)
    assert bench.state.status(bench.now_ns).num_leases == 0


def test_what_workers_say_meanwhile_counts() -> None:
    """Decode commits before its front is back: there is no push to be taken over any more."""
    bench = Bench()
    come_back(bench, D0, RESERVED)
    bench.worker_says(D0, Committed(attempt=R1, timeline=TIMELINE))
    announce(bench)
    assert bench.phase() == "decoding"
    bench = Bench()
    come_back(bench, D0, RESERVED)
    bench.worker_says(D0, LegReleased(attempt=R1))
    announce(bench)
    assert bench.phase() == "recovering"


def test_an_answer_that_ended_meanwhile_stays_with_the_worker_that_keeps_it() -> None:
    bench = Bench()
    announce(bench)
    come_back(bench, D0, KEPT)
    assert bench.phase() == "finished" and bench.commands(D0)[1:] == []
    bench.worker_gone(D0)
    assert isinstance(only(bench.said()), AttemptFailed)


def test_nothing_is_placed_or_stopped_before_the_window_is_over() -> None:
    bench = Bench()
    come_back(bench, D0, RESERVED)
    come_back(bench, P0)
    bench.connect()
    bench.submit("new")
    lease = LeaseInfo(
        lease_id=LEASE, attempt=R1, side="reserved", peer=P0, num_blocks=3, size_bytes=1, age_ms=1, remaining_ms=1
    )
    assert bench.worker_says(D0, Heartbeat(load=make_load(100), leases=(lease,))) == []
    bench.wait_ms(WINDOW_MS - 1)
    assert bench.effects == [] and bench.phase("new") == "queued"
    bench.beat(D0, P0)
    bench.wait_ms(1)
    cancel, stopped, reserve = bench.commands(D0)
    assert isinstance(cancel, CancelLeg) and isinstance(stopped, SenderStopped), "prefill never heard of it"
    assert cancel.attempt == stopped.attempt == R1 and isinstance(reserve, Reserve)


def test_the_window_ends_early_once_everybody_is_back() -> None:
    bench = Bench()
    for name in ("d0", "d1"):
        bench.worker_says(WorkerId(name, 1), make_hello(WorkerId(name, 1), Role.DECODE, epoch=2))
    bench.connect()
    bench.submit("new")
    bench.worker_says(P0, make_hello(P0, Role.PREFILL, epoch=2))
    assert bench.phase("new") == "queued"
    later = WorkerId("p1", 1)
    bench.worker_says(later, make_hello(later, Role.PREFILL))
    assert bench.phase("new") == "reserving"


def test_a_cluster_that_starts_has_no_window() -> None:
    bench = Bench()
    bench.connect()
    bench.join(P0, D0)
    bench.submit("new")
    assert bench.phase("new") == "reserving"


def test_a_sender_with_a_write_that_may_still_land_is_waited_for() -> None:
    """Its push is over and its lease with it; the leg is all that tells of the write."""
    bench = Bench()
    come_back(bench, D0, RESERVED)
    come_back(bench, P0, HeldLeg(attempt=R1, half=Role.PREFILL, stage=LegStage.CLOSING, peer=D0))
    bench.wait_ms(1_000)
    bench.beat(D0, P0)
    bench.wait_ms(WINDOW_MS - 1_000)
    assert [type(command) for command in bench.commands(D0)] == [CancelLeg]
    bench.release(P0, R1)
    assert bench.commands(D0) == [SenderStopped(attempt=R1)]
    bench.release(D0, R1)
    bench.assert_nothing_left()


def test_what_no_worker_has_is_tried_again_from_what_was_delivered() -> None:
    bench = Bench(make_config(with_prefill=False))
    announce(bench)
    come_back(bench, D0)
    bench.wait_ms(WINDOW_MS)
    assert isinstance(only(bench.said()), AttemptFailed)
    bench.front_says(Resubmit(request_id="r", failed_attempt=1, num_delivered=2))
    assert only(bench.commands(D0)).attempt == AttemptId("r", 2)  # type: ignore[union-attr]


def test_a_request_that_has_failed_too_often_ends_with_the_window() -> None:
    bench = Bench(make_config(max_attempts=2))
    announce(bench, attempt=2, num_failures=1)
    bench.wait_ms(WINDOW_MS)
    assert isinstance(only(bench.said()), EndRequest)


def test_numbers_of_attempts_never_come_again() -> None:
    """Known from a worker's inventory, or from the front that counts what an earlier life may have begun."""
    for floor, expected in ((0, 2), (100_000, 100_001)):
        bench = Bench(make_config(with_prefill=False))
        come_back(bench, D0, RUNNING)
        bench.connect()
        bench.front_says(Submit(request_id="r", num_prompt_tokens=40, max_tokens=8, attempt_floor=floor))
        bench.wait_ms(WINDOW_MS)
        cancel, run = bench.commands(D0)
        assert isinstance(cancel, CancelLeg) and cancel.attempt == R1
        assert run.attempt == AttemptId("r", expected)  # type: ignore[union-attr]


def test_a_live_request_is_not_run_twice_when_it_comes_from_another_front() -> None:
    bench = Bench()
    other = FrontId("other", 1)
    bench.connect(other)
    come_back(bench, D0, RUNNING)
    submit = Submit(request_id="r", num_prompt_tokens=40, max_tokens=8)
    bench.front_says(submit, other)
    announce(bench)
    refused = only(bench.said(other))
    assert isinstance(refused, Refused) and refused.is_duplicate and bench.dropped() == ["r"]
    assert bench.phase() == "decoding"
    bench.front_says(submit, other)
    refused = only(bench.said(other))
    assert isinstance(refused, Refused) and refused.is_duplicate and bench.dropped() == []


def test_who_leaves_in_the_window_leaves_nothing_behind() -> None:
    """The client, the front, or decode, with the request not taken over yet."""
    bench = Bench()
    announce(bench)
    come_back(bench, D0, RESERVED)
    bench.front_says(CancelRequest(request_id="r", outcome=Outcome.CANCELLED, reason="left"))
    assert isinstance(only(bench.commands(D0)), CancelLeg) and bench.phase() is None
    bench = Bench()
    announce(bench)
    come_back(bench, D0, RESERVED)
    bench.front_gone()
    assert isinstance(only(bench.commands(D0)), CancelLeg) and bench.phase() is None
    bench = Bench()
    announce(bench)
    come_back(bench, D0, RESERVED)
    bench.worker_gone(D0)
    come_back(bench, P0, READING)
    assert bench.phase() == "recovering"
    bench = Bench()
    announce(bench)
    bench.front_says(StreamLost(attempt=R1, worker=D0, reason="reset"))
    assert bench.phase() == "waiting_front"


def test_an_epoch_that_is_too_low_is_raised_above_what_anybody_has_seen() -> None:
    bench = Bench()
    bench.worker_says(D0, make_hello(D0, Role.DECODE, epoch=9))
    assert bench.state.status(bench.now_ns).epoch == 10
    bench.front_says(FrontHello(front=FRONT, address="f:1", epoch=10))
    assert bench.state.status(bench.now_ns).epoch == 10, "it has been welcomed by this life"


def test_a_life_that_was_cut_off_meanwhile_may_not_come_back() -> None:
    bench = Bench()
    come_back(bench, P0, READING)
    come_back(bench, D0, fenced=(P0,))
    assert bench.given_up() == [P0]
