from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.core.block_hash import ROOT_HASH
from engine.core.block_pool import (
    BlockPool,
    BlockState,
    IndexChanges,
    NamedBlock,
    OutOfBlocksError,
    PrefixCounters,
    StaleGenerationError,
)


def name(text: str) -> bytes:
    return text.encode().ljust(16, b".")


def store_chain(pool: BlockPool, *names: str) -> list[int]:
    """Computes, indexes and releases a chain of blocks."""
    block_ids = pool.allocate(len(names))
    parent_hash = ROOT_HASH
    for block_id, text in zip(block_ids, names, strict=True):
        pool.index(block_id, name(text), parent_hash)
        parent_hash = name(text)
    pool.release(block_ids)
    pool.check_invariants()
    return block_ids


def test_blocks_taken_together_lie_side_by_side_also_after_use() -> None:
    pool = BlockPool(8)
    first = pool.allocate(5)
    assert first == [0, 1, 2, 3, 4]
    pool.release(first)
    assert pool.allocate(5) == first


def test_allocate_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(OutOfBlocksError, match="2 blocks wanted, 1 can be given"):
        pool.allocate(2)
    assert pool.counts().free == 1
    pool.check_invariants()


def test_every_allocation_and_reservation_raises_the_generation() -> None:
    pool = BlockPool(1)
    [block_id] = pool.allocate(1)
    assert pool.generation(block_id) == 1
    pool.release([block_id])
    [granted] = pool.reserve(1)
    assert granted == (block_id, 2)
    pool.release_reserved([block_id])
    assert pool.generation(block_id) == 2


def test_a_stale_commit_changes_nothing() -> None:
    pool = BlockPool(4, max_reserved_blocks=4)
    granted = pool.reserve(2)
    stale = [granted[0], (granted[1][0], granted[1][1] - 1)]
    with pytest.raises(StaleGenerationError, match="generation"):
        pool.commit(stale)
    assert pool.counts().reserved == 2
    pool.commit(granted)
    assert pool.counts().active == 2
    with pytest.raises(StaleGenerationError):
        pool.commit(granted)
    pool.check_invariants()


def test_a_quarantined_block_cannot_be_committed_or_given_out() -> None:
    pool = BlockPool(2, max_reserved_blocks=2)
    granted = pool.reserve(2)
    block_ids = [block_id for block_id, _ in granted]
    pool.quarantine(block_ids)
    assert pool.num_allocatable == 0
    with pytest.raises(StaleGenerationError):
        pool.commit(granted)
    pool.release_reserved(block_ids)
    assert pool.counts().free == 2
    pool.check_invariants()


def test_reserved_and_quarantined_blocks_stay_under_the_watermark() -> None:
    pool = BlockPool(8)
    assert pool.num_reservable == 6
    pool.quarantine([block_id for block_id, _ in pool.reserve(4)])
    with pytest.raises(OutOfBlocksError, match="watermark 6"):
        pool.reserve(3)
    pool.reserve(2)
    assert pool.num_reservable == 0
    assert pool.num_allocatable == 2


def test_growth_of_running_sequences_comes_before_reservations() -> None:
    pool = BlockPool(8, max_reserved_blocks=8)
    pool.set_growth_headroom(3)
    with pytest.raises(OutOfBlocksError, match="growth headroom 3"):
        pool.reserve(6)
    pool.reserve(5)
    pool.allocate(3)


def test_released_blocks_are_cached_if_indexed_and_found_by_content() -> None:
    pool = BlockPool(4)
    block_ids = store_chain(pool, "a", "ab")
    plain = pool.allocate(1)
    pool.release(plain)
    assert pool.counts().cached == 2
    assert pool.match([name("a"), name("ab"), name("abc")]) == block_ids
    assert pool.match([name("ab")]) == block_ids[1:]
    assert pool.match([name("b"), name("ab")]) == []
    assert pool.num_cached_in(block_ids) == 2
    pool.acquire(block_ids)
    assert pool.num_cached_in(block_ids) == 0
    assert pool.counts().active == 2


