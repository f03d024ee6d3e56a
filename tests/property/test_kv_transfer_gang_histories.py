"""Pushes between gangs of ranks over a faulty network, by seed; what must hold is in tests/support/gang_world.py.

Throughout, a committed block equals its source bit for bit at every rank, no byte lands in a block that its writer has
no right to any more, and every push ends everywhere with its leases released.
"""

from __future__ import annotations

import pytest

from tests.support.gang_world import World

DEGREES = ((1, 2, 4), (2, 1, 4), (2, 4, 4), (4, 2, 4), (2, 2, 2), (4, 1, 2), (1, 4, 2), (4, 4, 2))
"""Sender ranks, receiver ranks, KV heads; the last three hold heads more than once."""
NUM_HISTORIES = 30


def run_history(seed: int, degrees: tuple[int, int, int]) -> World:
    world = World(seed, *degrees)
    try:
        world.run()
    except Exception as error:
        error.add_note(f"replay with: run_history({seed}, {degrees})")
        raise
    return world


@pytest.mark.parametrize("degrees", DEGREES, ids=lambda d: f"{d[0]}to{d[1]}-{d[2]}heads")
def test_histories(degrees: tuple[int, int, int]) -> None:
    for seed in range(NUM_HISTORIES):
        run_history(seed, degrees)


def test_histories_see_commits_failures_damage_and_deaths() -> None:
    """The histories would prove nothing if everything, or nothing, went wrong."""
    worlds = [run_history(seed, DEGREES[seed % len(DEGREES)]) for seed in range(1000, 1064)]
    outcomes = [outcome for world in worlds for outcome in world.outcomes.values()]
    assert sum(outcome.committed for outcome in outcomes) > len(outcomes) // 4
    assert sum(outcome.failed for outcome in outcomes) > len(outcomes) // 10
    assert sum(world.num_malformed for world in worlds) > 0
    assert sum(world.num_losses for world in worlds) > 0
