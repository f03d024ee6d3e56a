"""What has changed in a prefix cache since its reader last asked, so that a copy of it can be kept elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBlock:
    """What a block holds. `parent_hash` is ROOT_HASH for a sequence's first block."""

    block_hash: bytes
    parent_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexChanges:
    """`stored` can be matched from now on, `evicted` cannot any more. No hash is in both."""

    stored: tuple[NamedBlock, ...] = ()
    evicted: tuple[NamedBlock, ...] = ()


class PendingChanges:
    """Changes that the reader has not been told, net: a block stored and evicted unseen leaves no trace.

    Evictions are told before what was stored, so a reader who applies what it is told never knows more blocks than
    the tiers can hold. Therefore no more of either wait than these have blocks, even if nobody ever asks.
    """

    __slots__ = ("_evicted", "_stored")

    def __init__(self) -> None:
        self._stored: dict[bytes, bytes] = {}  # hash -> parent's hash
        self._evicted: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._stored) + len(self._evicted)

    def stored(self, block_hash: bytes, parent_hash: bytes) -> None:
        if block_hash in self._evicted:
            del self._evicted[block_hash]
        else:
            self._stored[block_hash] = parent_hash

    def evicted(self, block_hash: bytes, parent_hash: bytes) -> None:
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._evicted[block_hash] = parent_hash

    def take(self, max_hashes: int) -> IndexChanges:
        """The oldest changes; at most `max_hashes`, the rest waits for the next call."""
        evicted = _take_oldest(self._evicted, max_hashes)
        return IndexChanges(stored=_take_oldest(self._stored, max_hashes - len(evicted)), evicted=evicted)

    def start_over(self, names: Iterable[tuple[bytes, bytes]]) -> None:
        """The reader has forgotten everything. `names`: (hash, parent's hash) of all that can be matched now."""
        self._evicted.clear()
        self._stored = dict(names)

    def check_invariants(self, hashes: Iterable[bytes]) -> None:
        """`hashes`: of all that can be matched now."""
        indexed = set(hashes)
        assert self._stored.keys() <= indexed, "a block is to be told as stored and cannot be matched"
        assert not self._evicted.keys() & indexed, "a block is to be told as evicted and can be matched"


def _take_oldest(parents: dict[bytes, bytes], max_hashes: int) -> tuple[NamedBlock, ...]:
    taken = tuple(
        NamedBlock(block_hash=block_hash, parent_hash=parent_hash)
        for block_hash, parent_hash in islice(parents.items(), max_hashes)
    )
    for block in taken:
        del parents[block.block_hash]
    return taken
