"""PrefixMap: who holds how much of a prompt, gaps and snapshots, its limit, and that ends leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.core.ids import Role, WorkerId
from cluster.core.messages import BLOCK_HASH_BYTES, BlockEvents, BlockRun
from cluster.core.prefix_map import PrefixMap
from engine.core.block_hash import HASH_SIZE_BYTES, ROOT_HASH, hash_blocks

P0, P1, P2, D0 = WorkerId("p0", 1), WorkerId("p1", 1), WorkerId("p2", 1), WorkerId("d0", 1)
CHAIN = b"".join(hash_blocks(range(32), 4, b""))
FORK = b"".join(hash_blocks([*range(8), *range(100, 108)], 4, b""))


def blocks(start: int, stop: int, chain: bytes = CHAIN) -> bytes:
    return chain[start * BLOCK_HASH_BYTES : stop * BLOCK_HASH_BYTES]


def events(
    number: int, stored: bytes = b"", evicted: Iterable[bytes] = (), *, is_snapshot: bool = False
) -> BlockEvents:
    runs = (BlockRun(parent=ROOT_HASH, hashes=stored),) if stored else ()
    return BlockEvents(sequence_number=number, is_snapshot=is_snapshot, stored=runs, evicted=tuple(evicted))


def map_of(max_blocks: int = 1000, **held: int) -> PrefixMap:
    """`held`: by worker name, how many blocks of CHAIN it has told of. All are registered."""
    prefix_map = PrefixMap(max_blocks)
    for worker in (P0, P1, P2, D0):
        prefix_map.join(worker, Role.PREFILL if worker.name.startswith("p") else Role.DECODE)
        if worker.name in held:
            assert not prefix_map.hear(worker, events(1, blocks(0, held[worker.name]), is_snapshot=True))
    prefix_map.check_invariants()
    return prefix_map


def longest(
    prefix_map: PrefixMap, role: Role = Role.PREFILL, chain: bytes = CHAIN, limit: int = 4
) -> list[tuple[str, int]]:
    held = prefix_map.look_up(chain).longest(role, limit)
    return [(worker.name, num_blocks) for worker, num_blocks in held.items()]


def test_hashes_are_as_long_as_the_engines() -> None:
    assert BLOCK_HASH_BYTES == HASH_SIZE_BYTES


def test_hashes_of_another_length_match_nothing() -> None:
    prefix_map = map_of(p0=8)
    assert longest(prefix_map, chain=blocks(0, 2) + b"short" + blocks(2, 8)) == [("p0", 2)]
    prefix_map.hear(P0, events(2, stored=b"short", evicted=[b"short", blocks(6, 8)[1:]]))
    prefix_map.hear(P0, events(3, stored=FORK + b"short", evicted=[blocks(0, 8)]))
    prefix_map.check_invariants()
    assert longest(prefix_map, chain=FORK) == [("p0", 4)]


def test_the_longest_prefixes_come_first_and_roles_are_apart() -> None:
    prefix_map = map_of(p0=2, p1=8, p2=2, d0=5)
    assert longest(prefix_map) == [("p1", 8), ("p0", 2), ("p2", 2)]
    assert longest(prefix_map, Role.DECODE) == [("d0", 5)]
    assert longest(prefix_map, limit=2) == [("p1", 8), ("p0", 2)]
    assert longest(prefix_map, limit=0) == []


def test_only_what_hangs_together_from_the_first_block_on_counts() -> None:
    prefix_map = map_of(p0=8, p1=8)
    prefix_map.hear(P0, events(2, evicted=[blocks(3, 4)]))
    prefix_map.hear(P1, events(2, evicted=[blocks(0, 1)]))
    assert longest(prefix_map) == [("p0", 3)]
    assert longest(prefix_map, chain=FORK) == [("p0", 2)]
    prefix_map.hear(P2, events(1, FORK, is_snapshot=True))
    assert longest(prefix_map, chain=FORK) == [("p2", 4), ("p0", 2)]
    assert longest(prefix_map) == [("p0", 3), ("p2", 2)]
    assert longest(prefix_map, chain=b"") == []


def test_a_gap_is_asked_about_once_and_closed_by_a_snapshot() -> None:
    prefix_map = map_of(p0=2)
    assert not prefix_map.hear(P0, events(2, evicted=[blocks(1, 2)]))
    assert prefix_map.hear(P0, events(4, evicted=[blocks(0, 1)]))
    assert not prefix_map.hear(P0, events(5, CHAIN)), "what follows a gap is passed over"
    assert longest(prefix_map) == [("p0", 1)], "what was known stays in use"
    assert not prefix_map.hear(P0, events(6, blocks(0, 3), is_snapshot=True))
    assert not prefix_map.hear(P0, events(7, evicted=[blocks(2, 3)]))
    assert longest(prefix_map) == [("p0", 2)]
    prefix_map.check_invariants()


def test_events_that_do_not_begin_with_a_snapshot_are_a_gap() -> None:
    assert map_of().hear(P0, events(2))


def test_a_worker_that_leaves_is_forgotten_and_its_place_is_taken_anew() -> None:
    prefix_map = map_of(p0=4, p1=3)
    prefix_map.leave(P0)
    prefix_map.check_invariants()
    assert longest(prefix_map) == [("p1", 3)]
    later = WorkerId("p0", 2)
    prefix_map.join(later, Role.DECODE)
    prefix_map.check_invariants()
    assert prefix_map.num_blocks_of(later) == 0
    assert longest(prefix_map, Role.DECODE) == []


def test_the_map_remembers_no_more_than_its_limit() -> None:
    prefix_map = map_of(max_blocks=5, p0=4, p1=4)
    assert longest(prefix_map) == [("p0", 4), ("p1", 4)], "however many hold a block, it is remembered once"
    prefix_map.hear(P1, events(2, blocks(4, 8)))
    prefix_map.check_invariants()
    assert longest(prefix_map) == [("p1", 5), ("p0", 4)]
    prefix_map.hear(P1, events(3, evicted=[blocks(2, 8)]))
    prefix_map.check_invariants()
    assert (prefix_map.num_blocks_of(P0), prefix_map.num_blocks_of(P1)) == (4, 2)


def test_what_is_told_twice_counts_once() -> None:
    prefix_map = map_of(p0=2)
    prefix_map.hear(P0, events(2, blocks(0, 3), evicted=[blocks(7, 8)]))
    prefix_map.check_invariants()
    assert prefix_map.num_blocks_of(P0) == 3


def test_blocks_that_lose_the_ones_before_them_are_found_again_with_these() -> None:
    """A worker that still pushes the end of a prompt may have to give its beginning away."""
    prefix_map = map_of(p0=8, p1=8)
    prefix_map.hear(P0, events(2, evicted=[blocks(2, 4)]))
    prefix_map.hear(P1, events(2, evicted=[blocks(0, 8)]))
    prefix_map.check_invariants()
    assert longest(prefix_map) == [("p0", 2)] and prefix_map.num_blocks_of(P0) == 6
    prefix_map.hear(P2, events(1, CHAIN, is_snapshot=True))
    prefix_map.check_invariants()
    assert longest(prefix_map) == [("p2", 8), ("p0", 2)]
    prefix_map.hear(P0, events(3, blocks(2, 4)))
    prefix_map.check_invariants()
    assert longest(prefix_map) == [("p0", 8), ("p2", 8)]


def test_who_is_to_read_a_prompt_counts_as_its_holder() -> None:
    prefix_map = map_of(p0=2)
    short, long = prefix_map.expect(P0, blocks(0, 6)), prefix_map.expect(P0, CHAIN)
    assert longest(prefix_map) == [("p0", 8)] and prefix_map.num_blocks_of(P0) == 2
    prefix_map.hear(P0, events(2, blocks(2, 4)))
    prefix_map.check_invariants()
    prefix_map.expect_no_more(P0, short)
    prefix_map.check_invariants()
    assert prefix_map.expectations_of(P0) == [long]
    assert longest(prefix_map) == [("p0", 8)], "the other prompt has the same beginning"
    prefix_map.expect_no_more(P0, long)
    prefix_map.check_invariants()
    assert longest(prefix_map) == [("p0", 4)], "what was told of stays"


def test_a_snapshot_does_not_end_what_is_expected_and_the_end_of_a_life_does() -> None:
    prefix_map = map_of(p0=2)
    prefix_map.expect(P0, blocks(0, 4))
    prefix_map.hear(P0, events(2, blocks(0, 1), is_snapshot=True))
    prefix_map.check_invariants()
    assert longest(prefix_map) == [("p0", 4)] and prefix_map.num_blocks_of(P0) == 1
    prefix_map.leave(P0)
    prefix_map.check_invariants()
    assert longest(prefix_map) == []


def test_no_more_is_expected_than_the_map_may_remember() -> None:
    prefix_map = map_of(max_blocks=5, p0=3)
    expectation = prefix_map.expect(P0, CHAIN)
    prefix_map.check_invariants()
    assert longest(prefix_map) == [("p0", 5)]
    prefix_map.expect_no_more(P0, expectation)
    prefix_map.check_invariants()
    assert longest(prefix_map) == [("p0", 3)]
