"""The coordinator dies in every phase of a request, and its next life takes over: what runs goes on, untouched."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster.core.ids import Outcome
from cluster.core.rebuild import RebuildWindow
from cluster.core.requests import RequestTable
from cluster.front.request import FrontRequest
from cluster.sim.client import Violation
from cluster.sim.engine_model import StepCost
from cluster.sim.fabric import Family
from cluster.sim.kernel import MILLISECOND_NS, SECOND_NS
from cluster.sim.scenario import FaultKind, Request
from cluster.sim.world import World
from tests.sim.worlds import ANSWERED, ARRIVAL_NS, FAMILIES, ask, count, fault, finish, make_world, run_until

DOWN_MS = 300
SLOW = StepCost(base_ns=60 * MILLISECOND_NS)
"""Answers that outlast the coordinator's absence, and the window after it."""
SLOW_LINK = 2_000_000
"""Nanoseconds a byte: a push lasts for longer than it takes to come back to the coordinator."""
each_family = pytest.mark.parametrize("family", FAMILIES)
each_cost = pytest.mark.parametrize("cost", [StepCost(), SLOW], ids=["quick", "slow"])


def requests() -> list[Request]:
    """Some of several answers, that come one after the other."""
    return [
        ask(index, num_prompt_tokens=20 + index, max_tokens=14, num_choices=1 + index % 3, arrival_ns=arrival_ns)
        for index in range(4)
        for arrival_ns in [ARRIVAL_NS + index * 3 * MILLISECOND_NS]
    ]


def restarted(at_ms: int, *also: tuple[FaultKind, int, str], **fields: object) -> World:
    """The coordinator dies so long after the first arrival and is away for a while; others may follow."""
    faults = [(FaultKind.CRASH, at_ms, "coordinator"), *((kind, at_ms + ms, name) for kind, ms, name in also)]
    return make_world(
        *requests(),
        faults=tuple(
            fault(kind, ARRIVAL_NS + ms * MILLISECOND_NS, name, duration_ns=DOWN_MS * MILLISECOND_NS)
            for kind, ms, name in faults
        ),
        **{"num_prefill": 2, "num_decode": 2, **fields},  # type: ignore[arg-type]
    )


def moments(cost: StepCost) -> range:
    """Over the life of the requests, in milliseconds: every phase of some of them."""
    return range(0, 60, 4) if cost is not SLOW else range(0, 900, 75)


def assert_all_went_on(world: World) -> int:
    """Every answer that ran was ended by the very attempt that ran. Returns how many ran."""
    ends = [(client.request.request_id, client.outcome, client.reason) for client in finish(world)]
    assert all(outcome in ANSWERED for _, outcome, _ in ends), ends
    again = [(request.spec.request_id, attempt, request.attempt) for request, attempt in world.interrupted]
    assert all(before == after for _, before, after in again), again
    assert count(world, "AttemptFailed(") == 0
    return len(world.interrupted)


@each_family
@each_cost
def test_killed_in_every_phase(family: Family, cost: StepCost) -> None:
    """Queued, reserving, read, pushed, decoded, ended: what runs goes on, and what waits is asked for again."""
    num_interrupted = sum(
        assert_all_went_on(restarted(ms, family=family, cost=cost, link_ns_per_byte=20_000)) for ms in moments(cost)
    )
    assert num_interrupted > 15


def test_killed_in_every_phase_of_answers_without_a_push() -> None:
    assert sum(assert_all_went_on(restarted(ms, num_prefill=0, cost=SLOW)) for ms in moments(SLOW)) > 15


@each_family
def test_a_push_that_is_under_way_goes_on(family: Family) -> None:
    """It takes longer than the coordinator is away, so that both sides are taken over in the midst of it."""
    world = make_world(
        ask(num_prompt_tokens=40),
        faults=(fault(FaultKind.CRASH, ARRIVAL_NS + 10 * MILLISECOND_NS, "coordinator", duration_ns=MILLISECOND_NS),),
        family=family,
        link_ns_per_byte=SLOW_LINK,
        restart_ns=MILLISECOND_NS,
    )
    run_until(world, lambda: world.coordinator.process.incarnation == 2)
    run_until(world, lambda: "prefilling" in phases(world))
    assert assert_all_went_on(world) == 1
    assert count(world, "Prefill(") == 1 and count(world, "Reserve(") == 1


def phases(world: World) -> list[str]:
    node = world.coordinator
    return [view.phase for view in node.state.requests(node.process.now_ns())]


@pytest.mark.parametrize("again_ms", [DOWN_MS + 10, DOWN_MS + 200, DOWN_MS + 230, DOWN_MS + 700])
def test_killed_twice_in_a_row(again_ms: int) -> None:
    """Also before its second life has heard of anybody, and in the midst of its window."""
    for ms in (2, 20, 150, 500):
        assert_all_went_on(restarted(ms, (FaultKind.CRASH, again_ms, "coordinator"), cost=SLOW))


@pytest.mark.parametrize("name", ["p0", "d0"])
@pytest.mark.parametrize("later_ms", [-5, 100, DOWN_MS + 150, DOWN_MS + 215, DOWN_MS + 400])
def test_a_worker_dies_before_or_inside_the_window(name: str, later_ms: int) -> None:
    """What it had is computed elsewhere, from what was delivered; what others have goes on."""
    num_went_on = 0
    for ms in (20, 150, 500):
        world = restarted(ms, (FaultKind.CRASH, later_ms, name), cost=SLOW)
        assert all(client.outcome in ANSWERED for client in finish(world))
        num_went_on += sum(request.attempt == attempt for request, attempt in world.interrupted)
    assert num_went_on >= 4


