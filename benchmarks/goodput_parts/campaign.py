"""What to measure for one mix, point by point, so that goodput at every SLO is known for both sides.

Everything is a function of the points that are measured already: a run that was stopped goes on at the next one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.goodput_parts.attainment import SLOS, Limits, Point, Search, Served, Slo, goodput, limits_of, next_rate
from benchmarks.goodput_parts.points import PointFile, PointKey
from benchmarks.goodput_parts.sides import DISAGGREGATED, Side, aggregated
from benchmarks.goodput_parts.traffic import Arrival, Lengths, poisson_trace

USUAL_CHUNK = 256
"""Of the aggregated side when it is measured without load, where chunks hold nobody up."""
FIRST_LOAD = 1.0
"""At the first rate that is measured, so many requests would be running on average, if none waited for another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """`chunks` is for finding the chunk size, among `chunk_sizes`; `goodput` for what is reported."""

    unloaded_requests: int
    chunk_sizes: tuple[int, ...]
    chunks: Search
    goodput: Search


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """How points are measured: under load, and one request at a time."""

    under_load: Callable[[Side, Sequence[Arrival]], list[Served]]
    one_by_one: Callable[[Side, Sequence[Lengths]], list[Served]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The curves of one SLO. `searched`: the shorter ones by chunk size, by which the aggregated side's was chosen."""

    slo: Slo
    limits: Limits
    chunk_tokens: int
    disaggregated: list[Point]
    aggregated: list[Point]
    searched: dict[int, list[Point]]


class Campaign:
    """One mix of requests."""

    def __init__(
        self, mix: str, lengths: Sequence[Lengths], *, points: PointFile, tools: Tools, effort: Effort, seed: int
    ) -> None:
        self._mix = mix
        self._lengths = lengths
        self._points = points
        self._tools = tools
        self._effort = effort
        self._seed = seed
        self._unloaded: list[list[Served]] = []
        self._limits: dict[str, Limits] = {}
        self._first_rate = 0.0

    def run(self) -> list[Found]:
        """Measures what is missing; the sides take turns, so that both see the machine's better and worse hours."""
        self._unloaded = [self._measure_unloaded(side) for side in (DISAGGREGATED, aggregated(USUAL_CHUNK))]
        self._limits = {slo.name: limits_of(slo, self._unloaded) for slo in SLOS}
        self._first_rate = self._rate_of_load(FIRST_LOAD)
        effort = self._effort
        self._measure({aggregated(size): SLOS for size in effort.chunk_sizes}, effort.chunks)
        chunks = {slo.name: self._best_chunk(slo) for slo in SLOS}
        sides: dict[Side, Sequence[Slo]] = {DISAGGREGATED: SLOS}
        for size in dict.fromkeys(chunks.values()):
            sides[aggregated(size)] = [slo for slo in SLOS if chunks[slo.name] == size]
        self._measure(sides, effort.goodput)
        return [self._found(slo, chunks[slo.name]) for slo in SLOS]

    def unloaded_medians_ms(self) -> dict[str, dict[str, float]]:
        """For the report, once it has run."""
        names = (DISAGGREGATED.name, aggregated(USUAL_CHUNK).name)
        return {
            name: {
                "ttft_ms": median(one.ttft_s for one in served if one.ttft_s is not None) * 1e3,
                "tpot_ms": median(one.tpot_s for one in served if one.tpot_s is not None) * 1e3,
            }
            for name, served in zip(names, self._unloaded, strict=True)
        }

    def _measure_unloaded(self, side: Side) -> list[Served]:
        count = self._effort.unloaded_requests
        lengths = [arrival.lengths for arrival in poisson_trace(self._lengths, count, 1.0, self._seed)]
        key = self._key(side, None, count)
        return self._take(key, lambda: self._tools.one_by_one(side, lengths))

    def _rate_of_load(self, load: float) -> float:
        """The rate at which so many requests are there on average, if each takes as long as without load."""
        num_gaps = median(one.num_output_tokens for one in self._lengths) - 1
        one_s = min(
            median((one.ttft_s or 0.0) + num_gaps * (one.tpot_s or 0.0) for one in served) for served in self._unloaded
        )
        return float(f"{load / one_s:.2g}")

    def _measure(self, sides: dict[Side, Sequence[Slo]], search: Search) -> None:
        """Until goodput at those SLOs is known for each of the sides."""
        missing = dict(sides)
        while missing:
            for side, slos in list(missing.items()):
                rate = self._next_rate(side, slos, search)
                if rate is None:
                    del missing[side]
                    continue
                trace = poisson_trace(self._lengths, search.num_requests, rate, self._seed)
                self._take(
                    self._key(side, rate, search.num_requests),
                    lambda side=side, trace=trace: self._tools.under_load(side, trace),  # type: ignore[misc]
                )

    def _next_rate(self, side: Side, slos: Sequence[Slo], search: Search) -> float | None:
        for slo in slos:
            rate = next_rate(shares(self._curve(side, slo, search.num_requests)), self._first_rate, search)
            if rate is not None:
                return rate
        return None

    def _take(self, key: PointKey, measure: Callable[[], list[Served]]) -> list[Served]:
        served = self._points.get(key)
        if served is None:
            start_s = time.monotonic()
            served = measure()
            self._points.add(key, served)
            print(f"{key.mix}: {_say(key)} took {time.monotonic() - start_s:.0f} s", file=sys.stderr, flush=True)
        return served

    def _key(self, side: Side, rate: float | None, num_requests: int) -> PointKey:
        return PointKey(mix=self._mix, side=side.name, rate=rate, num_requests=num_requests, seed=self._seed)

    def _curve(self, side: Side, slo: Slo, num_requests: int) -> list[Point]:
        limits = self._limits[slo.name]
        return [
            Point(rate=rate, kept=tuple(limits.are_kept(one) for one in served))
            for rate, served in self._points.rates(self._mix, side.name, num_requests, self._seed)
        ]

    def _best_chunk(self, slo: Slo) -> int:
        """Of equally good ones the largest, which reads fastest."""
        searched = {size: shares(curve) for size, curve in self._searched(slo).items()}
        return max(searched, key=lambda size: (goodput(searched[size]), size))

    def _searched(self, slo: Slo) -> dict[int, list[Point]]:
        effort = self._effort
        return {size: self._curve(aggregated(size), slo, effort.chunks.num_requests) for size in effort.chunk_sizes}

    def _found(self, slo: Slo, chunk_tokens: int) -> Found:
        num_requests = self._effort.goodput.num_requests
        return Found(
            slo=slo,
            limits=self._limits[slo.name],
            chunk_tokens=chunk_tokens,
            disaggregated=self._curve(DISAGGREGATED, slo, num_requests),
            aggregated=self._curve(aggregated(chunk_tokens), slo, num_requests),
            searched=self._searched(slo),
        )


def shares(curve: Sequence[Point]) -> list[tuple[float, float]]:
    return [(point.rate, point.attainment) for point in curve]


def _say(key: PointKey) -> str:
    load = "one at a time" if key.rate is None else f"{key.rate:.3g} a second"
    return f"{key.side}, {key.num_requests} requests, {load},"
