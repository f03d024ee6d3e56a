"""Bad days that systems of this kind have had, one test each: what happened there must not happen here.

The numbers in their marks are those of docs/bad-days.md. What needs real processes or sockets is tested elsewhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cluster.core.ids import Outcome, Role, WorkerId
from cluster.core.output_estimate import OutputEstimate
from cluster.sim.checks import held
from cluster.sim.engine_model import StepCost
from cluster.sim.fabric import Family
from cluster.sim.kernel import MILLISECOND_NS, SECOND_NS
from cluster.sim.scenario import SIM_AGENT_LIMITS, SIM_PUSH_LIMITS, FaultKind
from cluster.sim.shape import worker_config
from cluster.sim.world import World
from engine.core.planning import StepBuilder
from engine.core.sequence import Sequence
from engine.core.step import SequenceKey
from tests.sim.worlds import ANSWERED, ARRIVAL_NS, FAMILIES, ask, count, fault, finish, is_free, make_world, run_until

LONG_NS = 60 * SECOND_NS
SLOW_LINK = 60_000
"""Nanoseconds a byte: a block of the usual size takes 2 ms, longer than the step that computes it."""

each_family = pytest.mark.parametrize("family", FAMILIES)


def reserved(world: World, name: str = "d0") -> int:
    node = world.worker(name)
    return 0 if node is None else node.state.pool.counts().reserved


def blocks_kept(world: World, name: str) -> int:
    """Active, reserved and quarantined."""
    node = world.worker(name)
    if node is None:
        return 0
    counts = node.state.pool.counts()
    return counts.active + counts.reserved + counts.quarantined


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[SequenceKey]:
    """Answers grow beyond what admission expects of them; the sequences preempted for it, as they come."""
    monkeypatch.setattr(OutputEstimate, "num_tokens", 2)
    keys: list[SequenceKey] = []
    preempt = StepBuilder._preempt

    def note(self: StepBuilder, victim: Sequence) -> None:
        keys.append(victim.key)
        preempt(self, victim)

    monkeypatch.setattr(StepBuilder, "_preempt", note)
    return keys


def assert_answered(world: World) -> None:
    ends = [(client.request.request_id, client.outcome, client.reason) for client in finish(world)]
    assert all(outcome in ANSWERED for _, outcome, _ in ends), ends


# ---- ownership of KV ------------------------------------------------------------------------------------------


@pytest.mark.bad_day(1)
@each_family
def test_client_leaves_while_decode_waits_for_a_silent_prefill_worker(family: Family) -> None:
    """The client aborts while decode waits for KV and prefill never says a word. Decode's blocks come back by
    deadline and fence while the silent worker is still silent, and no lease is shown any more."""
    silence = fault(FaultKind.PAUSE, ARRIVAL_NS + 8 * MILLISECOND_NS, "p0", duration_ns=LONG_NS)
    world = make_world(ask(leave_ns=40 * MILLISECOND_NS), faults=(silence,), family=family, can_kill=False)
    run_until(world, lambda: reserved(world) > 0)
    run_until(world, lambda: bool(world.clients) and world.clients[0].has_ended)
    run_until(world, lambda: blocks_kept(world, "d0") == 0, limit_ns=12 * SECOND_NS)
    assert world.kernel.now_ns < LONG_NS
    run_until(world, lambda: not world.coordinator.state.leases(world.coordinator.process.now_ns()))
    assert finish(world)[0].outcome is Outcome.CANCELLED


@pytest.mark.bad_day(2)
@each_family
def test_client_leaves_between_prefills_end_and_decodes_takeover(family: Family) -> None:
    """Prefill has finished, decode has not taken over, and the client leaves. Both legs end at once."""
    world = make_world(
        ask(num_prompt_tokens=40, leave_after_tokens=1), family=family, link_ns_per_byte=SLOW_LINK, max_running=2
    )
    run_until(world, lambda: bool(world.clients) and world.clients[0].has_ended)
    assert not is_free(world)
    assert run_until(world, lambda: is_free(world)) < SECOND_NS
    assert count(world, "Committed(") == 0
    finish(world)


@pytest.mark.bad_day(3)
def test_leases_of_requests_that_queue_are_renewed() -> None:
    """Under a batch of 128 requests, reservations wait far longer than a lease lasts. None of them expires."""
    requests = [ask(index, num_prompt_tokens=20, max_tokens=3) for index in range(128)]
    limits = dataclasses.replace(SIM_PUSH_LIMITS, lease_ttl_ns=200 * MILLISECOND_NS)
    world = make_world(
        *requests,
        push_limits=limits,
        queue_limit=200,
        queue_timeout_s=100.0,
        max_attempts=1,
        num_prefill=2,
        num_blocks=256,
        max_running=8,
        cost=StepCost(base_ns=150 * MILLISECOND_NS),
    )
    most_leases = oldest_ms = 0
    while len(world.clients) < 128 or not all(client.has_ended for client in world.clients):
        world.kernel.run_until(world.kernel.now_ns + 50 * MILLISECOND_NS)
        leases = world.coordinator.state.leases(world.coordinator.process.now_ns())
        most_leases = max(most_leases, len(leases))
        oldest_ms = max([oldest_ms, *(lease.age_ms for lease in leases)])
    assert_answered(world)
    assert most_leases >= 8 and oldest_ms > 3 * 200, f"{most_leases} leases, at most {oldest_ms} ms old"
    assert count(world, "LegFailed") == 0 and world.fabric.num_fences == 0


@pytest.mark.bad_day(4)
@pytest.mark.parametrize("damage", ["corrupt", "skip_data"])
@each_family
def test_a_block_that_is_not_what_was_granted_is_never_used(family: Family, damage: str) -> None:
    """KV that is stale or damaged fails closed; the request is computed again and the answer is right. (That a
    generation is verified, and what it guards, is shown in test_mutations.)"""
    faults = (fault(FaultKind.DATA, 0, "p0", duration_ns=60 * MILLISECOND_NS, detail=damage, amount=1.0),)
    world = make_world(ask(num_prompt_tokens=30), faults=faults, family=family, max_attempts=8)
    assert_answered(world)
    assert count(world, "PushMissing(") + count(world, "PushStop(") > 0


@pytest.mark.bad_day(5)
@each_family
@pytest.mark.parametrize("name", ["p0", "d0"])
def test_a_worker_restarts_at_the_same_address(family: Family, name: str) -> None:
    """Its peer still has the old life's connection. The stale peer is evicted; a later push is as good as any."""
    crash = fault(FaultKind.CRASH, ARRIVAL_NS + 12 * MILLISECOND_NS, name)
    later = [ask(index, arrival_ns=index * 400 * MILLISECOND_NS) for index in range(1, 5)]
    world = make_world(ask(), *later, faults=(crash,), family=family, same_address=True, restart_ns=MILLISECOND_NS)
    assert_answered(world)
    assert count(world, f"-> {name}#2", "Reserve(" if name == "d0" else "Prefill(") >= 4


