"""`python -m cluster.sim`: replays the history of a seed, or runs many."""

from __future__ import annotations

import argparse
import sys
import time

from cluster.core.brief import brief
from cluster.sim.generator import generate
from cluster.sim.history import HistoryError, Report, run_seed
from cluster.sim.trace import Trace


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 if a history went wrong."""
    parser = argparse.ArgumentParser(prog="python -m cluster.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the history to run, or the first of several")
    parser.add_argument("--count", type=int, default=1, help="how many histories to run, one a seed")
    parser.add_argument("--trace", action="store_true", help="print what happens, line by line")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first history that goes wrong")
    options = parser.parse_args(arguments)
    total, failed, started_s = Report(num_histories=0), 0, time.perf_counter()
    for seed in range(options.seed, options.seed + options.count):
        try:
            total.add(_run(seed, options.trace or options.count == 1, options.trace))
        except HistoryError as error:
            failed += 1
            print(error, file=sys.stderr)
            if not options.keep_going:
                break
    print(f"{total}; {failed} went wrong")
    print(f"took {time.perf_counter() - started_s:.1f} s", file=sys.stderr)
    return 1 if failed else 0


def _run(seed: int, is_replay: bool, prints: bool) -> Report:
    if prints:
        print(brief(generate(seed)))
    trace = Trace(prints, print) if prints else Trace()
    return run_seed(seed, trace=trace, **({"check_every": 1} if is_replay else {}))


if __name__ == "__main__":
    sys.exit(main())
