"""Finds blocks by content and says which idle one to evict.

Indexed blocks form a forest: a block's parent is the block before it in the sequence that computed it. The least
recently used idle block goes first, but a leaf always goes before its parent, since a block whose ancestors are gone
cannot be reached by `match`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.eviction import LruQueue


class PrefixIndex:
    """Block hash to block id, and the eviction order of the indexed blocks that nobody uses.

    `num_stored` and `num_evicted` blocks have come and gone since the start.

    A parent can be idle while its child is in use: a push holds only the blocks that its receiver lacks, and the
    sequence they belong to may be over. Such a parent is evicted only when no idle leaf is left.
    """

    __slots__ = (
        "_block_of",
        "_clock",
        "_idle_inner",
        "_idle_leaves",
        "_names",
        "_num_children",
        "num_evicted",
        "num_stored",
    )

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._names: dict[int, tuple[bytes, bytes]] = {}  # block id -> (its hash, its parent's hash)
        self._num_children: dict[bytes, int] = {}  # hash -> indexed children; the hash itself may be gone
        self._idle_leaves = LruQueue()
        self._idle_inner = LruQueue()
        self._clock = 0
        self.num_stored = 0
        self.num_evicted = 0

    @property
    def num_idle(self) -> int:
        return len(self._idle_leaves) + len(self._idle_inner)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._names

    def insert(self, block_id: int, block_hash: bytes, parent_hash: bytes) -> int:
        """Makes a block in use findable and returns its id, or that of the block that has the content already."""
        present = self._block_of.get(block_hash)
        if present is not None:
            return present
        assert block_id not in self._names, f"block {block_id} is indexed under another hash"
        self._block_of[block_hash] = block_id
        self._names[block_id] = (block_hash, parent_hash)
        num_siblings = self._num_children.get(parent_hash, 0)
        self._num_children[parent_hash] = num_siblings + 1
        parent_id = self._block_of.get(parent_hash)
        if num_siblings == 0 and parent_id is not None and parent_id in self._idle_leaves:
            self._idle_inner.add(parent_id, self._idle_leaves.remove(parent_id))
        self.num_stored += 1
        return block_id

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Block ids of the longest prefix of `hashes` that is indexed."""
        block_ids: list[int] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def mark_idle(self, block_id: int) -> None:
        """The last user of an indexed block has left; it counts as used just now."""
        self._clock += 1
        block_hash, _ = self._names[block_id]
        queue = self._idle_inner if self._num_children.get(block_hash, 0) else self._idle_leaves
        queue.add(block_id, self._clock)

    def mark_used(self, block_id: int) -> None:
        """An idle block has a user again."""
        queue = self._idle_leaves if block_id in self._idle_leaves else self._idle_inner
        queue.remove(block_id)

    def evict(self) -> tuple[int, bytes, bytes]:
        """Forgets one idle block and returns its id, its hash and its parent's. At least one must be idle."""
        block_id = (self._idle_leaves or self._idle_inner).pop_oldest()
        return block_id, *self.remove(block_id)

    def remove(self, block_id: int) -> tuple[bytes, bytes]:
        """Forgets a block that is not idle and returns its hash and its parent's. What follows it cannot be reached any
        more, and is evicted in its time."""
        block_hash, parent_hash = self._names.pop(block_id)
        del self._block_of[block_hash]
        num_siblings = self._num_children[parent_hash] - 1
        if num_siblings:
            self._num_children[parent_hash] = num_siblings
        else:
            del self._num_children[parent_hash]
            parent_id = self._block_of.get(parent_hash)
            if parent_id is not None and parent_id in self._idle_inner:
                self._idle_leaves.add(parent_id, self._idle_inner.remove(parent_id))
        self.num_evicted += 1
        return block_hash, parent_hash

    def names(self) -> Iterable[tuple[bytes, bytes]]:
        """(hash, parent's hash) of every indexed block."""
        return self._names.values()

    def holds(self, block_hash: bytes) -> bool:
        """Whether a block of that content is indexed."""
        return block_hash in self._block_of

    def check_invariants(self) -> None:
        assert len(self._block_of) == len(self._names), "hashes and blocks are not one to one"
        num_children: dict[bytes, int] = {}
        for block_id, (block_hash, parent_hash) in self._names.items():
            assert self._block_of[block_hash] == block_id, f"block {block_id} is not found under its own hash"
            num_children[parent_hash] = num_children.get(parent_hash, 0) + 1
            is_leaf, is_inner = block_id in self._idle_leaves, block_id in self._idle_inner
            assert not (is_leaf and is_inner), f"block {block_id} is queued twice"
            has_children = self._num_children.get(block_hash, 0) > 0
            assert not (is_leaf and has_children), f"block {block_id} has children, yet is queued as a leaf"
            assert not (is_inner and not has_children), f"block {block_id} is a leaf, yet is queued as inner"
        assert num_children == self._num_children, "child counts are wrong"
        assert self.num_stored - self.num_evicted == len(self._names), "blocks came or went uncounted"
        self._idle_leaves.check_invariants()
        self._idle_inner.check_invariants()