@pytest.mark.bad_day(6)
def test_a_sequence_that_decode_preempted_is_cancelled(preempted: list[SequenceKey]) -> None:
    """Retracted at decode, or aborted after its transfer: all it held is released. Each history is played twice; the
    second time the client whose answer was the first to be preempted leaves just after."""
    for seed in range(6):
        requests = [ask(index, num_prompt_tokens=30, max_tokens=30) for index in range(3)]
        world = make_world(*requests, num_blocks=24, seed=seed)
        preempted.clear()
        run_until(world, lambda: bool(preempted))
        victim = int(preempted[0].request_id[1:])
        leave_ns = world.kernel.now_ns - ARRIVAL_NS + MILLISECOND_NS
        requests[victim] = dataclasses.replace(requests[victim], leave_ns=leave_ns)
        world = make_world(*requests, num_blocks=24, seed=seed)
        world.kernel.run_until(ARRIVAL_NS + leave_ns - 1)
        decode = world.worker("d0")
        assert decode is not None and decode.state.load().num_waiting == 1 and not world.clients[victim].has_ended
        ends = [client.outcome for client in finish(world)]
        assert ends.pop(victim) is Outcome.CANCELLED and all(outcome in ANSWERED for outcome in ends)
        assert is_free(world)


@pytest.mark.bad_day(7)
@each_family
@pytest.mark.parametrize("is_local", [False, True])
def test_a_request_is_killed_at_every_moment_of_its_life(family: Family, is_local: bool) -> None:
    """Wherever the cancellation meets it, everything is free within a second and the next request runs."""
    num_ends = dict.fromkeys(Outcome, 0)
    for step in range(60):
        cancelled = ask(0, num_prompt_tokens=30, max_tokens=3, leave_ns=step * MILLISECOND_NS)
        world = make_world(
            cancelled, family=family, link_ns_per_byte=SLOW_LINK // 3, num_prefill=0 if is_local else 1, seed=step
        )
        run_until(world, lambda world=world: bool(world.clients) and world.clients[0].has_ended)  # type: ignore[misc]
        assert run_until(world, lambda world=world: is_free(world)) < SECOND_NS, f"left after {step} ms"  # type: ignore[misc]
        world.submit(dataclasses.replace(ask(1), arrival_ns=0))
        first, second = finish(world)
        assert first.outcome is not None and second.outcome in ANSWERED
        num_ends[first.outcome] += 1
    assert num_ends[Outcome.CANCELLED] > 10 and num_ends[Outcome.LENGTH] > 5, num_ends


