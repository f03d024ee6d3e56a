"""Builds small worlds for the scenario tests and runs them to a moment, or to their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.core.ids import Outcome
from cluster.sim.checks import held, leftovers, watch_landings
from cluster.sim.client import Client
from cluster.sim.fabric import Family
from cluster.sim.history import run_world
from cluster.sim.kernel import MILLISECOND_NS, SECOND_NS
from cluster.sim.scenario import Fault, FaultKind, Request, Scenario
from cluster.sim.trace import Trace
from cluster.sim.world import World
from engine.core.sampling import SamplingParams

FAMILIES = (Family.SHARED_MEMORY, Family.REMOTE)
ANSWERED = (Outcome.STOP, Outcome.LENGTH)
ARRIVAL_NS = 20 * MILLISECOND_NS
"""By then everybody has registered."""
LOOK_NS = MILLISECOND_NS // 4


def ask(index: int = 0, *, num_prompt_tokens: int = 18, max_tokens: int = 8, **fields: Any) -> Request:
    """A request that never ends early, with a prompt of its own."""
    prompt = tuple((7 * position + 13 * index + 5) % 60 + 3 for position in range(num_prompt_tokens))
    values = {"front": 0, "arrival_ns": ARRIVAL_NS, **fields}
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id=f"r{index}", prompt_ids=prompt, sampling=sampling, **values)


def fault(kind: FaultKind, at_ns: int, target: str, *, duration_ns: int = MILLISECOND_NS, **fields: Any) -> Fault:
    return Fault(kind=kind, at_ns=at_ns, duration_ns=duration_ns, target=target, **fields)


def make_world(*requests: Request, faults: tuple[Fault, ...] = (), seed: int = 1, **fields: Any) -> World:
    """One prefill and one decode worker unless `fields` of the scenario say otherwise. Invariants after every event."""
    scenario = Scenario(seed=seed, requests=requests, faults=faults, **fields)
    world = World(scenario, trace=Trace(enabled=True), check_every=1)
    watch_landings(world)
    return world


def finish(world: World) -> list[Client]:
    """To the end, judged as every random history is."""
    run_world(world)
    return world.clients


def run_until(world: World, condition: Callable[[], bool], limit_ns: int = 10 * SECOND_NS) -> int:
    """Runs until the condition holds, and returns how long that took."""
    started_ns = world.kernel.now_ns
    while not condition():
        assert world.kernel.now_ns < started_ns + limit_ns, f"not within {limit_ns / SECOND_NS} s; {leftovers(world)}"
        world.kernel.run_until(world.kernel.now_ns + LOOK_NS)
    return world.kernel.now_ns - started_ns


def is_free(world: World) -> bool:
    """No block, lease, leg, request or body anywhere."""
    return not held(world)


def count(world: World, *words: str) -> int:
    """Lines of the trace that hold all of the words."""
    return sum(all(word in line for word in words) for line in world.kernel.trace.lines)
