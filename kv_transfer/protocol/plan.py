"""Which bytes go where: turns pairs of blocks into copies between two pools of one layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.protocol.layout import KVLayout


@dataclass(frozen=True, slots=True)
class Copy:
    """Moves `size_bytes` from offset `source_bytes` of the local region to `target_bytes` of the peer's."""

    source_bytes: int
    target_bytes: int
    size_bytes: int


def plan_copies(pairs: Sequence[tuple[int, int]], layout: KVLayout) -> list[Copy]:
    """Copies for (source block id, target block id) pairs; neighbours on both sides become one copy.

    Few large copies cost a fraction of many small ones on every transport. The order of `pairs` is kept, so only
    pairs that follow each other are merged.
    """
    size_bytes = layout.block_size_bytes
    copies: list[Copy] = []
    first, last = (0, 0), (-2, -2)
    length = 0
    for pair in pairs:
        if length and pair == (last[0] + 1, last[1] + 1):
            length += 1
        else:
            if length:
                copies.append(Copy(first[0] * size_bytes, first[1] * size_bytes, length * size_bytes))
            first, length = pair, 1
        last = pair
    if length:
        copies.append(Copy(first[0] * size_bytes, first[1] * size_bytes, length * size_bytes))
    return copies


def plan_block_copies(pairs: Sequence[tuple[int, int]], layout: KVLayout) -> list[Copy]:
    """As plan_copies, one copy a pair: for writes whose checksums are wanted a block."""
    size_bytes = layout.block_size_bytes
    return [Copy(source * size_bytes, target * size_bytes, size_bytes) for source, target in pairs]
