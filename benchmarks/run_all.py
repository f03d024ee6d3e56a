"""Runs every benchmark, one after another: `python -m benchmarks.run_all [--quick] [--check]`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NOT_BENCHMARKS = {"__init__", "report", "run_all", "serving"}


def main() -> int:
    failed = []
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem in NOT_BENCHMARKS:
            continue
        print(f"== {path.stem}", file=sys.stderr, flush=True)
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{path.stem}", *sys.argv[1:]], check=False)
        if done.returncode:
            failed.append(path.stem)
    if failed:
        print("failed: " + ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
