"""Drains in the simulator: they cost nobody an answer, and whatever else happens the drained worker ends."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from cluster.core.drain_orders import DrainOrder
from cluster.core.ids import Outcome
from cluster.sim.client import Client
from cluster.sim.generator import generate
from cluster.sim.history import run_world
from cluster.sim.kernel import MILLISECOND_NS, SECOND_NS
from cluster.sim.scenario import Fault, FaultKind, Scenario
from cluster.sim.trace import Trace
from cluster.sim.world import World
from tests.sim.worlds import ANSWERED, ARRIVAL_NS, ask, count, fault, finish, make_world, run_until

NUM_HISTORIES = int(os.environ.get("BATON_SIM_HISTORIES", "1500")) // 100
LONG = 40


def drain(at_ns: int, target: str, then: str = "stop", *, deadline_s: float = 0.0, migrate: bool = False) -> Fault:
    return fault(FaultKind.DRAIN, at_ns, target, detail=then, amount=deadline_s, migrate=migrate)


def order_of(name: str, *, migrate: bool = False) -> DrainOrder:
    return DrainOrder(worker=name, migrate=migrate)


def run_to_tokens(world: World, num_tokens: int) -> Client:
    """Until the only client has so many."""
    run_until(world, lambda: bool(world.clients) and world.clients[0].num_tokens >= num_tokens)
    return world.clients[0]


def running_on(world: World) -> str:
    """The decode worker that writes the answer."""
    nodes = [world.worker(name) for name in world.scenario.decode_names]
    return next(node.worker.name for node in nodes if node is not None and node.state.num_legs())


def drained_alone(seed: int) -> Scenario:
    """A random scenario with nothing wrong but that workers are drained, up to three."""
    scenario, draw = generate(seed), random.Random(f"{seed}/drains")
    faults = [
        drain(
            draw.choice(scenario.requests).arrival_ns + draw.choice((1, 5, 20, 60, 200)) * MILLISECOND_NS,
            draw.choice(scenario.worker_names),
            draw.choice(("stop", "restart", "flip")),
            deadline_s=draw.choice((0.0, 0.0, 0.05, 1.0)),
            migrate=draw.random() < 0.6,
        )
        for _ in range(draw.choice((1, 2, 3)))
    ]
    faults.sort(key=lambda one: one.at_ns)
    requests = tuple(replace(request, poison=None) for request in scenario.requests)
    return replace(scenario, requests=requests, faults=tuple(faults), max_attempts=1)


def test_drains_alone_cost_nobody_an_answer() -> None:
    """With one attempt a request, so that a move that counted as a failure would be seen."""
    num_left = 0
    for seed in range(NUM_HISTORIES):
        world = World(drained_alone(seed), trace=Trace(), check_every=4)
        run_world(world)
        num_left += world.num_left
        for client in world.clients:
            told = f"seed {seed}: {client.request.request_id} ended as {client.outcome} ({client.reason})"
            assert not client.is_unavailable, told
            assert client.outcome not in (Outcome.WORKER_LOST, Outcome.TRANSFER_FAILED, Outcome.INTERNAL), told
    assert num_left > NUM_HISTORIES // 4


@pytest.mark.bad_day(23)
def test_a_running_answer_goes_on_from_the_kv_of_the_drained_worker() -> None:
    world = make_world(ask(max_tokens=LONG), num_decode=2)
    client = run_to_tokens(world, 5)
    name = running_on(world)
    other = {"d0": "d1", "d1": "d0"}[name]
    world.drain(order_of(name, migrate=True), force=False)
    finish(world)
    assert client.outcome in ANSWERED and len(client.token_ids) == LONG
    assert list(world.retired) == [name] and world.num_given_up == 1
    assert count(world, f"coordinator#1 -> {name}#1", "Prefill(attempt=r0/2") == 1
    assert count(world, f"{name}#1 => {other}#1", "PushEnd(key=PushKey(request_id=r0, attempt=2)") == 1


def test_without_migration_the_answer_ends_where_it_runs() -> None:
    world = make_world(ask(max_tokens=LONG), num_decode=2)
    client = run_to_tokens(world, 5)
    name = running_on(world)
    world.drain(order_of(name), force=False)
    finish(world)
    assert client.outcome in ANSWERED and list(world.retired) == [name]
    assert count(world, "AttemptFailed") == 0


@pytest.mark.bad_day(8)
def test_a_prefill_worker_is_drained_after_its_push() -> None:
    push_ns = ARRIVAL_NS + 3 * MILLISECOND_NS
    world = make_world(ask(max_tokens=4), faults=(drain(push_ns, "p0"),), num_prefill=2, link_ns_per_byte=20_000)
    (client,) = finish(world)
    assert client.outcome in ANSWERED and list(world.retired) == ["p0"]
    assert count(world, "AttemptFailed") == 0


def test_a_flipped_worker_serves_in_the_other_role() -> None:
    requests = (ask(), ask(1, arrival_ns=2 * SECOND_NS), ask(2, arrival_ns=2 * SECOND_NS))
    faults = (drain(SECOND_NS, "p1", "flip"), drain(4 * SECOND_NS, "p1", "flip"))
    world = make_world(*requests, faults=faults, num_prefill=2, max_running=1)
    clients = finish(world)
    assert all(client.outcome in ANSWERED for client in clients) and not world.retired
    assert count(world, "p1#2 -> coordinator#1", "WorkerHello", "role=decode") == 1
    assert count(world, "p1#3 -> coordinator#1", "WorkerHello", "role=prefill") == 1
    assert count(world, "-> p1#2", "Reserve(") == 1, "the two that came together went to both"


def test_a_drain_outlasts_its_coordinator() -> None:
    """The worker tells the new one of it, which then places nothing there and sends it away."""
    world = make_world(ask(max_tokens=LONG), ask(1, arrival_ns=2 * SECOND_NS), num_decode=2)
    client = run_to_tokens(world, 2)
    name = running_on(world)
    world.drain(order_of(name), force=False)
    world.kernel.run_until(world.kernel.now_ns + 5 * MILLISECOND_NS)
    world.coordinator.process.exit("crashed")
    clients = finish(world)
    assert client.outcome in ANSWERED and all(one.outcome in ANSWERED for one in clients)
    assert list(world.retired) == [name]
    assert count(world, "coordinator#2 ->", f"{name}#1", "Leave(") == 1


def test_a_worker_that_crashes_while_it_is_drained_is_drained_when_it_comes_back() -> None:
    world = make_world(ask(max_tokens=LONG), num_decode=2)
    client = run_to_tokens(world, 2)
    name = running_on(world)
    world.drain(order_of(name), force=False)
    world.kernel.run_until(world.kernel.now_ns + 5 * MILLISECOND_NS)
    process = world.process(name)
    assert process is not None
    process.exit("crashed")
    finish(world)
    assert client.outcome in ANSWERED and list(world.retired) == [name]
    assert count(world, f"coordinator#1 -> {name}#2", "Leave(") == 1
