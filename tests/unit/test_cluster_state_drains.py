"""ClusterState: workers are drained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.core.commands import CancelLeg, Prefill, Reserve
from cluster.core.drain_orders import AfterDrain, DrainOrder, Leave, StartDrain, WorkerLeft
from cluster.core.effects import GiveUpWorker, RetireWorker
from cluster.core.events import DrainAsked, Tick
from cluster.core.ids import AttemptId, Outcome, Role, WorkerId
from cluster.core.limits import LEAVE_TIMEOUT_NS, NEXT_LIFE_NS, NS_PER_MS
from cluster.core.messages import (
    AttemptFailed,
    BlockEvents,
    BlockRun,
    Committed,
    Finished,
    Heartbeat,
    Placed,
    PrefillDone,
    RequestDone,
    Resubmit,
)
from cluster.core.reports import LeaseInfo
from engine.core.block_hash import ROOT_HASH, hash_blocks
from tests.support.coordinator import D0, D1, P0, P1, TIMELINE, Bench, make_config, make_hello, make_load, only

R1 = AttemptId("r", 1)


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.join(P0, P1, D0, D1)
    bench.connect()
    return bench


def order(worker: WorkerId, **fields: Any) -> DrainOrder:
    return DrainOrder(worker=worker.name, **fields)


def drain(bench: Bench, worker: WorkerId, *, force: bool = False, **fields: Any) -> None:
    bench.handle(DrainAsked(order=order(worker, **fields), force=force))


def leave(bench: Bench, worker: WorkerId) -> None:
    """It says that it leaves, and is gone."""
    bench.worker_says(worker, WorkerLeft())
    bench.worker_gone(worker)


def finish(bench: Bench, worker: WorkerId, attempt: AttemptId = R1) -> None:
    """The worker draws the last token, and the front has it."""
    finished = Finished(attempt=attempt, outcome=Outcome.LENGTH, num_output_tokens=8, timeline=TIMELINE)
    bench.worker_says(worker, finished)
    assert not bench.commands(worker), "its front may still need what it has"
    bench.front_says(RequestDone(request_id=attempt.request_id, outcome=Outcome.LENGTH, num_output_tokens=8))


def resubmit(bench: Bench, num_delivered: int = 3) -> None:
    bench.front_says(Resubmit(request_id="r", failed_attempt=1, num_delivered=num_delivered))


def retired(bench: Bench) -> list[tuple[WorkerId, AfterDrain]]:
    return [(e.worker, e.order.then) for e in bench.effects if isinstance(e, RetireWorker)]


def state_of(bench: Bench, worker: WorkerId) -> str:
    pools = bench.state.status(bench.now_ns).pools
    return next(view.state for pool in pools for view in pool.workers if view.worker == worker)


def waits_for(bench: Bench) -> str:
    return only(list(bench.state.status(bench.now_ns).drains)).waits_for


# ---- the course of a drain ------------------------------------------------------------------------------------


def test_an_idle_worker_leaves_at_once_and_is_not_replaced(bench: Bench) -> None:
    drain(bench, D0)
    assert bench.commands(D0) == [StartDrain(order=order(D0)), Leave(then=AfterDrain.STOP)]
    assert state_of(bench, D0) == "draining" and waits_for(bench) == "its process to end"
    leave(bench, D0)
    assert retired(bench) == [(D0, AfterDrain.STOP)] and not bench.given_up()
    status = bench.state.status(bench.now_ns)
    assert status.drained == ("d0",) and status.drains == ()


def test_nothing_new_is_placed_on_it(bench: Bench) -> None:
    attempt = bench.run_to_decoding()
    drain(bench, D0)
    drain(bench, P0)
    for index in range(4):
        bench.submit(f"new-{index}")
        bench.grant(AttemptId(f"new-{index}", 1), D1)
        assert not bench.commands(P0) and bench.commands(P1)
    assert bench.num_legs(D0) == 1 and bench.phase() == "decoding"
    assert attempt == R1


@pytest.mark.bad_day(8)
def test_a_prefill_worker_waits_for_its_pushes(bench: Bench) -> None:
    bench.submit()
    bench.grant(R1)
    drain(bench, P0)
    assert bench.commands(P0) == [StartDrain(order=order(P0))] and waits_for(bench) == "1 prompt or push, 2 leases"
    bench.worker_says(P0, PrefillDone(attempt=R1, outcome=None, timeline=TIMELINE))
    bench.worker_says(D0, Committed(attempt=R1, timeline=TIMELINE))
    assert not bench.commands(P0)
    bench.release(P0, R1)
    assert bench.commands(P0) == [Leave(then=AfterDrain.STOP)]
    leave(bench, P0)
    assert bench.phase() == "decoding"


def test_an_answer_ends_where_it_runs_unless_it_is_to_migrate(bench: Bench) -> None:
    bench.run_to_decoding()
    drain(bench, D0)
    assert not bench.said() and waits_for(bench).startswith("1 answer")
    bench.release(P0, R1)
    finish(bench, D0)
    assert bench.commands(D0) == [Leave(then=AfterDrain.STOP)]


def test_a_lease_or_quarantine_at_the_worker_is_waited_for(bench: Bench) -> None:
    lease = LeaseInfo(
        lease_id=9, attempt=R1, side="quarantined", peer=P0, num_blocks=2, size_bytes=2000, age_ms=5, remaining_ms=0
    )
    bench.worker_says(D0, Heartbeat(load=make_load(100), leases=(lease,)))
    drain(bench, D0)
    assert bench.commands(D0) == [StartDrain(order=order(D0))] and "1 lease" in waits_for(bench)
    bench.beat(D0)
    assert bench.commands(D0) == [Leave(then=AfterDrain.STOP)]


def test_what_is_only_reserved_is_placed_elsewhere_and_no_front_learns_of_it(bench: Bench) -> None:
    bench.submit()
    drain(bench, D0)
    assert not bench.said()
    assert CancelLeg(attempt=R1, reason="d0#1 is being drained") in bench.commands(D0)
    assert isinstance(only(bench.commands(D1)), Reserve)
    bench.release(D0, R1)
    assert bench.commands(D0) == [Leave(then=AfterDrain.STOP)]


# ---- answers go on elsewhere ----------------------------------------------------------------------------------


@pytest.mark.bad_day(23)
def test_a_migrated_answer_goes_on_from_the_kv_of_the_drained_worker(bench: Bench) -> None:
    bench.run_to_decoding()
    bench.release(P0, R1)
    drain(bench, D0, migrate=True)
    failed = only(bench.said())
    assert isinstance(failed, AttemptFailed) and failed.is_planned
    assert CancelLeg(attempt=R1, reason="d0#1 is being drained") in bench.commands(D0)
    bench.release(D0, R1)
    assert not bench.commands(D0) and waits_for(bench) == "1 hand-over"
    resubmit(bench)
    second = AttemptId("r", 2)
    assert isinstance(only(bench.commands(D1)), Reserve)
    bench.grant(second, D1)
    assert isinstance(only(bench.commands(D0)), Prefill), "it pushes what it has"
    placed = only(bench.said())
    assert isinstance(placed, Placed) and placed.prefill is not None and placed.prefill.worker == D0
    bench.worker_says(D0, PrefillDone(attempt=second, outcome=None, timeline=TIMELINE))
    bench.worker_says(D1, Committed(attempt=second, timeline=TIMELINE))
    bench.release(D0, second)
    assert bench.commands(D0) == [Leave(then=AfterDrain.STOP)]
    finish(bench, D1, second)
    leave(bench, D0)
    bench.assert_nothing_left()


def test_a_drained_worker_fetches_nothing_for_the_answer_that_it_pushes() -> None:
    """It has all of it, though it may not have told of it yet."""
    bench = Bench(make_config(fetch_prefixes=True))
    bench.join(P0, D0)
    bench.connect()
    bench.beat(P0, D0, step_ms_per_token=10.0)
    chain = b"".join(hash_blocks(range(320), 16, b""))
    bench.submit("r", num_prompt_tokens=320, block_hashes=chain)
    bench.grant(R1)
    bench.worker_says(P0, PrefillDone(attempt=R1, outcome=None, timeline=TIMELINE))
    told = BlockEvents(sequence_number=1, is_snapshot=True, stored=(BlockRun(parent=ROOT_HASH, hashes=chain),))
    bench.worker_says(P0, told)
    bench.worker_says(D0, Committed(attempt=R1, timeline=TIMELINE))
    bench.release(P0, R1)
    bench.join(D1)
    drain(bench, D0, migrate=True)
    bench.release(D0, R1)
    bench.front_says(Resubmit(request_id="r", failed_attempt=1, num_delivered=3, block_hashes=chain))
    reserve = only(bench.commands(D1))
    assert isinstance(reserve, Reserve) and reserve.source.worker == D0
    assert bench.commands(D0) == []


def test_several_long_answers_all_come_from_the_drained_worker() -> None:
    """They have next to nothing to be computed, so none has to wait for the others."""
    bench = Bench()
    bench.join(P0, D0, num_blocks=1000)
    bench.connect()
    for index in range(4):
        attempt = AttemptId(f"r{index}", 1)
        bench.submit(f"r{index}", num_prompt_tokens=900)
        bench.grant(attempt)
        bench.worker_says(P0, PrefillDone(attempt=attempt, outcome=None, timeline=TIMELINE))
        bench.worker_says(D0, Committed(attempt=attempt, timeline=TIMELINE))
        bench.release(P0, attempt)
    bench.join(D1, num_blocks=1000)
    assert len(bench.said()) == 0
    drain(bench, D0, migrate=True)
    assert len(bench.said()) == 4
    for index in range(4):
        bench.release(D0, AttemptId(f"r{index}", 1))
        bench.front_says(Resubmit(request_id=f"r{index}", failed_attempt=1, num_delivered=3))
        reserve = only(bench.commands(D1))
        assert isinstance(reserve, Reserve) and reserve.source.worker == D0


def test_being_moved_is_no_failure() -> None:
    bench = Bench(make_config(max_attempts=1))
    bench.join(P0, D0, D1)
    bench.connect()
    bench.run_to_decoding()
    drain(bench, D0, migrate=True)
    assert isinstance(only(bench.said()), AttemptFailed)
    resubmit(bench)
    assert bench.phase() == "reserving"


def test_answers_stay_where_nobody_else_has_room() -> None:
    bench = Bench(make_config(max_running=1))
    bench.join(P0, D0, D1)
    bench.connect()
    bench.run_to_decoding("r", decode=D0)
    bench.run_to_decoding("s", decode=D1)
    drain(bench, D0, migrate=True)
    assert not bench.said()
    finished = Finished(attempt=AttemptId("s", 1), outcome=Outcome.LENGTH, num_output_tokens=8, timeline=TIMELINE)
    bench.worker_says(D1, finished)
    assert isinstance(only(bench.said()), AttemptFailed), "now there is room"


def test_a_source_that_is_lost_costs_a_computation_and_no_token(bench: Bench) -> None:
    bench.run_to_decoding()
    drain(bench, D0, migrate=True)
    bench.worker_gone(D0)
    resubmit(bench)
    bench.grant(AttemptId("r", 2), D1)
    placed = only(bench.said())
    assert isinstance(placed, Placed) and placed.prefill is not None and placed.prefill.worker in (P0, P1)


def test_at_the_deadline_everything_goes_on_elsewhere(bench: Bench) -> None:
    bench.submit()
    bench.grant(R1)
    drain(bench, D0, deadline_ms=800)
    bench.wait_ms(300)
    assert not bench.said()
    bench.wait_ms(600)
    failed = only(bench.said())
    assert isinstance(failed, AttemptFailed) and failed.is_planned
    bench.release(D0, R1)
    assert bench.commands(D0) == [Leave(then=AfterDrain.STOP)]


def test_answers_begin_to_migrate_before_the_deadline(bench: Bench) -> None:
    bench.run_to_decoding()
    drain(bench, D0, deadline_ms=800)
    bench.wait_ms(300)
    assert not bench.said()
    bench.wait_ms(150)
    assert isinstance(only(bench.said()), AttemptFailed)


# ---- what may be ordered --------------------------------------------------------------------------------------


def test_a_second_order_is_the_same_one_or_brings_it_up_to_date(bench: Bench) -> None:
    bench.run_to_decoding()
    drain(bench, D0)
    drain(bench, D0)
    assert bench.state.why_refused(order(D0), force=False) is None and not bench.said()
    drain(bench, D0, migrate=True, deadline_ms=5000)
    assert isinstance(only(bench.said()), AttemptFailed)
    view = only(list(bench.state.status(bench.now_ns).drains))
    assert view.order.migrate and view.remaining_ms == 5000
    refusal = bench.state.why_refused(order(D0, then=AfterDrain.FLIP), force=True)
    assert refusal is not None and refusal.reason == "d0 is being drained already, to end"


@pytest.mark.parametrize(
    ("worker", "then", "reason"),
    [
        ("x", AfterDrain.STOP, "worker 'x' is not registered; there is: d0, p0"),
        ("d0", AfterDrain.STOP, "d0 is the last decode worker: without it no answer can be written"),
        ("d0", AfterDrain.RESTART, "d0 is the last decode worker"),
        ("p0", AfterDrain.FLIP, "p0 is the last prefill worker: without it decode workers have to read prompts"),
    ],
)
def test_what_is_refused_and_changes_nothing(worker: str, then: AfterDrain, reason: str) -> None:
    bench = Bench()
    bench.join(P0, D0)
    refusal = bench.state.why_refused(DrainOrder(worker=worker, then=then), force=False)
    assert refusal is not None and refusal.reason.startswith(reason) and refusal.is_unknown is (worker == "x")
    assert bench.handle(DrainAsked(order=DrainOrder(worker=worker, then=then))) == []
    assert bench.state.why_refused(DrainOrder(worker=worker, then=then), force=True) is None or worker == "x"


def test_a_flip_needs_a_pool_of_the_other_role() -> None:
    bench = Bench(make_config(with_prefill=False))
    bench.join(D0, D1)
    refusal = bench.state.why_refused(order(D0, then=AfterDrain.FLIP), force=False)
    assert refusal is not None and refusal.reason == "the cluster file has no prefill pool that d0 could join"


# ---- lives come and go ----------------------------------------------------------------------------------------


def test_a_restart_leaves_the_next_life_to_whoever_runs_the_worker(bench: Bench) -> None:
    drain(bench, D0, then=AfterDrain.RESTART)
    assert bench.commands(D0)[-1] == Leave(then=AfterDrain.RESTART, pool="d")
    leave(bench, D0)
    assert bench.given_up() == [D0] and not retired(bench)
    bench.join(WorkerId("d0", 2))
    assert state_of(bench, WorkerId("d0", 2)) == "ready" and bench.state.status(bench.now_ns).drains == ()


def test_a_flipped_worker_comes_back_in_the_other_pool(bench: Bench) -> None:
    drain(bench, P1, then=AfterDrain.FLIP)
    assert bench.commands(P1)[-1] == Leave(then=AfterDrain.FLIP, pool="d")
    leave(bench, P1)
    assert retired(bench) == [(P1, AfterDrain.FLIP)]
    flipped = WorkerId("p1", 2)
    bench.worker_says(flipped, make_hello(flipped, Role.DECODE))
    assert state_of(bench, flipped) == "ready" and bench.state.status(bench.now_ns).drained == ()


def test_the_next_life_of_a_worker_that_was_lost_in_between_is_drained_as_well(bench: Bench) -> None:
    bench.run_to_decoding()
    drain(bench, D0)
    bench.worker_gone(D0)
    assert retired(bench) == [(D0, AfterDrain.STOP)] and waits_for(bench).startswith("its next life")
    again = WorkerId("d0", 2)
    bench.join(again)
    assert bench.commands(again)[-1] == Leave(then=AfterDrain.STOP)


def test_a_next_life_is_waited_for_no_longer_than_a_named_time(bench: Bench) -> None:
    bench.run_to_decoding()
    drain(bench, D0)
    bench.worker_gone(D0)
    bench.wait_ms(NEXT_LIFE_NS // NS_PER_MS + 1)
    again = WorkerId("d0", 2)
    bench.join(again)
    assert state_of(bench, again) == "ready"


def test_a_worker_that_does_not_leave_is_ended(bench: Bench) -> None:
    drain(bench, D0)
    for _ in range(LEAVE_TIMEOUT_NS // NS_PER_MS // 1000 + 1):
        bench.beat(P0, P1, D0, D1)
        bench.wait_ms(1000)
        if retired(bench):
            break
    assert retired(bench) == [(D0, AfterDrain.STOP)]


def test_a_worker_that_left_while_the_coordinator_was_away_has_done_so(bench: Bench) -> None:
    drain(bench, D0)
    bench.now_ns += 6 * LEAVE_TIMEOUT_NS
    bench.handle(Tick())
    assert not retired(bench)
    leave(bench, D0)
    assert retired(bench) == [(D0, AfterDrain.STOP)] and bench.state.status(bench.now_ns).drains == ()


def test_a_new_coordinator_goes_on_with_a_drain_that_the_worker_tells_of() -> None:
    bench = Bench()
    bench.connect()
    bench.worker_says(D0, replace(make_hello(D0, Role.DECODE), drain=order(D0, migrate=True)))
    assert state_of(bench, D0) == "draining"
    assert bench.commands(D0)[-1] == Leave(then=AfterDrain.STOP)
    assert not any(isinstance(effect, GiveUpWorker) for effect in bench.effects)
