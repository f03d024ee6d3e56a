"""Whole clusters in which requests take all three ways: pushed, read by decode, and written by prefill."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path

import pytest

from cluster.core.disaggregation import ALWAYS_PUSHED, DisaggregationConfig
from cluster.core.ids import Route
from cluster.core.limits import NUM_RECENT_ROUTES
from cluster.live.replay import Line, replay_file
from cluster.policy.break_even import MAX_STRETCH
from cluster.sim.client import Client
from cluster.sim.engine_model import StepCost
from cluster.sim.generator import generate
from cluster.sim.history import run_seed, run_world
from cluster.sim.kernel import MILLISECOND_NS
from cluster.sim.scenario import Request
from cluster.sim.trace import Trace
from cluster.sim.world import World
from tests.sim.test_journal import Recorder
from tests.sim.worlds import ANSWERED, ask, finish, make_world

NUM_SEEDS = 60
NETWORK_MS = 4.0
"""What the messages of a request take before its first token, on simulated networks."""
LARGE = {"num_blocks": 200, "max_model_tokens": 96, "max_step_tokens": 40}
SECOND = 1000


def routes_of(world: World) -> Counter[Route]:
    """Placements of the coordinator that lives."""
    view = world.coordinator.state.status(world.coordinator.process.now_ns()).routes
    counts: Counter[Route] = Counter()
    for route, _, number in view.counts:
        counts[route] += number
    return counts


def at(milliseconds: int, request: Request) -> Request:
    return dataclasses.replace(request, arrival_ns=milliseconds * MILLISECOND_NS)


def ttft_ms(client: Client) -> float:
    assert client.first_token_ns is not None
    return (client.first_token_ns - client.request.arrival_ns) / MILLISECOND_NS


def local_reads(world: World) -> list[tuple[str, float]]:
    """Request and predicted time of the prompts that decode was given by the break-even."""
    found = [re.search(r"Placed\(.*attempt=(r\d+)/.*itself in (\d+) ms", line) for line in world.kernel.trace.lines]
    return [(match[1], float(match[2])) for match in found if match is not None]


# ---- exact ----------------------------------------------------------------------------------------------------


def test_histories_mix_all_ways_and_every_answer_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of each request knows the only right tokens; faults of all kinds come on top."""
    worlds: list[World] = []
    monkeypatch.setattr("cluster.sim.history.run_world", lambda world: (worlds.append(world), run_world(world)))
    totals: Counter[Route] = Counter()
    num_mixed = 0
    for seed in range(NUM_SEEDS):
        run_seed(seed)
        taken = routes_of(worlds.pop())
        totals += taken
        num_mixed += len(taken) > 1
    assert min(totals[route] for route in Route) > NUM_SEEDS / 6 and num_mixed > NUM_SEEDS / 8, totals


def test_each_kind_of_rule_is_drawn() -> None:
    rules = [generate(seed).disaggregation for seed in range(100)]
    assert {rule.may_stay for rule in rules} == {True, False}
    assert {rule.max_local_tokens for rule in rules} >= {None, 0}
    assert any(rule.max_local_tokens for rule in rules)


# ---- the break-even -------------------------------------------------------------------------------------------


def long_then_short(num_long: int = 12, num_short: int = 8) -> list[Request]:
    """One after the other."""
    prompts = [48] * num_long + [6] * num_short
    return [
        at(50 + 300 * index, ask(index, num_prompt_tokens=length, max_tokens=8)) for index, length in enumerate(prompts)
    ]


@pytest.mark.bad_day(28)
def test_short_prompts_are_read_by_decode_once_it_is_known_to_be_cheaper() -> None:
    world = make_world(*long_then_short(), disaggregation=DisaggregationConfig(), **LARGE)
    assert all(client.outcome in ANSWERED for client in finish(world))
    assert routes_of(world) == {Route.PUSHED: 12, Route.LOCAL: 8}
    assert [request_id for request_id, _ in local_reads(world)] == [f"r{index}" for index in range(12, 20)]


def test_what_is_predicted_is_what_comes() -> None:
    """Of reads by decode, on an idle worker: all but the messages' time on the network."""
    world = make_world(*long_then_short(), disaggregation=DisaggregationConfig(), **LARGE)
    by_id = {client.request.request_id: client for client in finish(world)}
    reads = local_reads(world)
    assert len(reads) == 8
    for request_id, predicted_ms in reads:
        assert predicted_ms - 1 <= ttft_ms(by_id[request_id]) <= predicted_ms + NETWORK_MS, request_id


def test_a_replay_explains_the_way_that_a_request_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path, monkeypatch)
    finish(make_world(*long_then_short(), disaggregation=DisaggregationConfig(), **LARGE))
    story: list[Line] = []
    for path in recorder.write():
        assert replay_file(path, request_id="r12", tell=story.append).difference is None
    told = "\n".join(line.what for line in story)
    assert "reads 6 of 6 tokens itself in 6 ms, which costs all 16 ms, and a push 17" in told
    assert (
        "Placed attempt=1 decode=d0#1" in told and "route=local" in told and "RunLocal attempt=1 step_limit_ms=" in told
    )


