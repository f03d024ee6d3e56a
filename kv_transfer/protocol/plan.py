"""Which bytes go where: turns pairs of blocks, or some layers of them, into copies between two pools of one layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kv_transfer.protocol.layout import KVLayout


class Copy(NamedTuple):
    """Moves `size_bytes` from offset `source_bytes` of the local region to `target_bytes` of the peer's.

    A tuple, because a push between ranks of unequal degrees has tens of thousands of them.
    """

    source_bytes: int
    target_bytes: int
    size_bytes: int


def plan_copies(pairs: Sequence[tuple[int, int]], layout: KVLayout, layers: range | None = None) -> list[Copy]:
    """Copies for (source block id, target block id) pairs; neighbours on both sides become one copy.

    Few large copies cost a fraction of many small ones on every transport. The order of `pairs` is kept, so only
    pairs that follow each other are merged. `layers`: only these of each block; all of them if not given.
    """
    return merge_copies(plan_block_copies(pairs, layout, layers))


def plan_block_copies(pairs: Sequence[tuple[int, int]], layout: KVLayout, layers: range | None = None) -> list[Copy]:
    """As plan_copies, one copy a pair: for writes whose checksums are wanted a block.

    Raises: ValueError for layers that the layout does not have.
    """
    block_size_bytes = layout.block_size_bytes
    start_bytes, size_bytes = (0, block_size_bytes) if layers is None else layout.layers_slice(0, layers)
    return [
        Copy(source * block_size_bytes + start_bytes, target * block_size_bytes + start_bytes, size_bytes)
        for source, target in pairs
    ]


def summed_first(pairs: Sequence[tuple[int, int]], summed: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs in the order of a write whose first copies alone are summed (Transport.write): those at the positions
    `summed` (PushChunk.summed), then the others."""
    chosen = frozenset(summed)
    return [pairs[position] for position in summed] + [
        pair for position, pair in enumerate(pairs) if position not in chosen
    ]


def plan_write(pairs: Sequence[tuple[int, int]], layout: KVLayout, layers: range, summed: Sequence[int]) -> list[Copy]:
    """The copies of a chunk's write: first one for each block that is summed, then those of the others, merged."""
    ordered, num_summed = summed_first(pairs, summed), len(summed)
    return plan_block_copies(ordered[:num_summed], layout, layers) + plan_copies(ordered[num_summed:], layout, layers)


def merge_copies(copies: Sequence[Copy]) -> list[Copy]:
    """The same bytes in fewer copies: those that follow each other in the list and on both sides become one."""
    merged: list[Copy] = []
    for copy in copies:
        last = merged[-1] if merged else None
        if (
            last is not None
            and copy.source_bytes == last.source_bytes + last.size_bytes
            and copy.target_bytes == last.target_bytes + last.size_bytes
        ):
            merged[-1] = Copy(last.source_bytes, last.target_bytes, last.size_bytes + copy.size_bytes)
        else:
            merged.append(copy)
    return merged
