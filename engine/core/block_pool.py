"""The pool of KV blocks: who holds which block, and which one may be given out next.

Every block has exactly one state (ARCHITECTURE.md §5):

    free ---------- allocate ---------> active ---- release, indexed ----> cached
     ^  ^                               |  ^  ^                            |  |
     |  `----- release, not indexed ----'  |  `---------- acquire ---------'  |
     |                                     |                                  |
     |--- reserve ---> reserved -- commit -'     (eviction: cached -> free) <-'
     |                   |
     |                   `-- quarantine --> quarantined
     `---- release_reserved ------'-------------'

A reserved block is one that a remote sender may write into. It goes back to free only through `release_reserved`,
which the owner calls when the sender has stopped or is fenced; until then it is quarantined. Every allocation and
every reservation raises the block's generation, and a commit must name the generation that was granted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from engine.core.errors import OutOfBlocksError, StaleGenerationError
from engine.core.prefix_changes import IndexChanges, NamedBlock
from engine.core.prefix_index import PrefixIndex

__all__ = [
    "BlockCounts",
    "BlockPool",
    "BlockState",
    "IndexChanges",
    "NamedBlock",
    "OutOfBlocksError",
    "PrefixCounters",
    "StaleGenerationError",
]

DEFAULT_MAX_RESERVED_PERCENT = 75
"""Share of the pool that may be reserved or quarantined at once, unless the owner says otherwise."""


class BlockState(IntEnum):
    FREE = 0
    RESERVED = 1
    ACTIVE = 2
    CACHED = 3
    QUARANTINED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Number of blocks in each state; they add up to `total`."""

    total: int
    free: int
    active: int
    cached: int
    reserved: int
    quarantined: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCounters:
    """Of the prefix cache, since the start.

    Attributes:
        num_query_tokens: of prompts (with the output they resume after) that were looked up, each one once.
        num_hit_tokens: of these, found in the cache and not computed.
        num_stored_blocks, num_evicted_blocks: that have become findable, and that were given away again.
    """

    num_query_tokens: int
    num_hit_tokens: int
    num_stored_blocks: int
    num_evicted_blocks: int


