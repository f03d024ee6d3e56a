"""Which requests were served in time, how many that is at a rate, and up to which rate it is enough of them.

Times and goodput are those of DistServe (Zhong and others, OSDI 2024): TPOT is the time from the first to the last
token by the number of gaps, and goodput the rate at which nine of ten requests still keep both limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import mean, median

MIN_ATTAINMENT = 0.9
STEP = 2.0
"""Between rates, until one is found that is enough and one that is too much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits as multiples of the medians without load."""

    name: str
    ttft_factor: float
    tpot_factor: float


TIGHT_TPOT = Slo(name="tight TPOT", ttft_factor=10, tpot_factor=1.5)
TIGHT_TTFT = Slo(name="tight TTFT", ttft_factor=3, tpot_factor=4)
LOOSE = Slo(name="loose", ttft_factor=10, tpot_factor=4)
SLOS = (TIGHT_TPOT, TIGHT_TTFT, LOOSE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request. Both times are None where it was refused."""

    ttft_s: float | None
    tpot_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    ttft_s: float
    tpot_s: float

    def are_kept(self, served: Served) -> bool:
        if served.ttft_s is None or served.tpot_s is None:
            return False
        return served.ttft_s <= self.ttft_s and served.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Of a curve: at that rate, which requests were in time."""

    rate: float
    kept: tuple[bool, ...]

    @property
    def attainment(self) -> float:
        return mean(self.kept)


def limits_of(slo: Slo, unloaded: Sequence[Sequence[Served]]) -> Limits:
    """From requests served one at a time, on each side: what the better side's median is multiplied with."""
    ttft_s = min(median(one.ttft_s for one in side if one.ttft_s is not None) for side in unloaded)
    tpot_s = min(median(one.tpot_s for one in side if one.tpot_s is not None) for side in unloaded)
    return Limits(ttft_s=slo.ttft_factor * ttft_s, tpot_s=slo.tpot_factor * tpot_s)


def goodput(curve: Sequence[tuple[float, float]]) -> float:
    """The rate at which attainment first falls below the least that is wanted, on lines between neighbouring rates.

    `curve`: pairs of rate and attainment, by rate. The first rate's attainment holds below it, so the answer is 0 where
    already that is too low; where none is, it is the last rate.
    """
    if curve[0][1] < MIN_ATTAINMENT:
        return 0.0
    for (rate, attained), (next_rate, next_attained) in pairwise(curve):
        if next_attained < MIN_ATTAINMENT:
            return rate + (next_rate - rate) * (attained - MIN_ATTAINMENT) / (attained - next_attained)
    return curve[-1][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How goodput is looked for.

    Attributes:
        num_requests: at each rate.
        precision: ratio of the two rates around goodput that is close enough.
        max_steps: from the first rate, up or down; beyond, the curve is reported as it is.
    """

    num_requests: int
    precision: float
    max_steps: int


def next_rate(curve: Sequence[tuple[float, float]], first: float, search: Search) -> float | None:
    """Where to measure next, by bisection in ratios; None once that is known well enough.

    `curve` has what is measured already, by rate; `first` is where to begin."""
    if not curve:
        return first
    fails = next((index for index, (_, attained) in enumerate(curve) if attained < MIN_ATTAINMENT), len(curve))
    if fails == 0:
        lower = curve[0][0] / STEP
        return lower if lower > first / STEP ** (search.max_steps + 0.5) else None
    if fails == len(curve):
        higher = curve[-1][0] * STEP
        return higher if higher < first * STEP ** (search.max_steps + 0.5) else None
    low, high = curve[fails - 1][0], curve[fails][0]
    return sqrt(low * high) if high / low > search.precision else None
