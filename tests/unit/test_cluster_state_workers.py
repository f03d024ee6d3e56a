"""ClusterState: registration, loss and silence of workers, failing legs, and the lease ledger."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.core.commands import (
    CancelLeg,
    PeerLost,
    Reserve,
    RunLocal,
    SendBlockSnapshot,
    SenderStopped,
    WorkerRefused,
    WorkerWelcome,
)
from cluster.core.ids import AttemptId, LegStage, Outcome, Role, WorkerId
from cluster.core.limits import MAX_HEARTBEAT_MS
from cluster.core.messages import (
    BLOCK_HASH_BYTES,
    AttemptFailed,
    BlockEvents,
    BlockRun,
    Committed,
    EndRequest,
    Finished,
    Heartbeat,
    LegFailed,
    PeerFenced,
    Placed,
    PrefillDone,
    ReserveRefused,
    Resubmit,
)
from cluster.core.reports import HeldLeg, LeaseInfo
from tests.support.coordinator import D0, D1, P0, P1, TIMELINE, Bench, make_config, make_hello, make_load, only

R1 = AttemptId("r", 1)
R2 = AttemptId("r", 2)


def _bench(*more: WorkerId, **limits: Any) -> Bench:
    bench = Bench(make_config(**limits))
    bench.connect()
    bench.join(P0, D0, *more)
    return bench


def _finished(outcome: Outcome = Outcome.STOP) -> Finished:
    return Finished(attempt=R1, outcome=outcome, num_output_tokens=2, timeline=TIMELINE)


# ---- leaving --------------------------------------------------------------------------------------------------


@pytest.mark.bad_day(8)
def test_a_worker_that_leaves_gets_no_new_work_and_keeps_what_it_has() -> None:
    bench = _bench()
    bench.submit("r")
    bench.worker_says(P0, Heartbeat(load=make_load(100), is_leaving=True))
    bench.grant(R1)
    assert bench.commands(P0), "what was placed before is carried out"
    bench.submit("s")
    assert bench.commands(P0) == [] and isinstance(only(bench.commands(D0)), RunLocal)
    bench.worker_gone(P0)
    bench.join(WorkerId(P0.name, 2))
    bench.submit("t")
    assert isinstance(only(bench.commands(D0)), Reserve), "its next life is a worker like any other"


# ---- registration ---------------------------------------------------------------------------------------------


def test_a_worker_is_welcomed_with_its_heartbeat_interval() -> None:
    bench = Bench(make_config(heartbeat_timeout_s=2))
    bench.join(P0)
    assert bench.commands(P0) == [WorkerWelcome(heartbeat_ms=400)]
    slow = Bench(make_config(heartbeat_timeout_s=60))
    slow.join(P0)
    assert slow.commands(P0) == [WorkerWelcome(heartbeat_ms=MAX_HEARTBEAT_MS)]


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        (make_hello(P1, Role.PREFILL, compatibility="layout-b"), ("p1#1", "layout-b", "d0#1", "layout-a", "float32")),
        (make_hello(P1, Role.PREFILL, pool="x"), ("'x'", "p, d")),
        (make_hello(P1, Role.PREFILL, pool="d"), ("prefill", "decode", "'d'")),
        (make_hello(P1, Role.PREFILL, block_size=32), ("32", "16")),
    ],
)
def test_a_worker_that_does_not_match_is_refused_with_both_sides_values(hello: object, said: tuple[str, ...]) -> None:
    bench = Bench()
    bench.join(D0)
    bench.worker_says(P1, hello)  # type: ignore[arg-type]
    refused = only(bench.commands(P1))
    assert isinstance(refused, WorkerRefused)
    assert all(part in refused.reason for part in said), refused.reason
    assert bench.worker_says(P1, Heartbeat(load=make_load(1))) == []


def test_a_lost_life_stays_lost_and_an_older_one_is_refused() -> None:
    bench = _bench()
    bench.worker_gone(P0)
    assert bench.given_up() == [P0]
    bench.join(P0)
    refused = only(bench.commands(P0))
    assert isinstance(refused, WorkerRefused) and "lost" in refused.reason
    bench.join(WorkerId("p0", 5))
    assert isinstance(only(bench.commands(WorkerId("p0", 5))), WorkerWelcome)
    bench.join(WorkerId("p0", 3))
    refused = only(bench.commands(WorkerId("p0", 3)))
    assert isinstance(refused, WorkerRefused) and "p0#5" in refused.reason


def test_a_life_that_ended_before_it_registered_stays_lost() -> None:
    bench = Bench()
    assert bench.worker_gone(P0) == []
    bench.join(P0)
    assert isinstance(only(bench.commands(P0)), WorkerRefused)


def test_a_later_life_ends_the_one_before() -> None:
    bench = _bench()
    bench.run_to_decoding()
    later = WorkerId("d0", 2)
    bench.join(later)
    assert bench.given_up() == [D0]
    assert isinstance(only(bench.said()), AttemptFailed)
    assert isinstance(bench.commands(later)[0], WorkerWelcome)
    assert PeerLost(peer=D0) in bench.commands(P0)


def test_a_layout_is_free_again_once_no_other_worker_has_one() -> None:
    bench = Bench()
    bench.join(D0)
    later = WorkerId("d0", 2)
    bench.worker_says(later, make_hello(later, Role.DECODE, compatibility="layout-b"))
    assert isinstance(only(bench.commands(later)), WorkerWelcome)


def test_a_second_hello_changes_nothing() -> None:
    bench = _bench()
    bench.submit()
    bench.join(D0)
    assert isinstance(only(bench.commands(D0)), WorkerWelcome) and bench.given_up() == []
    assert bench.phase() == "reserving"


def test_attempts_in_a_new_workers_inventory_are_cancelled() -> None:
    bench = Bench()
    held = HeldLeg(attempt=R1, half=Role.DECODE, stage=LegStage.RUNNING)
    bench.worker_says(D0, make_hello(D0, Role.DECODE, inventory=(held,)))
    welcome, cancel = bench.commands(D0)
    assert isinstance(welcome, WorkerWelcome) and isinstance(cancel, CancelLeg) and cancel.attempt == R1


# ---- loss -----------------------------------------------------------------------------------------------------


def test_prefill_lost_while_reserving_is_not_the_fronts_business() -> None:
    bench = _bench(P1)
    bench.submit()
    bench.worker_gone(P0)
    assert bench.said() == []
    kinds = [type(body) for body in bench.commands(D0)]
    assert kinds == [PeerLost, CancelLeg, Reserve]
    reserve = bench.commands(D0)[2]
    assert isinstance(reserve, Reserve) and reserve.source.worker == P1 and reserve.attempt == R2


def test_decode_lost_while_reserving_is_not_the_fronts_business() -> None:
    bench = _bench(D1)
    bench.submit()
    bench.worker_gone(D0)
    assert bench.said() == [] and bench.commands(P0) == []
    assert isinstance(only(bench.commands(D1)), Reserve)


@pytest.mark.parametrize("has_read", [False, True])
def test_prefill_lost_before_the_commit_fails_the_attempt(has_read: bool) -> None:
    bench = _bench()
    bench.submit()
    bench.grant(R1)
    if has_read:
        bench.worker_says(P0, PrefillDone(attempt=R1, outcome=None, timeline=TIMELINE))
    bench.worker_gone(P0)
    assert bench.given_up() == [P0]
    failed = only(bench.said())
    assert isinstance(failed, AttemptFailed) and "p0#1" in failed.reason
    assert [type(body) for body in bench.commands(D0)] == [PeerLost, CancelLeg]
    assert [view.holder for view in bench.state.leases(bench.now_ns)] == [D0]
    bench.worker_says(D0, PeerFenced(peer=P0))
    assert bench.state.leases(bench.now_ns) == () and bench.given_up() == []
    bench.release(D0, R1)
    bench.front_says(Resubmit(request_id="r", failed_attempt=1, num_delivered=0))
    assert bench.commands(D0) == [RunLocal(attempt=R2, is_trial=not has_read)], "no prefill worker is left"


def test_prefill_lost_after_the_commit_harms_nobody() -> None:
    bench = _bench()
    bench.run_to_decoding()
    bench.worker_gone(P0)
    assert bench.said() == [] and bench.commands(D0) == [] and bench.phase() == "decoding"
    bench.worker_says(D0, _finished())
    assert bench.phase() == "finished" and bench.said() == []


def test_decode_lost_in_the_middle_of_the_answer() -> None:
    bench = _bench(D1)
    bench.run_to_decoding()
    bench.worker_gone(D0)
    failed = only(bench.said())
    assert isinstance(failed, AttemptFailed) and failed.attempt == R1
    assert [type(body) for body in bench.commands(P0)] == [PeerLost, CancelLeg]
    bench.release(P0, R1)
    bench.front_says(Resubmit(request_id="r", failed_attempt=1, num_delivered=4))
    reserve = only(bench.commands(D1))
    assert isinstance(reserve, Reserve) and reserve.num_tokens == 45


@pytest.mark.parametrize("by_prefill", [False, True])
def test_the_worker_that_drew_the_last_token_is_needed_until_the_front_is_done(by_prefill: bool) -> None:
    bench = _bench()
    if by_prefill:
        bench.submit()
        bench.grant(R1)
        bench.worker_says(P0, PrefillDone(attempt=R1, outcome=Outcome.STOP, timeline=TIMELINE))
    else:
        bench.run_to_decoding()
        bench.worker_says(D0, _finished())
    bench.worker_gone(P0 if by_prefill else D0)
    assert isinstance(only(bench.said()), AttemptFailed) and bench.phase() == "waiting_front"


def test_the_other_worker_is_not_needed_after_the_last_token() -> None:
    bench = _bench()
    bench.run_to_decoding()
    bench.worker_says(D0, _finished())
    bench.worker_gone(P0)
    assert bench.said() == [] and bench.phase() == "finished"


def test_a_lost_worker_of_a_local_request() -> None:
    bench = Bench(make_config(with_prefill=False))
    bench.connect()
    bench.join(D0, D1)
    bench.submit()
    bench.worker_gone(D0)
    assert isinstance(only(bench.said()), AttemptFailed)
    bench.front_says(Resubmit(request_id="r", failed_attempt=1, num_delivered=1))
    assert bench.commands(D1) == [RunLocal(attempt=R2, is_trial=True)]


def test_a_loss_is_told_once_to_each_worker_that_shared_a_lease() -> None:
    bench = _bench(D1)
    for request_id in ("r", "s", "t", "u"):
        bench.submit(request_id)
    bench.worker_gone(P0)
    assert bench.commands(D0).count(PeerLost(peer=P0)) == 1 == bench.commands(D1).count(PeerLost(peer=P0))


def test_what_a_lost_life_still_says_is_ignored() -> None:
    bench = _bench()
    bench.submit()
    bench.worker_gone(D0)
    bench.join(WorkerId("d0", 2))
    assert bench.grant(R1, D0) == [] and bench.worker_says(D0, _finished()) == []
    assert bench.worker_gone(D0) == [], "the life after it is not touched"
    assert bench.num_legs(WorkerId("d0", 2)) == 1


# ---- silence --------------------------------------------------------------------------------------------------


def test_a_silent_worker_is_given_up() -> None:
    bench = _bench(heartbeat_timeout_s=2)
    bench.run_to_decoding()
    bench.wait_ms(1_500)
    bench.beat(P0)
    view = bench.state.status(bench.now_ns)
    assert [(worker.worker, worker.state) for pool in view.pools for worker in pool.workers] == [
        (P0, "ready"),
        (D0, "silent"),
    ]
    bench.wait_ms(500)
    assert bench.given_up() == [D0]
    failed = only(bench.said())
    assert isinstance(failed, AttemptFailed) and "nothing was heard of it for 2 s" in failed.reason
    bench.wait_ms(1_499)
    assert bench.given_up() == []
    bench.wait_ms(1)
    assert bench.given_up() == [P0]


def test_a_cancelled_leg_that_is_never_released_costs_the_workers_life() -> None:
    bench = _bench(heartbeat_timeout_s=1000)
    bench.submit()
    bench.grant(R1)
    bench.front_gone()
    bench.wait_ms(29_999)
    assert bench.given_up() == []
    bench.wait_ms(1)
    assert bench.given_up() == [P0] and bench.commands(D0) == [PeerLost(peer=P0)], "decode may be waiting for prefill"
    bench.wait_ms(30_000)
    assert bench.given_up() == [D0]
    bench.assert_nothing_left()


# ---- failing legs ---------------------------------------------------------------------------------------------


def _leg_failed(*, retryable: bool = True) -> LegFailed:
    return LegFailed(attempt=R1, outcome=Outcome.TRANSFER_FAILED, reason="bad checksum", retryable=retryable)


def test_a_failed_decode_leg_stops_prefill_at_once() -> None:
    bench = _bench()
    bench.submit()
    bench.grant(R1)
    bench.worker_says(D0, _leg_failed())
    failed = only(bench.said())
    assert isinstance(failed, AttemptFailed) and "bad checksum" in failed.reason and "d0#1" in failed.reason
    assert [type(body) for body in bench.commands(P0)] == [CancelLeg] and bench.commands(D0) == []
    bench.release(P0, R1)
    assert bench.commands(D0) == [SenderStopped(attempt=R1)]
    bench.release(D0, R1)
    assert bench.num_legs(D0) == 0 == bench.num_legs(P0)


def test_a_failed_prefill_leg_stops_decode_at_once() -> None:
    bench = _bench()
    bench.submit()
    bench.grant(R1)
    bench.worker_says(P0, _leg_failed())
    assert isinstance(only(bench.said()), AttemptFailed)
    assert [type(body) for body in bench.commands(D0)] == [CancelLeg] and bench.commands(P0) == []
    bench.release(P0, R1)
    assert bench.commands(D0) == [SenderStopped(attempt=R1)]


def test_both_legs_fail_and_the_attempt_counts_once() -> None:
    bench = _bench(max_attempts=2)
    bench.submit()
    bench.grant(R1)
    bench.worker_says(P0, _leg_failed())
    assert bench.worker_says(D0, _leg_failed()) == []
    assert bench.phase() == "waiting_front"


def test_a_failure_that_no_retry_can_help_ends_the_request() -> None:
    bench = _bench()
    bench.submit()
    bench.grant(R1)
    bench.worker_says(P0, _leg_failed(retryable=False))
    end = only(bench.said())
    assert isinstance(end, EndRequest) and end.outcome is Outcome.TRANSFER_FAILED
    assert bench.dropped() == ["r"] and [type(body) for body in bench.commands(D0)] == [CancelLeg]


def test_the_last_attempt_after_failed_transfers_does_without_one() -> None:
    bench = _bench(max_attempts=2)
    bench.submit()
    bench.grant(R1)
    bench.worker_says(D0, _leg_failed())
    bench.front_says(Resubmit(request_id="r", failed_attempt=1, num_delivered=1))
    assert bench.phase() == "queued", "the prefill worker may have died of it"
    bench.release(P0, R1)
    assert bench.phase() == "local"
    commands = [body for worker in (D0, D1) for body in bench.commands(worker)]
    assert RunLocal(attempt=AttemptId("r", 2)) in commands


def test_failures_use_the_attempts_up() -> None:
    bench = _bench(max_attempts=1)
    bench.submit()
    bench.grant(R1)
    bench.worker_says(D0, _leg_failed())
    end = only(bench.said())
    assert isinstance(end, EndRequest) and end.outcome is Outcome.TRANSFER_FAILED and "1 of 1" in end.reason


def test_a_leg_that_fails_while_reserving_is_placed_elsewhere() -> None:
    bench = _bench(D1)
    bench.submit()
    bench.worker_says(D0, _leg_failed())
    assert bench.said() == [] and isinstance(only(bench.commands(D1)), Reserve)
    assert bench.commands(D0) == [SenderStopped(attempt=R1)]


def test_a_failure_after_the_last_token_is_stale() -> None:
    bench = _bench()
    bench.run_to_decoding()
    bench.worker_says(D0, _finished())
    assert bench.worker_says(D0, _leg_failed()) == [] and bench.phase() == "finished"


def test_prefill_failing_after_the_commit_harms_nobody() -> None:
    bench = _bench()
    bench.run_to_decoding()
    assert bench.worker_says(P0, _leg_failed()) == []
    assert bench.release(P0, R1) == [] and bench.phase() == "decoding"


@pytest.mark.parametrize("worker", [P0, D0])
def test_a_leg_let_go_of_unasked_fails_the_attempt(worker: WorkerId) -> None:
    bench = _bench()
    bench.submit()
    bench.grant(R1)
    bench.release(worker, R1)
    failed = only(bench.said())
    assert isinstance(failed, AttemptFailed) and "unasked" in failed.reason


def test_prefill_released_before_word_of_the_commit_is_no_failure() -> None:
    bench = _bench()
    bench.submit()
    bench.grant(R1)
    bench.worker_says(P0, PrefillDone(attempt=R1, outcome=None, timeline=TIMELINE))
    assert bench.release(P0, R1) == [] and bench.phase() == "prefilling"
    assert bench.worker_says(D0, Committed(attempt=R1, timeline=TIMELINE)) == [] and bench.phase() == "decoding"


def test_a_fence_gives_the_peer_up_everywhere() -> None:
    bench = _bench(D1)
    bench.submit("r")
    bench.submit("s")
    bench.grant(R1, D0)
    bench.grant(AttemptId("s", 1), D1)
    bench.worker_says(D0, _leg_failed())
    bench.worker_says(D0, PeerFenced(peer=P0))
    assert bench.given_up() == [P0]
    assert PeerLost(peer=P0) in bench.commands(D1)
    failed = only(bench.said())
    assert isinstance(failed, AttemptFailed) and failed.attempt == AttemptId("s", 1)
    assert [view.holder for view in bench.state.leases(bench.now_ns)] == [D1]
    assert bench.worker_says(D0, PeerFenced(peer=P0)) == []


@pytest.mark.bad_day(18)
def test_a_life_that_was_fenced_before_it_came_is_refused() -> None:
    """It was stopped while the coordinator restarted: a write of it may wait for ever for that fence's effect on it."""
    bench = Bench()
    bench.join(D0)
    bench.worker_says(D0, PeerFenced(peer=P0))
    bench.join(P0)
    assert isinstance(only(bench.commands(P0)), WorkerRefused)
    bench.join(WorkerId(P0.name, 2))
    assert isinstance(bench.commands(WorkerId(P0.name, 2))[0], WorkerWelcome), (
        "its next life is a worker like any other"
    )