def stop_prefill(step: int, **fields: Any) -> World:
    """A request whose push takes a quarter of a second, and a SIGTERM for its prefill worker at some moment of it."""
    world = make_world(ask(num_prompt_tokens=40), max_attempts=1, link_ns_per_byte=10 * SLOW_LINK, seed=step, **fields)
    world.kernel.run_until(ARRIVAL_NS + 10 * step * MILLISECOND_NS)
    node = world.worker("p0")
    assert node is not None
    node.leave()
    run_until(world, lambda: not node.process.alive, limit_ns=4 * SECOND_NS)
    return world


@pytest.mark.bad_day(8)
@each_family
def test_a_prefill_worker_that_is_stopped_waits_until_its_kv_is_taken_over(family: Family) -> None:
    """At every moment of a push: the worker is gone, and the request's only attempt ends well."""
    for step in range(1, 40, 2):
        world = stop_prefill(step, family=family)
        assert_answered(world)
        assert count(world, "LegFailed") == 0
    hasty = dataclasses.replace(SIM_AGENT_LIMITS, max_leave_ns=1, leave_notice_ns=1)
    world = stop_prefill(9, family=family, agent_limits=hasty)
    run_until(world, lambda: world.clients[0].has_ended)
    assert count(world, "LegFailed") > 0, "a worker that did not wait would not be noticed"


@pytest.mark.bad_day(8)
def test_a_worker_that_leaves_is_given_no_new_work() -> None:
    requests = [ask(index, arrival_ns=ARRIVAL_NS + index * 10 * MILLISECOND_NS) for index in range(20)]
    world = make_world(*requests, num_prefill=2, max_attempts=1, restart_ns=LONG_NS)
    world.kernel.run_until(ARRIVAL_NS + 35 * MILLISECOND_NS)
    node = world.worker("p0")
    assert node is not None
    node.leave()
    world.kernel.run_until(world.kernel.now_ns + 5 * MILLISECOND_NS)
    num_given = count(world, "-> p0#1", "Prefill(")
    world.kernel.run_until(ARRIVAL_NS + SECOND_NS)
    assert not node.process.alive and count(world, "-> p0#1", "Prefill(") == num_given
    assert [client.outcome in ANSWERED for client in world.clients] == [True] * 20
    assert count(world, "LegFailed") == 0


@pytest.mark.bad_day(8)
@each_family
def test_a_worker_leaves_in_the_end_also_if_nobody_takes_its_kv_over(family: Family) -> None:
    away = fault(FaultKind.PAUSE, ARRIVAL_NS + 60 * MILLISECOND_NS, "d0", duration_ns=20 * SECOND_NS)
    world = make_world(ask(num_prompt_tokens=40), faults=(away,), family=family, link_ns_per_byte=10 * SLOW_LINK)
    world.kernel.run_until(ARRIVAL_NS + 80 * MILLISECOND_NS)
    node = world.worker("p0")
    assert node is not None
    node.leave()
    assert run_until(world, lambda: not node.process.alive) <= SIM_AGENT_LIMITS.max_leave_ns + MILLISECOND_NS
    assert_answered(world)


