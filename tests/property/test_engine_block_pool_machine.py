"""BlockPool against a model that is too simple to be wrong and too slow to be used."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from engine.core.block_hash import ROOT_HASH, block_hash
from engine.core.block_pool import BlockPool, BlockState, OutOfBlocksError, StaleGenerationError

Path = tuple[int, ...]


def name(path: Path) -> bytes:
    """Hash of the last block on a path of one-token blocks."""
    return block_hash(name(path[:-1]), [path[-1]], b"") if path else ROOT_HASH


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Holder:
    """A sequence: its blocks, and what it would have computed into them."""

    block_ids: list[int]
    path: Path


class BlockPoolMachine(RuleBasedStateMachine):
    holders = Bundle("holders")
    pushes = Bundle("pushes")
    grants = Bundle("grants")
    quarantined = Bundle("quarantined")

    @initialize(num_blocks=st.integers(1, 12), percent=st.integers(0, 100))
    def start(self, num_blocks: int, percent: int) -> None:
        self.watermark = num_blocks * percent // 100
        self.pool = BlockPool(num_blocks, max_reserved_blocks=self.watermark)
        self.headroom = 0
        self.users: Counter[int] = Counter()
        self.reserved: set[int] = set()
        self.in_quarantine: set[int] = set()
        self.generations = [0] * num_blocks
        self.indexed: dict[Path, int] = {}
        self.idle: list[Path] = []  # least recently used first
        self.told: set[bytes] = set()

    # What the model expects.

    @property
    def num_free(self) -> int:
        return len(self.generations) - len(+self.users) - len(self.reserved) - len(self.in_quarantine) - len(self.idle)

    def take(self, block_ids: list[int]) -> None:
        """Blocks have left the free list or the cache: that they are the right ones is checked here."""
        num_evicted = max(0, len(block_ids) - self.num_free)
        for _ in range(num_evicted):
            leaves = [path for path in self.idle if not any(other[:-1] == path for other in self.indexed)]
            victim = leaves[0] if leaves else self.idle[0]
            self.idle.remove(victim)
            assert self.indexed.pop(victim) in block_ids
        assert not set(block_ids) & ({*(+self.users)} | self.reserved | self.in_quarantine)
        assert not set(block_ids) & {*self.indexed.values()}
        for block_id in block_ids:
            self.generations[block_id] += 1

    # What can happen.

    @rule(target=holders, num_blocks=st.integers(0, 5), path=st.lists(st.integers(0, 1), min_size=5, max_size=5))
    def allocate(self, num_blocks: int, path: list[int]) -> Holder:
        """A sequence starts: it takes what is cached of it and allocates the rest."""
        paths = [tuple(path[: length + 1]) for length in range(num_blocks)]
        found: list[int] = []
        for each in paths:
            if each not in self.indexed:
                break
            found.append(self.indexed[each])
        assert self.pool.match([name(each) for each in paths]) == found
        self.pool.acquire(found)
        self.idle = [each for each in self.idle if self.indexed[each] not in found]
        self.users.update(found)
        num_new = num_blocks - len(found)
        if num_new > self.num_free + len(self.idle):
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(num_new)
            new: list[int] = []
        else:
            new = self.pool.allocate(num_new)
            self.take(new)
            self.users.update(new)
        return Holder(block_ids=found + new, path=tuple(path[: len(found) + len(new)]))

    @rule(holder=holders)
    def index(self, holder: Holder) -> None:
        """The first block of a content stays; whoever computed it again goes on with that one."""
        for index, block_id in enumerate(holder.block_ids):
            path = holder.path[: index + 1]
            present = self.indexed.setdefault(path, block_id)
            assert self.pool.index(block_id, name(path), name(path[:-1])) == present
            if present != block_id:
                self.idle = [each for each in self.idle if each != path]
                self.users.update([present])
                self.users.subtract([block_id])
                holder.block_ids[index] = present

    @rule(holder=consumes(holders))
    def release(self, holder: Holder) -> None:
        self.give_up(holder.block_ids)

    @rule(target=pushes, holder=holders, num_blocks=st.integers(1, 4))
    def push(self, holder: Holder, num_blocks: int) -> list[int]:
        """A push reads the last blocks of a sequence, and may outlive it: a parent can be idle under a used child."""
        block_ids = holder.block_ids[-num_blocks:]
        self.pool.acquire(block_ids)
        self.users.update(block_ids)
        return block_ids

    @rule(block_ids=consumes(pushes))
    def end_push(self, block_ids: list[int]) -> None:
        self.give_up(block_ids)

    def give_up(self, block_ids: list[int]) -> None:
        self.pool.release(block_ids)
        self.users.subtract(block_ids)
        path_of = {block_id: path for path, block_id in self.indexed.items()}
        for block_id in reversed(block_ids):
            if self.users[block_id] == 0 and block_id in path_of:
                self.idle.append(path_of[block_id])

    @rule(headroom=st.integers(0, 4))
    def set_headroom(self, headroom: int) -> None:
        self.pool.set_growth_headroom(headroom)
        self.headroom = headroom

    @rule(target=grants, num_blocks=st.integers(1, 5))
    def reserve(self, num_blocks: int) -> list[tuple[int, int]]:
        num_written = len(self.reserved) + len(self.in_quarantine)
        fits = num_blocks + self.headroom <= self.num_free + len(self.idle)
        if not fits or num_written + num_blocks > self.watermark:
            with pytest.raises(OutOfBlocksError):
                self.pool.reserve(num_blocks)
            return []
        granted = self.pool.reserve(num_blocks)
        self.take([block_id for block_id, _ in granted])
        assert all(self.generations[block_id] == generation for block_id, generation in granted)
        self.reserved.update(block_id for block_id, _ in granted)
        return granted

    @rule(target=holders, grant=consumes(grants))
    def commit(self, grant: list[tuple[int, int]]) -> Holder:
        self.pool.commit(grant)
        block_ids = [block_id for block_id, _ in grant]
        self.reserved.difference_update(block_ids)
        self.users.update(block_ids)
        return Holder(block_ids=block_ids, path=tuple([2] * len(block_ids)))

    @rule(grant=grants, index=st.integers(0, 4), age=st.integers(1, 3))
    def commit_stale(self, grant: list[tuple[int, int]], index: int, age: int) -> None:
        if not grant:
            return
        block_id, generation = grant[index % len(grant)]
        stale = [pair if pair[0] != block_id else (block_id, generation - age) for pair in grant]
        with pytest.raises(StaleGenerationError):
            self.pool.commit(stale)

    @rule(target=quarantined, grant=consumes(grants))
    def quarantine(self, grant: list[tuple[int, int]]) -> list[tuple[int, int]]:
        block_ids = [block_id for block_id, _ in grant]
        self.pool.quarantine(block_ids)
        self.reserved.difference_update(block_ids)
        self.in_quarantine.update(block_ids)
        return grant

    @rule(grant=quarantined)
    def commit_quarantined(self, grant: list[tuple[int, int]]) -> None:
        if grant:
            with pytest.raises(StaleGenerationError):
                self.pool.commit(grant)

    @rule(grant=st.one_of(consumes(grants), consumes(quarantined)))
    def release_reserved(self, grant: list[tuple[int, int]]) -> None:
        block_ids = [block_id for block_id, _ in grant]
        self.pool.release_reserved(block_ids)
        self.reserved.difference_update(block_ids)
        self.in_quarantine.difference_update(block_ids)

    @rule(max_hashes=st.integers(1, 20))
    def take_changes(self, max_hashes: int) -> None:
        """A reader who applies what it is told knows what is indexed once nothing waits, and never more than fits."""
        changes = self.pool.take_changes(max_hashes)
        stored = {block.block_hash for block in changes.stored}
        assert len(stored) == len(changes.stored) and len(stored) + len(changes.evicted) <= max_hashes
        assert not self.told & stored
        for evicted in changes.evicted:
            self.told.remove(evicted.block_hash)
        self.told |= stored
        assert len(self.told) <= len(self.generations)
        parents = {name(path): name(path[:-1]) for path in self.indexed}
        assert all(parents[block.block_hash] == block.parent_hash for block in changes.stored)
        if self.pool.num_pending_changes == 0:
            assert self.told == parents.keys()
        else:
            assert len(stored) + len(changes.evicted) == max_hashes

    @rule()
    def tell_all_again(self) -> None:
        self.pool.tell_all_again()
        self.told = set()

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_invariants()
        counts = self.pool.counts()
        assert counts.total == len(self.generations)
        assert (counts.active, counts.cached) == (len(+self.users), len(self.idle))
        assert (counts.reserved, counts.quarantined) == (len(self.reserved), len(self.in_quarantine))
        assert counts.free == self.num_free
        assert self.pool.num_allocatable == counts.free + counts.cached
        assert self.pool.num_indexed == len(self.indexed)
        assert self.pool.num_pending_changes <= 2 * counts.total
        assert [self.pool.generation(block_id) for block_id in range(counts.total)] == self.generations
        for block_id in self.idle:
            assert self.pool.state(self.indexed[block_id]) is BlockState.CACHED


BlockPoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_block_pool_agrees_with_a_simple_model = BlockPoolMachine.TestCase