def test_a_fence_that_is_told_of_at_the_next_reservation_leads_to_another_placement() -> None:
    """So a worker answers a coordinator that has not heard of the fence; its refusal comes behind it."""
    bench = _bench()
    bench.submit("r")
    assert any(isinstance(command, Reserve) for command in bench.commands(D0))
    bench.worker_says(D0, PeerFenced(peer=P0))
    assert bench.given_up() == [P0]
    assert RunLocal(attempt=AttemptId("r", 2)) in bench.commands(D0)
    bench.worker_says(D0, ReserveRefused(attempt=R1, reason="that life of p0 is fenced"))
    assert bench.phase() == "local"
    assert [view.holder for view in bench.state.leases(bench.now_ns)] == []


# ---- heartbeats, leases and status ----------------------------------------------------------------------------


def _info(attempt: AttemptId, peer: WorkerId, lease_id: int, side: str = "quarantined") -> LeaseInfo:
    return LeaseInfo(
        lease_id=lease_id,
        attempt=attempt,
        side=side,
        peer=peer,
        num_blocks=3,
        size_bytes=3000,
        age_ms=5,
        remaining_ms=7,
    )


def test_the_ledger_shows_what_holders_say_of_their_leases() -> None:
    bench = _bench()
    bench.submit()
    lease_id = only(list(bench.state.leases(bench.now_ns))).lease_id
    bench.worker_says(D0, Heartbeat(load=make_load(100), leases=(_info(R1, P0, lease_id),)))
    bench.now_ns += 20_000_000
    view = only(list(bench.state.leases(bench.now_ns)))
    assert (view.side, view.holder, view.peer, view.num_blocks, view.size_bytes) == ("quarantined", D0, P0, 3, 3000)
    assert (view.age_ms, view.remaining_ms, view.known) == (20, 7, True)


