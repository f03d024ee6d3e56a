"""The picture of one mix: attainment over the rate, a panel for each SLO."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.goodput_parts.attainment import MIN_ATTAINMENT, Point, goodput
from benchmarks.goodput_parts.bootstrap import attainment_interval
from benchmarks.goodput_parts.campaign import Found, shares

COLORS = {"disaggregated": "#4477aa", "aggregated": "#ee6677"}
SEARCH_STYLES = (":", "-.", "--", (0, (1, 4)))


def plot_mix(title: str, found: Sequence[Found], seed: int, path: Path) -> None:
    """Whiskers are bootstrap intervals; vertical lines are goodput; thin ones the search for the chunk size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(found), figsize=(5 * len(found), 4.5), sharey=True, layout="constrained")
    for axes, one in zip(panels, found, strict=True):
        for (size, curve), style in zip(one.searched.items(), SEARCH_STYLES * len(one.searched), strict=False):
            label = f"aggregated, search, chunks of {size}"
            axes.plot(*zip(*shares(curve), strict=True), color="gray", linestyle=style, linewidth=0.8, label=label)
        _draw(axes, "aggregated", f"aggregated, chunks of {one.chunk_tokens}", one.aggregated, seed)
        _draw(axes, "disaggregated", "disaggregated", one.disaggregated, seed)
        axes.axhline(MIN_ATTAINMENT, color="black", linewidth=0.8, linestyle=":")
        limits = f"TTFT ≤ {one.limits.ttft_s * 1e3:.0f} ms, TPOT ≤ {one.limits.tpot_s * 1e3:.0f} ms"
        axes.set(title=f"{one.slo.name}\n{limits}", xlabel="requests a second", ylim=(0, 1.03))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.legend(fontsize=7, loc="lower left")
    panels[0].set_ylabel("share of requests that keep both limits")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(axes: Any, kind: str, label: str, curve: Sequence[Point], seed: int) -> None:
    attained = [point.attainment for point in curve]
    intervals = [attainment_interval(point, seed) for point in curve]
    errors = [
        [max(0.0, value - low) for value, (low, _) in zip(attained, intervals, strict=True)],
        [max(0.0, high - value) for value, (_, high) in zip(attained, intervals, strict=True)],
    ]
    rates = [point.rate for point in curve]
    axes.errorbar(rates, attained, yerr=errors, color=COLORS[kind], marker="o", markersize=4, capsize=2, label=label)
    best = goodput(shares(curve))
    if best:
        axes.axvline(best, color=COLORS[kind], linewidth=0.8)