@pytest.mark.bad_day(9)
def test_pools_too_small_for_what_comes_do_not_lock_each_other() -> None:
    """Both sides are full of each other's requests. Decode is acquired first, so that no cycle can be closed."""
    requests = [ask(index, num_prompt_tokens=40, max_tokens=16) for index in range(24)]
    world = make_world(*requests, num_prefill=2, num_decode=2, num_blocks=18, queue_timeout_s=60.0)
    assert_answered(world)


@pytest.mark.bad_day(10)
def test_arrivals_do_not_fill_decodes_memory() -> None:
    """Reservations stay under their watermark, and writes in flight under theirs, however many requests come."""
    requests = [ask(index, num_prompt_tokens=30) for index in range(60)]
    world = make_world(
        *requests, num_prefill=3, num_blocks=40, queue_limit=100, queue_timeout_s=60.0, link_ns_per_byte=SLOW_LINK
    )
    most_reserved = most_writes = 0

    def look() -> bool:
        nonlocal most_reserved, most_writes
        counts = world.all_workers[-1].state.pool.counts()
        most_reserved = max(most_reserved, counts.reserved + counts.quarantined)
        most_writes = max(most_writes, *(node.bridge.transport.num_writes_in_flight for node in world.all_workers))
        return bool(world.clients) and all(client.has_ended for client in world.clients)

    run_until(world, look, limit_ns=60 * SECOND_NS)
    assert_answered(world)
    assert 10 < most_reserved <= 30, "three quarters of the pool"
    assert 1 < most_writes <= world.scenario.push_limits.max_inflight_writes + 3, "writes, and a few messages"


# ---- failure of a peer ----------------------------------------------------------------------------------------


@pytest.mark.bad_day(11)
@each_family
def test_prefill_dies_at_any_moment_of_its_first_connection(family: Family) -> None:
    """Decode neither waits for ever nor dies of it; that request alone is tried again."""
    for step in range(24):
        at_ns = ARRIVAL_NS + 2 * MILLISECOND_NS + step * MILLISECOND_NS // 4
        crash = fault(FaultKind.CRASH, at_ns, "p0", duration_ns=3 * SECOND_NS)
        world = make_world(ask(), ask(1, arrival_ns=at_ns), faults=(crash,), family=family, num_prefill=2, seed=step)
        assert_answered(world)


@pytest.mark.bad_day(12)
def test_a_worker_of_another_layout_is_refused_when_it_registers() -> None:
    """With both sides' values in the message, before it can meet anybody."""
    world = make_world(ask(arrival_ns=200 * MILLISECOND_NS), num_decode=2)
    world.kernel.run_until(50 * MILLISECOND_NS)
    config = worker_config(world.scenario, WorkerId("stranger", 1), role=Role.DECODE, token_address="stranger:tokens")
    hello = dataclasses.replace(config.hello, compatibility="other", compatibility_details="block size 8")
    node = world.add_stranger(dataclasses.replace(config, hello=hello))
    run_until(world, lambda: not node.process.alive)
    lines = [line for line in world.kernel.trace.lines if "WorkerRefused" in line]
    assert len(lines) == 1 and "block size 8" in lines[0] and "sim" in lines[0]
    assert_answered(world)


@pytest.mark.bad_day(15)
@each_family
def test_an_error_that_one_leg_knows_reaches_the_other_at_once(family: Family) -> None:
    """The engine of either side fails; the other side's blocks are free long before any lease ends."""
    for name in ("p0", "d0"):
        failure = fault(FaultKind.FAIL_STEPS, ARRIVAL_NS, name, amount=2)
        world = make_world(ask(max_tokens=20), faults=(failure,), family=family, max_attempts=1)
        run_until(world, lambda world=world: bool(world.clients) and world.clients[0].has_ended)  # type: ignore[misc]
        assert run_until(world, lambda world=world: is_free(world)) < 100 * MILLISECOND_NS  # type: ignore[misc]
        assert finish(world)[0].outcome is Outcome.INTERNAL


