"""BlockReporter: what it tells, how often, how much at once; and that whoever listens knows what can be found."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.agent.block_reports import BlockReporter
from cluster.core.ids import Role, WorkerId
from cluster.core.messages import BLOCK_HASH_BYTES, BlockEvents, BlockRun
from cluster.core.prefix_map import PrefixMap
from engine.core.block_hash import ROOT_HASH, block_hash
from engine.core.block_pool import BlockPool

INTERVAL_NS = 1_000
WORKER = WorkerId("p0", 1)


def name(path: str) -> bytes:
    return block_hash(name(path[:-1]), [ord(path[-1])], b"") if path else ROOT_HASH


def store(pool: BlockPool, path: str) -> None:
    """A sequence of one-letter blocks is computed as far as it is not cached, and ends."""
    names = [name(path[: end + 1]) for end in range(len(path))]
    cached = pool.match(names)
    pool.acquire(cached)
    block_ids = cached + pool.allocate(len(path) - len(cached))
    for index in range(len(cached), len(path)):
        pool.index(block_ids[index], names[index], names[index - 1] if index else ROOT_HASH)
    pool.release(block_ids)


def reporter_of(pool: BlockPool, *, max_hashes: int = 100) -> BlockReporter:
    return BlockReporter(pool, interval_ns=INTERVAL_NS, max_hashes=max_hashes)


def hashes_of(*packed: bytes) -> list[bytes]:
    return [run[at : at + BLOCK_HASH_BYTES] for run in packed for at in range(0, len(run), BLOCK_HASH_BYTES)]


class Listener:
    """Keeps the hashes that it was told of and not told to be gone, and has a PrefixMap hear the same."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self.prefix_map = PrefixMap()
        self.prefix_map.join(WORKER, Role.PREFILL)

    def hear(self, events: BlockEvents) -> bool:
        if events.is_snapshot:
            self.hashes = set()
        for gone in hashes_of(*events.evicted):
            self.hashes.remove(gone)
        for run in events.stored:
            news = hashes_of(run.hashes)
            assert news and not self.hashes & set(news)
            self.hashes.update(news)
        is_gap = self.prefix_map.hear(WORKER, events)
        self.prefix_map.check_invariants()
        return is_gap


def test_the_first_events_are_a_snapshot_even_of_nothing() -> None:
    reporter = reporter_of(BlockPool(4))
    assert reporter.take(5) == BlockEvents(sequence_number=1, is_snapshot=True)
    assert reporter.take(10**9) is None and reporter.next_deadline_ns() is None


def test_blocks_that_follow_each_other_are_told_as_one_run() -> None:
    pool = BlockPool(8)
    reporter = reporter_of(pool)
    reporter.take(0)
    store(pool, "abc")
    store(pool, "abx")
    store(pool, "q")
    runs = (
        BlockRun(parent=ROOT_HASH, hashes=name("a") + name("ab") + name("abc")),
        BlockRun(parent=name("ab"), hashes=name("abx")),
        BlockRun(parent=ROOT_HASH, hashes=name("q")),
    )
    assert reporter.take(INTERVAL_NS) == BlockEvents(sequence_number=2, is_snapshot=False, stored=runs)


def test_evictions_are_told_as_runs_in_the_order_of_their_sequence() -> None:
    pool = BlockPool(6)
    reporter = reporter_of(pool)
    store(pool, "abc")
    store(pool, "xyz")
    reporter.take(0)
    pool.allocate(5)
    told = reporter.take(INTERVAL_NS)
    assert told is not None and told.evicted == (name("a") + name("ab") + name("abc"), name("xy") + name("xyz"))


def test_changes_are_told_at_intervals() -> None:
    pool = BlockPool(4)
    reporter = reporter_of(pool)
    reporter.take(0)
    store(pool, "a")
    assert reporter.next_deadline_ns() == INTERVAL_NS
    assert reporter.take(INTERVAL_NS - 1) is None
    store(pool, "b")
    told = reporter.take(INTERVAL_NS)
    assert told is not None and len(told.stored) == 2
    store(pool, "c")
    assert reporter.next_deadline_ns() == 2 * INTERVAL_NS


def test_much_is_told_in_parts() -> None:
    pool = BlockPool(10)
    reporter = reporter_of(pool, max_hashes=4)
    store(pool, "abcdefghij")
    listener = Listener()
    for now_ns in range(0, 3 * INTERVAL_NS, INTERVAL_NS):
        told = reporter.take(now_ns)
        assert told is not None and told.is_snapshot == (now_ns == 0)
        listener.hear(told)
    assert [len(listener.hashes), listener.prefix_map.num_blocks_of(WORKER)] == [10, 10]
    assert reporter.next_deadline_ns() is None


def test_starting_over_tells_everything_at_the_next_number() -> None:
    pool = BlockPool(4)
    reporter = reporter_of(pool)
    store(pool, "ab")
    reporter.take(0)
    reporter.start_over()
    assert reporter.take(INTERVAL_NS) == BlockEvents(
        sequence_number=2,
        is_snapshot=True,
        stored=(BlockRun(parent=ROOT_HASH, hashes=name("a") + name("ab")),),
    )


@settings(max_examples=200, deadline=None)
@given(
    num_blocks=st.integers(1, 8),
    max_hashes=st.integers(1, 5),
    work=st.lists(
        st.one_of(st.text("ab", min_size=1, max_size=4), st.sampled_from(("tell", "tell", "lose", "start over"))),
        max_size=60,
    ),
)
def test_whoever_listens_comes_to_know_exactly_what_can_be_found(
    num_blocks: int, max_hashes: int, work: list[str]
) -> None:
    pool, listener = BlockPool(num_blocks), Listener()
    reporter = reporter_of(pool, max_hashes=max_hashes)
    paths: set[str] = set()
    now_ns = 0
    for item in [*work, *["tell"] * 20]:
        if item in ("tell", "lose"):
            now_ns += INTERVAL_NS
            told = reporter.take(now_ns)
            # A message is lost only with its stream, and the next one begins with a snapshot.
            if item == "lose":
                reporter.start_over()
            elif told is not None:
                told_runs = (*told.evicted, *(run.hashes for run in told.stored))
                assert len(hashes_of(*told_runs)) <= max_hashes
                assert not listener.hear(told)
                assert len(listener.hashes) <= num_blocks
        elif item == "start over":
            reporter.start_over()
        elif len(item) <= num_blocks:
            store(pool, item)
            paths.update(item[: end + 1] for end in range(len(item)))
        pool.check_invariants()
    findable = {name(path) for path in paths if pool.match([name(path)])}
    assert listener.hashes == findable
    assert listener.prefix_map.num_blocks_of(WORKER) == pool.num_indexed == len(findable)
