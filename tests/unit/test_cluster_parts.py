"""The parts of ClusterState that stand alone: queue, timers, lease ledger, worker registry."""

from __future__ import annotations

import pytest

from cluster.core.ids import AttemptId, Role, WorkerId
from cluster.core.leases import Lease, LeaseLedger, Side
from cluster.core.limits import MAX_LOST_NAMES
from cluster.core.timers import TimerKey, TimerKind, Timers
from cluster.core.workers import WorkerRegistry
from tests.support.coordinator import D0, D1, P0, P1, make_config, make_hello

A, B = TimerKey(TimerKind.REQUEST, "a"), TimerKey(TimerKind.REQUEST, "b")


def test_timers_come_in_order_and_once() -> None:
    timers = Timers()
    timers.set(A, 20)
    timers.set(B, 10)
    assert timers.next_deadline_ns() == 10
    assert timers.pop_due(9) is None
    assert timers.pop_due(20) == B and timers.pop_due(20) == A and timers.pop_due(20) is None
    assert timers.next_deadline_ns() is None and timers.keys() == ()


def test_a_timer_is_replaced_or_cleared() -> None:
    timers = Timers()
    timers.set(A, 10)
    timers.set(A, 30)
    timers.set(B, 20)
    timers.set(B, None)
    timers.check_invariants()
    assert timers.next_deadline_ns() == 30 and timers.pop_due(29) is None and timers.pop_due(30) == A
    timers.set(B, None)
    assert timers.next_deadline_ns() is None


def test_equal_deadlines_come_in_the_order_they_were_set() -> None:
    timers = Timers()
    timers.set(B, 5)
    timers.set(A, 5)
    assert [timers.pop_due(5), timers.pop_due(5)] == [B, A]


def test_timers_do_not_grow_with_what_was_set_before() -> None:
    timers = Timers()
    for deadline_ns in range(10_000, 0, -1):
        timers.set(A, deadline_ns)
    timers.check_invariants()
    assert timers.pop_due(1) == A and timers.next_deadline_ns() is None


def _lease(lease_id: int, side: Side, holder: WorkerId, peer: WorkerId) -> Lease:
    return Lease(
        lease_id=lease_id,
        side=side,
        attempt_id=AttemptId("r", lease_id),
        holder=holder,
        peer=peer,
        num_blocks=1,
        opened_ns=0,
    )


def test_ledger_finds_who_shares_leases_with_a_worker() -> None:
    ledger = LeaseLedger()
    for lease_id, (prefill, decode) in enumerate([(P0, D1), (P0, D0), (P1, D0), (P0, D1)]):
        ledger.open(_lease(lease_id, Side.RESERVED, decode, prefill))
        ledger.open(_lease(lease_id, Side.HELD, prefill, decode))
    ledger.check_invariants()
    assert ledger.holders_paired_with(P0) == (D1, D0)
    ledger.close_reserved_from(D1, P0)
    assert ledger.holders_paired_with(P0) == (D0,) and ledger.holders_paired_with(D1) == (P0,)
    ledger.forget_holder(P0)
    ledger.check_invariants()
    assert ledger.holders_paired_with(D1) == () and len(ledger) == 3
    ledger.close(1, Side.RESERVED)
    ledger.close(1, Side.RESERVED)
    assert ledger.holders_paired_with(P0) == () and len(ledger) == 2


def test_registry_remembers_lost_lives_up_to_a_limit() -> None:
    registry = WorkerRegistry(make_config())
    registry.lose(WorkerId("first", 3))
    assert registry.is_lost(WorkerId("first", 3)) and registry.is_lost(WorkerId("first", 2))
    assert not registry.is_lost(WorkerId("first", 4))
    registry.lose(WorkerId("first", 1))
    assert registry.is_lost(WorkerId("first", 3)), "an older loss does not bring it back"
    for number in range(MAX_LOST_NAMES):
        registry.lose(WorkerId(f"w{number}", 1))
    assert not registry.is_lost(WorkerId("first", 3))


def test_registry_refuses_more_workers_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.core.workers.MAX_WORKERS", 1)
    registry = WorkerRegistry(make_config())
    registry.add(make_hello(P0, Role.PREFILL), 0)
    assert registry.refusal(make_hello(WorkerId("p0", 2), Role.PREFILL)) is None, "it takes the place of its older life"
    assert "the limit" in (registry.refusal(make_hello(D0, Role.DECODE)) or "")


def test_the_heap_of_timers_stays_small_while_they_are_cleared() -> None:
    timers = Timers()
    keys = [TimerKey(TimerKind.REQUEST, f"r{number}") for number in range(200)]
    for deadline_ns, key in enumerate(keys):
        timers.set(key, 1_000 + deadline_ns)
    for key in reversed(keys):
        timers.set(key, None)
        timers.check_invariants()
