"""ClusterState: the normal life of a request, and its end in every phase."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.core.commands import CancelLeg, Prefill, Reserve, RunLocal, SenderStopped
from cluster.core.ids import AttemptId, FrontId, Outcome
from cluster.core.messages import (
    GRANTED_BLOCK_BYTES,
    AttemptFailed,
    CancelRequest,
    Committed,
    EndRequest,
    Finished,
    FrontHello,
    FrontWelcome,
    Placed,
    PrefillDone,
    Refused,
    RequestDone,
    ReserveRefused,
    Resubmit,
    StreamLost,
    Submit,
)
from cluster.core.reports import LiveRequest
from tests.support.coordinator import D0, D1, FRONT, P0, TIMELINE, Bench, make_config, only

R1 = AttemptId("r", 1)
R2 = AttemptId("r", 2)
CANCEL = CancelRequest(request_id="r", outcome=Outcome.CANCELLED, reason="client left")


def _bench(**limits: Any) -> Bench:
    bench = Bench(make_config(**limits))
    bench.connect()
    bench.join(P0, D0)
    return bench


# ---- the normal life ------------------------------------------------------------------------------------------


def test_disaggregated_from_submit_to_done() -> None:
    bench = _bench()
    bench.submit()
    reserve = only(bench.commands(D0))
    assert isinstance(reserve, Reserve)
    assert (reserve.attempt, reserve.num_tokens, reserve.ttl_ms) == (R1, 41, 10_000)
    assert reserve.source.worker == P0 and reserve.lease_id >> 32 == 3
    assert bench.commands(P0) == [] and bench.said() == [] and bench.phase() == "reserving"

    bench.now_ns += 2_000_000
    bench.grant(R1)
    prefill = only(bench.commands(P0))
    assert isinstance(prefill, Prefill)
    assert (prefill.attempt, prefill.lease_id, prefill.ttl_ms) == (R1, reserve.lease_id, 9_000)
    assert prefill.destination.worker == D0 and len(prefill.blocks) == 2 * GRANTED_BLOCK_BYTES
    placed = only(bench.said())
    assert isinstance(placed, Placed) and placed.attempt == R1 and placed.epoch == 3
    assert placed.prefill is not None and placed.prefill.worker == P0 and placed.decode.worker == D0
    assert (placed.queued_ms, placed.reserved_ms) == (0.0, 2.0)
    assert bench.phase() == "prefilling"
    assert [view.side for view in bench.state.leases(bench.now_ns)] == ["reserved", "held"]

    bench.worker_says(P0, PrefillDone(attempt=R1, outcome=None, timeline=TIMELINE))
    assert bench.effects == [] and bench.phase() == "prefilling"

    bench.worker_says(D0, Committed(attempt=R1, timeline=TIMELINE))
    assert bench.phase() == "decoding"
    assert [view.side for view in bench.state.leases(bench.now_ns)] == ["held"]
    bench.release(P0, R1)
    assert bench.effects == [] and bench.state.leases(bench.now_ns) == ()
    bench.worker_says(D0, Finished(attempt=R1, outcome=Outcome.LENGTH, num_output_tokens=8, timeline=TIMELINE))
    assert bench.effects == [] and bench.phase() == "finished" and bench.num_legs(D0) == 0
    bench.front_says(RequestDone(request_id="r", outcome=Outcome.LENGTH, num_output_tokens=8))
    assert bench.dropped() == ["r"] and len(bench.effects) == 1
    bench.assert_nothing_left()


def test_the_first_token_can_be_the_last() -> None:
    bench = _bench()
    bench.submit()
    bench.grant(R1)
    bench.worker_says(P0, PrefillDone(attempt=R1, outcome=Outcome.STOP, timeline=TIMELINE))
    assert [type(body) for body in bench.commands(D0)] == [CancelLeg] and bench.said() == []
    assert bench.phase() == "finished"
    bench.front_says(RequestDone(request_id="r", outcome=Outcome.STOP, num_output_tokens=1))
    assert bench.dropped() == ["r"] and [type(body) for body in bench.commands(P0)] == [CancelLeg]
    bench.release(P0, R1)
    assert bench.commands(D0) == [SenderStopped(attempt=R1)]
    bench.release(D0, R1)
    bench.assert_nothing_left()


def test_a_cluster_without_prefill_workers_runs_locally() -> None:
    bench = Bench(make_config(with_prefill=False))
    bench.connect()
    bench.join(D0)
    bench.submit()
    assert bench.commands(D0) == [RunLocal(attempt=R1)]
    placed = only(bench.said())
    assert isinstance(placed, Placed) and placed.prefill is None and placed.decode.worker == D0
    assert bench.phase() == "local" and bench.state.leases(bench.now_ns) == ()
    bench.worker_says(D0, Finished(attempt=R1, outcome=Outcome.STOP, num_output_tokens=3, timeline=TIMELINE))
    bench.front_says(RequestDone(request_id="r", outcome=Outcome.STOP, num_output_tokens=3))
    bench.assert_nothing_left()


def test_a_stop_string_found_by_the_front_stops_decode() -> None:
    bench = _bench()
    bench.run_to_decoding()
    bench.front_says(RequestDone(request_id="r", outcome=Outcome.STOP, num_output_tokens=3))
    assert [type(body) for body in bench.commands(D0)] == [CancelLeg] == [type(body) for body in bench.commands(P0)]
    bench.release(D0, R1)
    bench.release(P0, R1)
    assert bench.effects == []
    bench.assert_nothing_left()


def test_a_second_submit_is_ignored() -> None:
    bench = _bench()
    bench.submit()
    assert bench.submit() == [] and bench.phase() == "reserving"


def test_a_submit_of_another_fronts_id_is_refused_and_leaves_the_first_alone() -> None:
    bench = _bench()
    bench.submit()
    other = FrontId("g", 1)
    bench.connect(other)
    bench.front_says(Submit(request_id="r", num_prompt_tokens=5, max_tokens=1), other)
    refused = only(bench.said(other))
    assert isinstance(refused, Refused) and refused.outcome is Outcome.REJECTED_INVALID
    assert bench.dropped() == [] and bench.phase() == "reserving"
    for message in (CANCEL, RequestDone(request_id="r", outcome=Outcome.STOP, num_output_tokens=0)):
        assert bench.front_says(message, other) == []


# ---- reservation refused --------------------------------------------------------------------------------------


def test_a_refused_reservation_is_placed_on_another_decode_worker_at_once() -> None:
    bench = _bench()
    bench.join(D1)
    bench.submit()
    bench.worker_says(D0, ReserveRefused(attempt=R1, reason="no blocks"))
    assert bench.commands(D0) == [] and bench.said() == []
    reserve = only(bench.commands(D1))
    assert isinstance(reserve, Reserve) and reserve.attempt == R2


def test_a_refused_reservation_waits_a_short_time_for_the_only_decode_worker() -> None:
    bench = _bench()
    bench.submit()
    bench.worker_says(D0, ReserveRefused(attempt=R1, reason="no blocks"))
    assert bench.effects == [] and bench.phase() == "queued"
    bench.wait_ms(49)
    assert bench.effects == []
    bench.wait_ms(1)
    assert isinstance(only(bench.commands(D0)), Reserve)


def test_refusals_never_use_attempts_up_and_end_at_the_queues_deadline() -> None:
    bench = _bench(max_attempts=1, queue_timeout_s=0.5)
    bench.submit()
    for number in range(1, 11):
        bench.worker_says(D0, ReserveRefused(attempt=AttemptId("r", number), reason="no blocks"))
        assert bench.said() == []
        bench.wait_ms(50)
    refused = only(bench.said())
    assert isinstance(refused, Refused) and refused.outcome is Outcome.REJECTED_OVERLOAD
    assert "no place in 500 ms" in refused.reason and refused.retry_after_ms is not None
    assert bench.dropped() == ["r"]
    bench.assert_nothing_left()


def test_a_reservation_that_is_not_answered_is_given_up() -> None:
    bench = _bench()
    bench.submit()
    bench.now_ns += 9_000_000_000
    bench.beat(P0, D0)
    bench.wait_ms(1_000)
    assert [type(body) for body in bench.commands(D0)] == [CancelLeg, SenderStopped]
    assert bench.phase() == "queued" and bench.num_legs(P0) == 0
    bench.grant(R1)
    assert bench.commands(P0) == [] and bench.said() == []
    bench.release(D0, R1)
    bench.wait_ms(50)
    reserve = only(bench.commands(D0))
    assert isinstance(reserve, Reserve) and reserve.attempt == R2


# ---- cancellation in every phase ------------------------------------------------------------------------------


def test_cancel_while_queued() -> None:
    bench = Bench()
    bench.connect()
    bench.submit()
    assert bench.phase() == "queued"
    bench.front_says(CANCEL)
    assert bench.dropped() == ["r"] and len(bench.effects) == 1
    bench.join(P0, D0)
    bench.assert_nothing_left()


def test_cancel_while_reserving() -> None:
    bench = _bench()
    bench.submit()
    bench.front_says(CANCEL)
    assert [type(body) for body in bench.commands(D0)] == [CancelLeg, SenderStopped]
    assert bench.commands(P0) == [] and bench.said() == [] and bench.dropped() == ["r"]
    assert bench.grant(R1) == [], "a grant that crossed the cancel starts nothing"
    assert bench.release(D0, R1) == []
    bench.assert_nothing_left()


def test_cancel_while_reserving_meets_a_refusal() -> None:
    bench = _bench()
    bench.submit()
    bench.front_says(CANCEL)
    assert bench.worker_says(D0, ReserveRefused(attempt=R1, reason="no blocks")) == []
    assert bench.release(D0, R1) == []
    bench.assert_nothing_left()


@pytest.mark.parametrize("decode_first", [False, True])
def test_cancel_while_prefilling(decode_first: bool) -> None:
    bench = _bench()
    bench.submit()
    bench.grant(R1)
    bench.front_says(CANCEL)
    assert [type(body) for body in bench.commands(P0)] == [CancelLeg] == [type(body) for body in bench.commands(D0)]
    if decode_first:
        assert bench.release(D0, R1) == []
        assert bench.release(P0, R1) == []
    else:
        bench.release(P0, R1)
        assert bench.commands(D0) == [SenderStopped(attempt=R1)]
        assert bench.release(D0, R1) == []
    bench.assert_nothing_left()


def test_cancel_crosses_the_commit() -> None:
    bench = _bench()
    bench.submit()
    bench.grant(R1)
    bench.front_says(CANCEL)
    bench.worker_says(D0, Committed(attempt=R1, timeline=TIMELINE))
    assert bench.effects == []
    assert bench.release(P0, R1) == [], "decode owns its blocks: nothing to be told"
    assert bench.release(D0, R1) == []
    bench.assert_nothing_left()


def test_cancel_while_decoding() -> None:
    bench = _bench()
    bench.run_to_decoding()
    bench.release(P0, R1)
    bench.front_says(CANCEL)
    assert [type(body) for body in bench.commands(D0)] == [CancelLeg] and bench.commands(P0) == []
    bench.release(D0, R1)
    bench.assert_nothing_left()


def test_cancel_while_local() -> None:
    bench = Bench(make_config(with_prefill=False))
    bench.connect()
    bench.join(D0)
    bench.submit()
    bench.front_says(CANCEL)
    assert [type(body) for body in bench.commands(D0)] == [CancelLeg]
    bench.release(D0, R1)
    bench.assert_nothing_left()


def test_cancel_while_finished_and_while_waiting_for_the_front() -> None:
    bench = _bench()
    bench.run_to_decoding()
    bench.release(P0, R1)
    bench.worker_says(D0, Finished(attempt=R1, outcome=Outcome.STOP, num_output_tokens=2, timeline=TIMELINE))
    bench.front_says(CANCEL)
    assert bench.dropped() == ["r"] and len(bench.effects) == 1
    bench.run_to_decoding("s")
    bench.front_says(StreamLost(attempt=AttemptId("s", 1), worker=D0, reason="reset"))
    assert bench.phase("s") == "waiting_front"
    bench.front_says(CancelRequest(request_id="s", outcome=Outcome.CANCELLED, reason="client left"))
    assert bench.dropped() == ["s"]


def test_messages_about_what_is_over_are_ignored() -> None:
    bench = _bench()
    bench.run_to_decoding()
    bench.front_says(CANCEL)
    bench.release(P0, R1)
    bench.release(D0, R1)
    bench.assert_nothing_left()
    for worker in (P0, D0):
        assert bench.worker_says(worker, PrefillDone(attempt=R1, outcome=None, timeline=TIMELINE)) == []
        assert bench.worker_says(worker, Committed(attempt=R1, timeline=TIMELINE)) == []
        finished = Finished(attempt=R1, outcome=Outcome.STOP, num_output_tokens=1, timeline=TIMELINE)
        assert bench.worker_says(worker, finished) == []
        assert bench.worker_says(worker, ReserveRefused(attempt=R1, reason="late")) == []
        assert bench.release(worker, R1) == []
        assert bench.grant(R1, worker) == []
    assert bench.front_says(CANCEL) == []
    bench.assert_nothing_left()


# ---- deadlines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["queued", "reserving", "prefilling", "decoding", "waiting_front"])
def test_the_clients_deadline_ends_the_request_in_any_phase(phase: str) -> None:
    bench = Bench()
    bench.connect()
    if phase != "queued":
        bench.join(P0, D0)
    bench.submit(deadline_ms=900)
    if phase not in ("queued", "reserving"):
        bench.grant(R1)
    if phase == "decoding":
        bench.worker_says(D0, Committed(attempt=R1, timeline=TIMELINE))
    if phase == "waiting_front":
        bench.front_says(StreamLost(attempt=R1, worker=D0, reason="reset"))
    assert bench.phase() == phase
    bench.wait_ms(899)
    assert bench.said() == []
    bench.wait_ms(1)
    end = only(bench.said())
    assert isinstance(end, EndRequest) and end.outcome is Outcome.DEADLINE_EXCEEDED and phase in end.reason
    assert bench.dropped() == ["r"] and bench.phase() is None


def test_the_queues_timeout_refuses_with_what_was_missing() -> None:
    bench = Bench(make_config(queue_timeout_s=2))
    bench.connect()
    bench.join(P0)
    bench.submit()
    bench.beat(P0)
    bench.wait_ms(2_000)
    refused = only(bench.said())
    assert isinstance(refused, Refused) and refused.outcome is Outcome.REJECTED_OVERLOAD
    assert "no decode worker is alive" in refused.reason and refused.retry_after_ms == 1_000
    bench.assert_nothing_left()


def test_the_deadline_of_a_finished_request_has_been_met() -> None:
    bench = _bench()
    bench.submit(deadline_ms=900)
    bench.grant(R1)
    bench.worker_says(D0, Committed(attempt=R1, timeline=TIMELINE))
    bench.worker_says(D0, Finished(attempt=R1, outcome=Outcome.STOP, num_output_tokens=2, timeline=TIMELINE))
    bench.wait_ms(1_000)
    assert bench.said() == [] and bench.phase() == "finished"


def test_a_front_that_never_says_done_leaves_nothing_behind() -> None:
    bench = Bench(make_config(heartbeat_timeout_s=1000))
    bench.connect()
    bench.join(P0, D0)
    bench.run_to_decoding()
    bench.release(P0, R1)
    bench.worker_says(D0, Finished(attempt=R1, outcome=Outcome.STOP, num_output_tokens=2, timeline=TIMELINE))
    bench.wait_ms(120_000)
    assert bench.dropped() == ["r"] and [type(message) for message in bench.said()] == [AttemptFailed, EndRequest]
    bench.assert_nothing_left()


# ---- fronts ---------------------------------------------------------------------------------------------------


def test_a_front_that_goes_takes_its_requests_with_it() -> None:
    bench = _bench()
    other = FrontId("g", 1)
    bench.connect(other)
    bench.run_to_decoding()
    bench.submit("s")
    bench.front_says(Submit(request_id="t", num_prompt_tokens=5, max_tokens=1), other)
    bench.front_gone()
    assert bench.dropped() == ["r", "s"] and bench.said() == []
    assert [type(body) for body in bench.commands(D0)] == [CancelLeg, CancelLeg, SenderStopped]
    assert bench.phase("t") == "reserving"
    late = Submit(request_id="u", num_prompt_tokens=5, max_tokens=1)
    assert bench.front_says(late) != [] and bench.dropped() == ["u"], "its body must not stay"
    assert bench.front_says(CANCEL) == []


def test_a_later_life_of_a_front_ends_the_one_before() -> None:
    bench = _bench()
    bench.submit()
    later = FrontId("f", 2)
    bench.connect(later)
    assert bench.dropped() == ["r"]
    assert bench.said(later) == [FrontWelcome(epoch=3)]
    bench.connect(FRONT)
    assert bench.effects == [], "an older life is not welcome"


def test_requests_a_front_still_serves_after_it_was_cut_off_are_tried_again() -> None:
    bench = _bench()
    bench.run_to_decoding()
    bench.front_gone()
    live = LiveRequest(request_id="r", attempt=1, is_running=True, num_prompt_tokens=40, max_tokens=8, num_delivered=2)
    bench.front_says(FrontHello(front=FRONT, address="f:1", live=(live,)))
    welcome, failed = bench.said()
    assert isinstance(welcome, FrontWelcome) and bench.phase() == "waiting_front"
    assert isinstance(failed, AttemptFailed) and failed.attempt == R1


# ---- a failed attempt -----------------------------------------------------------------------------------------


def test_resubmit_goes_on_after_what_was_delivered() -> None:
    bench = _bench()
    bench.run_to_decoding()
    bench.release(P0, R1)
    bench.front_says(StreamLost(attempt=R1, worker=D0, reason="reset"))
    failed = only(bench.said())
    assert isinstance(failed, AttemptFailed) and failed.attempt == R1 and "reset" in failed.reason
    assert [type(body) for body in bench.commands(D0)] == [CancelLeg] and bench.dropped() == []
    bench.release(D0, R1)
    bench.now_ns += 5_000_000
    bench.front_says(Resubmit(request_id="r", failed_attempt=1, num_delivered=3))
    reserve = only(bench.commands(D0))
    assert isinstance(reserve, Reserve) and reserve.attempt == R2 and reserve.num_tokens == 44
    bench.now_ns += 1_000_000
    bench.grant(R2)
    placed = only(bench.said())
    assert isinstance(placed, Placed) and (placed.queued_ms, placed.reserved_ms) == (0.0, 1.0)


def test_an_attempt_counts_the_answers_that_are_still_to_be_written() -> None:
    """Eight places in decode's batch: five answers and four do not fit; once three of the five have ended they do."""
    bench = _bench()
    bench.submit(num_choices=5)
    bench.grant(R1)
    bench.worker_says(P0, PrefillDone(attempt=R1, outcome=None, timeline=TIMELINE))
    bench.worker_says(D0, Committed(attempt=R1, timeline=TIMELINE))
    bench.release(P0, R1)
    bench.submit("s", num_choices=4)
    assert bench.phase("s") == "queued"
    bench.front_says(StreamLost(attempt=R1, worker=D0, reason="reset"))
    bench.release(D0, R1)
    bench.front_says(Resubmit(request_id="r", failed_attempt=1, num_delivered=3, num_choices=2, num_unshared=4))
    reserves = [body for body in bench.commands(D0) if isinstance(body, Reserve)]
    assert [reserve.attempt for reserve in reserves] == [R2]
    bench.grant(R2)
    assert bench.phase("s") == "reserving" and bench.num_legs(D0) == 2


