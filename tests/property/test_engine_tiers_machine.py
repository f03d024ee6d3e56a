"""The pool and the tier below it, with bytes: whatever is found is what was computed, and no copy comes too late.

Copies that go with a step are made at any moment until it ends, or never if it fails; all others at once. Meanwhile
others are given the blocks and slots that are free, and write to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from engine.core.block_hash import ROOT_HASH, block_hash
from engine.core.block_pool import BlockPool, BlockState
from engine.core.disk_tier import DiskResult, DiskWork
from engine.core.lower_tiers import HELD_SHARE, LowerTiers
from engine.core.tiers import BlockCopy, HostTier

RUBBISH = b"rubbish"
DEPTH = 4
PATHS = st.lists(st.integers(0, 1), min_size=DEPTH, max_size=DEPTH)


def names_of(path: list[int]) -> list[bytes]:
    """Hashes of the blocks along a path of one-token blocks."""
    names: list[bytes] = []
    for token in path:
        names.append(block_hash(names[-1] if names else ROOT_HASH, [token], b""))
    return names


@dataclass(slots=True, kw_only=True, eq=False)
class Holder:
    """A sequence: its blocks, the first `num_indexed` of which are findable, and their contents' names."""

    block_ids: list[int]
    names: list[bytes]
    num_indexed: int
    num_loaded: int = 0


class TiersMachine(RuleBasedStateMachine):
    holders = Bundle("holders")

    @initialize(num_blocks=st.integers(4, 7), num_slots=st.integers(0, 8), num_files=st.sampled_from((0, 3, 30)))
    def start(self, num_blocks: int, num_slots: int, num_files: int) -> None:
        num_files = num_files if num_slots >= HELD_SHARE else 0
        self.lower = LowerTiers(num_slots, num_files)
        self.files: dict[bytes, bytes] = {}
        self.works: list[DiskWork] = []  # being done, in this order
        self.pool = BlockPool(num_blocks, max_reserved_blocks=num_blocks, lower_tiers=self.lower)
        self.blocks = [RUBBISH] * num_blocks
        self.slots = [RUBBISH] * num_slots
        self.told: set[bytes] = set()

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        for each in copies:
            if each.is_load:
                self.blocks[each.block_id] = self.slots[each.slot]
            else:
                self.slots[each.slot] = self.blocks[each.block_id]

    @rule(path=PATHS)
    def read_ahead(self, path: list[int]) -> None:
        """A prompt has come; what files have of it is read in its own time."""
        for name in self.pool.read_ahead(names_of(path)):
            assert self.pool.is_reading(name)

    @rule(fails=st.sampled_from((False, False, True)))
    def disk_work(self, fails: bool) -> None:
        """Work is taken after the copies, and done later; it may fail."""
        work = self.pool.take_disk_work()
        if work is not None:
            self.works.append(work)
        if not self.works:
            return
        work, failed = self.works.pop(0), set()
        for block in work.reads:
            self.slots[block.slot] = RUBBISH if fails else self.files[block.block_hash]
        failed.update(block.block_hash for block in (*work.reads, *work.writes) if fails)
        for name in (*work.deletions, *failed):
            self.files.pop(name, None)
        for block in work.writes:
            if not fails:
                assert self.slots[block.slot] == block.block_hash, "not what was spilled is written"
                self.files[block.block_hash] = self.slots[block.slot]
        self.pool.disk_done(DiskResult(work=work, failed=frozenset(failed)))

    def find(self, path: list[int], num_new: int) -> Holder | None:
        """What a scheduler does: takes what is there, brings what is below, and allocates what is left."""
        names = names_of(path)
        cached = self.pool.match(names)
        loadable = names[len(cached) :]
        loadable = loadable[: self.pool.num_loadable(loadable)]
        num_new = min(num_new, len(names) - len(cached) - len(loadable))
        if len(loadable) + num_new > self.pool.num_allocatable - self.pool.num_cached_in(cached):
            return None
        self.pool.acquire(cached)
        block_ids = cached + self.pool.load(loadable)
        block_ids += self.pool.allocate(num_new)
        return Holder(
            block_ids=block_ids, names=names[: len(block_ids)], num_indexed=len(cached), num_loaded=len(loadable)
        )

    def index(self, holder: Holder) -> None:
        for index in range(holder.num_indexed, len(holder.block_ids)):
            assert self.blocks[holder.block_ids[index]] == holder.names[index], "not what was computed"
            parent = holder.names[index - 1] if index else ROOT_HASH
            holder.block_ids[index] = self.pool.index(holder.block_ids[index], holder.names[index], parent)
        holder.num_indexed = len(holder.block_ids)

    @rule(
        target=holders,
        paths=st.lists(PATHS, min_size=1, max_size=2),
        num_new=st.sampled_from((DEPTH, DEPTH, 1)),
        meanwhile=st.lists(st.one_of(PATHS, st.integers(1, 7)), max_size=4),
        runs_after=st.integers(0, 4),
        fails=st.sampled_from((False, False, False, True)),
        stays=st.sampled_from((False, False, False, True)),
    )
    def step(
        self,
        paths: list[list[int]],
        num_new: int,
        meanwhile: list[list[int] | int],
        runs_after: int,
        fails: bool,
        stays: bool,
    ) -> list[Holder]:
        """A step from its plan to its end. Its copies are made after so many of the things that happen meanwhile:
        prefixes pinned, and blocks reserved and written. One that fails may end before that."""
        found = [self.find(path, num_new) for path in paths]
        running = [holder for holder in found if holder is not None]
        copies = self.pool.start_step()
        for happened, each in enumerate(meanwhile):
            if happened == runs_after:
                self.run(running, copies)
            self.happens(each)
            self.pool.check_invariants()
        if not fails and len(meanwhile) <= runs_after:
            self.run(running, copies)
        self.pool.end_step(is_failed=fails)
        if not fails:
            for holder in running:
                self.index(holder)
        return self.left_after(running, stays and not fails)

    @rule(path=PATHS)
    def pin(self, path: list[int]) -> None:
        self.happens(path)

    def run(self, holders: list[Holder], copies: tuple[BlockCopy, ...]) -> None:
        self.copy(copies)
        for holder in holders:
            for index in range(holder.num_indexed + holder.num_loaded, len(holder.block_ids)):
                self.blocks[holder.block_ids[index]] = holder.names[index]

    def happens(self, each: list[int] | int) -> None:
        """Copies at once: a prefix is pinned for a push that is to come, or blocks are reserved and written to."""
        if isinstance(each, int):
            block_ids = [block_id for block_id, _ in self.pool.reserve(min(each, self.pool.num_reservable))]
            self.copy(self.pool.take_copies())
            for block_id in block_ids:
                self.blocks[block_id] = RUBBISH
            self.pool.release_reserved(block_ids)
        elif (holder := self.find(each, 0)) is not None:
            self.copy(self.pool.take_copies())
            self.index(holder)
            self.pool.release(holder.block_ids)

    @rule(finished=consumes(holders))
    def release(self, finished: list[Holder]) -> None:
        self.left_after(finished, stays=False)

    def left_after(self, finished: list[Holder], stays: bool) -> list[Holder]:
        """Most sequences are short: they leave at once."""
        if stays:
            return finished
        for holder in finished:
            self.pool.release(holder.block_ids)
        return []

    @rule(max_hashes=st.integers(1, 20))
    def take_changes(self, max_hashes: int) -> None:
        changes = self.pool.take_changes(max_hashes)
        for evicted in changes.evicted:
            self.told.remove(evicted.block_hash)
        stored = {block.block_hash for block in changes.stored}
        assert not self.told & stored
        self.told |= stored
        if not self.pool.num_pending_changes:
            everything = deepcopy(self.pool)
            everything.tell_all_again()
            assert self.told == {block.block_hash for block in everything.take_changes(1000).stored}
            assert len(self.told) == self.pool.num_findable

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def what_is_found_is_right(self) -> None:
        self.pool.check_invariants()
        assert self.pool.num_host_blocks <= len(self.slots)
        for number in range(2**DEPTH):
            names = names_of([number >> shift & 1 for shift in range(DEPTH)])
            for block_id, block_name in zip(self.pool.match(names), names, strict=False):
                assert self.blocks[block_id] == block_name
                assert self.pool.state(block_id) in (BlockState.ACTIVE, BlockState.CACHED)


