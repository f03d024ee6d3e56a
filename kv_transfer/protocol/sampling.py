"""Which blocks of a chunk are summed at the sender and verified at the receiver: all, a sample, or none.

Both halves know the rule. The sender names in each chunk the blocks whose sums come with it, and the receiver takes the
chunk only if those that its own rule asks for are among them: a sum that was left out never passes for one that held.
"""

from __future__ import annotations

from enum import Enum

from kv_transfer.protocol.messages import PushChunk

SAMPLE_INTERVAL = 16
"""Of so many neighbours in a sequence one is summed."""

_MASK = (1 << 64) - 1


class Checksums(Enum):
    """What both workers of a pair are set to."""

    OFF = "off"
    SAMPLED = "sampled"
    FULL = "full"


def summed_positions(checksums: Checksums, chunk: PushChunk) -> tuple[int, ...]:
    """Positions within `chunk.blocks`, ascending, of the blocks that must be summed.

    Sampled: a chunk's first and last block, and in between every SAMPLE_INTERVAL-th of the sequence, so that no damage
    to as many neighbours is missed. The lease, the layers and the sender's rank tell where the counting begins, so that
    over many pushes every block gets its turn. A chunk that is written again is summed whole, because where one block
    was damaged its neighbours may be.
    """
    positions = range(len(chunk.blocks))
    if checksums is Checksums.OFF:
        return ()
    if checksums is Checksums.FULL or chunk.round > 0:
        return tuple(positions)
    start = _start_of(chunk.lease_id + chunk.first_layer + chunk.rank)
    ends = (0, len(positions) - 1)
    return tuple(
        position
        for position in positions
        if position in ends or chunk.blocks[position].index % SAMPLE_INTERVAL == start
    )


def _start_of(number: int) -> int:
    """From 0 to SAMPLE_INTERVAL - 1, by the finaliser of MurmurHash3: each as often as the others, also over numbers
    that lie a fixed step apart, as the leases of one worker among many may."""
    number = (number ^ (number >> 33)) * 0xFF51AFD7ED558CCD & _MASK
    number = (number ^ (number >> 33)) * 0xC4CEB9FE1A85EC53 & _MASK
    return (number ^ (number >> 33)) % SAMPLE_INTERVAL
