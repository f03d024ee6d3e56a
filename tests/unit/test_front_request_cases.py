"""FrontRequest, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.core.ids import AttemptId, Outcome
from cluster.core.messages import (
    CancelRequest,
    EndRequest,
    LegTimeline,
    Refused,
    RequestDone,
    Resubmit,
    StreamLost,
    Submit,
)
from cluster.front import request_events as events
from cluster.front.request import Phase
from cluster.front.request_effects import Deliver, End, ForgetWorker, ToCoordinator, WatchWorker
from cluster.front.request_hashes import hashes_of
from cluster.front.request_spec import RequestSpec
from engine.core.block_hash import hash_blocks
from engine.core.request import RequestBody
from engine.core.sampling import SamplingParams
from tests.support.front_driver import BODY, HASHES, MS, D, Driver, P, delivered, end, sent, watch


def test_submit_carries_lengths_hashes_and_the_time_that_is_left() -> None:
    driver = Driver(deadline_ns=750 * MS, max_latency_ms=90)
    driver.now_ns = 250 * MS
    (effect,) = driver.start()
    assert effect == ToCoordinator(
        message=Submit(
            request_id="r",
            num_prompt_tokens=40,
            max_tokens=8,
            block_hashes=b"h" * 16,
            priority=3,
            tenant="t",
            cache_salt="s",
            deadline_ms=500,
            max_latency_ms=90,
        ),
        body=BODY,
    )


def test_a_disaggregated_answer() -> None:
    driver = Driver()
    driver.start()
    assert driver.place() == [WatchWorker(ref=P, watch=watch(0)), WatchWorker(ref=D, watch=watch(0))]
    first = driver.run(P, 0, 10, leg_done=True, timeline=LegTimeline(prefill_ms=5.0, kv_early_bytes=70), at_ms=20)
    assert delivered(first) == [(0, (10,))]
    assert ForgetWorker(worker=P.worker, attempt=AttemptId("r", 1)) in first
    assert delivered(driver.run(D, 0, 10, 11, at_ms=50)) == [(1, (11,))]  # decode's record begins with that token
    assert delivered(driver.run(D, 2, 12, at_ms=60)) == [(2, (12,))]
    timeline = LegTimeline(push_ms=7.0, kv_bytes=100, kv_transport="shm", num_cached_tokens=16)
    effects = driver.run(D, 3, 13, finish=Outcome.LENGTH, timeline=timeline, at_ms=72)
    assert delivered(effects) == [(3, (13,))]
    assert sent(effects) == [RequestDone(request_id="r", outcome=Outcome.LENGTH, num_output_tokens=4)]
    assert [effect.worker for effect in effects if isinstance(effect, ForgetWorker)] == [D.worker]
    report = end(effects).report
    assert (report.prefill_worker, report.decode_worker, report.num_attempts) == ("p", "d", 1)
    assert (report.queued_ms, report.reserved_ms, report.prefill_ms, report.push_ms) == (1.0, 2.0, 5.0, 7.0)
    assert (report.kv_bytes, report.kv_early_bytes, report.kv_transport) == (100, 70, "shm")
    assert (report.first_token_ms, report.decode_ms, report.num_cached_tokens) == (20.0, 52.0, 16)
    assert report.handover_gap_ms == 30.0 - 11.0
    assert driver.request.phase is Phase.ENDED and driver.request.next_deadline_ns() is None


def test_decode_may_be_heard_before_prefill() -> None:
    driver = Driver()
    driver.start()
    driver.place()
    assert delivered(driver.run(D, 0, 10, 11)) == [(0, (10, 11))]
    late = driver.run(P, 0, 10, leg_done=True, timeline=LegTimeline(prefill_ms=5.0))
    assert delivered(late) == []
    effects = driver.run(D, 2, finish=Outcome.STOP)
    assert end(effects).report.prefill_ms == 5.0


def test_the_first_token_may_end_the_request() -> None:
    driver = Driver()
    driver.start()
    driver.place()
    effects = driver.run(P, 0, 2, finish=Outcome.STOP, leg_done=True)
    assert delivered(effects) == [(0, (2,))]
    assert end(effects).outcome is Outcome.STOP
    forgotten = [effect.worker for effect in effects if isinstance(effect, ForgetWorker)]
    assert forgotten == [P.worker, D.worker]


def test_local_prefill_has_one_leg_and_no_hand_over() -> None:
    driver = Driver()
    driver.start()
    assert driver.place(prefill=None) == [WatchWorker(ref=D, watch=watch(0))]
    effects = driver.run(D, 0, 1, 2, 3, 4, finish=Outcome.LENGTH, timeline=LegTimeline(prefill_ms=3.0))
    report = end(effects).report
    assert (report.prefill_worker, report.prefill_ms, report.handover_gap_ms) == ("", 3.0, None)


def test_a_gap_is_watched_again_once() -> None:
    driver = Driver()
    driver.start()
    driver.place()
    driver.run(P, 0, 10)
    assert driver.run(D, 2, 12) == [WatchWorker(ref=D, watch=watch(1))]
    assert driver.run(D, 3, 13) == []
    assert delivered(driver.run(D, 1, 11, 12, 13)) == [(1, (11, 12, 13))]


def test_a_failed_attempt_is_resubmitted_with_what_was_delivered() -> None:
    driver = Driver()
    driver.start()
    driver.place()
    driver.run(P, 0, 10)
    driver.run(D, 1, 11)
    effects = driver.fail(1)
    assert sent(effects) == [Resubmit(request_id="r", failed_attempt=1, num_delivered=2, block_hashes=HASHES)]
    body = next(effect.body for effect in effects if isinstance(effect, ToCoordinator))
    assert body is not None and body.delivered_ids == (10, 11) and body.prompt_ids == BODY.prompt_ids
    assert len([effect for effect in effects if isinstance(effect, ForgetWorker)]) == 2
    assert driver.run(D, 2, 12) == [], "the failed attempt is over"
    assert driver.fail(1) == [], "said twice"
    assert driver.place(1) == [], "late"
    assert driver.place(2)[0] == WatchWorker(ref=P, watch=watch(2, attempt=2))
    assert delivered(driver.run(D, 2, 12, attempt=1)) == []
    assert delivered(driver.run(P, 2, 32, attempt=2)) == [(2, (32,))]
    effects = driver.run(D, 3, 33, attempt=2, finish=Outcome.STOP)
    assert end(effects).report.num_attempts == 2
    assert end(effects).report.num_output_tokens == 4


def test_what_is_asked_for_again_is_named_by_the_hashes_of_prompt_and_delivered_tokens() -> None:
    """Full blocks only; those of the prompt are the ones that were computed when the request came."""
    for num_prompt_tokens in (3, 8, 10):
        prompt_ids, extra = tuple(range(num_prompt_tokens)), b"e" * 16
        spec = RequestSpec(
            request_id="r",
            body=RequestBody(prompt_ids=prompt_ids, sampling=SamplingParams()),
            block_hashes=b"".join(hash_blocks(prompt_ids, 4, extra)),
            block_size=4,
            extra_key=extra,
        )
        for num_delivered in range(10):
            body = replace(spec.body, delivered_ids=tuple(range(100, 100 + num_delivered)))
            assert hashes_of(spec, body) == b"".join(hash_blocks(prompt_ids + body.delivered_ids, 4, extra))


def test_an_attempt_may_fail_before_it_was_placed_here() -> None:
    driver = Driver()
    driver.start()
    assert sent(driver.fail(1)) == [Resubmit(request_id="r", failed_attempt=1, num_delivered=0, block_hashes=HASHES)]
    assert len(driver.place(2)) == 2


def test_an_attempt_that_starts_from_too_few_tokens_is_refused() -> None:
    driver = Driver()
    driver.start()
    driver.place(1)
    driver.run(P, 0, 10)
    effects = driver.place(2)
    assert sent(effects) == [Resubmit(request_id="r", failed_attempt=2, num_delivered=1, block_hashes=HASHES)]
    assert driver.run(D, 1, 91, attempt=2) == []


def test_messages_of_an_older_epoch_are_ignored() -> None:
    driver = Driver()
    driver.start()
    driver.place(1, epoch=5)
    assert driver.fail(1, epoch=4) == []
    assert driver.place(2, epoch=4) == []
    assert sent(driver.fail(1, epoch=5)) != []


@pytest.mark.parametrize("retry_after_ms", [None, 250])
def test_refusal_ends_the_request(retry_after_ms: int | None) -> None:
    driver = Driver()
    driver.start()
    refused = Refused(
        request_id="r", outcome=Outcome.REJECTED_OVERLOAD, reason="queue full", retry_after_ms=retry_after_ms
    )
    (end,) = driver.handle(events.FromCoordinator(message=refused))
    assert isinstance(end, End)
    assert (end.outcome, end.reason, end.retry_after_ms) == (Outcome.REJECTED_OVERLOAD, "queue full", retry_after_ms)
    assert end.report.decode_worker == "" and end.report.queued_ms is None and end.report.first_token_ms is None


def test_the_coordinator_may_end_the_request() -> None:
    driver = Driver()
    driver.start()
    driver.place()
    message = EndRequest(epoch=1, request_id="r", outcome=Outcome.WORKER_LOST, reason="attempts used up")
    effects = driver.handle(events.FromCoordinator(message=message))
    assert sent(effects) == []
    assert end(effects).outcome is Outcome.WORKER_LOST


@pytest.mark.parametrize("placed", [False, True])
def test_a_client_that_leaves_cancels_everywhere(placed: bool) -> None:
    driver = Driver()
    driver.start()
    if placed:
        driver.place()
    effects = driver.handle(events.ClientGone(reason="the client left"))
    assert sent(effects) == [
        CancelRequest(request_id="r", outcome=Outcome.CANCELLED, reason="the client left"),
    ]
    assert len([effect for effect in effects if isinstance(effect, ForgetWorker)]) == (2 if placed else 0)
    assert end(effects).outcome is Outcome.CANCELLED
    assert driver.place(2) == []


def test_the_deadline_cancels_everywhere() -> None:
    driver = Driver(deadline_ns=30 * MS)
    driver.start()
    driver.place()
    assert driver.request.next_deadline_ns() == 30 * MS
    assert driver.handle(events.Tick(), 29) == []
    effects = driver.handle(events.Tick(), 30)
    assert isinstance(sent(effects)[0], CancelRequest)
    assert end(effects).outcome is Outcome.DEADLINE_EXCEEDED


def test_a_client_that_hangs_up_at_its_deadline_met_its_deadline() -> None:
    driver = Driver(deadline_ns=30 * MS)
    driver.start()
    assert end(driver.handle(events.ClientGone(reason="x"), 30)).outcome is Outcome.DEADLINE_EXCEEDED


def test_max_latency_counts_until_the_first_token() -> None:
    driver = Driver(max_latency_ms=30)
    driver.start()
    driver.place()
    assert driver.request.next_deadline_ns() == 30 * MS
    driver.run(P, 0, 10, at_ms=20)
    assert driver.request.next_deadline_ns() is None
    late = Driver(max_latency_ms=30)
    late.start()
    assert end(late.handle(events.Tick(), 30)).outcome is Outcome.REJECTED_OVERLOAD


def test_a_worker_out_of_reach_is_reported_once_and_in_time() -> None:
    driver = Driver()
    driver.start()
    driver.place()
    driver.handle(events.WorkerStreamLost(worker=D.worker, reason="refused"), 10)
    driver.handle(events.WorkerStreamLost(worker=D.worker, reason="again"), 20)
    assert driver.request.next_deadline_ns() == 60 * MS
    effects = driver.handle(events.Tick(), 60)
    assert sent(effects) == [StreamLost(attempt=AttemptId("r", 1), worker=D.worker, reason="refused")]
    assert driver.request.next_deadline_ns() is None
    assert driver.handle(events.Tick(), 200) == []
    driver.fail(1)
    driver.place(2)
    assert driver.request.next_deadline_ns() is None
    driver.handle(events.WorkerStreamLost(worker=D.worker, reason="refused"), 300)
    assert driver.request.next_deadline_ns() == 350 * MS, "in another attempt it matters anew"


def test_a_restored_stream_is_watched_from_the_next_position() -> None:
    driver = Driver()
    driver.start()
    driver.place()
    driver.run(P, 0, 10, leg_done=True)
    driver.handle(events.WorkerStreamLost(worker=D.worker, reason="cut"), 10)
    assert driver.handle(events.WorkerStreamRestored(worker=D.worker), 20) == [WatchWorker(ref=D, watch=watch(1))]
    assert driver.request.next_deadline_ns() is None
    assert driver.handle(events.WorkerStreamRestored(worker=P.worker), 20) == [], "prefill has said everything"


def test_prefill_is_not_missed_once_the_first_token_is_here() -> None:
    driver = Driver()
    driver.start()
    driver.place()
    driver.handle(events.WorkerStreamLost(worker=P.worker, reason="cut"), 10)
    assert driver.request.next_deadline_ns() == 60 * MS
    driver.run(D, 0, 10)
    assert driver.request.next_deadline_ns() is None


def test_a_lost_coordinator_does_not_disturb_what_runs() -> None:
    driver = Driver()
    driver.start()
    driver.place()
    driver.run(P, 0, 10)
    driver.handle(events.CoordinatorLost(), 10)
    assert driver.request.next_deadline_ns() is None
    live = driver.request.live(15 * MS)
    assert live is not None and live.is_running
    assert (live.request_id, live.attempt, live.num_delivered, live.num_failures) == ("r", 1, 1, 0)
    assert driver.handle(events.CoordinatorRegained(epoch=2), 20) == []
    assert end(driver.run(D, 1, 11, finish=Outcome.STOP)).outcome is Outcome.STOP


def test_what_waits_for_the_coordinator_asks_again_or_gives_up() -> None:
    driver = Driver()
    driver.start()
    driver.handle(events.CoordinatorLost(), 10)
    driver.handle(events.CoordinatorLost(), 50)
    assert driver.request.next_deadline_ns() == 110 * MS
    assert driver.request.live(55 * MS) is None, "it was never placed, and is submitted again"
    assert isinstance(sent(driver.handle(events.CoordinatorRegained(epoch=1), 60))[0], Submit)
    driver.fail(1)
    driver.handle(events.CoordinatorLost(), 70)
    again = sent(driver.handle(events.CoordinatorRegained(epoch=1), 80))[0]
    assert isinstance(again, Resubmit) and again.attempt_floor == 0
    driver.handle(events.CoordinatorLost(), 82)
    live = driver.request.live(83 * MS)
    assert live is not None and not live.is_running and live.num_failures == 1
    again = sent(driver.handle(events.CoordinatorRegained(epoch=2), 84))[0]
    assert isinstance(again, Resubmit) and again.attempt_floor > 1, "the earlier life may have begun others"
    driver.handle(events.CoordinatorLost(), 90)
    assert end(driver.handle(events.Tick(), 190)).outcome is Outcome.WORKER_LOST


def test_the_end_of_the_output_is_searched_for_stop_strings_first() -> None:
    for matched in (False, True):
        driver = Driver(has_stop_strings=True)
        driver.start()
        driver.place()
        driver.run(P, 0, 10)
        (deliver,) = driver.run(D, 1, 11, 12, finish=Outcome.LENGTH)
        assert isinstance(deliver, Deliver) and deliver.last
        assert driver.run(D, 1, 11, 12, finish=Outcome.LENGTH) == [], "said twice"
        matched_event = events.StopMatched(choice=0, num_tokens=2)
        effects = driver.handle(matched_event if matched else events.NoStopMatched(choice=0))
        outcome, num_tokens = (Outcome.STOP, 2) if matched else (Outcome.LENGTH, 3)
        assert sent(effects) == [RequestDone(request_id="r", outcome=outcome, num_output_tokens=num_tokens)]
        assert end(effects).outcome is outcome
        assert end(effects).report.num_output_tokens == num_tokens


def test_a_stop_string_ends_a_running_request() -> None:
    driver = Driver(has_stop_strings=True)
    driver.start()
    driver.place()
    driver.run(P, 0, 10)
    effects = driver.handle(events.StopMatched(choice=0, num_tokens=1))
    assert sent(effects) == [RequestDone(request_id="r", outcome=Outcome.STOP, num_output_tokens=1)]
    assert driver.run(D, 1, 11) == []


def test_a_request_that_is_cut_reports_what_has_reached_it() -> None:
    prefill = LegTimeline(prefill_ms=5.0, num_cached_tokens=16, kv_transport="shm")
    decode = LegTimeline(push_ms=7.0, kv_bytes=100, kv_early_bytes=70, kv_transport="shm", num_cached_tokens=16)
    for num_known in range(4):
        driver = Driver(has_stop_strings=True)
        driver.start()
        if num_known >= 1:
            driver.place()
        if num_known >= 2:
            driver.run(P, 0, 10, leg_done=True, timeline=prefill, at_ms=20)
        if num_known >= 3:
            driver.run(D, 0, 10, 11, timeline=decode, at_ms=30)
            effects = driver.handle(events.StopMatched(choice=0, num_tokens=2))
        else:
            effects = driver.handle(events.ClientGone(reason="x"))
        report = end(effects).report
        placed = ("p", "d", 1, 1.0) if num_known >= 1 else ("", "", 0, None)
        assert (report.prefill_worker, report.decode_worker, report.num_attempts, report.queued_ms) == placed
        computed = (5.0, 20.0, 16, "shm") if num_known >= 2 else (None, None, None, "")
        told = (report.prefill_ms, report.first_token_ms, report.num_cached_tokens, report.kv_transport)
        assert told == computed
        pushed = (100, 70, 7.0) if num_known >= 3 else (None, None, None)
        assert (report.kv_bytes, report.kv_early_bytes, report.push_ms) == pushed


def test_a_request_without_a_push_has_moved_nothing() -> None:
    driver = Driver()
    driver.start()
    driver.place(prefill=None)
    report = end(driver.handle(events.ClientGone(reason="x"))).report
    assert (report.kv_bytes, report.kv_early_bytes, report.num_cached_tokens) == (0, 0, None)


def test_nothing_comes_before_start() -> None:
    with pytest.raises(AssertionError):
        Driver().place()