def test_answers_begin_sooner_where_a_push_costs_more_than_reading() -> None:
    """Slow links: the KV of a short prompt takes as long as computing it."""
    slow = {"link_ns_per_byte": 100_000, **LARGE}
    second_token_ms = {}
    for rules in (ALWAYS_PUSHED, DisaggregationConfig()):
        clients = finish(make_world(*long_then_short(), disaggregation=rules, **slow))
        ends = [client.ended_ns - client.request.arrival_ns for client in clients[14:]]
        second_token_ms[rules] = sum(ends) / len(ends) / MILLISECOND_NS
    assert second_token_ms[DisaggregationConfig()] < 0.9 * second_token_ms[ALWAYS_PUSHED], second_token_ms


def test_running_answers_keep_their_time_per_token_while_decode_reads() -> None:
    """A long answer runs; beside it decode reads prompts all the time. No step takes longer than the limit allows,
    but for what a block takes."""
    cost = StepCost(base_ns=8 * MILLISECOND_NS)
    long = at(50, ask(0, num_prompt_tokens=8, max_tokens=80))
    others = [at(300 + 20 * index, ask(index, num_prompt_tokens=30, max_tokens=1)) for index in range(1, 20)]
    fixed = DisaggregationConfig(max_local_tokens=60, may_stay=False)
    world = make_world(long, *others, disaggregation=fixed, cost=cost, prefill_chunk_tokens=16, **LARGE)
    steps_ms: list[tuple[int, float]] = []
    node = world.worker("d0")
    assert node is not None
    add = node.state._stepper.costs.add

    def note(plan, duration_ns: int) -> None:  # type: ignore[no-untyped-def]
        num_read = sum(len(step.token_ids) for step in plan.sequences if len(step.token_ids) > 1)
        writes = any(len(step.token_ids) == 1 for step in plan.sequences)
        if writes and num_read and world.kernel.now_ns > 350 * MILLISECOND_NS:
            steps_ms.append((num_read, duration_ns / MILLISECOND_NS))
        add(plan, duration_ns)

    node.state._stepper.costs.add = note  # type: ignore[method-assign]
    assert all(client.outcome in ANSWERED for client in finish(world))
    assert len(steps_ms) > 20
    undisturbed_ms = 8.5
    noise = 1.25
    slow = [(number, step) for number, step in steps_ms if step > MAX_STRETCH * noise * undisturbed_ms]
    assert all(number <= world.scenario.block_size for number, _ in slow), slow


# ---- prefill writes -------------------------------------------------------------------------------------------


def full_decode() -> list[Request]:
    """Decode may run two at once, and more come; they are long."""
    return [at(50 + 40 * index, ask(index, num_prompt_tokens=16, max_tokens=50)) for index in range(5)]


def test_requests_stay_where_decode_is_full_and_prefill_idles() -> None:
    rules = DisaggregationConfig(max_local_tokens=0)
    ends_ms = {}
    for rule in (rules, ALWAYS_PUSHED):
        world = make_world(*full_decode(), disaggregation=rule, max_running=2, **LARGE)
        clients = finish(world)
        assert all(client.outcome in ANSWERED for client in clients)
        ends_ms[rule] = max(client.ended_ns for client in clients) / MILLISECOND_NS
        assert (routes_of(world)[Route.STAYED] > 0) is rule.may_stay
    assert ends_ms[rules] < ends_ms[ALWAYS_PUSHED]


def test_while_answers_are_written_on_prefill_prompts_of_others_are_read_as_soon() -> None:
    """Two stay; then a prompt comes for which decode has room again."""
    rules = DisaggregationConfig(max_local_tokens=0)
    first = full_decode()
    late = at(700, ask(9, num_prompt_tokens=48, max_tokens=2))
    times = {}
    for rule in (rules, ALWAYS_PUSHED):
        world = make_world(*first[:3], late, disaggregation=rule, max_running=2, **LARGE)
        times[rule] = ttft_ms(next(client for client in finish(world) if client.request.request_id == "r9"))
    assert times[rules] <= 1.3 * times[ALWAYS_PUSHED], times


# ---- nothing is pushed any more -------------------------------------------------------------------------------


@pytest.mark.bad_day(29)
def test_a_cluster_that_pushes_nothing_any_more_says_so() -> None:
    many = [
        at(50 + 10 * index, ask(index % 50, num_prompt_tokens=4, max_tokens=1)) for index in range(NUM_RECENT_ROUTES)
    ]
    many = [dataclasses.replace(request, request_id=f"r{index}") for index, request in enumerate(many)]
    scenario = {"disaggregation": DisaggregationConfig(max_local_tokens=8), "num_decode": 2, **LARGE}
    world = make_world(*many, **scenario)
    world.kernel.trace = Trace()
    assert all(client.outcome in ANSWERED for client in finish(world))
    assert [few.num_pushed for few in world.coordinator.warnings] == [0]
    view = world.coordinator.state.status(world.coordinator.process.now_ns()).routes
    assert view.pushed_share == 0 and view.few == world.coordinator.warnings[0]
