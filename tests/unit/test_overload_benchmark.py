"""The overload benchmark's own parts: what counts as good, what is compared, and a short run in the simulator."""

from __future__ import annotations

import pytest

from benchmarks.overload import SIM_LIMITS, Ended, Limits, Run, evaluate, simulate
from benchmarks.report import Report
from cluster.core.ids import Outcome

LIMITS = Limits(ttft_ms=100.0, tpot_ms=10.0)


def ended(arrival_s: float, ttft_ms: float | None = 50.0, tpot_ms: float | None = 5.0) -> Ended:
    outcome = Outcome.REJECTED_OVERLOAD if ttft_ms is None else Outcome.STOP
    return Ended(tenant="large", arrival_s=arrival_s, outcome=outcome, ended_ms=3.0, ttft_ms=ttft_ms, tpot_ms=tpot_ms)


def run(rate: float, duration_s: float, *requests: Ended) -> Run:
    return Run(rate=rate, duration_s=duration_s, ended=list(requests), memory_bytes=[100, 100, 100, 120])


def test_good_is_what_keeps_both_limits_after_the_warm_up() -> None:
    late, slow, refused, short = ended(5, ttft_ms=101.0), ended(5, tpot_ms=11.0), ended(5, None), ended(9, tpot_ms=None)
    measured = run(1.0, 10.0, ended(1), ended(3), late, slow, refused, short)
    assert measured.goodput(LIMITS) == pytest.approx(2 / 7.5)
    assert measured.goodput(LIMITS, "small") == 0 and measured.refusals_ms() == [3.0]
    assert measured.memory_growth() == 1.2


def test_three_times_the_peak_is_compared_with_it() -> None:
    rates = []

    def measure(rate: float, duration_s: float, seed: int) -> Run:
        rates.append(rate)
        num_good = min(int(rate * duration_s), 60)
        return run(rate, duration_s, *(ended(9.0) for _ in range(num_good)), ended(9.0, None))

    report = Report("overload")
    evaluate(report, measure, LIMITS, (2.0, 4.0, 8.0), 10.0, 10.0)
    assert rates == [2.0, 4.0, 8.0, 24.0], "the peak is 8 a second, of the 7.5 s that count"
    assert [(result.value, result.holds) for result in report.results] == [(1.0, True), (3.0, True), (1.2, False)]


def test_a_short_run_in_the_simulator() -> None:
    measured = simulate(20.0, 0.8, 1)
    assert len(measured.ended) > 5 and all(one.outcome is not Outcome.INTERNAL for one in measured.ended)
    assert measured.goodput(SIM_LIMITS) > 0 and len(measured.memory_bytes) > 4
