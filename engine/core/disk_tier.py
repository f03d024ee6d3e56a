"""The lowest tier of the prefix cache: content in files, by block hash. Only bookkeeping, like `engine.core.tiers`.

What is spilled to the host tier is written to disk as well, while its slot is held there; a hit is read back into a
slot. Both take their time on a thread of their own, so work is handed out and its result comes later. A write for which
there is no time is left out, and a file that cannot be read is forgotten: either costs no more than computing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.core.tiers import BlockName

MAX_WRITES = 64
"""Blocks that wait to be written, at most: what is spilled meanwhile is not written."""
MAX_READS = 256
"""Blocks that are being read at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskBlock:
    """A block's content between a slot of the host tier and a file."""

    block_hash: bytes
    parent_hash: bytes
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskWork:
    """What is to be done with the files, in the order of the fields; answered by one DiskResult."""

    reads: tuple[DiskBlock, ...]
    deletions: tuple[bytes, ...]
    writes: tuple[DiskBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskResult:
    """`failed`: hashes of reads that gave nothing usable, whose files are gone, and of writes that left no file."""

    work: DiskWork
    failed: frozenset[bytes] = frozenset()


class DiskTier:
    """Which content lies in files, at most `max_blocks`, and what is being read and written. The least recently written
    or read content makes room."""

    __slots__ = ("_deletions", "_parents", "_reading", "_reads", "_writes", "_writing", "max_blocks")

    def __init__(self, max_blocks: int = 0, found: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """`found`: (hash, parent's hash) of what an earlier life left, the oldest first; at most `max_blocks`."""
        self.max_blocks = max_blocks
        self._parents = dict(found)
        assert len(self._parents) <= max_blocks
        self._reads: list[DiskBlock] = []
        self._writes: list[DiskBlock] = []
        self._deletions: list[bytes] = []
        self._reading: dict[bytes, int] = {}  # hash -> slot
        self._writing: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._parents

    def names(self) -> Iterable[tuple[bytes, bytes]]:
        return self._parents.items()

    def is_reading(self, block_hash: bytes) -> bool:
        return block_hash in self._reading

    def can_read(self) -> bool:
        return len(self._reading) < MAX_READS

    def takes(self, block_hash: bytes, max_writes: int) -> bool:
        """Whether that content should be written, with at most `max_writes` under way."""
        if not self.max_blocks or block_hash in self._parents or block_hash in self._writing:
            return False
        return len(self._writing) < min(MAX_WRITES, max_writes)

    def write(self, block: DiskBlock) -> None:
        self._writing[block.block_hash] = block.slot
        self._writes.append(block)

    def read(self, block_hash: bytes, slot: int) -> None:
        """Into a slot that is nobody else's until the result is there."""
        self._reading[block_hash] = slot
        self._reads.append(DiskBlock(block_hash=block_hash, parent_hash=self._parents[block_hash], slot=slot))

    def forget(self, block_hash: bytes) -> BlockName | None:
        """That content is not trusted. Stays if it is being read just now. Returns its name if it went."""
        if block_hash not in self._parents or block_hash in self._reading:
            return None
        self._deletions.append(block_hash)
        return block_hash, self._parents.pop(block_hash)

    def take_work(self) -> DiskWork | None:
        if not (self._reads or self._deletions or self._writes):
            return None
        work = DiskWork(reads=tuple(self._reads), deletions=tuple(self._deletions), writes=tuple(self._writes))
        self._reads, self._deletions, self._writes = [], [], []
        return work

    def done(self, result: DiskResult) -> tuple[BlockName, ...]:
        """Returns the names of what lies in no file any more."""
        gone: list[BlockName] = []
        for block in result.work.reads:
            del self._reading[block.block_hash]
            parent_hash = self._parents.pop(block.block_hash)
            if block.block_hash in result.failed:
                gone.append((block.block_hash, parent_hash))
            else:
                self._parents[block.block_hash] = parent_hash  # the newest now
        for block in result.work.writes:
            del self._writing[block.block_hash]
            if block.block_hash in result.failed:
                continue
            self._parents[block.block_hash] = block.parent_hash
            if len(self._parents) > self.max_blocks:
                oldest = next(block_hash for block_hash in self._parents if block_hash not in self._reading)
                gone.append((oldest, self._parents.pop(oldest)))
                self._deletions.append(oldest)
        return tuple(gone)

    def check_invariants(self) -> None:
        assert len(self._parents) <= self.max_blocks
        assert not self._parents.keys() & self._writing.keys(), "what lies in a file is written again"
        assert not set(self._deletions) & self._parents.keys(), "what is to be found is deleted"
        assert {block.block_hash for block in self._reads} <= self._reading.keys() <= self._parents.keys()
        assert {block.block_hash for block in self._writes} <= self._writing.keys()
