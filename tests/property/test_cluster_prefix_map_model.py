"""PrefixMap against a model that keeps one plain set of hashes for each worker."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.ids import Role, WorkerId
from cluster.core.messages import BlockEvents, BlockRun
from cluster.core.prefix_map import PrefixMap, pack_chain
from engine.core.block_hash import ROOT_HASH, block_hash

NUM_NAMES = 5


def name(path: str) -> bytes:
    return block_hash(name(path[:-1]), [ord(path[-1])], b"") if path else ROOT_HASH


def chain_of(path: str) -> list[bytes]:
    return [name(path[: end + 1]) for end in range(len(path))]


def role_of(worker: WorkerId) -> Role:
    return Role.PREFILL if int(worker.name) % 2 else Role.DECODE


class Model:
    """What each life has told, whether a message of it was missed, and what it is to read."""

    def __init__(self) -> None:
        self.held: dict[WorkerId, set[bytes]] = {}
        self.is_stale: dict[WorkerId, bool] = {}
        self.expected: dict[WorkerId, set[bytes]] = {}

    def join(self, worker: WorkerId) -> None:
        self.held[worker], self.expected[worker], self.is_stale[worker] = set(), set(), True

    def longest(self, role: Role, path: str) -> dict[WorkerId, int]:
        found = {}
        for worker, told in self.held.items():
            held = told | self.expected[worker]
            num_blocks = next((n for n, h in enumerate(chain_of(path)) if h not in held), len(path))
            if num_blocks and role_of(worker) is role:
                found[worker] = num_blocks
        return found


PATHS = st.text("ab", min_size=1, max_size=5)
ACTIONS = st.tuples(
    st.integers(0, NUM_NAMES - 1),
    st.sampled_from(("store", "store", "evict", "lose", "snapshot", "restart", "expect", "give up")),
    PATHS,
)


@settings(max_examples=150, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=40), asked=st.lists(PATHS, min_size=1, max_size=4))
def test_the_map_knows_what_a_plain_model_knows(actions: list[tuple[int, str, str]], asked: list[str]) -> None:
    prefix_map, model = PrefixMap(), Model()
    lives = [WorkerId(str(number), 0) for number in range(NUM_NAMES)]
    numbers = [0] * NUM_NAMES
    for worker in lives:
        prefix_map.join(worker, role_of(worker))
        model.join(worker)
    for index, action, path in actions:
        worker = lives[index]
        if action == "restart":
            prefix_map.leave(worker)
            del model.held[worker]
            lives[index] = worker = WorkerId(worker.name, worker.incarnation + 1)
            prefix_map.join(worker, role_of(worker))
            model.join(worker)
            continue
        if action == "expect":
            news = set(prefix_map.expect(worker, pack_chain(chain_of(path), len(path))))
            assert news == set(chain_of(path)) - model.held[worker] - model.expected[worker]
            model.expected[worker] |= news
            continue
        if action == "give up":
            prefix_map.expect_no_more(worker, tuple(chain_of(path)))
            model.expected[worker] -= set(chain_of(path))
            continue
        numbers[index] += 1
        if action == "lose":
            model.is_stale[worker] = True
            continue
        held, chain = model.held[worker], chain_of(path)
        is_snapshot = action == "snapshot"
        if is_snapshot:
            held.clear()
            model.is_stale[worker] = False
        stored = tuple(h for h in chain if h not in held) if action != "evict" else ()
        evicted = tuple(h for h in chain[-1:] if h in held) if action == "evict" else ()
        run = (BlockRun(parent=ROOT_HASH, hashes=stored),) if stored else ()
        told = BlockEvents(sequence_number=numbers[index], is_snapshot=is_snapshot, stored=run, evicted=evicted)
        prefix_map.hear(worker, told)
        if not model.is_stale[worker]:
            held.update(stored)
            held.difference_update(evicted)
            model.expected[worker] -= held
        prefix_map.check_invariants()
    for path in asked:
        held_prefixes = prefix_map.look_up(pack_chain(chain_of(path), len(path)))
        for role in Role:
            wanted = model.longest(role, path)
            assert held_prefixes.longest(role, NUM_NAMES) == wanted
            first_two = held_prefixes.longest(role, 2)
            assert list(first_two.values()) == sorted(wanted.values(), reverse=True)[:2]