@pytest.mark.bad_day(16)
def test_decodes_transport_fails_and_prefill_does_not_hang() -> None:
    """Nothing passes between one pair of workers. The push is cancelled, its blocks are released, and the request
    runs on another decode worker."""
    apart = fault(FaultKind.PARTITION, 0, "p0", other="d0", duration_ns=LONG_NS)
    world = make_world(ask(), faults=(apart,), family=Family.REMOTE, num_decode=2, max_attempts=6)
    run_until(world, lambda: bool(world.clients) and world.clients[0].has_ended, limit_ns=30 * SECOND_NS)
    assert world.clients[0].outcome in ANSWERED
    run_until(world, lambda: is_free(world), limit_ns=10 * SECOND_NS)
    assert world.kernel.now_ns < LONG_NS


@pytest.mark.bad_day(17)
@pytest.mark.parametrize("pool", ["p0", "d0"])
def test_both_legs_are_placed_or_neither(pool: str) -> None:
    """A pool is away altogether. Without prefill workers decode reads the prompt itself; without decode workers
    nothing is begun anywhere until one is back."""
    away = fault(FaultKind.CRASH, 5 * MILLISECOND_NS, pool, duration_ns=SECOND_NS)
    world = make_world(ask(arrival_ns=100 * MILLISECOND_NS), faults=(away,))
    world.kernel.run_until(900 * MILLISECOND_NS)
    if pool == "p0":
        assert count(world, "RunLocal(") == 1 and world.clients[0].outcome in ANSWERED
    else:
        assert count(world, "Prefill(") == 0 and blocks_kept(world, "p0") == 0 and not world.clients[0].has_ended
    assert_answered(world)


@pytest.mark.bad_day(18)
@each_family
def test_no_wait_is_without_a_deadline(family: Family) -> None:
    """Every word between the workers is lost, for good. A request with one attempt ends with an error; with another
    attempt decode reads the prompt itself, and the answer is right. Nothing is left of either."""
    for max_attempts in (1, 2):
        deaf = fault(FaultKind.DATA, 0, "p0", duration_ns=LONG_NS, detail="lose_notice", amount=1.0)
        world = make_world(ask(), faults=(deaf,), family=family, max_attempts=max_attempts)
        run_until(world, lambda world=world: bool(world.clients) and world.clients[0].has_ended, limit_ns=LONG_NS)
        failed = world.clients[0].outcome in (Outcome.TRANSFER_FAILED, Outcome.WORKER_LOST)
        assert failed if max_attempts == 1 else world.clients[0].outcome in ANSWERED
        run_until(world, lambda world=world: is_free(world), limit_ns=20 * SECOND_NS)
        finish(world)


@pytest.mark.bad_day(19)
def test_what_can_never_fit_is_refused_before_anything_is_reserved() -> None:
    """Over-long input reaches no worker."""
    world = make_world(ask(num_prompt_tokens=65, is_invalid=True))
    assert finish(world)[0].outcome is Outcome.REJECTED_INVALID
    assert count(world, "Reserve(") + count(world, "Prefill(") + count(world, "RunLocal(") == 0


@pytest.mark.bad_day(20)
@each_family
def test_a_failed_load_of_kv_is_an_error_and_not_an_answer(family: Family) -> None:
    """Every block arrives damaged, for ever. A client with one attempt is told, and is given no token that is not
    right; with more, decode reads the prompt itself in the end."""
    for max_attempts in (1, 3):
        damage = fault(FaultKind.DATA, 0, "p0", duration_ns=20 * SECOND_NS, detail="corrupt", amount=1.0)
        world = make_world(ask(), faults=(damage,), family=family, max_attempts=max_attempts)
        client = finish(world)[0]
        if max_attempts == 1:
            assert client.outcome is Outcome.TRANSFER_FAILED and len(client.token_ids) <= 1
        else:
            assert client.outcome in ANSWERED and count(world, "RunLocal(") == 1


@pytest.mark.bad_day(21)
def test_both_legs_have_one_id() -> None:
    """The id the front made and the attempt the coordinator numbered are the same on both workers."""
    world = make_world(ask(5))
    assert_answered(world)
    for command, worker in (("Reserve(", "d0#1"), ("Prefill(", "p0#1")):
        assert count(world, f"-> {worker}", command, "attempt=r5/1") == 1


# ---- answers --------------------------------------------------------------------------------------------------


