"""Which workers a decision looks at: those that hold most of the prompt, and a few others drawn by a seed.

Of few workers, all; so a decision costs the same in a large cluster as in a small one. Drawing some and taking the best
of these comes close to taking the best of all ("the power of two choices", Mitzenmacher 1996).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from cluster.policy.costs import WorkerLike

MAX_HOLDERS: Final = 4
"""Workers of a role that are looked at because they hold a prefix of the prompt."""
MAX_ALL: Final = 8
"""Where there are no more workers of a role than these, all are looked at ..."""
NUM_DRAWN: Final = 4
"""... and otherwise so many are drawn besides the holders."""

_DRAW_SHIFTS: Final = tuple(range(0, 16 * NUM_DRAWN, 16))
"""Each draw takes 16 bits of one mixed number, which has 64."""
_MASK: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15

Worker = TypeVar("Worker", bound=WorkerLike)


def candidates_of(workers: Sequence[Worker], holders: Sequence[Worker], seed: int) -> tuple[Worker, ...]:
    """The holders, those that hold most first, then others. Costs O(candidates). Each comes once.

    Args:
        workers: all of the role. holders: at most MAX_HOLDERS of them.
        seed: another one at each decision, so that no worker is passed over for ever.
    """
    drawn: Iterable[Worker] = workers
    if len(workers) <= MAX_ALL and not holders:
        return tuple(workers)
    if len(workers) > MAX_ALL:
        mixed, num_workers = _mix(seed), len(workers)
        drawn = [workers[(mixed >> shift & 0xFFFF) * num_workers >> 16] for shift in _DRAW_SHIFTS]
    chosen = {worker.id: worker for worker in holders}
    for worker in drawn:
        chosen.setdefault(worker.id, worker)
    return tuple(chosen.values())


def _mix(number: int) -> int:
    """SplitMix64's output function (Steele, Lea, Flood 2014) of the number-th state from 0."""
    state = number * _GOLDEN & _MASK
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
    return state ^ state >> 31
