"""What a worker has of a prompt that is to be pushed to it: pinned, so that the push brings only the rest."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.block_hash import ROOT_HASH
from engine.core.block_pool import BlockPool


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPrefix:
    """Blocks in use once, in token order; the last `num_loaded` of them come from the host tier."""

    block_ids: list[int]
    num_loaded: int


def pin_prefix(pool: BlockPool, hashes: list[bytes], num_blocks: int) -> PinnedPrefix:
    """Acquires what the pool has of `hashes`, and loads what follows in the host tier.

    Nothing is loaded where the rest of the sequence, which has `num_blocks` in all, could not be reserved beside it: it
    is about to be refused. The copies are to be made at once, before anything of the blocks is read.
    """
    cached = pool.match(hashes)
    pool.acquire(cached)
    num_loaded = pool.num_loadable(hashes[len(cached) :])
    num_pinned = len(cached) + num_loaded
    if not pool.can_reserve_beside(num_blocks - num_pinned, num_loaded):
        return PinnedPrefix(block_ids=cached, num_loaded=0)
    loaded = pool.load(hashes[len(cached) : num_pinned])
    for index, block_id in enumerate(loaded, start=len(cached)):
        parent_hash = hashes[index - 1] if index else ROOT_HASH
        cached.append(pool.index(block_id, hashes[index], parent_hash))
    return PinnedPrefix(block_ids=cached, num_loaded=num_loaded)
