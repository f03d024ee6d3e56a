"""A request is cancelled, or its deadline passes, in each of the states that it can be in: everything is free a second
later, but for what a fence still guards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from cluster.core.ids import Outcome
from cluster.sim.checks import held
from cluster.sim.engine_model import StepCost
from cluster.sim.fabric import Family
from cluster.sim.kernel import MILLISECOND_NS, SECOND_NS
from cluster.sim.scenario import Fault, FaultKind, Request
from cluster.sim.world import World
from tests.sim.worlds import ANSWERED, ARRIVAL_NS, ask, count, fault, make_world, run_until

LONG_NS = 60 * SECOND_NS
SLOW_LINK = 60_000
MAX_SEEDS = 20
Condition = Callable[[World], bool]


def phase(world: World) -> str:
    """The request's, as the coordinator sees it; empty where it knows of none."""
    node = world.coordinator
    view = node.state.request("r0", node.process.now_ns()) if node.process.alive else None
    return "" if view is None else view.phase


def attempt(world: World) -> int:
    view = world.coordinator.state.request("r0", world.coordinator.process.now_ns())
    return 0 if view is None else view.attempt


def in_phase(name: str) -> Condition:
    return lambda world: phase(world) == name


def blocks(world: World, name: str, state: str) -> int:
    node = world.worker(name)
    return 0 if node is None else int(getattr(node.state.pool.counts(), state))


def num_legs(world: World, name: str) -> int:
    node = world.worker(name)
    return 0 if node is None else node.state.num_legs()


def has_tokens(number: int) -> Condition:
    return lambda world: any(c.request.request_id == "r0" and c.num_tokens >= number for c in world.clients)


