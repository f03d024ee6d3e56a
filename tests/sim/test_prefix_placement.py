"""Placement by the prefix map in whole clusters: who asks again comes back to what is cached, and a map that is stale
or plainly wrong costs time and never an answer."""

from __future__ import annotations

import dataclasses
from zlib import crc32

import pytest

from cluster.core.ids import Role, WorkerId
from cluster.core.messages import BlockEvents
from cluster.core.prefix_map import BLOCK_HASH_BYTES, HeldPrefixes, PrefixMap
from cluster.sim import worker_node
from cluster.sim.client import Client
from cluster.sim.engine_model import StepRun
from cluster.sim.history import run_seed
from cluster.sim.kernel import MILLISECOND_NS
from cluster.sim.kv_memory import KVMemory
from cluster.sim.scenario import Request, Scenario
from cluster.sim.shape import MODEL_FINGERPRINT
from cluster.sim.trace import Trace
from cluster.sim.world import World
from engine.core.block_hash import extra_key, hash_blocks
from engine.core.step import StepPlan
from tests.sim.conftest import NUM_HISTORIES
from tests.sim.worlds import ANSWERED, ask, count, finish, make_world

NUM_SEEDS = 40
TURNS = 4


def conversations(number: int) -> list[Request]:
    """Several clients, each of whom asks again with a longer prompt; all turns are far apart."""
    turns = []
    for turn in range(TURNS):
        for index in range(number):
            whole = ask(index, num_prompt_tokens=12 + 12 * turn)
            arrival_ns = (40 + 400 * turn + 90 * index) * MILLISECOND_NS
            turns.append(dataclasses.replace(whole, request_id=f"{index}/{turn}", arrival_ns=arrival_ns))
    return turns


def cached_share(world: World) -> float:
    """Of all prompt tokens looked up on prefill workers, those found."""
    loads = [node.state.load() for node in world.all_workers if node.worker.name.startswith("p")]
    return sum(load.prefix_hit_tokens for load in loads) / sum(load.prefix_query_tokens for load in loads)


def run_conversations() -> tuple[World, list[Client]]:
    world = make_world(*conversations(3), num_prefill=4, num_decode=2, num_blocks=96)
    clients = finish(world)
    assert all(client.outcome in ANSWERED for client in clients)
    return world, clients


def test_a_conversation_comes_back_to_the_worker_that_has_read_it() -> None:
    world, _ = run_conversations()
    readers = {name: count(world, f"-> {name}#", "Prefill(") for name in world.scenario.prefill_names}
    assert sorted(readers.values()) == [0, TURNS, TURNS, TURNS], readers
    assert cached_share(world) > 0.5


def test_one_prompt_asked_by_many_at_once_is_computed_once() -> None:
    """All come before its first block can have been told of."""
    many = [dataclasses.replace(ask(0, num_prompt_tokens=50), request_id=f"r{index}", front=0) for index in range(8)]
    world = make_world(*many, num_prefill=4, num_decode=4, num_blocks=192)
    assert all(client.outcome in ANSWERED for client in finish(world))
    assert cached_share(world) >= 7 / 8 * 48 / 50


def test_a_map_that_hears_nothing_more_costs_time_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers' events are lost after the first: what is cached is found by luck alone."""
    hear, informed = PrefixMap.hear, run_conversations()[0]

    def hear_once(self: PrefixMap, worker: WorkerId, events: BlockEvents) -> bool:
        return hear(self, worker, events) if events.is_snapshot else False

    monkeypatch.setattr(PrefixMap, "hear", hear_once)
    monkeypatch.setattr("cluster.sim.checks._untold_blocks", lambda world: [])
    assert cached_share(run_conversations()[0]) < cached_share(informed)


class Lies(HeldPrefixes):
    """Says of every worker that it holds some part of the prompt or other."""

    def __init__(self, prefix_map: PrefixMap, chain: bytes) -> None:
        super().__init__(prefix_map, [])
        self.lives, self.chain = prefix_map.lives(), chain

    def num_blocks_of(self, worker: WorkerId) -> int:
        num_blocks = len(self.chain) // BLOCK_HASH_BYTES
        return crc32(str(worker).encode() + self.chain) % (num_blocks + 1)

    def longest(self, role: Role, limit: int) -> dict[WorkerId, int]:
        letter = role.value[0]
        liars = [worker for worker in self.lives if worker.name.startswith(letter)][:limit]
        return {worker: self.num_blocks_of(worker) for worker in liars}


