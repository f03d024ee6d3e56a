"""From the times of interleaved rounds to figures: a median, a spread, and ratios taken round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A median over rounds, and the quartiles around it."""

    median: float
    low: float
    high: float


def figure(values: Sequence[float]) -> Figure:
    """Raises ValueError if there are no values."""
    if not values:
        raise ValueError("values must not be empty")
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return Figure(median=middle, low=low, high=high)


def round_medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    """The usual time of a step in each round; a step that something disturbed does not count."""
    return [median(times_s) for times_s in rounds]


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Round by round: what slows the machine down for a while slows both sides of a round."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]
