"""The picture of the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine_peers.figures import Figure

COLORS = ("#77aadd", "#ee8866")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One measure in one setting, beside the target that it has to reach (or, with `at_most`, stay below)."""

    measure: str
    setting: str
    value: Figure
    target: float
    at_most: bool = False


def plot_bars(ratios: Sequence[Bar], shares: Sequence[Bar], path: Path) -> None:
    """Ratios over the peer above, shares below; whiskers are quartiles over rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = len({bar.measure for bar in ratios}), len({bar.measure for bar in shares})
    figure, panels = pyplot.subplots(2, 1, figsize=(9, 9), height_ratios=heights, layout="constrained")
    _panel(panels[0], ratios)
    panels[0].axvline(1, color="gray", linewidth=0.8)
    panels[0].set(title="Baton / vLLM: tokens a second; seconds from start to first token", xlim=(0, None))
    panels[0].legend(loc="lower right")
    _panel(panels[1], shares)
    panels[1].set(title="Baton: shares", xlim=(0, 1.1))
    figure.savefig(path, dpi=120)


def _panel(axes: Any, bars: Sequence[Bar]) -> None:
    measures = list(dict.fromkeys(bar.measure for bar in bars))
    settings = list(dict.fromkeys(bar.setting for bar in bars))
    height = 0.8 / max(1, len(settings))
    rows: Mapping[str, int] = {measure: row for row, measure in enumerate(measures)}
    for index, setting in enumerate(settings):
        of_setting = [bar for bar in bars if bar.setting == setting]
        places = [rows[bar.measure] + (index - (len(settings) - 1) / 2) * height for bar in of_setting]
        middles = [bar.value.median for bar in of_setting]
        errors = [
            [bar.value.median - bar.value.low for bar in of_setting],
            [bar.value.high - bar.value.median for bar in of_setting],
        ]
        axes.barh(places, middles, height, xerr=errors, color=COLORS[index], label=setting, capsize=2)
        for place, bar in zip(places, of_setting, strict=True):
            axes.plot([bar.target] * 2, [place - height / 2, place + height / 2], color="black", linewidth=2)
            axes.text(0, place, f" {bar.value.median:.2f}", va="center", fontsize=8)
    axes.plot([], [], color="black", linewidth=2, label="target")
    axes.set_yticks(range(len(measures)), [_with_sense(measure, bars) for measure in measures])
    axes.invert_yaxis()


def _with_sense(measure: str, bars: Sequence[Bar]) -> str:
    at_most = next(bar.at_most for bar in bars if bar.measure == measure)
    return f"{measure}\n({'at most' if at_most else 'at least'} the mark)"