def test_a_map_that_lies_costs_no_answer_whatever_else_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random histories with all kinds of faults. Reserve's answer and the worker's own index decide what is used."""
    asked: list[bytes] = []

    def lie(self: PrefixMap, chain: bytes) -> HeldPrefixes:
        asked.append(chain)
        return Lies(self, chain)

    monkeypatch.setattr(PrefixMap, "look_up", lie)
    for seed in range(NUM_SEEDS):
        run_seed(seed)
    assert sum(len(chain) > 0 for chain in asked) > NUM_SEEDS


def test_a_conversation_that_its_pool_cannot_hold_is_read_from_host_memory() -> None:
    """Six conversations on one worker whose pool holds the blocks of one or two."""
    shares = {}
    for num_host_blocks in (0, 200):
        world = make_world(*conversations(6), num_blocks=20, num_host_blocks=num_host_blocks)
        assert all(client.outcome in ANSWERED for client in finish(world))
        shares[num_host_blocks] = cached_share(world)
    assert shares[0] < 0.1 and shares[200] > 0.5, shares


def test_a_conversation_that_host_memory_cannot_hold_is_read_from_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they can be read in time; where they cannot, prompts are computed and nobody waits for long."""
    shares = []
    for max_disk_ns in (MILLISECOND_NS, 100_000 * MILLISECOND_NS):
        monkeypatch.setattr(worker_node, "MAX_DISK_NS", max_disk_ns)
        monkeypatch.setattr(worker_node, "DISK_FAILURE_SHARE", 0.0)
        world = make_world(*conversations(6), num_blocks=20, num_host_blocks=24, num_disk_blocks=500)
        assert all(client.outcome in ANSWERED for client in finish(world))
        shares.append(cached_share(world))
    assert shares[0] > 0.4 and shares[1] < 0.2, shares


def test_one_document_read_by_many_is_computed_and_stored_once_a_worker_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Questions (a thousand in `make soak`) about one document, which other prompts push out of every pool."""
    num_questions = 1000 if NUM_HISTORIES > 1500 else 120
    document, num_blocks = ask(0, num_prompt_tokens=48).prompt_ids, 48 // 4
    questions = [
        dataclasses.replace(
            ask(index, max_tokens=2),
            request_id=f"q{index}",
            prompt_ids=(*document, 3 + index % 57, 3 + index // 57),
            arrival_ns=(40 + 60 * index) * MILLISECOND_NS,
        )
        for index in range(num_questions)
    ]
    others = [
        dataclasses.replace(ask(index, num_prompt_tokens=60, max_tokens=2), arrival_ns=each.arrival_ns + MILLISECOND_NS)
        for index, each in enumerate(questions)
        if index % 2 == 0
    ]
    num_computed: dict[int, int] = {}

    class CountingRun(StepRun):
        def __init__(
            self, plan: StepPlan, memory: KVMemory, variant: int = 0, unusable: frozenset[int] = frozenset()
        ) -> None:
            super().__init__(plan, memory, variant, unusable)
            for step in plan.sequences:
                if step.key.request_id.startswith("q") and step.start < len(document):
                    num_tokens = min(step.start + len(step.token_ids), len(document)) - step.start
                    num_computed[id(memory)] = num_computed.get(id(memory), 0) + num_tokens

    monkeypatch.setattr(worker_node, "StepRun", CountingRun)
    scenario = Scenario(
        seed=1, requests=(*questions, *others), num_prefill=3, num_decode=2, num_blocks=20, num_host_blocks=4000
    )
    world = World(scenario, trace=Trace(enabled=False), check_every=500, max_events=5_000_000)
    assert all(client.outcome in ANSWERED for client in finish(world))
    assert 1 <= len(num_computed) <= 3 and set(num_computed.values()) == {len(document)}, num_computed
    hashes = hash_blocks(document, 4, extra_key(MODEL_FINGERPRINT))
    for node in world.all_workers:
        pool = node.state.pool
        num_in_pool = len(pool.match(hashes))
        assert num_in_pool + pool.num_loadable(hashes[num_in_pool:]) in (0, num_blocks)
    counters = [node.state.pool.prefix_counters() for node in world.all_workers]
    assert sum(each.num_host_hit_tokens for each in counters) > num_questions // 10 * len(document), (
        "it never was in the pool's way"
    )