def test_what_only_a_worker_knows_of_is_shown_and_cancelled() -> None:
    bench = _bench()
    orphan = AttemptId("x", 4)
    bench.worker_says(D0, Heartbeat(load=make_load(100), leases=(_info(orphan, P0, 99),)))
    cancel = only(bench.commands(D0))
    assert isinstance(cancel, CancelLeg) and cancel.attempt == orphan
    assert not only(list(bench.state.leases(bench.now_ns))).known
    bench.worker_gone(P0)
    bench.worker_says(D0, Heartbeat(load=make_load(100), leases=(_info(orphan, P0, 99),)))
    assert bench.commands(D0)[1:] == [PeerLost(peer=P0)]
    bench.beat(D0)
    assert bench.effects == [] and bench.state.leases(bench.now_ns) == ()


def test_status_shows_pools_and_what_is_missing() -> None:
    bench = _bench()
    bench.run_to_decoding()
    bench.submit("s")
    bench.beat(D0, num_running=1)
    view = bench.state.status(bench.now_ns)
    assert (view.name, view.epoch, view.num_requests, view.num_running, view.num_queued) == ("bench", 3, 2, 2, 0)
    assert [(pool.name, pool.num_replicas, len(pool.workers)) for pool in view.pools] == [("p", 2, 1), ("d", 2, 1)]
    worker = view.pools[1].workers[0]
    assert (worker.worker, worker.pid, worker.host, worker.role, worker.num_legs) == (D0, 7, "host", Role.DECODE, 2)
    assert worker.load.num_running == 1 and worker.blocks.total == 100 and worker.transports == ("loopback",)
    assert not view.is_ready
    bench.join(P1, D1)
    assert bench.state.status(bench.now_ns).is_ready
    running = bench.state.requests(bench.now_ns)[0]
    assert (running.prefill, running.decode, running.phase) == (P0, D0, "decoding") and "d0#1" in running.why


