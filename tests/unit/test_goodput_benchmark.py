"""The goodput benchmark's own parts: its traffic, what it makes of times, where it measures next, and going on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import isnan
from pathlib import Path

import pytest

from benchmarks import goodput as script
from benchmarks.goodput_parts.attainment import (
    LOOSE,
    SLOS,
    STEP,
    TIGHT_TPOT,
    Limits,
    Point,
    Search,
    Served,
    goodput,
    limits_of,
    next_rate,
)
from benchmarks.goodput_parts.bootstrap import attainment_interval, goodput_draws, interval, ratio_draws
from benchmarks.goodput_parts.campaign import Campaign, Effort, Found, Tools
from benchmarks.goodput_parts.points import PointFile, PointKey
from benchmarks.goodput_parts.sides import DISAGGREGATED, Side, aggregated
from benchmarks.goodput_parts.traffic import Arrival, Lengths, poisson_trace, read_lengths
from benchmarks.report import Report
from cluster.core.ids import Role

SEARCH = Search(num_requests=300, precision=1.1, max_steps=6)
LENGTHS = [Lengths(num_prompt_tokens=100 * index, num_output_tokens=10) for index in range(1, 50)]


# ---- traffic ----------------------------------------------------------------------------------------------------


def test_the_same_requests_at_every_rate() -> None:
    slow, fast = (poisson_trace(LENGTHS, 200, rate, seed=3) for rate in (0.5, 2.0))
    assert [arrival.lengths for arrival in slow] == [arrival.lengths for arrival in fast]
    assert [arrival.at_s / 4 for arrival in slow] == pytest.approx([arrival.at_s for arrival in fast])
    assert slow != poisson_trace(LENGTHS, 200, 0.5, seed=4)
    assert poisson_trace(LENGTHS, 100, 0.5, seed=3) == slow[:100]


def test_arrivals_are_a_poisson_process() -> None:
    times_s = [arrival.at_s for arrival in poisson_trace(LENGTHS, 20_000, 8.0, seed=1)]
    gaps_s = [after - before for before, after in pairwise([0.0, *times_s])]
    mean_s = sum(gaps_s) / len(gaps_s)
    spread_s = (sum((gap - mean_s) ** 2 for gap in gaps_s) / len(gaps_s)) ** 0.5
    assert mean_s == pytest.approx(1 / 8, rel=0.03) and spread_s == pytest.approx(mean_s, rel=0.03)


def test_recorded_lengths_are_scaled_to_the_mix(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [(9000, 200), (2000, 100), (10, 1), (2000, 99), (1990, 100)]
    lines = [f"2023-11-16 18:17:03,{prompt},{output}" for prompt, output in rows]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    lengths = read_lengths(path, prompt_share=20)
    # The longest is cut to twice the median; then 10,000 tokens of prompts came on 500 of answers, 20 on one.
    assert [one.num_prompt_tokens for one in lengths] == [1200, 600, 16, 600, 597]
    assert [one.num_output_tokens for one in lengths] == [60, 30, 4, 30, 30]


# ---- attainment and bisection -----------------------------------------------------------------------------------


def test_both_limits_are_to_be_kept() -> None:
    limits = Limits(ttft_s=1.0, tpot_s=0.1)
    times = [(1.0, 0.1), (1.01, 0.1), (1.0, 0.11), (None, None)]
    assert [limits.are_kept(Served(ttft_s=ttft_s, tpot_s=tpot_s)) for ttft_s, tpot_s in times] == [True, *[False] * 3]


def test_limits_come_from_the_better_side() -> None:
    one = [Served(ttft_s=ttft_s, tpot_s=0.02) for ttft_s in (0.4, 0.5, 9.0)]
    other = [Served(ttft_s=0.6, tpot_s=0.01), Served(ttft_s=None, tpot_s=None)]
    assert limits_of(TIGHT_TPOT, [one, other]) == Limits(ttft_s=5.0, tpot_s=0.015)


def test_goodput_is_where_attainment_first_falls_too_low() -> None:
    curve = [(1.0, 1.0), (2.0, 0.95), (4.0, 0.75), (8.0, 0.92), (16.0, 0.1)]
    assert goodput(curve) == pytest.approx(2.5)
    assert goodput(curve[:2]) == 2.0
    assert goodput(curve[2:]) == 0.0


@pytest.mark.parametrize("crossing", [0.03, 0.9, 1.0, 1.7, 40.0])
def test_bisection_closes_in(crossing: float) -> None:
    curve: list[tuple[float, float]] = []
    while (rate := next_rate(curve, 1.0, SEARCH)) is not None:
        assert rate not in dict(curve)
        curve = sorted([*curve, (rate, 1.0 if rate < crossing else 0.0)])
    low = max(rate for rate, attained in curve if attained)
    high = min(rate for rate, attained in curve if not attained)
    assert low < crossing <= high <= 1.1 * low
    assert len(curve) <= 12


@pytest.mark.parametrize("attained", [0.0, 1.0])
def test_what_never_or_always_holds_is_given_up(attained: float) -> None:
    curve: list[tuple[float, float]] = []
    while (rate := next_rate(curve, 1.0, SEARCH)) is not None:
        curve = sorted([*curve, (rate, attained)])
    assert len(curve) == 1 + SEARCH.max_steps
    assert max(curve[-1][0], 1 / curve[0][0]) == STEP**SEARCH.max_steps


# ---- intervals --------------------------------------------------------------------------------------------------


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    source = random.Random(5)
    num_held = 0
    for seed in range(40):
        low, high = attainment_interval(Point(rate=1.0, kept=tuple(source.random() < 0.85 for _ in range(300))), seed)
        num_held += low <= 0.85 <= high
    assert num_held >= 34


def test_requests_that_fail_together_make_intervals_wider() -> None:
    apart = Point(rate=1.0, kept=tuple(index % 10 != 0 for index in range(300)))
    together = Point(rate=1.0, kept=tuple(index >= 30 for index in range(300)))
    widths = [high - low for low, high in (attainment_interval(point, 1) for point in (apart, together))]
    assert widths[0] == pytest.approx(0.0) and widths[1] > 0.1


def test_draws_of_goodput() -> None:
    curve = [Point(rate=1.0, kept=(True,) * 300), Point(rate=2.0, kept=(True, False, True) * 100)]
    draws = goodput_draws(curve, 1)
    low, high = interval(draws)
    assert low < goodput([(point.rate, point.attainment) for point in curve]) < high
    assert draws == goodput_draws(curve, 1) != goodput_draws(curve, 2)
    assert ratio_draws([3.0, 3.0], [2.0, 0.0]) == [1.5, float("inf")]
    assert isnan(ratio_draws([0.0], [0.0])[0]) and interval([2.0, float("nan"), 1.0])[1] == 2.0


# ---- the file of points -----------------------------------------------------------------------------------------


def test_points_are_found_again_and_half_a_line_is_not(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    served = [Served(ttft_s=0.5, tpot_s=0.01), Served(ttft_s=None, tpot_s=None)]
    keys = [PointKey(mix="m", side="s", rate=rate, num_requests=2, seed=1) for rate in (2.0, 0.1 + 0.2, None)]
    points = PointFile(path)
    for key in keys:
        points.add(key, served)
    with path.open("a") as file:
        file.write('{"mix": "m", "si')
    again = PointFile(path)
    assert len(again) == 3 and all(again.get(key) == served for key in keys)
    assert list(again.rates("m", "s", 2, 1)) == [(0.1 + 0.2, served), (2.0, served)]
    assert not list(again.rates("m", "s", 2, 2)) and not list(again.rates("m", "other", 2, 1))
    again.add(PointKey(mix="m", side="s", rate=3.0, num_requests=2, seed=1), served)
    assert len(PointFile(path)) == 4


# ---- the whole --------------------------------------------------------------------------------------------------


class Model:
    """Sides as they should be: requests are served in time up to some rate, and none beyond."""

    def __init__(self) -> None:
        self.capacities = {DISAGGREGATED: 3.0, aggregated(64): 1.0, aggregated(128): 2.0, aggregated(256): 1.5}
        self.measured: list[tuple[Side, int]] = []

    @property
    def tools(self) -> Tools:
        return Tools(under_load=self._under_load, one_by_one=self._one_by_one)

    def _under_load(self, side: Side, arrivals: Sequence[Arrival]) -> list[Served]:
        self.measured.append((side, len(arrivals)))
        rate = len(arrivals) / arrivals[-1].at_s
        tpot_s = 0.02 if rate < self.capacities[side] else 0.2
        return [Served(ttft_s=0.5, tpot_s=tpot_s) for _ in arrivals]

    def _one_by_one(self, side: Side, lengths: Sequence[Lengths]) -> list[Served]:
        self.measured.append((side, len(lengths)))
        return [Served(ttft_s=0.5, tpot_s=0.02) for _ in lengths]


EFFORT = Effort(
    unloaded_requests=4,
    chunk_sizes=(64, 128, 256),
    chunks=Search(num_requests=40, precision=1.25, max_steps=5),
    goodput=Search(num_requests=60, precision=1.1, max_steps=5),
)


def run(path: Path, model: Model) -> list[Found]:
    points = PointFile(path)
    return Campaign("mix", LENGTHS, points=points, tools=model.tools, effort=EFFORT, seed=1).run()


def test_a_campaign_finds_chunk_and_goodput(tmp_path: Path) -> None:
    model = Model()
    found = run(tmp_path / "points.jsonl", model)
    assert [one.slo for one in found] == list(SLOS) and {one.chunk_tokens for one in found} == {128}
    assert all(script.ratio(one) == pytest.approx(1.5, rel=0.15) for one in found)
    at_length = [side for side, count in model.measured if count == EFFORT.goodput.num_requests]
    assert {*at_length} == {DISAGGREGATED, aggregated(128)}
    assert at_length[:4] == [DISAGGREGATED, aggregated(128)] * 2  # in turns

    summary = script.summary(found[2], seed=1)
    assert found[2].slo is LOOSE and summary["limits_ms"] == pytest.approx({"ttft": 5000, "tpot": 80})
    assert set(summary["search_curves"]) == {64, 128, 256}


def test_a_campaign_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    path, whole = tmp_path / "points.jsonl", Model()
    found = run(path, whole)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:7]))
    rest = Model()
    assert run(path, rest) == found
    assert Counter(rest.measured) == Counter(whole.measured[7:])


def test_targets_are_about_both_mixes() -> None:
    def results(**ratios: dict[str, float]) -> list[bool]:
        report = Report("goodput")
        script.judge(report, ratios)
        return [result.holds for result in report.results if result.holds is not None]

    good = {"tight TPOT": 1.6, "tight TTFT": 1.0, "loose": 0.96}
    fair = {"tight TPOT": 1.3, "tight TTFT": 1.0, "loose": 0.9}
    assert results(heavy=good) == []
    assert results(heavy=fair, balanced=good) == [True, True, False]
    assert results(heavy=fair, balanced=fair) == [False, True, False]


def test_sides_differ_in_their_pools_alone() -> None:
    apart, together = DISAGGREGATED.config([4, 7, 9]), aggregated(128).config([4, 7, 9])
    assert [(pool.role, pool.cores) for pool in apart.pools] == [(Role.PREFILL, ((4,),)), (Role.DECODE, ((7,),))]
    [both] = together.pools
    assert both.role is Role.DECODE and both.cores == ((4,), (7,)) and both.prefill_chunk_tokens == 128
    assert (apart.model, apart.front, apart.coordinator) == (together.model, together.front, together.coordinator)
