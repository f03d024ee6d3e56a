"""The shape all benchmarks share: arguments, results, JSON, and whether the targets hold."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PLAIN_NUMBER = "1"
"""The unit of a figure that has none, such as a ratio."""
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One measured figure. `target` and `holds` are None where the figure is only reported."""

    measure: str
    value: float
    unit: str
    target: str | None = None
    holds: bool | None = None

    def __str__(self) -> str:
        unit = "" if self.unit == PLAIN_NUMBER else f" {self.unit}"
        return f"{self.measure}: {self.value:.4g}{unit}, wanted {self.target}"


def at_most(measure: str, value: float, limit: float, unit: str) -> Result:
    return Result(measure=measure, value=value, unit=unit, target=f"<= {limit:g}", holds=value <= limit)


def at_least(measure: str, value: float, limit: float, unit: str) -> Result:
    return Result(measure=measure, value=value, unit=unit, target=f">= {limit:g}", holds=value >= limit)


@dataclass(slots=True)
class Report:
    """What a benchmark found. `details` holds whatever helps to understand it: samples, settings, percentiles."""

    benchmark: str
    results: list[Result] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "machine": _machine(),
            "commit": _commit(),
            "results": [asdict(result) for result in self.results],
            "details": self.details,
        }


def arguments(description: str) -> argparse.ArgumentParser:
    """The options every benchmark has; a script may add its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer samples, for a first look")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where to write the JSON (default: benchmarks/results)"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 where a target does not hold")
    return parser


def finish(report: Report, args: argparse.Namespace, plot: Callable[[Path], None] | None = None) -> None:
    """Prints and writes the JSON, draws the plot beside it, and ends the process with the right exit code."""
    target: Path = args.json or RESULTS / f"{report.benchmark}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report.to_json(), indent=2)
    target.write_text(text + "\n")
    print(text)
    if plot is not None:
        plot(target.with_suffix(".png"))
    print(f"written to {target}" + ("" if plot is None else f" and {target.with_suffix('.png')}"), file=sys.stderr)
    missed = [result for result in report.results if result.holds is False]
    for result in missed:
        print(f"MISSED {result}", file=sys.stderr)
    sys.exit(1 if missed and args.check else 0)


def _machine() -> dict[str, Any]:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {"cpu": model, "num_cores": os.cpu_count(), "python": platform.python_version(), "system": platform.system()}


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=RESULTS.parent)
    return done.stdout.strip() or "unknown"
