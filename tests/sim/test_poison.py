"""Requests that end, fail or stop the engines that compute them: singled out, ended after the second, and reported."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cluster.core.ids import Outcome
from cluster.sim.client import Client, Violation
from cluster.sim.kernel import MILLISECOND_NS, SECOND_NS
from cluster.sim.scenario import FaultKind, Poison, PoisonKind, Request
from cluster.sim.worker_node import WorkerNode
from cluster.sim.world import World
from engine.core.block_pool import BlockPool
from tests.sim.worlds import ANSWERED, ARRIVAL_NS, FAMILIES, ask, count, fault, finish, make_world, run_until

NUM_PROMPT_TOKENS = 18
PLACES = [5, NUM_PROMPT_TOKENS, NUM_PROMPT_TOKENS + 1, NUM_PROMPT_TOKENS + 2, NUM_PROMPT_TOKENS + 5]
"""In the first chunk, the last one, and with the first, second and fifth token of the answer."""
LONG_NS = 120 * SECOND_NS


def poison(index: int, kind: PoisonKind, num_tokens: int, **fields: Any) -> Request:
    values = {"arrival_ns": ARRIVAL_NS + 20 * MILLISECOND_NS, **fields}
    return ask(index, num_prompt_tokens=NUM_PROMPT_TOKENS, poison=Poison(kind=kind, num_tokens=num_tokens), **values)


def innocents(num_requests: int, every_ms: int = 6) -> list[Request]:
    return [
        ask(index, max_tokens=20, arrival_ns=ARRIVAL_NS + index * every_ms * MILLISECOND_NS)
        for index in range(num_requests)
    ]


def num_struck(world: World) -> int:
    """Workers that poison has taken down."""
    return count(world, "exits: poisoned")


def assert_stopped(world: World) -> list[Client]:
    """Each poison request ended as such and was reported, all others were answered. Returns the poisonous clients."""
    num_requests = len(world.scenario.requests)
    run_until(
        world,
        lambda: len(world.clients) == num_requests and all(client.has_ended for client in world.clients),
        limit_ns=LONG_NS,
    )
    node = world.coordinator
    finish(world)
    bad = [client for client in world.clients if client.request.poison is not None]
    assert [client.outcome for client in bad] == [Outcome.INTERNAL] * len(bad), [client.reason for client in bad]
    ends = [(client.request.request_id, client.outcome, client.reason) for client in world.clients if client not in bad]
    assert all(outcome in ANSWERED for _, outcome, _ in ends), ends
    told = {report.request_id: report.reason for report in node.reports}
    assert told == {client.request.request_id: client.reason for client in bad} and len(node.reports) == len(bad)
    assert node.state.status(node.process.now_ns()).num_poison == len(bad)
    return bad


@pytest.mark.parametrize("place", PLACES)
def test_a_request_that_ends_workers_is_stopped_after_the_second(place: int) -> None:
    for num_each, family in ((1, FAMILIES[0]), (2, FAMILIES[1]), (4, FAMILIES[0])):
        requests = [*innocents(6), poison(20, PoisonKind.CRASH, place)]
        world = make_world(*requests, family=family, num_prefill=num_each, num_decode=num_each, seed=place)
        (client,) = assert_stopped(world)
        assert num_struck(world) == 2
        assert "died or failed" in client.reason and client.reason.count("#") >= 2, client.reason


@pytest.mark.parametrize("place", [5, NUM_PROMPT_TOKENS + 2])
def test_a_request_that_fails_its_steps_is_stopped_after_the_second(place: int) -> None:
    for num_each in (1, 2):
        requests = [*innocents(6), poison(20, PoisonKind.RAISE, place)]
        world = make_world(*requests, num_prefill=num_each, num_decode=num_each)
        assert_stopped(world)
        assert count(world, "blame=shared", "attempt=r20/") == 2
        assert len(world.all_workers) == 2 * num_each, "no worker was taken for broken"


@pytest.mark.parametrize("place", [5, NUM_PROMPT_TOKENS + 2])
def test_a_request_for_which_nothing_usable_is_computed_fails_alone(place: int) -> None:
    """It is tried elsewhere once. What was computed of it is in no cache, also not for one that begins as it does."""
    requests = [*innocents(6), poison(20, PoisonKind.NOT_FINITE, place)]
    again = dataclasses.replace(requests[-1], request_id="r21", poison=None, arrival_ns=ARRIVAL_NS + 500_000_000)
    world = make_world(*requests, again, num_prefill=2, num_decode=2)
    assert_stopped(world)
    failures = [line.split()[2] for line in world.kernel.trace.lines if "blame=own" in line]
    assert len(failures) == len(set(failures)) == 2, "at two workers"
    assert count(world, "LegFailed(") == count(world, "LegFailed(", "attempt=r20/"), "nobody else noticed"


@pytest.mark.parametrize("place", [5, NUM_PROMPT_TOKENS + 2])
def test_a_request_that_stops_engines_is_stopped_after_the_second(place: int) -> None:
    requests = [*innocents(6), poison(20, PoisonKind.STUCK, place)]
    world = make_world(*requests, num_prefill=2, num_decode=2, queue_timeout_s=100.0)
    (client,) = assert_stopped(world)
    assert world.num_given_up == 2 and "a step of its engine has been running" in client.reason


def test_several_poison_requests_at_once_convict_nobody_else() -> None:
    for seed in range(3):
        bad = [
            poison(20 + index, PoisonKind.CRASH, place, arrival_ns=ARRIVAL_NS + 5 * index * MILLISECOND_NS)
            for index, place in enumerate(PLACES[1:4])
        ]
        world = make_world(*innocents(6), *bad, num_prefill=2, num_decode=2, seed=seed, max_attempts=6)
        assert_stopped(world)
        assert num_struck(world) <= 2 * len(bad)


def busy(world: World, role: str) -> list[WorkerNode]:
    """Workers of that role that have a part in some request."""
    nodes = [world.worker(name) for name in world.scenario.worker_names if name.startswith(role)]
    return [node for node in nodes if node is not None and node.state.num_legs()]


def test_workers_that_die_for_other_reasons_convict_nobody() -> None:
    """Whoever answers dies, twice, and the requests have come through a trial between the two."""
    world = make_world(ask(max_tokens=46), ask(1, max_tokens=46), num_decode=2, max_attempts=9)
    for num_survived in (0, 2):
        run_until(world, lambda number=num_survived: count(world, "LegSurvived(") >= number)  # type: ignore[misc]
        run_until(world, lambda: len(world.clients) == 2 and all(client.num_tokens for client in world.clients))
        run_until(world, lambda: bool(busy(world, "d")) and not busy(world, "p"))
        for node in busy(world, "d"):
            node.process.exit("crash")
    assert [client.outcome in ANSWERED for client in finish(world)] == [True, True]
    assert count(world, "AttemptFailed(") >= 3


def test_a_worker_that_was_away_before_it_was_asked_convicts_nobody() -> None:
    """A suspect's trial goes to a worker that is stopped, which nobody knows yet. Its silence says nothing."""
    noise = fault(FaultKind.CLOCK_JUMP, 0, "p0")
    world = make_world(ask(), faults=(noise,), num_prefill=2, max_attempts=9, restart_ns=20 * SECOND_NS)
    run_until(world, lambda: bool(busy(world, "p")))
    (reader,) = busy(world, "p")
    (other,) = [name for name in ("p0", "p1") if name != reader.worker.name]
    away = world.worker(other)
    assert away is not None
    away.process.pause()
    reader.process.exit("crash")
    run_until(world, lambda: not away.process.alive, limit_ns=LONG_NS)
    assert count(world, "Placed(", f"prefill=WorkerRef(worker={away.worker},") > 0, "its trial"
    assert finish(world)[0].outcome in ANSWERED and not world.coordinator.reports


def test_keeping_what_cannot_be_trusted_in_the_cache_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "forget", lambda self, block_ids: None)
    with pytest.raises(Violation, match="was given token"):
        test_a_request_for_which_nothing_usable_is_computed_fails_alone(5)