class BlockPool:
    """Hands out blocks 0 .. num_blocks - 1, counts their users, and caches what was computed by its content.

    Every call either succeeds whole or raises and changes nothing. Costs are O(blocks named), O(log num_blocks) for
    each eviction.
    """

    def __init__(self, num_blocks: int, *, max_reserved_blocks: int | None = None) -> None:
        """`max_reserved_blocks` is the watermark on reserved plus quarantined blocks.

        Raises:
            ValueError: num_blocks < 1, or max_reserved_blocks outside 0..num_blocks.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        if max_reserved_blocks is None:
            max_reserved_blocks = max(1, num_blocks * DEFAULT_MAX_RESERVED_PERCENT // 100)
        if not 0 <= max_reserved_blocks <= num_blocks:
            raise ValueError(f"max_reserved_blocks must be between 0 and {num_blocks}, got {max_reserved_blocks}")
        self.num_blocks = num_blocks
        self._max_reserved_blocks = max_reserved_blocks
        self._growth_headroom = 0
        self._states = [BlockState.FREE] * num_blocks
        self._num_users = [0] * num_blocks
        self._generations = [0] * num_blocks
        # A stack, lowest id on top: blocks taken together lie side by side, so that a push merges into few copies.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_in_state = [num_blocks, 0, 0, 0, 0]
        self._index = PrefixIndex()
        self._num_query_tokens = 0
        self._num_hit_tokens = 0

    @property
    def num_allocatable(self) -> int:
        """Blocks that `allocate` can give now: free ones and cached ones."""
        return self._num_in_state[BlockState.FREE] + self._num_in_state[BlockState.CACHED]

    @property
    def num_reservable(self) -> int:
        """Blocks that `reserve` can give now: allocatable, less the growth headroom, up to the watermark."""
        num_written = self._num_in_state[BlockState.RESERVED] + self._num_in_state[BlockState.QUARANTINED]
        return max(0, min(self.num_allocatable - self._growth_headroom, self._max_reserved_blocks - num_written))

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks for computing: active, one user each. Evicts cached blocks where free ones don't suffice.

        Raises:
            OutOfBlocksError: fewer than `num_blocks` are allocatable.
        """
        if num_blocks > self.num_allocatable:
            raise OutOfBlocksError(f"{num_blocks} blocks wanted, {self.num_allocatable} can be given")
        block_ids = self._take(num_blocks, BlockState.ACTIVE)
        for block_id in block_ids:
            self._num_users[block_id] = 1
        return block_ids

    def set_growth_headroom(self, num_blocks: int) -> None:
        """Keeps so many blocks out of the reach of `reserve`, for the sequences that run already.

        The scheduler keeps this up to date; arriving requests cannot starve what runs.
        """
        assert num_blocks >= 0
        self._growth_headroom = num_blocks

    def reserve(self, num_blocks: int) -> list[tuple[int, int]]:
        """Sets blocks aside for a remote sender to write into. Returns (block id, generation) pairs.

        Where part of the prompt is cached here, `acquire` that part first: it is then no longer allocatable, and the
        headroom is judged with it gone.

        Raises:
            OutOfBlocksError: not enough blocks beyond the growth headroom, or the watermark would be passed.
        """
        if num_blocks > self.num_reservable:
            raise OutOfBlocksError(
                f"{num_blocks} blocks wanted for a push, {self.num_reservable} can be reserved: "
                f"{self.counts()}, growth headroom {self._growth_headroom}, watermark {self._max_reserved_blocks}"
            )
        return [(block_id, self._generations[block_id]) for block_id in self._take(num_blocks, BlockState.RESERVED)]

    def commit(self, blocks: Sequence[tuple[int, int]]) -> None:
        """The KV has arrived whole: reserved blocks become active, one user each.

        Raises:
            StaleGenerationError: one of the (block id, generation) pairs is not reserved under that generation.
        """
        for block_id, generation in blocks:
            state, current = self._states[block_id], self._generations[block_id]
            if state is not BlockState.RESERVED or current != generation:
                raise StaleGenerationError(
                    f"block {block_id}, granted under generation {generation}, is {state.name.lower()} under {current}"
                )
        assert len({block_id for block_id, _ in blocks}) == len(blocks), "a block is committed twice"
        for block_id, _ in blocks:
            self._move(block_id, BlockState.ACTIVE)
            self._num_users[block_id] = 1

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """Reserved blocks that nobody waits for any more, but that the sender may still write into."""
        for block_id in block_ids:
            assert self._states[block_id] is BlockState.RESERVED, f"block {block_id} is not reserved"
        for block_id in block_ids:
            self._move(block_id, BlockState.QUARANTINED)

    def release_reserved(self, block_ids: Sequence[int]) -> None:
        """No write into these reserved or quarantined blocks can land any more: they are free."""
        for block_id in block_ids:
            state = self._states[block_id]
            assert state in (BlockState.RESERVED, BlockState.QUARANTINED), f"block {block_id} is {state.name}"
        for block_id in reversed(block_ids):
            self._move(block_id, BlockState.FREE)
            self._free.append(block_id)

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Adds a user to blocks that are active or cached (as `match` found them)."""
        for block_id in block_ids:
            state = self._states[block_id]
            assert state in (BlockState.ACTIVE, BlockState.CACHED), f"block {block_id} is {state.name}"
        for block_id in block_ids:
            if self._states[block_id] is BlockState.CACHED:
                self._index.mark_used(block_id)
                self._move(block_id, BlockState.ACTIVE)
            self._num_users[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Takes a user off active blocks. Without users, an indexed block is cached and any other is free.

        Name a sequence's blocks in token order: its tail then counts as used longer ago than its head.
        """
        for block_id in block_ids:
            assert self._states[block_id] is BlockState.ACTIVE, f"block {block_id} has no user"
        for block_id in reversed(block_ids):
            assert self._num_users[block_id] > 0, f"block {block_id} is released more often than it was acquired"
            self._num_users[block_id] -= 1
            if self._num_users[block_id]:
                continue
            if block_id in self._index:
                self._move(block_id, BlockState.CACHED)
                self._index.mark_idle(block_id)
            else:
                self._move(block_id, BlockState.FREE)
                self._free.append(block_id)

    def index(self, block_id: int, block_hash: bytes, parent_hash: bytes) -> int:
        """Makes an active, full, computed block findable. Returns the block to use instead of it from now on.

        That is the block itself, unless another one with its content can be found already (it was computed twice at
        once, or pushed here twice). The caller's use then moves over to that one, so that content lies in the pool
        once, however it came.
        """
        assert self._states[block_id] is BlockState.ACTIVE, f"block {block_id} is not active"
        indexed_id = self._index.insert(block_id, block_hash, parent_hash)
        if indexed_id != block_id:
            self.acquire([indexed_id])
            self.release([block_id])
        return indexed_id

    def forget(self, block_ids: Sequence[int]) -> None:
        """What these blocks, which are in use, hold is not trusted: they cannot be found any more."""
        for block_id in block_ids:
            assert self._states[block_id] is BlockState.ACTIVE, f"block {block_id} is not active"
            if block_id in self._index:
                self._index.remove(block_id)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Block ids of the longest prefix of `hashes` that lies in the pool. They are not acquired."""
        return self._index.match(hashes)

    def num_cached_in(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks are cached, that is, would stop being allocatable if they were acquired."""
        return sum(self._states[block_id] is BlockState.CACHED for block_id in block_ids)

    def generation(self, block_id: int) -> int:
        return self._generations[block_id]

    def state(self, block_id: int) -> BlockState:
        return self._states[block_id]

    def counts(self) -> BlockCounts:
        return BlockCounts(
            total=self.num_blocks,
            free=self._num_in_state[BlockState.FREE],
            active=self._num_in_state[BlockState.ACTIVE],
            cached=self._num_in_state[BlockState.CACHED],
            reserved=self._num_in_state[BlockState.RESERVED],
            quarantined=self._num_in_state[BlockState.QUARANTINED],
        )

    @property
    def num_indexed(self) -> int:
        """Blocks that `match` can find, in use or not."""
        return len(self._index)

    def count_lookup(self, num_query_tokens: int, num_hit_tokens: int) -> None:
        """A sequence has come to run here: so many of its tokens were looked up, and so many found and acquired."""
        assert 0 <= num_hit_tokens <= num_query_tokens
        self._num_query_tokens += num_query_tokens
        self._num_hit_tokens += num_hit_tokens

    def prefix_counters(self) -> PrefixCounters:
        return PrefixCounters(
            num_query_tokens=self._num_query_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_stored_blocks=self._index.num_stored,
            num_evicted_blocks=self._index.num_evicted,
        )

    @property
    def num_pending_changes(self) -> int:
        """Of the prefix index, that `take_changes` has not returned yet; at most two a block of the pool."""
        return len(self._index.changes)

    def take_changes(self, max_hashes: int) -> IndexChanges:
        """What has become findable and what was evicted since the last call, net; see PendingChanges."""
        return self._index.changes.take(max_hashes)

    def tell_all_again(self) -> None:
        """Whoever takes the changes has forgotten them all: everything findable counts as stored anew."""
        self._index.tell_all_again()

    def _take(self, num_blocks: int, state: BlockState) -> list[int]:
        block_ids: list[int] = []
        for _ in range(num_blocks):
            block_id = self._free.pop() if self._free else self._index.evict()
            self._move(block_id, state)
            self._generations[block_id] += 1
            block_ids.append(block_id)
        return block_ids

    def _move(self, block_id: int, state: BlockState) -> None:
        self._num_in_state[self._states[block_id]] -= 1
        self._num_in_state[state] += 1
        self._states[block_id] = state

    def check_invariants(self) -> None:
        num_in_state = [0] * len(BlockState)
        num_idle = 0
        for block_id, state in enumerate(self._states):
            num_in_state[state] += 1
            has_users = self._num_users[block_id] > 0
            assert has_users == (state is BlockState.ACTIVE), f"block {block_id}, {state.name}, {has_users=}"
            is_indexed = block_id in self._index
            if state is BlockState.CACHED:
                num_idle += 1
                assert is_indexed, f"block {block_id} is cached but cannot be found"
            elif state is not BlockState.ACTIVE:
                assert not is_indexed, f"block {block_id} is {state.name} but can be found"
        assert num_in_state == self._num_in_state, "state counts are wrong"
        assert self._index.num_idle == num_idle, "the eviction order misses blocks or holds ones in use"
        assert len(set(self._free)) == len(self._free) == num_in_state[BlockState.FREE], "the free list is wrong"
        for block_id in self._free:
            assert self._states[block_id] is BlockState.FREE, f"block {block_id} is on the free list"
        self._index.check_invariants()