# ---- placement through the state ------------------------------------------------------------------------------


def test_requests_wait_until_prefill_can_start_soon() -> None:
    bench = _bench()
    bench.submit("r", num_prompt_tokens=300)
    bench.submit("s")
    assert bench.phase("s") == "queued" and "start soon" in bench.state.requests(bench.now_ns)[1].why
    bench.grant(R1)
    bench.beat(P0, waiting_prefill_tokens=200)
    assert bench.phase("s") == "reserving", "the heartbeat shows how far the long prompt has come"
    bench.worker_says(P0, PrefillDone(attempt=R1, outcome=None, timeline=TIMELINE))
    bench.submit("t", num_prompt_tokens=300)
    bench.submit("u")
    assert [bench.phase(request_id) for request_id in "tu"] == ["reserving", "queued"]


def test_a_heartbeat_before_the_command_does_not_hide_the_backlog() -> None:
    bench = _bench()
    bench.submit("r", num_prompt_tokens=300)
    bench.beat(P0, waiting_prefill_tokens=0)
    bench.submit("s")
    assert bench.phase("s") == "queued"
    bench.grant(R1)
    bench.worker_says(P0, PrefillDone(attempt=R1, outcome=None, timeline=TIMELINE))
    assert bench.phase("s") == "reserving"


