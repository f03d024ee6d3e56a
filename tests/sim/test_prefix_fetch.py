"""Prefixes that are fetched from another worker, in whole clusters: computed once, and right whatever goes wrong."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from cluster.agent.prefix_fetches import PrefixFetches
from cluster.policy import prefix_fetch
from cluster.sim.generator import generate
from cluster.sim.history import run_scenario
from cluster.sim.kernel import MILLISECOND_NS
from cluster.sim.scenario import SIM_AGENT_LIMITS, Request, Scenario
from cluster.sim.world import World
from tests.sim.conftest import NUM_HISTORIES
from tests.sim.worlds import ANSWERED, ask, count, finish, make_world

NUM_SEEDS = NUM_HISTORIES // 125


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Every prefix that another worker holds is fetched. Counts how fetches end."""
    monkeypatch.setattr(prefix_fetch, "MIN_BLOCKS", 1)
    monkeypatch.setattr(prefix_fetch, "WORTH", 0)
    monkeypatch.setattr(prefix_fetch, "OVERHEAD_MS", 0.0)
    counts: Counter[str] = Counter()
    send, arrived, settle = PrefixFetches.send, PrefixFetches.arrived, PrefixFetches.settle

    def counted_send(self, now_ns, command, body):  # type: ignore[no-untyped-def]
        refusal = send(self, now_ns, command, body)
        counts["sent" if refusal is None else "refused"] += 1
        return refusal

    def counted_arrived(self, now_ns, leg, push):  # type: ignore[no-untyped-def]
        counts["arrived"] += 1
        return arrived(self, now_ns, leg, push)

    def counted_settle(self, now_ns):  # type: ignore[no-untyped-def]
        late = settle(self, now_ns)
        counts["late"] += len(late)
        return late

    monkeypatch.setattr(PrefixFetches, "send", counted_send)
    monkeypatch.setattr(PrefixFetches, "arrived", counted_arrived)
    monkeypatch.setattr(PrefixFetches, "settle", counted_settle)
    return counts


def crowd(document: tuple[int, ...], number: int) -> list[Request]:
    """One who reads the document, and later many at once, more than one worker takes."""
    return [
        dataclasses.replace(
            ask(index, max_tokens=2),
            request_id=f"q{index}",
            prompt_ids=(*document, 3 + index % 57),
            arrival_ns=(40 if index == 0 else 800 + index) * MILLISECOND_NS,
        )
        for index in range(number)
    ]


def num_document_tokens_computed(world: World) -> int:
    """Prompt tokens that prefill workers have computed, less each prompt's own."""
    counters = [node.state.pool.prefix_counters() for node in world.all_workers if node.worker.name.startswith("p")]
    return sum(each.num_query_tokens - each.num_hit_tokens for each in counters)


def test_a_document_is_computed_once_in_the_whole_cluster(always: Counter[str]) -> None:
    """Without fetches, every worker that the crowd is spread over computes it."""
    document, number = ask(0, num_prompt_tokens=56).prompt_ids, 24
    computed = {}
    for fetch_prefixes in (False, True):
        world = make_world(
            *crowd(document, number), num_prefill=4, num_decode=4, num_blocks=96, fetch_prefixes=fetch_prefixes
        )
        assert all(client.outcome in ANSWERED for client in finish(world))
        computed[fetch_prefixes] = num_document_tokens_computed(world) - number
        fetched = [node.state.num_fetched_blocks() for node in world.all_workers]
        assert max(fetched) <= len(document) // 4, "it was stored twice"
    assert computed[True] == len(document) <= computed[False] - len(document), computed
    assert always["arrived"] == always["sent"] > 0 and not always["late"]


def test_whoever_could_fetch_counts_as_a_holder_when_a_prompt_is_placed() -> None:
    """By the rules as they are: a worker that idles fetches the document, rather than that all wait for who has it."""
    document, number = ask(0, num_prompt_tokens=56).prompt_ids[:48], 24
    requests = []
    for index, request in enumerate(crowd(document, number)):
        own = ask(100 + index, num_prompt_tokens=8).prompt_ids
        arrival_ns = (40 if index == 0 else 800 + 2 * index) * MILLISECOND_NS
        requests.append(dataclasses.replace(request, prompt_ids=(*document, *own), arrival_ns=arrival_ns))
    world = make_world(*requests, num_prefill=4, num_decode=4, num_blocks=96, fetch_prefixes=True)
    assert all(client.outcome in ANSWERED for client in finish(world))
    assert num_document_tokens_computed(world) == len(document) + 8 * number
    num_read = {name: count(world, f"-> {name}#", "Prefill(") for name in world.scenario.prefill_names}
    assert max(num_read.values()) <= number // 4 + 1, num_read


def test_a_fetch_that_comes_too_late_or_never_costs_its_time_and_no_answer(always: Counter[str]) -> None:
    document = ask(0, num_prompt_tokens=56).prompt_ids
    limits = dataclasses.replace(SIM_AGENT_LIMITS, max_fetch_wait_ns=1)
    world = make_world(
        *crowd(document, 24), num_prefill=4, num_decode=4, num_blocks=96, fetch_prefixes=True, agent_limits=limits
    )
    assert all(client.outcome in ANSWERED for client in finish(world))
    assert always["late"] > 0


def test_random_histories_with_all_kinds_of_faults(always: Counter[str]) -> None:
    """Prompts with common beginnings on several workers, so that there is much to fetch."""
    for seed in range(NUM_SEEDS):
        run_scenario(with_common_prompts(generate(seed)))
    assert always["arrived"] > NUM_SEEDS // 4, always


def with_common_prompts(scenario: Scenario) -> Scenario:
    draw = random.Random(f"{scenario.seed}/fetch")
    longest = scenario.max_model_tokens
    stems = [[draw.randrange(64) for _ in range(longest)] for _ in range(2)]
    requests = []
    for index in range(16):
        base, length = scenario.requests[index % len(scenario.requests)], draw.randint(longest // 2, longest - 2)
        sampling = dataclasses.replace(
            base.sampling,
            max_tokens=min(base.sampling.max_tokens, longest - length),
            min_tokens=0,
            prompt_logprobs=None,
        )
        requests.append(
            dataclasses.replace(
                base,
                request_id=f"r{index}",
                arrival_ns=base.arrival_ns + draw.randrange(400 * MILLISECOND_NS),
                prompt_ids=(*stems[draw.randrange(2)][: length - 1], draw.randrange(64)),
                sampling=sampling,
                is_invalid=False,
                max_latency_ms=None,
                cache_salt="",
            )
        )
    num_prefill = max(scenario.num_prefill, draw.choice((0, 3, 3, 4)))
    return dataclasses.replace(scenario, fetch_prefixes=True, num_prefill=num_prefill, requests=tuple(requests))
