"""Whether who reads a prompt should first fetch its beginning from a worker that holds it, and from which one.

A block fetched is written over a link, a block computed is read by the engine, which keeps other prompts waiting. So it
is fetched where that should take at most half as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cluster.core.ids import WorkerId
from cluster.policy.costs import LinksLike, StepCosts, WorkerLike, push_ms

MIN_BLOCKS: Final = 4
"""Fewer are not worth the messages that it takes."""
OVERHEAD_MS: Final = 5.0
"""Of a fetch, besides the writing: messages between three processes, and the commit."""
MAX_SOURCES: Final = 2
"""Workers that a fetch is considered from, those that hold most: every reader is looked at with each of them."""
WORTH: Final = 2
"""Computing has to take so many times as long."""
UNKNOWN_BANDWIDTH_BYTES_PER_S: Final = 500_000_000
"""Taken where no such link has been measured: of a slow network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFetch:
    """`num_blocks` of the prompt's beginning, as many as `holder` has, of which the reader gets what it lacks."""

    holder: WorkerId
    num_blocks: int
    predicted_ms: float
    reason: str


def fetch_of(
    reader: WorkerLike,
    holders: Sequence[tuple[WorkerLike, int]],
    num_own_blocks: int,
    block_size: int,
    links: LinksLike,
    usual: StepCosts,
) -> PrefixFetch | None:
    """The fetch that saves most; None where none is worth it. Costs O(holders).

    Args:
        holders: workers with the number of blocks that each holds. num_own_blocks: of the reader.
    """
    ms_per_block = (reader.ms_per_token or usual.ms_per_token) * block_size
    best: PrefixFetch | None = None
    best_ms = 0.0
    for holder, num_blocks in holders:
        num_missing = num_blocks - num_own_blocks
        if holder.id == reader.id or num_missing < MIN_BLOCKS:
            continue
        fetching_ms = OVERHEAD_MS + (
            push_ms(links, holder, reader, num_missing)
            or num_missing * reader.block_size_bytes * 1e3 / UNKNOWN_BANDWIDTH_BYTES_PER_S
        )
        saved_ms = num_missing * ms_per_block - fetching_ms
        is_better = best is None or (-saved_ms, holder.id) < (-best_ms, best.holder)
        if is_better and num_missing * ms_per_block >= WORTH * fetching_ms:
            best_ms = saved_ms
            reason = f"{num_missing} blocks come from {holder.id} in about {fetching_ms:.0f} ms"
            best = PrefixFetch(holder=holder.id, num_blocks=num_blocks, predicted_ms=fetching_ms, reason=reason)
    return best
