"""Where a worker's threads may run, and whether they had the cores they were given, all of them and no others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BUSY_SHARE = 0.1
"""Of the busiest thread's CPU time: a thread above it takes part in the computation."""


class PlacementError(Exception):
    """A side does not run on the cores it was given; its figures would mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadUse:
    """One thread: the cores it may run on, and the CPU time it has used so far."""

    tid: int
    name: str
    cores: list[int]
    cpu_s: float


def thread_uses() -> list[ThreadUse]:
    """Of every thread of this process."""
    uses = []
    for path in Path("/proc/self/task").iterdir():
        tid = int(path.name)
        try:
            # After the name in parentheses: state is field 3, user and system time are fields 14 and 15.
            name, _, rest = (path / "stat").read_text().partition("(")[2].rpartition(")")
            ticks = sum(map(int, rest.split()[11:13]))
            cores = sorted(os.sched_getaffinity(tid))
        except (FileNotFoundError, ProcessLookupError):
            continue  # The thread has ended.
        uses.append(ThreadUse(tid=tid, name=name, cores=cores, cpu_s=ticks / os.sysconf("SC_CLK_TCK")))
    return uses


def check_placement(before: Sequence[ThreadUse], after: Sequence[ThreadUse], cores: Sequence[int]) -> list[ThreadUse]:
    """The threads that computed between the two looks, with the CPU time they used.

    Raises:
        PlacementError: a thread may run elsewhere than on `cores`; or not exactly one thread a core computed; or
            two of them are bound to the same core.
    """
    for use in after:
        if not set(use.cores) <= set(cores):
            raise PlacementError(f"thread {use.name!r} may run on cores {use.cores}, not only on {list(cores)}")
    used_before_s = {use.tid: use.cpu_s for use in before}
    used_s = {use.tid: use.cpu_s - used_before_s.get(use.tid, 0.0) for use in after}
    most_s = max(used_s.values())
    busy = [use for use in after if used_s[use.tid] > BUSY_SHARE * most_s]
    if len(busy) != len(cores):
        names = ", ".join(f"{use.name} {used_s[use.tid]:.2f} s" for use in busy)
        raise PlacementError(f"{len(busy)} threads compute on {len(cores)} cores: {names}")
    if not _can_run_at_once([set(use.cores) for use in busy]):
        raise PlacementError(f"computing threads share a core: {[use.cores for use in busy]}")
    return [ThreadUse(tid=use.tid, name=use.name, cores=use.cores, cpu_s=used_s[use.tid]) for use in busy]


def _can_run_at_once(core_sets: list[set[int]]) -> bool:
    """Whether each set can be given a core of its own (a matching, searched in full: there are two or three)."""
    if not core_sets:
        return True
    first, *others = core_sets
    return any(_can_run_at_once([cores - {core} for cores in others]) for core in first)