def test_resubmit_goes_before_requests_admitted_later() -> None:
    bench = _bench()
    bench.run_to_decoding()
    bench.worker_gone(P0)
    bench.worker_gone(D0)
    bench.submit("s")
    bench.front_says(Resubmit(request_id="r", failed_attempt=1, num_delivered=1))
    bench.join(D1)
    assert next(body for body in bench.commands(D1) if isinstance(body, RunLocal)).attempt == R2


def test_stale_and_unknown_resubmits() -> None:
    bench = _bench()
    bench.run_to_decoding()
    assert bench.front_says(Resubmit(request_id="r", failed_attempt=1, num_delivered=1)) == [], "nothing has failed"
    bench.front_says(StreamLost(attempt=R1, worker=D0, reason="reset"))
    assert bench.front_says(Resubmit(request_id="r", failed_attempt=0, num_delivered=1)) == []
    bench.front_says(Resubmit(request_id="x", failed_attempt=1, num_delivered=1))
    end = only(bench.said())
    assert isinstance(end, EndRequest) and end.request_id == "x" and end.outcome is Outcome.WORKER_LOST


def test_stale_stream_losses_are_ignored() -> None:
    bench = _bench()
    bench.submit()
    assert bench.front_says(StreamLost(attempt=R1, worker=D0, reason="reset")) == [], "it has not heard of that attempt"
    bench.grant(R1)
    assert bench.front_says(StreamLost(attempt=R2, worker=D0, reason="reset")) == []
    assert bench.front_says(StreamLost(attempt=R1, worker=D1, reason="reset")) == [], "not a worker of it"
    assert bench.front_says(StreamLost(attempt=AttemptId("x", 1), worker=D0, reason="reset")) == []
    assert bench.phase() == "prefilling"


