"""Runs one history from its scenario to its end, judges it, and says what happened in it."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.core.ids import Outcome
from cluster.front.request import FrontRequest
from cluster.sim.checks import check_outcomes, held, leftovers, watch_landings
from cluster.sim.client import Client, Violation
from cluster.sim.generator import generate
from cluster.sim.kernel import MILLISECOND_NS, SECOND_NS
from cluster.sim.scenario import Scenario
from cluster.sim.trace import Trace
from cluster.sim.world import World

CHECK_EVERY = 16
"""Invariants are checked after every so-many-th event of a machine; a replay checks after every one."""
LIVENESS_NS = 150 * SECOND_NS
"""Once faults have stopped, every request must have ended within this time."""
GRACE_NS = 90 * SECOND_NS
"""And then everything that was held must be free within this."""
PROMPT_NS = 1 * SECOND_NS
"""Where nothing went wrong, blocks, legs and leases are free so soon; records of tokens may stay for their time."""
LOOK_INTERVAL_NS = 250 * MILLISECOND_NS


class HistoryError(Exception):
    """A history went wrong; the cause says how. Replayed by its seed."""

    def __init__(self, seed: int, error: BaseException) -> None:
        self.seed = seed
        frame = traceback.extract_tb(error.__traceback__)[-1]
        super().__init__(
            f"seed {seed}: {type(error).__name__}: {error}\n  in {frame.name} ({frame.filename}:{frame.lineno})"
            f"\n  replay: python -m cluster.sim --seed {seed} --trace"
        )


@dataclass(slots=True, kw_only=True)
class Report:
    """What happened in a history (or, added up, in many).

    By `num_drains` orders `num_left` lives ended. `num_interrupted` requests ran as the coordinator died;
    `num_continued` of them were answered by that very attempt.
    """

    num_histories: int = 1
    num_events: int = 0
    num_given_up: int = 0
    num_lives: int = 0
    num_copies: int = 0
    num_late_copies: int = 0
    num_partial_copies: int = 0
    num_fences: int = 0
    num_drains: int = 0
    num_left: int = 0
    num_coordinator_deaths: int = 0
    num_interrupted: int = 0
    num_continued: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    virtual_ns: int = 0

    def add(self, other: Report) -> None:
        self.num_histories += other.num_histories
        self.num_events += other.num_events
        self.num_given_up += other.num_given_up
        self.num_lives += other.num_lives
        self.num_copies += other.num_copies
        self.num_late_copies += other.num_late_copies
        self.num_partial_copies += other.num_partial_copies
        self.num_fences += other.num_fences
        self.num_drains += other.num_drains
        self.num_left += other.num_left
        self.num_coordinator_deaths += other.num_coordinator_deaths
        self.num_interrupted += other.num_interrupted
        self.num_continued += other.num_continued
        self.virtual_ns += other.virtual_ns
        self.outcomes += other.outcomes

    def __str__(self) -> str:
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        return (
            f"{self.num_histories} histories, {self.num_events} events, {self.virtual_ns / SECOND_NS:.0f} simulated s, "
            f"{self.num_lives} worker lives, {self.num_given_up} given up, {self.num_fences} fences, "
            f"{self.num_copies} copies landed, {self.num_partial_copies} of them of some layers and "
            f"{self.num_late_copies} late; {self.num_drains} drains, by which {self.num_left} lives ended; "
            f"{self.num_coordinator_deaths} deaths of the coordinator while "
            f"{self.num_interrupted} answers ran, {self.num_continued} went on; requests: {outcomes}"
        )


def run_seed(seed: int, *, trace: Trace | None = None, check_every: int = CHECK_EVERY) -> Report:
    """The history of a seed. Raises HistoryError."""
    return run_scenario(generate(seed), trace=trace, check_every=check_every)


def run_scenario(scenario: Scenario, *, trace: Trace | None = None, check_every: int = CHECK_EVERY) -> Report:
    """Runs and judges. Raises HistoryError for whatever goes wrong, a bug in a machine included."""
    try:
        world = World(scenario, trace=trace or Trace(), check_every=check_every)
        run_world(world)
    except Exception as error:
        raise HistoryError(scenario.seed, error) from error
    return report(world)


def run_world(world: World) -> None:
    """Runs a world to its end. Raises Violation, HangError, or what a machine raised."""
    watch_landings(world)
    kernel, scenario = world.kernel, world.scenario
    kernel.run_until(max(scenario.requests_end_ns, scenario.faults_end_ns) + 1)
    world.stop_faults()
    _run_until_empty(world, LIVENESS_NS, lambda: _unfinished(world), "never ended")
    check_outcomes(world)
    if not scenario.has_trouble:
        _run_until_empty(world, PROMPT_NS, lambda: held(world), "is held")
    _run_until_empty(world, GRACE_NS, lambda: leftovers(world), "is left over")
    world.check_invariants()


def _run_until_empty(world: World, limit_ns: int, look: Callable[[], list[str]], complaint: str) -> None:
    end_ns = world.kernel.now_ns + limit_ns
    while found := look():
        if world.kernel.now_ns >= end_ns:
            raise Violation("; ".join(found) + f" ({complaint} within {limit_ns // SECOND_NS} s)")
        world.kernel.run_until(world.kernel.now_ns + LOOK_INTERVAL_NS)


def _unfinished(world: World) -> list[str]:
    return [client.request.request_id for client in world.clients if not client.has_ended]


def report(world: World) -> Report:
    return Report(
        num_events=world.kernel.num_events,
        num_given_up=world.num_given_up,
        num_lives=len(world.all_workers),
        num_copies=world.fabric.num_copies,
        num_late_copies=world.num_late_copies,
        num_partial_copies=world.num_partial_copies,
        num_fences=world.fabric.num_fences,
        num_drains=world.num_drains,
        num_left=world.num_left,
        num_coordinator_deaths=world.num_coordinator_deaths,
        num_interrupted=len(world.interrupted),
        num_continued=sum(_has_gone_on(world, request, attempt) for request, attempt in world.interrupted),
        virtual_ns=world.kernel.now_ns,
        outcomes=Counter(_end_of(client) for client in world.clients),
    )


def _has_gone_on(world: World, request: FrontRequest, attempt: int) -> bool:
    """Whether the request, which ran at that attempt, was answered by it."""
    client = next(client for client in world.clients if client.request.request_id == request.spec.request_id)
    return request.attempt == attempt and client.outcome in (Outcome.STOP, Outcome.LENGTH)


def _end_of(client: Client) -> str:
    return "unavailable" if client.outcome is None else client.outcome.value
