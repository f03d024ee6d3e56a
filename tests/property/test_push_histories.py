"""PushSender and PushReceiver over a faulty network, by seed; what must hold is in tests/support/push_world.py.

`make soak-push` plays many more (BATON_PUSH_HISTORIES).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.push_world import FAULTS, run_history
from tests.support.soak import NUM_PUSH_HISTORIES

BATCH = 50
NUM_COUNTED = 200
"""Histories in which every fault is to be found."""


@pytest.fixture(scope="module")
def total() -> Iterator[Counter[str]]:
    """What happened in all histories that were played."""
    counts: Counter[str] = Counter()
    yield counts
    print("; ".join(f"{name}: {number}" for name, number in sorted(counts.items())))


def play(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        world = run_history(seed)
        counts.update(world.counts)
        counts["history"] += 1
        counts["push"] += len(world.outcomes)
        counts["committed push"] += sum(outcome.committed for outcome in world.outcomes.values())
        counts["failed push"] += sum(outcome.committed == 0 for outcome in world.outcomes.values())
    return counts


@pytest.mark.bad_day(1, 4, 5, 7, 18)
@pytest.mark.parametrize("start", range(0, NUM_PUSH_HISTORIES, BATCH))
def test_histories(start: int, total: Counter[str]) -> None:
    total.update(play(range(start, min(start + BATCH, NUM_PUSH_HISTORIES))))


def test_every_fault_happens_and_pushes_arrive_all_the_same() -> None:
    """The histories would prove nothing if everything, or nothing, went wrong."""
    counts = play(range(NUM_COUNTED))
    assert not [name for name in FAULTS if counts[name] == 0], str(counts)
    assert counts["committed push"] > counts["push"] // 4 and counts["failed push"] > counts["push"] // 10, str(counts)
    assert counts["committed block"] > 0 and counts["fence"] > 0 and counts["malformed"] > 0, str(counts)
    assert counts["layer group"] > 100, "some layers of a chunk are ready before others"