def is_rebuilding(world: World) -> bool:
    return world.coordinator.process.alive and world.coordinator.state._parts.rebuild.is_open


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a request comes into a state.

    Attributes:
        is_there: whether it is.
        until, then: first of all, when this comes, these faults begin (kind, target, duration); none at all if None.
        stopped: a worker whose process is stopped, so that it cannot release anything. Its peers wait for its fence,
            and keep blocks, their lease and their leg until then.
        has_company: another request runs; only what is this one's counts.
    """

    is_there: Condition
    until: Condition | None = None
    then: tuple[tuple[FaultKind, str, int], ...] = ()
    fields: dict[str, object] = dataclasses.field(default_factory=dict)
    stopped: str = ""
    has_company: bool = False


def restarted(is_there: Condition) -> Case:
    """Within the rebuild window, which stays open since a worker is missing."""
    return Case(
        is_there=lambda world: is_rebuilding(world) and is_there(world),
        until=has_tokens(2),
        then=((FaultKind.CRASH, "coordinator", MILLISECOND_NS), (FaultKind.CRASH, "d1", LONG_NS)),
        fields={"num_decode": 2, "cost": StepCost(base_ns=60 * MILLISECOND_NS), "restart_ns": 50 * MILLISECOND_NS},
    )


DECODE_DIES = ((FaultKind.CRASH, "d0", 200 * MILLISECOND_NS),)
SMALL_CHUNKS = {"prefill_chunk_tokens": 4, "max_step_tokens": 12}
CASES = {
    "queued": Case(is_there=in_phase("queued"), fields={"max_running": 1}, has_company=True),
    "reserving": Case(is_there=in_phase("reserving")),
    "reserved": Case(is_there=lambda world: blocks(world, "d0", "reserved") > 0 and not num_legs(world, "p0")),
    "being read": Case(is_there=lambda world: blocks(world, "p0", "active") > 0, fields=SMALL_CHUNKS),
    "being read and pushed": Case(is_there=lambda world: world.fabric.num_copies > 2, fields=SMALL_CHUNKS),
    "pushed": Case(
        is_there=lambda world: count(world, "PrefillDone(") > 0 and phase(world) == "prefilling",
        fields={"link_ns_per_byte": SLOW_LINK},
    ),
    "committed": Case(is_there=in_phase("decoding")),
    "decoding": Case(is_there=has_tokens(4)),
    "in a long step": Case(is_there=has_tokens(2), fields={"cost": StepCost(base_ns=400 * MILLISECOND_NS)}),
    "finished": Case(is_there=in_phase("finished")),
    "read by decode": Case(
        is_there=lambda world: blocks(world, "d0", "active") > 0, fields={"num_prefill": 0, **SMALL_CHUNKS}
    ),
    "local": Case(is_there=has_tokens(3), fields={"num_prefill": 0}),
    "asking for another attempt": Case(is_there=in_phase("waiting_front"), until=has_tokens(3), then=DECODE_DIES),
    "queued again": Case(
        is_there=lambda world: phase(world) == "queued" and attempt(world) > 0, until=has_tokens(3), then=DECODE_DIES
    ),
    "on its second attempt": Case(
        is_there=lambda world: attempt(world) == 2 and has_tokens(4)(world), until=has_tokens(3), then=DECODE_DIES
    ),
    "waiting for a fence": Case(
        is_there=lambda world: blocks(world, "d0", "quarantined") > 0,
        until=lambda world: world.fabric.num_copies > 2,
        then=((FaultKind.PAUSE, "p0", LONG_NS),),
        fields={"family": Family.REMOTE, "link_ns_per_byte": SLOW_LINK, "can_kill": False, **SMALL_CHUNKS},
        stopped="p0",
    ),
    "announced to a new coordinator": restarted(in_phase("recovering")),
    "taken over by a new coordinator": restarted(in_phase("decoding")),
}


def make(case: Case, request: Request, faults: tuple[Fault, ...], seed: int) -> World:
    others = [ask(1, max_tokens=40, arrival_ns=ARRIVAL_NS - 5 * MILLISECOND_NS)] if case.has_company else []
    return make_world(*others, request, faults=faults, seed=seed, **case.fields)


def moment_of(world: World, condition: Condition) -> int | None:
    try:
        run_until(world, lambda: condition(world), limit_ns=4 * SECOND_NS)
    except AssertionError:
        return None
    return world.kernel.now_ns


def find(case: Case) -> tuple[int, int, tuple[Fault, ...]]:
    """(seed, time, faults) at which the request is in that state: equal histories come to it again."""
    request = ask(num_prompt_tokens=30, max_tokens=14)
    for seed in range(MAX_SEEDS):
        faults: tuple[Fault, ...] = ()
        if case.until is not None:
            begin_ns = moment_of(make(case, request, (), seed), case.until)
            assert begin_ns is not None
            faults = tuple(
                fault(kind, begin_ns, target, duration_ns=duration_ns) for kind, target, duration_ns in case.then
            )
        found_ns = moment_of(make(case, request, faults, seed), case.is_there)
        if found_ns is not None:
            return seed, found_ns, faults
    raise AssertionError("the state was never reached")


def left(world: World, case: Case) -> list[str]:
    found = [line for line in held(world) if not case.has_company or "r0" in line]
    if case.stopped:
        guarded = ("quarantined", " lease ", " legs", f"{case.stopped}#")
        found = [line for line in found if not any(word in line for word in guarded)]
    return found


@pytest.mark.bad_day(2)
@pytest.mark.bad_day(6)
@pytest.mark.parametrize("how", ["leave_ns", "deadline_ns"])
@pytest.mark.parametrize("state", CASES)
def test_everything_is_released_within_a_second(state: str, how: str) -> None:
    case = CASES[state]
    seed, found_ns, faults = find(case)
    request = ask(num_prompt_tokens=30, max_tokens=14)
    world = make(case, dataclasses.replace(request, **{how: found_ns - ARRIVAL_NS}), faults, seed)  # type: ignore[arg-type]
    world.kernel.run_until(found_ns - 1)
    client = next(client for client in world.clients if client.request.request_id == "r0")
    assert not client.has_ended
    run_until(world, lambda: client.has_ended, limit_ns=MILLISECOND_NS)
    expected = Outcome.CANCELLED if how == "leave_ns" else Outcome.DEADLINE_EXCEEDED
    assert client.outcome is expected or (state == "finished" and client.outcome in ANSWERED)
    run_until(world, lambda: not left(world, case), limit_ns=SECOND_NS)