@pytest.mark.bad_day(23)
@each_family
@pytest.mark.parametrize("num_variants", [1, 3])
def test_an_answer_goes_on_from_another_worker(family: Family, num_variants: int) -> None:
    """Decode dies after any number of tokens. None is lost, repeated or changed, also with inexact arithmetic."""
    for step in range(30):
        crash = fault(FaultKind.CRASH, ARRIVAL_NS + (4 + 2 * step) * MILLISECOND_NS, "d0", duration_ns=SECOND_NS)
        world = make_world(
            ask(max_tokens=16), faults=(crash,), family=family, num_decode=2, num_variants=num_variants, seed=step
        )
        assert_answered(world)


@pytest.mark.bad_day(22)
def test_a_prefix_hit_does_not_change_an_answer() -> None:
    """The same prompt again and again, now with its blocks cached on both sides. (Compared with the oracle.)"""
    requests = [
        dataclasses.replace(
            ask(0, num_prompt_tokens=31, arrival_ns=index * 100 * MILLISECOND_NS), request_id=f"r{index}"
        )
        for index in range(1, 6)
    ]
    world = make_world(*requests)
    assert_answered(world)
    assert count(world, "ReserveGranted(", "num_cached_blocks=7") >= 3


# ---- load -----------------------------------------------------------------------------------------------------


@pytest.mark.bad_day(26)
def test_answers_that_grow_beyond_the_pool_are_preempted_and_finish(preempted: list[SequenceKey]) -> None:
    """Running answers grow until blocks run out. They are preempted and computed again, and all end well."""
    requests = [ask(index, num_prompt_tokens=16, max_tokens=40) for index in range(6)]
    world = make_world(*requests, num_blocks=28, queue_timeout_s=60.0)
    assert_answered(world)
    assert preempted