def test_decode_takes_no_more_sequences_than_it_may_run() -> None:
    bench = Bench(make_config(max_running=2))
    bench.connect()
    bench.join(P0, D0)
    for request_id in ("r", "s", "t"):
        bench.submit(request_id, num_prompt_tokens=4)
    assert [bench.phase(request_id) for request_id in ("r", "s", "t")] == ["reserving", "reserving", "queued"]
    bench.grant(R1)
    bench.worker_says(D0, Committed(attempt=R1, timeline=TIMELINE))
    bench.worker_says(D0, _finished())
    assert bench.phase("t") == "reserving"


def test_higher_priority_is_placed_first() -> None:
    bench = Bench(make_config(with_prefill=False, max_running=1))
    bench.connect()
    bench.submit("low")
    bench.submit("high", priority=5)
    bench.join(D0)
    assert [message.attempt.request_id for message in bench.said() if isinstance(message, Placed)] == ["high"]


# ---- block events ---------------------------------------------------------------------------------------------


CHAIN = b"".join(bytes([i]) * BLOCK_HASH_BYTES for i in range(1, 9))


def _block_events(number: int, num_stored: int = 0, num_evicted: int = 0, *, is_snapshot: bool = False) -> BlockEvents:
    run = BlockRun(parent=bytes(16), hashes=CHAIN[: num_stored * BLOCK_HASH_BYTES])
    evicted = (CHAIN[: num_evicted * BLOCK_HASH_BYTES],)
    return BlockEvents(
        sequence_number=number, is_snapshot=is_snapshot, stored=(run,) if num_stored else (), evicted=evicted
    )


