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

Below the pool lie tiers in host memory and on disk (`engine.core.lower_tiers`), to which evicted content goes and from
which `load` brings it back. The copies that this takes are the owner's to make: at once (`take_copies`), or with the
step that is being planned (`start_step`). So is the work with files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from engine.core.disk_tier import DiskResult, DiskWork
from engine.core.errors import OutOfBlocksError, StaleGenerationError
from engine.core.lower_tiers import LowerTiers
from engine.core.prefix_changes import IndexChanges, NamedBlock, PendingChanges
from engine.core.prefix_counters import PrefixCounters, UseCounts
from engine.core.prefix_index import PrefixIndex
from engine.core.tiers import BlockCopy, BlockName

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


class BlockPool:
    """Hands out blocks 0 .. num_blocks - 1, counts their users, and caches what was computed by its content.

    Every call either succeeds whole or raises and changes nothing. Costs are O(blocks named), O(log num_blocks) for
    each eviction.
    """

    def __init__(
        self, num_blocks: int, *, max_reserved_blocks: int | None = None, lower_tiers: LowerTiers | None = None
    ) -> None:
        """`max_reserved_blocks` is the watermark on reserved plus quarantined blocks; without `lower_tiers`, what is
        evicted is gone.

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
        self._lower = lower_tiers or LowerTiers()
        self._changes = PendingChanges()
        self._uses = UseCounts()

    @property
    def num_allocatable(self) -> int:
        """Blocks that `allocate` can give now: free ones and cached ones."""
        return self._num_in_state[BlockState.FREE] + self._num_in_state[BlockState.CACHED]

    @property
    def num_reservable(self) -> int:
        """Blocks that `reserve` can give now: allocatable, less the growth headroom, up to the watermark."""
        return max(0, self._num_reservable_beside(0))

    def can_reserve_beside(self, num_blocks: int, num_loaded: int) -> bool:
        """Whether `reserve` would give `num_blocks` once `num_loaded` have been allocated besides."""
        return num_blocks <= self._num_reservable_beside(num_loaded)

    def _num_reservable_beside(self, num_allocated: int) -> int:
        num_written = self._num_in_state[BlockState.RESERVED] + self._num_in_state[BlockState.QUARANTINED]
        num_left = self.num_allocatable - num_allocated - self._growth_headroom
        return min(num_left, self._max_reserved_blocks - num_written)

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
        num_before = len(self._index)
        indexed_id = self._index.insert(block_id, block_hash, parent_hash)
        if indexed_id != block_id:
            self.acquire([indexed_id])
            self.release([block_id])
        elif num_before < len(self._index) and block_hash not in self._lower:
            self._changes.stored(block_hash, parent_hash)
        return indexed_id

    def forget(self, block_ids: Sequence[int]) -> None:
        """What these blocks hold, which are in use, is not trusted: neither they nor copies of it are found again."""
        for block_id in block_ids:
            assert self._states[block_id] is BlockState.ACTIVE, f"block {block_id} is not active"
            if block_id in self._index:
                name = self._index.remove(block_id)
                self._gone([*self._lower.forget(name[0]), name])

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Block ids of the longest prefix of `hashes` that lies in the pool. They are not acquired."""
        return self._index.match(hashes)

    def num_loadable(self, hashes: Sequence[bytes]) -> int:
        """How many of the first of `hashes` (those after what `match` finds) the host tier can give now."""
        return self._lower.num_loadable(hashes)

    def load(self, hashes: Sequence[bytes]) -> list[int]:
        """Takes blocks for content that the host tier has (`num_loadable`): active, one user each. They can be found
        only once the caller has indexed them, which it does when the copies are made.

        Raises:
            OutOfBlocksError: as `allocate`.
        """
        if not hashes:
            return []
        if len(hashes) > self.num_allocatable:
            raise OutOfBlocksError(f"{len(hashes)} blocks wanted, {self.num_allocatable} can be given")
        self._lower.pin(hashes)
        block_ids = self.allocate(len(hashes))
        self._lower.load(block_ids, hashes)
        return block_ids

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Copies to make in this order, before anything is written to the blocks that were given out since."""
        copies = self._lower.take_copies()
        self._uses.copies(copies)
        return copies

    def start_step(self) -> tuple[BlockCopy, ...]:
        """Copies that the step now planned makes in this order, before it computes. `end_step` follows."""
        copies = self._lower.start_step()
        self._uses.copies(copies)
        return copies

    def end_step(self, *, is_failed: bool = False) -> None:
        """The step is over; one that failed may not have made its copies. The caller indexes what it has loaded."""
        self._gone(self._lower.end_step(is_failed=is_failed))

    def read_ahead(self, hashes: Sequence[bytes]) -> tuple[bytes, ...]:
        """A prompt is to come for these: begins to read what of them lies in files alone, and returns their hashes."""
        reading, dropped = self._lower.read_ahead(hashes[len(self.match(hashes)) :])
        self._gone(dropped)
        return reading

    def is_reading(self, block_hash: bytes) -> bool:
        return self._lower.is_reading(block_hash)

    def take_disk_work(self) -> DiskWork | None:
        """To be done after the copies that `take_copies` has returned; `disk_done` follows."""
        return self._lower.take_disk_work()

    def disk_done(self, result: DiskResult) -> None:
        self._gone(self._lower.disk_done(result))

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

    @property
    def num_findable(self) -> int:
        """Contents that `match` or `num_loadable` can find: what `take_changes` tells of."""
        return len(self._index) + sum(not self._index.holds(block_hash) for block_hash in self._lower.names())

    @property
    def num_host_blocks(self) -> int:
        """Blocks in the host tier, of which some may lie in the pool as well."""
        return self._lower.num_host_blocks

    @property
    def num_disk_blocks(self) -> int:
        """Blocks in files."""
        return self._lower.num_disk_blocks

    def count_lookup(self, num_query_tokens: int, num_hit_tokens: int, num_host_hit_tokens: int = 0) -> None:
        """A sequence has come to run here: so many of its tokens were looked up, and so many found and acquired, some
        of them in the host tier."""
        self._uses.lookup(num_query_tokens, num_hit_tokens, num_host_hit_tokens)

    def prefix_counters(self) -> PrefixCounters:
        return PrefixCounters(
            num_query_tokens=self._uses.num_query_tokens,
            num_hit_tokens=self._uses.num_hit_tokens,
            num_stored_blocks=self._index.num_stored,
            num_evicted_blocks=self._index.num_evicted,
            num_host_hit_tokens=self._uses.num_host_hit_tokens,
            num_spilled_blocks=self._uses.num_spilled_blocks,
            num_loaded_blocks=self._uses.num_loaded_blocks,
        )

    @property
    def num_pending_changes(self) -> int:
        """That `take_changes` has not returned yet; at most two a block of any tier."""
        return len(self._changes)

    def take_changes(self, max_hashes: int) -> IndexChanges:
        """What has become findable, in whichever tier, and what is in none any more, since the last call, net; see
        PendingChanges."""
        return self._changes.take(max_hashes)

    def tell_all_again(self) -> None:
        """Whoever takes the changes has forgotten them all: everything findable counts as stored anew."""
        self._changes.start_over((self._lower.names() | dict(self._index.names())).items())

    def _take(self, num_blocks: int, state: BlockState) -> list[int]:
        block_ids: list[int] = []
        for _ in range(num_blocks):
            block_id = self._free.pop() if self._free else self._evict()
            self._move(block_id, state)
            self._generations[block_id] += 1
            block_ids.append(block_id)
        return block_ids

    def _evict(self) -> int:
        block_id, block_hash, parent_hash = self._index.evict()
        self._gone((*self._lower.spill(block_id, block_hash, parent_hash), (block_hash, parent_hash)))
        return block_id

    def _gone(self, names: Iterable[BlockName]) -> None:
        """One tier has lost these; that is told of those that no other has."""
        for block_hash, parent_hash in names:
            if block_hash not in self._lower and not self._index.holds(block_hash):
                self._changes.evicted(block_hash, parent_hash)

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
        self._lower.check_invariants()
        self._changes.check_invariants(self._lower.names() | dict(self._index.names()))