def test_shared_blocks_stay_until_the_last_user_leaves() -> None:
    pool = BlockPool(2)
    block_ids = store_chain(pool, "a")
    pool.acquire(block_ids)
    pool.acquire(block_ids)
    pool.release(block_ids)
    assert pool.state(block_ids[0]) is BlockState.ACTIVE
    pool.release(block_ids)
    assert pool.state(block_ids[0]) is BlockState.CACHED


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(3)
    store_chain(pool, "a")
    pool.allocate(2)
    assert pool.counts().cached == 1


def test_eviction_takes_the_least_recently_used_chain_from_its_end() -> None:
    pool = BlockPool(6)
    store_chain(pool, "a", "ab", "abc")
    store_chain(pool, "x", "xy", "xyz")
    pool.take_changes(100)
    hit = pool.match([name("a")])
    pool.acquire(hit)
    pool.release(hit)  # "a" is the newest now, but it still has children
    evicted: list[bytes] = []
    for _ in range(6):
        pool.allocate(1)
        pool.check_invariants()
        evicted += [block.block_hash for block in pool.take_changes(100).evicted]
    assert evicted == [name(text) for text in ("abc", "ab", "xyz", "xy", "x", "a")]


def test_a_hit_makes_a_block_the_most_recently_used() -> None:
    pool = BlockPool(3)
    [first], [second], [third] = store_chain(pool, "a"), store_chain(pool, "b"), store_chain(pool, "c")
    for block_id in (first, second, first):
        pool.acquire([block_id])
        pool.release([block_id])
    assert pool.allocate(3) == [third, second, first]


def test_of_two_blocks_with_the_same_content_the_first_stays_and_the_other_is_free() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    assert pool.index(first, name("a"), ROOT_HASH) == first
    assert pool.index(second, name("a"), ROOT_HASH) == first
    assert pool.index(first, name("a"), ROOT_HASH) == first
    assert pool.state(second) is BlockState.FREE
    assert pool.match([name("a")]) == [first]
    pool.release([first])
    assert pool.state(first) is BlockState.ACTIVE  # in use by who computed the second one
    pool.release([first])
    assert pool.counts().cached == 1
    pool.check_invariants()


def test_blocks_that_are_not_trusted_cannot_be_found() -> None:
    pool = BlockPool(4)
    shared, own, after = pool.allocate(3)
    for block_id, text, parent in ((shared, "a", ROOT_HASH), (own, "b", name("a")), (after, "c", name("b"))):
        pool.index(block_id, name(text), parent)
    pool.acquire([own])
    pool.take_changes(10)
    pool.release([shared, after])
    pool.forget([own])
    pool.check_invariants()
    pool.release([own])
    assert pool.state(own) is BlockState.ACTIVE, "somebody else uses it still"
    pool.release([own])
    pool.check_invariants()
    states = [pool.state(block) for block in (shared, own, after)]
    assert states == [BlockState.CACHED, BlockState.FREE, BlockState.CACHED]
    assert pool.match([name("a"), name("b"), name("c")]) == [shared], "what follows is out of reach"
    assert pool.take_changes(10).evicted == (NamedBlock(block_hash=name("b"), parent_hash=name("a")),)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]


def test_a_block_computed_again_beside_an_idle_one_gives_way_to_it() -> None:
    pool = BlockPool(2)
    [first] = pool.allocate(1)
    [second] = pool.allocate(1)
    pool.index(first, name("a"), ROOT_HASH)
    pool.release([first])
    assert pool.index(second, name("a"), ROOT_HASH) == first
    assert (pool.state(first), pool.state(second)) == (BlockState.ACTIVE, BlockState.FREE)
    pool.check_invariants()


def test_an_idle_parent_of_a_used_child_is_evicted_last_but_can_be() -> None:
    pool = BlockPool(4)
    parent, copy, child, other = pool.allocate(4)
    pool.index(parent, name("a"), ROOT_HASH)
    pool.index(child, name("ab"), name("a"))
    pool.index(other, name("x"), ROOT_HASH)
    pool.release([parent])
    pool.release([other])
    assert pool.allocate(1) == [other]
    assert pool.num_allocatable == 1
    assert pool.allocate(1) == [parent]
    pool.check_invariants()
    assert pool.match([name("a"), name("ab")]) == []
    # The child is found again once somebody has computed the parent anew.
    pool.index(copy, name("a"), ROOT_HASH)
    assert pool.match([name("a"), name("ab")]) == [copy, child]
    pool.check_invariants()


