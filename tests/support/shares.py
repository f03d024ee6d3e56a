"""What a rank holds of a block: the tests' own account of it, head by head."""

from __future__ import annotations

from kv_transfer.protocol.layout import KVLayout
from kv_transfer.protocol.ranks import Rank


def share_of(layout: KVLayout, whole_block: bytes, rank: Rank) -> bytes:
    """`layout` is of the whole model, and so is the block."""
    parts, layer = [], 0
    for group in layout.groups:
        for _ in range(group.num_layers):
            for head in rank.heads(group.num_kv_heads):
                start, size = layout.head_slice(0, layer, head, 1)
                parts.append(whole_block[start : start + size])
            layer += 1
    return b"".join(parts)
