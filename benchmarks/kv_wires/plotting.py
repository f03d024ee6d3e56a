"""The picture: bandwidth over the size of a piece, one line a backend, the limits as lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.kv_wires.rounds import Samples
from benchmarks.kv_wires.wires import BARE_NIXL, BARE_NIXL_CMA, BARE_UCX, BARE_UCX_EARLY, MEMCPY, NIXL, SHM, UCX

LIMIT_OF = {MEMCPY: SHM, BARE_NIXL: NIXL, BARE_NIXL_CMA: NIXL, BARE_UCX: UCX, BARE_UCX_EARLY: UCX}
COLORS = {SHM: "#4477aa", NIXL: "#228833", UCX: "#ee6677"}
STYLES = {MEMCPY: "--", BARE_NIXL: "--", BARE_NIXL_CMA: ":", BARE_UCX: "--", BARE_UCX_EARLY: ":"}


def plot_speeds(sweep: Sequence[Samples], marks: Mapping[str, int], path: Path) -> None:
    """`marks` are block sizes worth a vertical line, by their label."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5.5), layout="constrained")
    names = list(dict.fromkeys(name for samples in sweep for name in samples.timings))
    for name in names:
        having = [samples for samples in sweep if samples.timings.get(name)]
        sizes = [samples.load.size_bytes for samples in having]
        speeds = [median(samples.speeds(name)) for samples in having]
        is_limit = name in LIMIT_OF
        axes.plot(
            sizes,
            speeds,
            STYLES.get(name, "-"),
            marker=None if is_limit else "o",
            color=COLORS[LIMIT_OF.get(name, name)],
            linewidth=1.2 if is_limit else 2,
            label=f"{name} (limit)" if is_limit else name,
        )
    axes.set_yscale("log")
    for label, size_bytes in marks.items():
        axes.axvline(size_bytes, color="gray", linewidth=0.8)
        axes.text(size_bytes, axes.get_ylim()[0], f" {label}", rotation=90, va="bottom", ha="right", fontsize=8)
    sizes = [samples.load.size_bytes for samples in sweep]
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB" for size in sizes])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="size of a piece", ylabel="GB/s")
    axes.set_title("Scattered pieces from one process's pool to another's, checksums off")
    axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=120)
