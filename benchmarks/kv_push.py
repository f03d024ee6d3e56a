"""How fast KV moves from one worker's pool to another's, beside what the machine and the libraries give by themselves.

Blocks lie scattered over both pools and go in writes as a push posts them; a move counts as over when the receiver has
said that it has everything. Its limit for shm is one thread's memcpy of as many bytes in one call between the same
memory, for nixl and ucx the bare library with the same descriptors (ucx's receives are posted within the time: nobody
knows of a push before it begins). All sides take turns round by round, sender and receiver with a core each; of a
side's two runs in a round the faster counts, and ratios are medians over rounds. "One request's push" is what
reservation, opening, descriptors, notifications and commit take beside the copy, on workers that are otherwise idle. A
backend or library that is not there is named under `not_measured`, with the reason.

The hand-over gap, which is a matter of the whole cluster, is measured by push_overlap.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.engine_peers.figures import Figure, figure
from benchmarks.kv_wires.plans import DEMO_LAYOUT, LARGE_LAYOUT, LIMITS, POOL_BYTES, Load
from benchmarks.kv_wires.plotting import plot_speeds
from benchmarks.kv_wires.push_cost import PROMPT_TOKENS, measure_prefill, measure_push_cost
from benchmarks.kv_wires.rounds import FULL, SAMPLED, Samples, run_rounds
from benchmarks.kv_wires.wires import BARE, BARE_NIXL_CMA, BARE_UCX_EARLY, MEMCPY, NIXL, SHM, UCX, open_wires
from benchmarks.report import Report, Result, arguments, at_least, at_most, finish
from cluster.live.environment import read_environment
from engine.model.importer import import_model
from engine.model.packaged_models import SMOLLM2
from kv_transfer.native_library import load as load_native
from kv_transfer.protocol.sampling import Checksums

LOADS = {
    "SmolLM2 blocks": Load(size_bytes=DEMO_LAYOUT.block_size_bytes),
    "70B-class blocks": Load(size_bytes=LARGE_LAYOUT.block_size_bytes),
}
SWEEP_SIZES_BYTES = [16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
MAX_SWEEP_PIECES = 2048
MIN_SPEED_RATIO = 0.9
MAX_CPU_RATIO = 1.15
MAX_FULL_CPU_RATIO = 1.9
MAX_FIXED_MS = 1.0
MAX_FIXED_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    rounds: int
    sweep_rounds: int
    pushes: int
    prefills: int


FULL_EFFORT = Effort(rounds=15, sweep_rounds=5, pushes=300, prefills=9)
QUICK_EFFORT = Effort(rounds=3, sweep_rounds=1, pushes=50, prefills=3)


def judge_load(report: Report, name: str, samples: Samples) -> None:
    """Speeds against their limits, and what the sender's processor does for them."""
    for wire, limit in {SHM: MEMCPY, **BARE}.items():
        if not (samples.timings.get(wire) and samples.timings.get(limit)):
            continue
        ratio = samples.speed_ratio(wire, limit).median
        report.results.append(at_least(f"{name}, {wire}: speed / {limit}", ratio, MIN_SPEED_RATIO, "1"))
        for label in (SAMPLED, FULL):
            if samples.timings.get(wire + label):
                ratio = samples.speed_ratio(wire + label, limit).median
                report.results.append(Result(measure=f"{name}, {wire}{label}: speed / {limit}", value=ratio, unit="1"))
    for wire, other in ((NIXL, BARE_NIXL_CMA), (UCX, BARE_UCX_EARLY)):  # what Baton cannot do, for comparison
        if samples.timings.get(wire) and samples.timings.get(other):
            ratio = samples.speed_ratio(wire, other).median
            report.results.append(Result(measure=f"{name}, {wire}: speed / {other}", value=ratio, unit="1"))
    if samples.timings.get(SHM):
        measure = f"{name}, {SHM}{{}}: sender's CPU time / {MEMCPY}'s"
        ratio = samples.cpu_ratio(SHM, MEMCPY).median
        report.results.append(at_most(measure.format(""), ratio, MAX_CPU_RATIO, "1"))
        ratio = samples.cpu_ratio(SHM + SAMPLED, MEMCPY).median
        report.results.append(Result(measure=measure.format(SAMPLED), value=ratio, unit="1"))
        ratio = samples.cpu_ratio(SHM + FULL, MEMCPY).median
        report.results.append(at_most(measure.format(FULL), ratio, MAX_FULL_CPU_RATIO, "1"))