def test_attempts_are_bounded() -> None:
    bench = _bench(max_attempts=2)
    bench.run_to_decoding()
    bench.front_says(StreamLost(attempt=R1, worker=D0, reason="reset"))
    bench.front_says(Resubmit(request_id="r", failed_attempt=1, num_delivered=1))
    bench.grant(R2)
    bench.front_says(StreamLost(attempt=R2, worker=D0, reason="reset"))
    end = only(bench.said())
    assert isinstance(end, EndRequest) and end.outcome is Outcome.WORKER_LOST and "attempt 2 of 2" in end.reason
    assert bench.dropped() == ["r"]


def test_a_front_that_does_not_answer_a_failed_attempt_loses_the_request() -> None:
    bench = _bench()
    bench.run_to_decoding()
    bench.front_says(StreamLost(attempt=R1, worker=D0, reason="reset"))
    for worker in (P0, D0):
        bench.release(worker, R1)
    bench.now_ns += 5_000_000_000
    bench.beat(P0, D0)
    bench.wait_ms(5_000)
    end = only(bench.said())
    assert isinstance(end, EndRequest) and end.outcome is Outcome.INTERNAL
    bench.assert_nothing_left()


def test_a_retried_request_that_finds_no_place_ends_as_what_failed_it() -> None:
    bench = _bench(queue_timeout_s=1)
    bench.run_to_decoding()
    bench.worker_gone(D0)
    bench.release(P0, R1)
    bench.front_says(Resubmit(request_id="r", failed_attempt=1, num_delivered=1))
    bench.wait_ms(1_000)
    end = only(bench.said())
    assert isinstance(end, EndRequest) and end.outcome is Outcome.WORKER_LOST
    assert "no decode worker is alive" in end.reason and "stream ended" in end.reason
    bench.assert_nothing_left()