class HostTierMachine(RuleBasedStateMachine):
    """The order in which content goes, against a list."""

    @initialize(num_slots=st.integers(0, 5))
    def start(self, num_slots: int) -> None:
        self.tier = HostTier(num_slots)
        self.kept: list[bytes] = []  # the least recently used first
        self.held: set[bytes] = set()  # in the running step's hands
        self.unloadable: set[bytes] = set()

    @rule(number=st.integers(0, 9))
    def spill(self, number: int) -> None:
        name = bytes([number]) * 16
        dropped = self.tier.spill(0, name, ROOT_HASH)
        if name in self.kept:
            self.kept.remove(name)
            self.kept.append(name)
            assert dropped is None
            return
        expected = None
        if len(self.kept) == self.tier.num_slots:
            expected = next((each for each in self.kept if each not in self.held), None)
            if expected is None:
                assert dropped is None and name not in self.tier
                return
            self.kept.remove(expected)
        self.kept.append(name)
        assert dropped == (None if expected is None else (expected, ROOT_HASH))

    @rule(numbers=st.lists(st.integers(0, 9), unique=True, max_size=4))
    def load(self, numbers: list[int]) -> None:
        names = [bytes([number]) * 16 for number in numbers]
        names = names[: self.tier.num_loadable(names)]
        for name in reversed(names):
            assert name in self.kept and name not in self.unloadable
            self.kept.remove(name)
            self.kept.append(name)
        self.tier.pin(names)
        self.tier.load(list(range(len(names))), names)

    @precondition(lambda self: not self.held)
    @rule()
    def start_step(self) -> None:
        slots = {copy.slot for copy in self.tier.start_step()}
        spilled = set(self.tier._step_spills)
        self.held = {name for name in self.kept if self.tier._entries[name].slot in slots}
        assert spilled <= self.held
        self.unloadable = spilled

    @rule(is_failed=st.booleans())
    def end_step(self, is_failed: bool) -> None:
        forgotten = {block_hash for block_hash, _ in self.tier.end_step(is_failed=is_failed)}
        assert forgotten == (self.unloadable if is_failed else set())
        self.kept = [name for name in self.kept if name not in forgotten]
        self.held, self.unloadable = set(), set()

    @precondition(lambda self: hasattr(self, "tier"))
    @invariant()
    def agrees(self) -> None:
        self.tier.check_invariants()
        assert [name for name, _ in self.tier.names()] == self.kept


TiersMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_what_is_found_is_what_was_computed = TiersMachine.TestCase
HostTierMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_the_least_recently_used_content_goes = HostTierMachine.TestCase
