"""After a loss a request goes on from the KV that survives: prefill's blocks, and those of whoever else has some."""

from __future__ import annotations

import dataclasses

import pytest

from cluster.sim.engine_model import StepCost
from cluster.sim.fabric import Family
from cluster.sim.kernel import MILLISECOND_NS, SECOND_NS
from cluster.sim.worker_node import WorkerNode
from cluster.sim.world import World
from tests.sim.worlds import ANSWERED, ARRIVAL_NS, FAMILIES, ask, count, finish, make_world, run_until

NUM_PROMPT_TOKENS = 40
MAX_TOKENS = 20
NUM_DELIVERED = 7
each_family = pytest.mark.parametrize("family", FAMILIES)


def num_computed(world: World, role: str = "") -> int:
    """Tokens that workers whose names begin so have computed so far, in all of their lives."""
    return sum(node.num_computed_tokens for node in world.all_workers if node.worker.name.startswith(role))


def decoding(world: World) -> WorkerNode:
    """The decode worker that has the one request that runs."""
    nodes = (world.worker(name) for name in world.scenario.decode_names)
    (node,) = (node for node in nodes if node is not None and node.state.num_legs())
    return node


def has(world: World, index: int, num_tokens: int) -> bool:
    return len(world.clients) > index and world.clients[index].num_tokens >= num_tokens


@each_family
@pytest.mark.parametrize("restarts", [False, True])
def test_decode_dies_and_prefill_still_has_the_prompt(family: Family, restarts: bool) -> None:
    """Of four prefill workers the one that has read the prompt reads what was delivered since, and not much more. A
    coordinator that was started in the meantime has never seen the prompt: the front tells it the hashes."""
    for seed in range(4):
        # Another one comes first, so that it is not the first of all workers that reads the prompt.
        other = ask(1, max_tokens=1)
        arrival_ns = ARRIVAL_NS + 200 * MILLISECOND_NS
        request = ask(num_prompt_tokens=NUM_PROMPT_TOKENS, max_tokens=MAX_TOKENS, arrival_ns=arrival_ns)
        cost = StepCost(base_ns=40 * MILLISECOND_NS)
        world = make_world(other, request, family=family, num_prefill=4, num_decode=2, seed=seed, cost=cost)
        run_until(world, lambda world=world: has(world, 1, 2))  # type: ignore[misc]
        if restarts:
            world.coordinator.process.exit("crash")
            world.kernel.run_until(world.kernel.now_ns + world.scenario.restart_ns + 250 * MILLISECOND_NS)
            assert len(_registered(world)) == 6
        run_until(world, lambda world=world: has(world, 1, NUM_DELIVERED))  # type: ignore[misc]
        before, read_before = num_computed(world), num_computed(world, "p")
        num_delivered = world.clients[1].num_tokens
        decoding(world).process.exit("crash")
        assert [client.outcome in ANSWERED for client in finish(world)] == [True, True]
        assert count(world, "Resubmit(") == 1
        num_read, block_size = num_computed(world, "p") - read_before, world.scenario.block_size
        assert 0 < num_read <= num_delivered + 2 + block_size, f"{num_read} tokens for {num_delivered} delivered"
        assert num_computed(world) - before <= num_read + MAX_TOKENS - num_delivered


def _registered(world: World) -> list[str]:
    status = world.coordinator.state.status(world.coordinator.process.now_ns())
    return [worker.worker.name for pool in status.pools for worker in pool.workers]


def test_decode_dies_and_another_one_has_the_same_answer() -> None:
    """Blocks that were filled while an answer was written are found as well, by the hashes that the front sends."""
    first = ask(num_prompt_tokens=NUM_PROMPT_TOKENS, max_tokens=MAX_TOKENS)
    second = dataclasses.replace(first, request_id="r1", arrival_ns=ARRIVAL_NS + SECOND_NS)
    # A third one keeps the worker that has everything busy, so that the second is placed on the other.
    third = ask(2, num_prompt_tokens=8, max_tokens=55, arrival_ns=ARRIVAL_NS + SECOND_NS - 30 * MILLISECOND_NS)
    world = make_world(first, third, second, num_decode=2, num_blocks=96)
    run_until(world, lambda: has(world, 2, 2))
    holder = next(node for node in world.all_workers if node.worker.name == _of(world, "r0"))
    node = world.worker(_of(world, "r1"))
    assert node is not None
    assert node is not holder, "the third keeps it away from there"
    run_until(world, lambda: has(world, 2, 10))
    node.process.exit("crash")
    assert all(client.outcome in ANSWERED for client in finish(world))
    granted = [line for line in world.kernel.trace.lines if "ReserveGranted(attempt=r1/2" in line]
    assert granted and "num_cached_blocks=12" in granted[0], granted


def _of(world: World, request_id: str) -> str:
    """The decode worker that the request was first given to."""
    lines = (
        line for line in world.kernel.trace.lines if "ReserveGranted(" in line and f"attempt={request_id}/1" in line
    )
    return next(lines).split()[2].partition("#")[0]
