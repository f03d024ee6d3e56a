"""Goodput of one prefill and one decode worker against two workers that do both, on the same two cores.

Real processes and the demo model in bfloat16; every worker is pinned to a core of its own, and front, coordinator and
the load generator of neither side to any. The two single-process workers run the same engine with chunked prefill,
behind the same front and coordinator; their chunk size is the best of a few, found here for each mix and SLO. Requests
arrive as a Poisson process, whatever becomes of them, with the lengths of the Azure LLM inference traces of 2023 (code
and conversation; Splitwise, ISCA 2024), scaled (goodput_parts/traffic.py): the same requests at the same times for both
sides. An SLO's limits are multiples of the medians without load. Attainment is measured over the rate, and where it
crosses 90% is found by bisection.

A whole run takes hours. Each measured point is kept in a file, and `--resume` with that file goes on where a run was
stopped. The traces are not part of the repository: they are looked for in benchmarks/data, or where `--data` says. A
mix without its trace is skipped, and the report says so.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.goodput_parts.attainment import MIN_ATTAINMENT, TIGHT_TPOT, Point, Search, goodput
from benchmarks.goodput_parts.bootstrap import attainment_interval, goodput_draws, interval, ratio_draws
from benchmarks.goodput_parts.campaign import Campaign, Effort, Found, Tools, shares
from benchmarks.goodput_parts.load import measure_open_loop, measure_unloaded
from benchmarks.goodput_parts.plotting import plot_mix
from benchmarks.goodput_parts.points import PointFile
from benchmarks.goodput_parts.traffic import MIXES, Lengths, read_lengths
from benchmarks.report import PLAIN_NUMBER, RESULTS, Report, Result, arguments, at_least, finish

DATA = Path(__file__).parent / "data"
FULL = Effort(
    unloaded_requests=40,
    chunk_sizes=(64, 128, 256, 512),
    chunks=Search(num_requests=100, precision=1.25, max_steps=3),
    goodput=Search(num_requests=300, precision=1.1, max_steps=3),
)
QUICK = Effort(
    unloaded_requests=4,
    chunk_sizes=(128, 512),
    chunks=Search(num_requests=6, precision=2.0, max_steps=1),
    goodput=Search(num_requests=12, precision=2.0, max_steps=1),
)
MIN_BETTER, MIN_OTHER, MIN_ANYWHERE = 1.5, 1.2, 0.95
"""Goodput of separate workers by that of the others: at the tight TPOT in the better mix and in the other, and at any
SLO."""


def summary(found: Found, seed: int) -> dict[str, Any]:
    """Of one SLO, for the report."""
    sides = {"disaggregated": found.disaggregated, "aggregated": found.aggregated}
    draws = {name: goodput_draws(curve, seed + index) for index, (name, curve) in enumerate(sides.items())}
    return {
        "limits_ms": {"ttft": found.limits.ttft_s * 1e3, "tpot": found.limits.tpot_s * 1e3},
        "chunk_tokens": found.chunk_tokens,
        "goodput": {
            name: {
                "requests_per_s": goodput(shares(curve)),
                "interval": interval(draws[name]),
                # Otherwise goodput is at least that of the last rate that was tried.
                "is_crossed": min(point.attainment for point in curve) < MIN_ATTAINMENT,
            }
            for name, curve in sides.items()
        },
        "ratio": {
            "value": ratio(found),
            "interval": interval(ratio_draws(draws["disaggregated"], draws["aggregated"])),
        },
        "curves": {name: curve_summary(curve, seed) for name, curve in sides.items()},
        "search_goodput": {size: goodput(shares(curve)) for size, curve in found.searched.items()},
        "search_curves": {size: curve_summary(curve, seed) for size, curve in found.searched.items()},
    }


def curve_summary(curve: Sequence[Point], seed: int) -> list[dict[str, Any]]:
    return [
        {"rate": point.rate, "attainment": point.attainment, "interval": attainment_interval(point, seed)}
        for point in curve
    ]


def ratio(found: Found) -> float:
    """Not a number where neither side keeps the limits at any rate that was tried."""
    [value] = ratio_draws([goodput(shares(found.disaggregated))], [goodput(shares(found.aggregated))])
    return value


def judge(report: Report, ratios: dict[str, dict[str, float]]) -> None:
    """`ratios` by mix and SLO. The targets are about both mixes; a single one is only reported."""
    for mix, of_mix in ratios.items():
        for slo, value in of_mix.items():
            measure = f"goodput, disaggregated / aggregated, {mix}, {slo}"
            report.results.append(Result(measure=measure, value=value, unit=PLAIN_NUMBER))
    if len(ratios) < len(MIXES):
        return
    tight = sorted(of_mix[TIGHT_TPOT.name] for of_mix in ratios.values())
    lowest = min(value for of_mix in ratios.values() for value in of_mix.values())
    report.results += [
        at_least("goodput ratio at the tight TPOT, the better mix", tight[-1], MIN_BETTER, PLAIN_NUMBER),
        at_least("goodput ratio at the tight TPOT, the other mix", tight[0], MIN_OTHER, PLAIN_NUMBER),
        at_least("goodput ratio, the lowest of all", lowest, MIN_ANYWHERE, PLAIN_NUMBER),
    ]


def length_summary(lengths: Sequence[Lengths]) -> dict[str, float]:
    return {
        "prompt_tokens_mean": mean(one.num_prompt_tokens for one in lengths),
        "output_tokens_mean": mean(one.num_output_tokens for one in lengths),
        "prompt_tokens_max": max(one.num_prompt_tokens for one in lengths),
        "output_tokens_max": max(one.num_output_tokens for one in lengths),
    }


def parse() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    names = [mix.name for mix in MIXES]
    parser.add_argument("--data", type=Path, metavar="DIR", default=DATA, help="where the Azure traces are")
    parser.add_argument("--mixes", nargs="+", choices=names, default=names, help="only these (default: all)")
    parser.add_argument(
        "--requests", type=int, metavar="N", help=f"at each point (default: {FULL.goodput.num_requests})"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with the measured points in this file")
    return parser.parse_args()


def main() -> None:
    args = parse()
    cores = sorted(os.sched_getaffinity(0))
    effort = QUICK if args.quick else FULL
    if args.requests is not None:
        effort = replace(effort, goodput=replace(effort.goodput, num_requests=args.requests))
    target: Path = args.json or RESULTS / "goodput.json"
    points = PointFile(args.resume or target.with_name(f"goodput-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"))
    print(f"{len(points)} points so far; --resume {points.path} goes on from there", file=sys.stderr, flush=True)
    tools = Tools(
        under_load=partial(measure_open_loop, cores=cores, seed=args.seed),
        one_by_one=partial(measure_unloaded, cores=cores, seed=args.seed),
    )
    report = Report("goodput", details={"effort": asdict(effort), "seed": args.seed, "pinned_cores": cores[:2]})
    ratios: dict[str, dict[str, float]] = {}
    for mix in MIXES:
        path = args.data / mix.file
        if mix.name not in args.mixes or not path.is_file():
            why = f"there is no {path}" if mix.name in args.mixes else "not asked for"
            report.details[mix.name] = {"skipped": why}
            continue
        lengths = read_lengths(path, mix.prompt_share)
        campaign = Campaign(mix.name, lengths, points=points, tools=tools, effort=effort, seed=args.seed)
        found = campaign.run()
        ratios[mix.name] = {one.slo.name: ratio(one) for one in found}
        report.details[mix.name] = {
            "lengths": length_summary(lengths),
            "unloaded_medians": campaign.unloaded_medians_ms(),
            **{one.slo.name: summary(one, args.seed) for one in found},
        }
        picture = target.with_name(f"{target.stem}-{mix.name}.png")
        plot_mix(f"{mix.name} requests, {effort.goodput.num_requests} a point", found, args.seed, picture)
        print(f"{mix.name}: drawn in {picture}", file=sys.stderr)
    judge(report, ratios)
    finish(report, args)


if __name__ == "__main__":
    main()
