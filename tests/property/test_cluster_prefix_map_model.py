"""PrefixMap against a model that keeps one plain set of hashes for each worker."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.ids import Role, WorkerId
from cluster.core.messages import BlockEvents, BlockRun
from cluster.core.prefix_map import PrefixMap
from engine.core.block_hash import ROOT_HASH, block_hash

NUM_NAMES = 5


def name(path: str) -> bytes:
    return block_hash(name(path[:-1]), [ord(path[-1])], b"") if path else ROOT_HASH


def chain_of(path: str) -> list[bytes]:
    return [name(path[: end + 1]) for end in range(len(path))]


def runs_of(path: str, wanted: set[bytes]) -> list[tuple[bytes, bytes]]:
    """Of the path's blocks those that are wanted: for each run its parent and the packed hashes."""
    runs: list[tuple[bytes, bytes]] = []
    for end in range(len(path)):
        block, parent = name(path[: end + 1]), name(path[:end])
        if block in wanted:
            if runs and runs[-1][1].endswith(parent):
                runs[-1] = (runs[-1][0], runs[-1][1] + block)
            else:
                runs.append((parent, block))
    return runs


def role_of(worker: WorkerId) -> Role:
    return Role.PREFILL if int(worker.name) % 2 else Role.DECODE


class Model:
    """What each life has told, whether a message of it was missed, and the prompts that it is to read."""

    def __init__(self) -> None:
        self.held: dict[WorkerId, set[bytes]] = {}
        self.is_stale: dict[WorkerId, bool] = {}
        self.expected: dict[WorkerId, dict[int, set[bytes]]] = {}

    def join(self, worker: WorkerId) -> None:
        self.held[worker], self.expected[worker], self.is_stale[worker] = set(), {}, True

    def longest(self, role: Role, path: str) -> dict[WorkerId, int]:
        found = {}
        for worker, told in self.held.items():
            prefixes = [
                next((n for n, h in enumerate(chain_of(path)) if h not in held), len(path))
                for held in (told, *self.expected[worker].values())
            ]
            if max(prefixes) and role_of(worker) is role:
                found[worker] = max(prefixes)
        return found


PATHS = st.text("ab", min_size=1, max_size=6)
ACTIONS = st.tuples(
    st.integers(0, NUM_NAMES - 1),
    st.sampled_from(
        ("store", "store", "store", "evict one", "evict run", "lose", "snapshot", "restart", "expect", "give up")
    ),
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
        held, expected = model.held[worker], model.expected[worker]
        if action == "restart":
            prefix_map.leave(worker)
            del model.held[worker]
            lives[index] = worker = WorkerId(worker.name, worker.incarnation + 1)
            prefix_map.join(worker, role_of(worker))
            model.join(worker)
        elif action == "expect":
            expected[prefix_map.expect(worker, b"".join(chain_of(path)))] = set(chain_of(path))
        elif action == "give up":
            if expected:
                oldest = next(iter(expected))
                prefix_map.expect_no_more(worker, oldest)
                del expected[oldest]
        else:
            numbers[index] += 1
            if action == "lose":
                model.is_stale[worker] = True
                continue
            if action == "snapshot":
                held.clear()
                model.is_stale[worker] = False
            tell(prefix_map, model, worker, numbers[index], action, path)
        prefix_map.check_invariants()
        assert all(prefix_map.num_blocks_of(life) == len(model.held[life]) for life in lives)
    for path in asked:
        held_prefixes = prefix_map.look_up(b"".join(chain_of(path)))
        for role in Role:
            wanted = model.longest(role, path)
            assert held_prefixes.longest(role, NUM_NAMES) == wanted
            assert all(held_prefixes.num_blocks_of(worker) == num_blocks for worker, num_blocks in wanted.items())
            first_two = held_prefixes.longest(role, 2)
            assert list(first_two.values()) == sorted(wanted.values(), reverse=True)[:2]


def tell(prefix_map: PrefixMap, model: Model, worker: WorkerId, number: int, action: str, path: str) -> None:
    """Blocks of the path that are there are evicted (from its middle on, or the last), or those that are not stored."""
    held = model.held[worker]
    chain, stored, evicted = chain_of(path), set[bytes](), set[bytes]()
    if action == "evict one":
        evicted = held & set(chain[-1:])
    elif action == "evict run":
        evicted = held & set(chain[len(path) // 2 :])
    else:
        stored = set(chain) - held
    told = BlockEvents(
        sequence_number=number,
        is_snapshot=action == "snapshot",
        stored=tuple(BlockRun(parent=parent, hashes=hashes) for parent, hashes in runs_of(path, stored)),
        evicted=tuple(hashes for _, hashes in runs_of(path, evicted)),
    )
    prefix_map.hear(worker, told)
    if not model.is_stale[worker]:
        held.update(stored)
        held.difference_update(evicted)
