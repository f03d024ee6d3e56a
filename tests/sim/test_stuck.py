"""Workers that are there and do nothing: whose engines do not come back from a step, or of which nothing is heard."""

from __future__ import annotations

import pytest

from cluster.core.limits import MAX_STEP_NS
from cluster.sim.fabric import Family
from cluster.sim.kernel import MILLISECOND_NS, SECOND_NS
from cluster.sim.scenario import FaultKind
from tests.sim.worlds import ANSWERED, ARRIVAL_NS, FAMILIES, ask, fault, finish, make_world, run_until

LONG_NS = 120 * SECOND_NS
HEARTBEAT_NS = SECOND_NS
"""The longest interval between two."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "at_ms"), [("p0", 1), ("p0", 8), ("d0", 1), ("d0", 60)])
def test_an_engine_that_is_stuck_is_found_out_and_replaced(family: Family, name: str, at_ms: int) -> None:
    """Its heartbeats go on. Within a named time it is given up, nothing of it can land any more, and its requests are
    answered by others; a next life takes its place."""
    stuck = fault(FaultKind.STUCK_ENGINE, ARRIVAL_NS + at_ms * MILLISECOND_NS, name, duration_ns=LONG_NS)
    requests = [ask(index, num_prompt_tokens=30, max_tokens=24) for index in range(4)]
    # Where the coordinator cannot kill it, it is refused when it comes back, and ends by itself.
    can_kill = at_ms == 1
    world = make_world(
        *requests, faults=(stuck,), family=family, num_prefill=2, num_decode=2, can_kill=can_kill, queue_timeout_s=60.0
    )
    node = world.worker(name)
    assert node is not None
    run_until(world, lambda: world.num_given_up > 0, limit_ns=LONG_NS)
    assert world.kernel.now_ns < ARRIVAL_NS + SECOND_NS + MAX_STEP_NS + 2 * HEARTBEAT_NS
    run_until(world, lambda: not node.process.alive, limit_ns=5 * SECOND_NS)
    run_until(world, lambda: all(client.has_ended for client in world.clients), limit_ns=5 * SECOND_NS)
    assert [client.outcome in ANSWERED for client in finish(world)] == [True] * 4
    assert world.num_given_up == 1 and world.worker(name) is not None


def test_a_slow_engine_is_not_taken_for_stuck() -> None:
    """Steps of many seconds, one after the other: they advance."""
    slow = fault(FaultKind.SLOW_ENGINE, 0, "d0", duration_ns=LONG_NS, amount=4_000.0)
    world = make_world(ask(max_tokens=4), faults=(slow,), queue_timeout_s=60.0)
    run_until(world, lambda: bool(world.clients) and world.clients[0].has_ended, limit_ns=LONG_NS)
    assert world.kernel.now_ns > 40 * SECOND_NS and world.num_given_up == 0
    assert finish(world)[0].outcome in ANSWERED


def test_a_worker_of_which_nothing_is_heard_is_replaced_within_the_heartbeat_timeout() -> None:
    stopped = fault(FaultKind.PAUSE, ARRIVAL_NS + 40 * MILLISECOND_NS, "d0", duration_ns=LONG_NS)
    requests = [ask(index, max_tokens=24) for index in range(4)]
    world = make_world(*requests, faults=(stopped,), num_decode=2, heartbeat_timeout_s=2.0)
    run_until(world, lambda: world.num_given_up > 0)
    assert world.kernel.now_ns < ARRIVAL_NS + 3 * SECOND_NS
    assert [client.outcome in ANSWERED for client in finish(world)] == [True] * 4