@pytest.mark.bad_day(26)
def test_answers_that_admission_expects_are_never_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no answer is longer than expected, placement leaves them room to grow."""
    monkeypatch.delattr(StepBuilder, "_preempt")
    requests = [ask(index, num_prompt_tokens=16, max_tokens=40) for index in range(6)]
    world = make_world(*requests, num_blocks=28, queue_timeout_s=60.0)
    assert_answered(world)


@pytest.mark.bad_day(31)
def test_a_full_queue_refuses_early_and_says_when_to_come_back() -> None:
    """Nothing queues without bound; what is refused is refused at once."""
    requests = [ask(index) for index in range(30)]
    world = make_world(*requests, queue_limit=4)
    refused = [client for client in finish(world) if client.outcome is Outcome.REJECTED_OVERLOAD]
    assert 10 < len(refused) < 30
    for client in refused:
        assert client.retry_after_ms is not None and client.retry_after_ms > 0
        assert client.ended_ns is not None and client.ended_ns < ARRIVAL_NS + 10 * MILLISECOND_NS


@pytest.mark.bad_day(32)
@pytest.mark.parametrize(("slow", "command"), [("p1", "Prefill("), ("d1", "Reserve(")])
def test_a_straggler_gets_less(slow: str, command: str) -> None:
    """The slowest worker of a pool does not keep getting its turn."""
    slowness = fault(FaultKind.SLOW_ENGINE, 5 * MILLISECOND_NS, slow, duration_ns=LONG_NS, amount=10.0)
    requests = [ask(index, arrival_ns=ARRIVAL_NS + index * 25 * MILLISECOND_NS) for index in range(80)]
    world = make_world(*requests, faults=(slowness,), num_prefill=2, num_decode=2)
    run_until(world, lambda: len(world.clients) == 80 and all(c.has_ended for c in world.clients), limit_ns=LONG_NS)
    fast = slow.replace("1", "0")
    num_slow, num_fast = (count(world, f"-> {name}#", command) for name in (slow, fast))
    assert num_slow * 2 < num_fast, f"{num_slow} to the straggler, {num_fast} to the other"


# ---- found by the simulator -----------------------------------------------------------------------------------


def test_an_answer_of_one_token_never_looks_like_a_failed_push() -> None:
    """The push's abort can overtake the news that the first token was the last: one attempt must be enough."""
    for seed in range(60):
        requests = [ask(index, max_tokens=1, arrival_ns=ARRIVAL_NS + index * 3_000_000) for index in range(4)]
        world = make_world(*requests, seed=seed, max_attempts=1, link_ns_per_byte=SLOW_LINK // 10)
        assert_answered(world)
        assert not held(world)


@pytest.mark.parametrize("kind", [FaultKind.PAUSE, FaultKind.CLOCK_JUMP])
def test_a_coordinator_that_was_away_does_not_take_its_workers_for_silent(kind: FaultKind) -> None:
    """It is stopped, or its host sleeps: what they said waits in its sockets, and is read before it judges."""
    away = fault(kind, ARRIVAL_NS + 20 * MILLISECOND_NS, "coordinator", duration_ns=8 * SECOND_NS)
    world = make_world(ask(max_tokens=20), ask(1, arrival_ns=9 * SECOND_NS), faults=(away,), heartbeat_timeout_s=1.0)
    assert_answered(world)
    assert world.num_given_up == 0 and len(world.all_workers) == 2


@each_family
@pytest.mark.parametrize("kind", [FaultKind.PAUSE, FaultKind.CLOCK_JUMP])
def test_a_decode_worker_that_was_away_does_not_fence_its_senders(family: Family, kind: FaultKind) -> None:
    """Its leases look expired when it wakes, but their renewals are in its sockets."""
    away = fault(kind, ARRIVAL_NS + 9 * MILLISECOND_NS, "d0", duration_ns=3 * SECOND_NS)
    world = make_world(ask(num_prompt_tokens=40), faults=(away,), family=family, heartbeat_timeout_s=10.0)
    assert_answered(world)
    assert world.fabric.num_fences == 0


def test_a_front_that_was_cut_off_for_longer_than_tokens_are_kept() -> None:
    """The worker has finished and forgotten: the front's new watch finds nothing. The rest is computed again."""
    for seed in range(10):
        faults = (
            fault(FaultKind.PARTITION, ARRIVAL_NS + 5 * MILLISECOND_NS, "d0", other="f0", duration_ns=300_000_000),
            fault(FaultKind.CLOCK_JUMP, ARRIVAL_NS + 200 * MILLISECOND_NS, "d0", duration_ns=9 * SECOND_NS),
        )
        world = make_world(ask(max_tokens=3), faults=faults, num_prefill=0, seed=seed, heartbeat_timeout_s=30.0)
        assert_answered(world)


# ---- several answers, and scores of the prompt ----------------------------------------------------------------


@each_family
@pytest.mark.parametrize("num_prefill", [0, 1])
def test_several_answers_survive_the_loss_of_their_decode_worker(family: Family, num_prefill: int) -> None:
    """Each goes on where it was, on another worker."""
    requests = [ask(index, num_prompt_tokens=13, max_tokens=30, num_choices=3) for index in range(2)]
    world = make_world(*requests, num_prefill=num_prefill, num_decode=2, family=family)
    run_until(world, lambda: bool(world.clients) and world.clients[0].num_tokens >= 30)
    for name in ("d0", "d1"):
        node = world.worker(name)
        if node is not None and node.state.num_legs():
            node.process.exit("crash")
            break
    assert_answered(world)
    assert count(world, "Resubmit(", "num_choices=3") > 0
    assert [client.num_tokens for client in world.clients] == [90, 90]


def test_what_is_pushed_for_several_answers_is_one_prompt() -> None:
    alone, together = (make_world(ask(num_prompt_tokens=18, num_choices=number)) for number in (1, 4))
    for world in (alone, together):
        assert_answered(world)
    assert together.fabric.num_copies == alone.fabric.num_copies > 0
    assert count(together, "Prefill(") == 1


@each_family
def test_scores_of_a_prompt_survive_the_loss_of_the_worker_that_computes_them(family: Family) -> None:
    """They are computed again, and nothing of them is shown twice; after the first token they are not wanted again."""
    request = ask(num_prompt_tokens=60, max_tokens=3, num_choices=2)
    request = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, prompt_logprobs=0))
    world = make_world(request, num_prefill=2, family=family, prefill_chunk_tokens=4, max_step_tokens=12)
    run_until(world, lambda: bool(world.clients) and world.clients[0].num_scores >= 12)
    node = next(node for node in (world.worker("p0"), world.worker("p1")) if node is not None and node.state.num_legs())
    node.process.exit("crash")
    assert_answered(world)
    assert world.clients[0].num_scores == 59 and count(world, "Resubmit(") == 1
