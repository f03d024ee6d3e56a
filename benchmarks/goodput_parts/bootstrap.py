"""Intervals by the circular block bootstrap (Politis and Romano, 1992).

Requests that arrive close together wait in the same queues, so not single requests are drawn anew but runs of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf, isnan, nan

from benchmarks.goodput_parts.attainment import Point, goodput

BLOCK = 10
"""Requests that are drawn together."""
NUM_DRAWS = 1_000
OUTSIDE = 0.025
"""Share of the draws beyond either end of an interval."""


class BlockSums:
    """How many were in time in each run of BLOCK requests; after the last one the first follows."""

    def __init__(self, kept: Sequence[bool]) -> None:
        self._num_blocks = max(1, len(kept) // BLOCK)
        size = min(BLOCK, len(kept))
        circle = [*kept, *kept[: size - 1]]
        self._shares = [sum(circle[start : start + size]) / size for start in range(len(kept))]

    def draw(self, source: random.Random) -> float:
        """The attainment of as many requests, drawn anew."""
        return sum(source.choices(self._shares, k=self._num_blocks)) / self._num_blocks


def attainment_interval(point: Point, seed: int) -> tuple[float, float]:
    sums, source = BlockSums(point.kept), random.Random(seed)
    return interval([sums.draw(source) for _ in range(NUM_DRAWS)])


def goodput_draws(curve: Sequence[Point], seed: int) -> list[float]:
    """What goodput would have been with other requests. `curve` is sorted by rate."""
    source = random.Random(seed)
    sums = [(point.rate, BlockSums(point.kept)) for point in curve]
    return [goodput([(rate, one.draw(source)) for rate, one in sums]) for _ in range(NUM_DRAWS)]


def ratio_draws(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Of draws that have nothing to do with each other. Over nothing, something is infinite, and nothing no number."""
    return [_ratio(one, other) for one, other in zip(above, below, strict=True)]


def _ratio(above: float, below: float) -> float:
    if below:
        return above / below
    return inf if above else nan


def interval(draws: Sequence[float]) -> tuple[float, float]:
    """Between the quantiles that leave OUTSIDE at either end. Draws that are no number count as the lowest."""
    ordered = sorted(draws, key=lambda value: (not isnan(value), value))
    skipped = int(OUTSIDE * len(ordered))
    return ordered[skipped], ordered[len(ordered) - 1 - skipped]