def _known_blocks(bench: Bench) -> dict[WorkerId, int]:
    pools = bench.state.status(bench.now_ns).pools
    return {view.worker: view.num_known_blocks for pool in pools for view in pool.workers}


def test_the_blocks_that_each_worker_can_find_are_counted() -> None:
    bench = _bench()
    bench.worker_says(P0, _block_events(1, is_snapshot=True))
    bench.worker_says(P0, _block_events(2, num_stored=5))
    assert bench.effects == []
    bench.worker_says(P0, _block_events(3, num_stored=1, num_evicted=2))
    bench.worker_says(D0, _block_events(1, num_stored=3, is_snapshot=True))
    assert _known_blocks(bench) == {P0: 4, D0: 3}


def test_a_gap_in_the_block_events_has_the_worker_tell_everything_again() -> None:
    bench = _bench()
    bench.worker_says(P0, _block_events(1, num_stored=2, is_snapshot=True))
    bench.worker_says(P0, _block_events(3, num_stored=5))
    assert bench.commands(P0) == [SendBlockSnapshot()]
    bench.worker_says(P0, _block_events(4, num_evicted=5))
    assert bench.commands(P0) == [] and _known_blocks(bench)[P0] == 2
    bench.worker_says(P0, _block_events(5, num_stored=6, is_snapshot=True))
    bench.worker_says(P0, _block_events(6, num_evicted=1))
    assert bench.effects == [] and _known_blocks(bench)[P0] == 5


def test_the_next_life_of_a_worker_begins_without_blocks() -> None:
    bench = _bench()
    bench.worker_says(P0, _block_events(1, num_stored=2, is_snapshot=True))
    later = WorkerId(P0.name, 2)
    bench.join(later)
    bench.worker_says(P0, _block_events(2, num_stored=2))
    assert bench.effects == [] and _known_blocks(bench)[later] == 0