def describe(samples: Samples) -> dict[str, Any]:
    def rounded(values: Figure) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(values).items()}

    return {
        side: {
            "gb_per_s": rounded(figure(samples.speeds(side))),
            "cpu_s_per_gib": rounded(figure(samples.cpu_seconds_per_gib(side))),
        }
        for side, timings in samples.timings.items()
        if timings
    }


def judge_push(report: Report, cores: list[int], effort: Effort) -> None:
    model_dir = import_model(SMOLLM2.name, read_environment(os.environ).models_dir)
    prefill_s = measure_prefill(model_dir, cores, effort.prefills, seed=time.time_ns())
    report.details["prefill_ms"] = {"prompt_tokens": PROMPT_TOKENS, "median": prefill_s * 1e3}
    for label, checksums in (("", Checksums.OFF), (FULL, Checksums.FULL)):  # a sample of one block is all of it
        cost = measure_push_cost(cores, effort.pushes, checksums)
        report.details[f"push_us{label}"] = {name: value * 1e6 for name, value in asdict(cost).items()}
        fixed_ms, share = cost.fixed * 1e3, cost.fixed / prefill_s
        measure = f"one request's push{label}: fixed cost"
        of_prefill = f"{measure} / prefill of {PROMPT_TOKENS} tokens"
        if checksums is Checksums.FULL:
            report.results.append(Result(measure=measure, value=fixed_ms, unit="ms"))
            report.results.append(Result(measure=of_prefill, value=share, unit="1"))
        else:
            report.results.append(at_most(measure, fixed_ms, MAX_FIXED_MS, "ms"))
            report.results.append(at_most(of_prefill, share, MAX_FIXED_SHARE, "1"))


def sweep_loads() -> list[Load]:
    return [
        Load(size_bytes=size_bytes, total_bytes=min(POOL_BYTES, MAX_SWEEP_PIECES * size_bytes))
        for size_bytes in SWEEP_SIZES_BYTES
    ]


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    native = load_native()
    assert native is not None, "the native copy kernel is not built: run python -m kv_transfer.build"
    effort = QUICK_EFFORT if args.quick else FULL_EFFORT
    cores = sorted(os.sched_getaffinity(0))[:2]
    missing: dict[str, str] = {}
    details = {
        "effort": asdict(effort),
        "cores": cores,
        "copy_walk": native.walk.name.lower(),
        "load_at_start": os.getloadavg()[0],
        "blocks_per_write": {name: LIMITS.blocks_per_write(load.size_bytes) for name, load in LOADS.items()},
        "writes_in_flight": LIMITS.max_inflight_writes,
        "not_measured": missing,
    }
    report = Report("kv_push", details=details)
    with ExitStack() as stack:
        wires = open_wires(cores, stack, missing)
        for name, load in LOADS.items():
            samples = run_rounds(wires, load, effort.rounds, missing, has_sums=True)
            judge_load(report, name, samples)
            report.details[name] = describe(samples)
        sweep = [run_rounds(wires, load, effort.sweep_rounds, missing, has_sums=False) for load in sweep_loads()]
    report.details["sweep_gb_per_s"] = speeds_by_size(sweep)
    judge_push(report, cores, effort)
    marks = {name: load.size_bytes for name, load in LOADS.items()}
    finish(report, args, lambda path: plot_speeds(sweep, marks, path))


def speeds_by_size(sweep: list[Samples]) -> Mapping[str, Mapping[str, float]]:
    return {
        f"{samples.load.size_bytes >> 10} KiB": {
            side: round(median(samples.speeds(side)), 3) for side, timings in samples.timings.items() if timings
        }
        for samples in sweep
    }


if __name__ == "__main__":
    main()