def test_a_cached_leaf_that_gets_a_child_is_no_leaf_any_more() -> None:
    pool = BlockPool(4)
    parent, _copy, child, other = pool.allocate(4)
    pool.index(parent, name("a"), ROOT_HASH)
    pool.release([parent])
    pool.index(child, name("ab"), name("a"))
    pool.index(other, name("x"), ROOT_HASH)
    pool.release([child])
    pool.release([other])
    assert [pool.allocate(1)[0] for _ in range(3)] == [child, parent, other]


def blocks_of(*names: str) -> tuple[NamedBlock, ...]:
    """Of a chain: each name has one letter more than its parent's."""
    parents = [name(text[:-1]) if text[:-1] else ROOT_HASH for text in names]
    return tuple(
        NamedBlock(block_hash=name(text), parent_hash=parent) for text, parent in zip(names, parents, strict=True)
    )


def test_changes_are_net() -> None:
    pool = BlockPool(2)
    store_chain(pool, "a", "ab")
    assert pool.take_changes(100) == IndexChanges(stored=blocks_of("a", "ab"))
    assert pool.take_changes(100) == IndexChanges()
    pool.release(pool.allocate(2))
    store_chain(pool, "x")
    pool.allocate(2)
    assert pool.take_changes(100) == IndexChanges(evicted=blocks_of("ab", "a"))
    again = BlockPool(2)
    store_chain(again, "a")
    again.take_changes(100)
    again.release(again.allocate(2))
    store_chain(again, "a")
    assert again.num_pending_changes == 0


def test_changes_are_taken_in_parts_evictions_first() -> None:
    pool = BlockPool(3)
    store_chain(pool, "a", "ab")
    pool.take_changes(100)
    pool.release(pool.allocate(3))
    store_chain(pool, "x", "xy", "xyz")
    assert pool.num_pending_changes == 5
    assert pool.take_changes(1) == IndexChanges(evicted=blocks_of("ab"))
    assert pool.take_changes(2) == IndexChanges(evicted=blocks_of("a"), stored=blocks_of("x"))
    assert pool.take_changes(2) == IndexChanges(stored=blocks_of("xy", "xyz"))
    assert pool.num_pending_changes == 0


def test_everything_can_be_told_again() -> None:
    pool = BlockPool(4)
    store_chain(pool, "a", "ab")
    pool.take_changes(100)
    store_chain(pool, "x")
    pool.allocate(2)  # one is free, "ab" is evicted
    pool.tell_all_again()
    assert pool.num_indexed == 2
    assert pool.take_changes(100) == IndexChanges(stored=blocks_of("a", "x"))
    pool.tell_all_again()
    pool.allocate(1)
    assert pool.take_changes(100) == IndexChanges(stored=blocks_of("x"))


def test_what_came_and_what_was_asked_for_is_counted() -> None:
    pool = BlockPool(2)
    store_chain(pool, "a", "ab")
    pool.allocate(1)
    pool.count_lookup(40, 16)
    pool.count_lookup(5, 0)
    assert pool.prefix_counters() == PrefixCounters(
        num_query_tokens=45, num_hit_tokens=16, num_stored_blocks=2, num_evicted_blocks=1
    )


def test_misuse_is_caught() -> None:
    pool = BlockPool(4)
    [used, twice] = pool.allocate(2)
    [(reserved, _)] = pool.reserve(1)
    misuses: list[Callable[[], None]] = [
        lambda: pool.acquire([3]),
        lambda: pool.acquire([reserved]),
        lambda: pool.release([3]),
        lambda: pool.release([twice, twice]),
        lambda: pool.quarantine([used]),
        lambda: pool.release_reserved([used]),
        lambda: pool.index(reserved, name("a"), ROOT_HASH),
    ]
    for misuse in misuses:
        with pytest.raises(AssertionError):
            misuse()


@pytest.mark.parametrize(("num_blocks", "watermark", "field"), [(0, None, "num_blocks"), (4, 5, "max_reserved_blocks")])
def test_impossible_sizes_are_refused(num_blocks: int, watermark: int | None, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        BlockPool(num_blocks, max_reserved_blocks=watermark)