@pytest.mark.parametrize("later_ms", [-5, 100, DOWN_MS + 215, DOWN_MS + 400])
def test_a_front_dies_before_or_inside_the_window(later_ms: int) -> None:
    """What it served is cancelled, and nothing of it is left; the other front's answers go on."""
    others = [ask(index, max_tokens=14, front=1) for index in (8, 9)]
    at_ms = 150
    world = make_world(
        *requests(),
        *others,
        num_fronts=2,
        num_decode=2,
        cost=SLOW,
        faults=tuple(
            fault(FaultKind.CRASH, ARRIVAL_NS + ms * MILLISECOND_NS, name, duration_ns=DOWN_MS * MILLISECOND_NS)
            for ms, name in sorted([(at_ms, "coordinator"), (at_ms + later_ms, "f0")])
        ),
    )
    clients = finish(world)
    assert all(client.is_unavailable for client in clients if client.request.front == 0)
    assert all(client.outcome in ANSWERED for client in clients if client.request.front == 1)
    served = [(r, attempt) for r, attempt in world.interrupted if r.spec.request_id in ("r8", "r9")]
    assert served and all(request.attempt == attempt for request, attempt in served)


def test_the_window_ends_although_somebody_stays_away() -> None:
    """A worker that died with the coordinator: new requests wait for it no longer than the named time."""
    late = ask(7, arrival_ns=ARRIVAL_NS + 400 * MILLISECOND_NS)
    world = make_world(
        late,
        num_decode=2,
        restart_ns=100 * SECOND_NS,
        faults=(
            fault(FaultKind.CRASH, ARRIVAL_NS, "d1", duration_ns=100 * SECOND_NS),
            fault(FaultKind.PAUSE, ARRIVAL_NS, "coordinator"),
        ),
    )
    world.kernel.at(ARRIVAL_NS, lambda: world.coordinator.process.exit("crashed"))
    world.kernel.at(ARRIVAL_NS + MILLISECOND_NS, lambda: setattr(world, "coordinator", world._start_coordinator()))
    run_until(world, lambda: bool(world.clients) and world.clients[0].has_ended)
    first_token_ns = world.clients[0].first_token_ns
    assert world.clients[0].outcome is Outcome.LENGTH and first_token_ns is not None
    assert 4 * SECOND_NS < first_token_ns < 6 * SECOND_NS


# ---- broken on purpose ----------------------------------------------------------------------------------------


def break_it(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, broken: Callable[..., object]) -> None:
    monkeypatch.setattr(owner, name, broken)


def test_a_coordinator_that_stops_what_it_does_not_know_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch, RebuildWindow, "open", lambda self, now_ns: None)
    with pytest.raises(AssertionError):
        assert_all_went_on(restarted(150, cost=SLOW))


def test_a_front_that_announces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch, FrontRequest, "live", lambda self, now_ns: None)
    with pytest.raises((AssertionError, Violation)):
        assert_all_went_on(restarted(150, cost=SLOW))


def test_attempts_that_are_numbered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a front has never heard of is begun again under the same number, and meets what is left of the first."""
    world = reserved_and_restarted()
    assert count(world, "LegFailed(") + count(world, "ReserveRefused(") == 0
    break_it(monkeypatch, RequestTable, "heard_of", lambda self, attempt_id: None)
    monkeypatch.setattr("cluster.front.request.MAX_ATTEMPTS_PER_LIFE", 0)
    with pytest.raises(AssertionError):
        reserved_and_restarted()


def reserved_and_restarted() -> World:
    """The coordinator dies as decode has reserved and nobody else was told."""
    world = make_world(ask(), restart_ns=50 * MILLISECOND_NS)
    node = world.worker("d0")
    assert node is not None
    run_until(world, lambda: node.state.pool.counts().reserved > 0)
    world.coordinator.process.exit("crashed")
    finish(world)
    return world


def test_a_sender_that_is_said_to_have_stopped_before_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever had a part in a push is waited for, whatever has become of its lease."""
    held_by_sender = RebuildWindow.held

    def blind(self: RebuildWindow, attempt_id: object) -> object:
        held = held_by_sender(self, attempt_id)  # type: ignore[arg-type]
        return {worker: leg for worker, leg in held.items() if worker.name != "p0"}

    def damaged() -> World:
        slow = fault(FaultKind.DATA, ARRIVAL_NS, "p0", duration_ns=SECOND_NS, detail="slow_write", amount=1.0)
        death = fault(FaultKind.CRASH, ARRIVAL_NS + 12 * MILLISECOND_NS, "coordinator")
        return make_world(
            ask(num_prompt_tokens=40, max_tokens=14),
            faults=(slow, death),
            family=Family.REMOTE,
            restart_ns=MILLISECOND_NS,
        )

    assert finish(damaged())[0].outcome in ANSWERED
    break_it(monkeypatch, RebuildWindow, "held", blind)
    with pytest.raises(Violation, match="lands in block"):
        finish(damaged())
