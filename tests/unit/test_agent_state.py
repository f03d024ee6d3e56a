"""WorkerState through every phase of a request, with toys below the boundary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.agent import events as ev
from cluster.agent.limits import AgentLimits
from cluster.core.commands import (
    CancelLeg,
    Command,
    PeerLost,
    Reserve,
    RunLocal,
    SendBlockSnapshot,
    SenderStopped,
    WorkerRefused,
    WorkerWelcome,
)
from cluster.core.ids import AttemptId, FrontId, LegStage, Outcome, Role, WorkerId
from cluster.core.messages import (
    BLOCK_HASH_BYTES,
    BlockEvents,
    Heartbeat,
    LegFailed,
    LegReleased,
    PeerFenced,
    ReserveGranted,
    ReserveRefused,
    WorkerHello,
)
from cluster.core.reports import HeldLeg, LinkReport
from cluster.core.token_messages import Forget, Watch
from engine.core.block_hash import ROOT_HASH, extra_key, hash_blocks
from engine.core.request import RequestBody
from engine.core.sampling import SamplingParams
from engine.core.step import StepPlan, StepResult
from kv_transfer.protocol.messages import FirstToken, PeerId, PushEnd, PushKey
from tests.support.toy_engine import undisturbed
from tests.support.worker_pair import (
    BLOCK_SIZE,
    FRONT,
    MILLISECOND_NS,
    SECOND_NS,
    TOY_BANDWIDTH_BYTES_PER_S,
    TTL_MS,
    Request,
    World,
)

PROMPT = tuple(range(1, 20))


def body(
    prompt: tuple[int, ...] = PROMPT, *, max_tokens: int = 6, delivered: tuple[int, ...] = (), **rest: object
) -> RequestBody:
    sampling = SamplingParams(max_tokens=max_tokens, **rest)  # type: ignore[arg-type]
    return RequestBody(prompt_ids=prompt, sampling=sampling, delivered_ids=delivered)


def expected(request: RequestBody) -> list[int]:
    answer = undisturbed(list(request.prompt_ids), request.sampling, forced_ids=list(request.delivered_ids))
    return answer.token_ids[len(request.delivered_ids) :]


def finish(world: World, request: Request) -> None:
    world.settle()
    world.forget(request)
    world.check_nothing_left()


@pytest.mark.parametrize("num_prompt_tokens", [1, 2, 3, 4, 5, 8, 15, 16, 17, 33])
def test_disaggregated_tokens_equal_those_of_a_sequence_alone(num_prompt_tokens: int) -> None:
    world = World()
    request = world.submit("r", body(tuple(range(num_prompt_tokens))))
    world.settle()
    assert world.front.token_ids("r") == expected(request.body)
    assert world.front.finishes == {"r": Outcome.LENGTH}
    assert request.finished is not None and request.finished.num_output_tokens == 6
    assert request.committed is not None
    num_pushed_blocks = -(-num_prompt_tokens // BLOCK_SIZE)
    assert request.committed.timeline.kv_bytes == 64 * num_pushed_blocks
    assert request.legs == {}
    finish(world, request)


def test_local_tokens_equal_those_of_a_sequence_alone() -> None:
    world = World()
    request = world.submit("r", body(), local=True)
    world.settle()
    assert world.front.token_ids("r") == expected(request.body)
    assert world.prefill.plan is None
    finish(world, request)


def test_first_token_is_sent_before_the_push_has_ended() -> None:
    world = World()
    request = world.submit("r", body())
    world.prefill.connect()
    while request.prefill_done is None:
        world.prefill.end_step()
        world.run_later()
    assert world.front.token_ids("r") == expected(request.body)[:1]
    run = world.front.runs[-1]
    assert run.leg_done and run.finish is None and run.timeline is not None
    assert run.timeline.prefill_ms is not None and run.timeline.waiting_ms is not None
    assert request.committed is None
    finish(world, request)


def test_first_token_is_the_same_whichever_worker_sends_it() -> None:
    """Its front may hear decode before prefill; what only prefill has computed must be there all the same."""
    world = World()
    run = world.prefill.runner.run

    def run_with_logprobs(plan: StepPlan) -> StepResult:
        result = run(plan)
        drawn = [
            tuple(replace(token, logprob=-0.5, top=((token.token_id, -0.5), (3, -2.5))) for token in tokens)
            for tokens in result.tokens
        ]
        return replace(result, tokens=drawn)

    world.prefill.runner.run = run_with_logprobs  # type: ignore[method-assign]
    request = world.submit("r", body(logprobs=2))
    world.settle()
    firsts = [run.tokens[0] for run in world.front.runs if run.position == 0 and run.tokens]
    assert len(firsts) == 2 and firsts[0] == firsts[1] and firsts[0].logprob == -0.5
    finish(world, request)


def test_completed_blocks_are_pushed_while_the_prompt_is_computed() -> None:
    world = World()
    request = world.submit("r", body(tuple(range(32))))
    world.prefill.connect()
    while request.prefill_done is None:
        while world.prefill.writes:
            world.prefill.land_write()
        world.prefill.end_step()
        world.run_later()
    world.settle()
    assert request.committed is not None
    timeline = request.committed.timeline
    # Chunks of 8 tokens: all but the last chunk's two blocks of eight were written before it was computed.
    assert (timeline.kv_bytes, timeline.kv_early_bytes) == (8 * 64, 6 * 64)
    assert timeline.kv_transport == "toy"
    finish(world, request)


@pytest.mark.parametrize("local", [False, True])
def test_the_front_is_told_what_was_measured_with_the_first_token(local: bool) -> None:
    """It may end the request long before the leg ends, by a stop string or at a deadline."""
    world = World()
    request = world.submit("r", body(tuple(range(32)), max_tokens=60), local=local)
    world.settle()
    writer = world.decode.state  # the worker that writes the answer
    runs = [run for run in world.front.runs if run.timeline is not None and run.finish is None and not run.leg_done]
    assert writer.num_legs() == 0 and len(runs) == 1
    timeline = runs[0].timeline
    assert runs[0].position == 0 and runs[0].tokens and timeline is not None
    if local:
        assert timeline.prefill_ms is not None and timeline.kv_bytes == 0
    else:
        assert request.committed is not None and timeline.kv_bytes == request.committed.timeline.kv_bytes == 8 * 64
        assert timeline.push_ms == request.committed.timeline.push_ms is not None
    finish(world, request)


def test_what_decode_has_cached_is_pinned_and_not_pushed() -> None:
    world = World()
    first = world.submit("r1", body())
    world.settle()
    second = world.submit("r2", body())
    world.settle()
    assert second.committed is not None and first.committed is not None
    # 19 tokens: four full blocks are cached, the fifth is partly filled.
    assert first.committed.timeline.kv_bytes == 5 * 64
    assert second.committed.timeline.kv_bytes == 64
    assert second.committed.timeline.num_cached_tokens == 16
    assert world.front.token_ids("r2") == expected(second.body)
    world.forget(first)
    finish(world, second)


def test_prompt_of_whole_blocks_that_is_cached_still_leaves_a_token_to_compute() -> None:
    world = World()
    requests = [world.submit("r1", body(tuple(range(16))))]
    world.settle()
    requests.append(world.submit("r2", body(tuple(range(16)))))
    world.settle()
    assert world.front.token_ids("r2") == expected(requests[1].body)
    committed = requests[1].committed
    assert committed is not None and committed.timeline.num_cached_tokens == 12
    for request in requests:
        world.forget(request)
    world.check_nothing_left()


@pytest.mark.parametrize("kind", ["max_tokens", "stop"])
def test_first_token_that_ends_the_request_ends_it_on_prefill(kind: str) -> None:
    world = World()
    probe = expected(body(max_tokens=1))[0]
    request = world.submit("r", body(max_tokens=1) if kind == "max_tokens" else body(stop_token_ids=(probe,)))
    world.settle()
    outcome = Outcome.LENGTH if kind == "max_tokens" else Outcome.STOP
    assert request.prefill_done is not None and request.prefill_done.outcome is outcome
    assert world.front.token_ids("r") == [probe]
    assert world.front.finishes == {"r": outcome}
    assert request.committed is None and request.legs == {}
    finish(world, request)


def test_second_attempt_replays_delivered_tokens_and_goes_on_after_them() -> None:
    world = World()
    whole = expected(body())
    request = world.submit("r", body(delivered=tuple(whole[:3])), attempt=2)
    world.settle()
    assert world.front.token_ids("r") == whole[3:]
    assert sorted(world.front.tokens["r"]) == [3, 4, 5]
    finish(world, request)


def test_many_requests_share_both_workers() -> None:
    world = World()
    requests = [world.submit(f"r{i}", body(tuple(range(i, i + 3 + i)), max_tokens=3 + i % 5)) for i in range(6)]
    world.settle()
    for request in requests:
        assert request.finished is not None, request
        assert world.front.token_ids(request.attempt.request_id) == expected(request.body)
        world.forget(request)
    world.check_nothing_left()


# ---- cancelling --------------------------------------------------------------------------------------------------


@pytest.mark.bad_day(6, 7)
@pytest.mark.parametrize("local", [False, True])
def test_cancel_after_any_number_of_events_leaves_nothing(local: bool) -> None:
    for num_events in range(200):
        world = World()
        request = world.submit("r", body(), local=local)
        for _ in range(num_events):
            if not any(host.advance_once() for host in world.hosts()):
                break
            world.run_later()
        is_finished = request.is_over
        world.cancel(request)
        world.settle()
        assert request.legs == {}, f"after {num_events} events"
        world.forget(request)
        world.check_nothing_left()
        if is_finished:
            return
    raise AssertionError("the request never finished")


def test_cancel_during_a_step_is_released_when_the_step_ends() -> None:
    world = World()
    request = world.submit("r", body(), local=True)
    assert world.decode.plan is not None
    world.cancel(request)
    assert request.legs != {}
    world.decode.end_step()
    world.run_later()
    assert request.legs == {}
    world.check_nothing_left()


def test_cancel_of_an_unknown_attempt_is_answered_and_forbids_it() -> None:
    world = World()
    attempt = AttemptId("r", 1)
    world.requests[attempt] = Request(attempt=attempt, body=body())
    world.decode.command(CancelLeg(attempt=attempt, reason="toy"))
    assert world.messages[-1] == (world.decode.worker, LegReleased(attempt=attempt))
    world.decode.command(RunLocal(attempt=attempt), body())
    assert assert_failed_and_released(world, attempt).outcome is Outcome.CANCELLED
    world.check_nothing_left()


def test_quarantined_blocks_wait_for_the_senders_word() -> None:
    world = World()
    request = world.submit("r", body())
    world.decode.command(CancelLeg(attempt=request.attempt, reason="toy"))
    assert world.decode.state.pool.counts().quarantined == 5
    assert not any(isinstance(message, LegReleased) for _, message in world.messages)
    world.decode.command(SenderStopped(attempt=request.attempt))
    assert world.decode.state.pool.counts().quarantined == 0
    assert isinstance(world.messages[-1][1], LegReleased)


# ---- failing -----------------------------------------------------------------------------------------------------


def test_corrupt_block_is_written_again() -> None:
    world = World()
    request = world.submit("r", body())
    world.prefill.connect()
    world.prefill.end_step()
    world.prefill.land_write(is_corrupt=True)
    world.settle()
    assert world.front.token_ids("r") == expected(request.body)
    finish(world, request)


@pytest.mark.bad_day(4, 20)
@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": 18},
        {"num_blocks": 6},
        {"first_tokens": ()},
        {"first_tokens": (FirstToken(choice=0, position=1, token_id=7),)},
        {"first_tokens": (FirstToken(choice=1, position=0, token_id=7),)},
    ],
)
def test_push_of_something_else_than_was_asked_for_is_not_committed(change: dict[str, Any]) -> None:
    world = World()
    request = world.submit("r", body())
    while not any(isinstance(message, PushEnd) for _, message in world.decode.inbox):
        if not world.prefill.advance_once():
            world.decode.advance_once()
        world.run_later()
    world.decode.inbox = [
        (peer, replace(message, **change) if isinstance(message, PushEnd) else message)
        for peer, message in world.decode.inbox
    ]
    world.settle()
    assert request.committed is None
    assert [failure.outcome for failure in request.failures] == [Outcome.TRANSFER_FAILED]
    assert world.front.token_ids("r") == expected(request.body)[:1]
    finish(world, request)


@pytest.mark.bad_day(11, 15)
def test_unreachable_peer_fails_the_attempt_on_both_sides() -> None:
    world = World()
    request = world.submit("r", body())
    world.prefill.connect(fails=True)
    world.settle()
    assert [failure.outcome for failure in request.failures] == [Outcome.TRANSFER_FAILED]
    assert request.failures[0].retryable and request.legs == {}
    finish(world, request)


def test_write_that_may_still_land_is_never_reported_as_stopped() -> None:
    world = World()
    request = world.submit("r", body())
    world.prefill.connect()
    world.prefill.end_step()
    world.prefill.break_write(quiesced=False)
    world.run_later()
    while world.prefill.writes:
        world.prefill.break_write(quiesced=False)
    old = world.prefill
    world.settle()
    assert (old.worker, LegReleased(attempt=request.attempt)) not in world.messages
    assert world.decode.state.pool.counts().quarantined == 5
    # Nobody says that it stopped: decode asks until the time is up, and then fences that life.
    for _ in range(100):
        world.advance(500 * MILLISECOND_NS)
        world.settle()
    assert world.prefill is not old, "the sender was not fenced"
    assert (world.decode.worker, PeerFenced(peer=old.worker)) in world.messages
    assert request.legs == {}
    finish(world, request)


def test_blocks_that_came_for_a_cancelled_push_are_nobodys_damage() -> None:
    """They may be another's before they are verified: what is found there must not be called corrupt."""
    world = World()
    request = world.submit("r", body())
    key = PushKey("r", 1)
    world.prefill.connect()
    world.prefill.end_step()
    world.prefill.land_write()
    while world.decode.inbox:
        world.decode.receive()
    assert world.decode.verifications and world.decode.state.is_receiving(key)
    world.cancel(request)
    assert not world.decode.state.is_receiving(key)
    finish(world, request)
    assert not world.decode.state.is_receiving(key)


@pytest.mark.bad_day(1)
def test_silent_sender_loses_its_lease_and_is_fenced() -> None:
    world = World()
    request = world.submit("r", body())
    old = world.prefill
    for _ in range(60):
        world.now_ns += SECOND_NS
        world.decode.handle(ev.Tick())
        world.run_later()
    assert world.prefill is not old
    assert any(isinstance(m, LegFailed) and m.outcome is Outcome.TRANSFER_FAILED for _, m in world.messages)
    finish(world, request)


def test_lost_prefill_worker_fails_what_waits_for_it_and_frees_the_blocks() -> None:
    world = World()
    request = world.submit("r", body())
    world.prefill.connect()
    world.prefill.end_step()
    world.prefill.land_write()
    world.lose_prefill()
    world.settle()
    assert request.legs == {} and request.committed is None
    finish(world, request)


def test_newer_life_of_a_sender_is_granted_and_only_the_older_ones_pushes_fail() -> None:
    """Its Reserve may come before anybody has said that the older life is lost."""
    world = World()
    older = world.prefill.config.hello.ref
    newer = replace(older, worker=WorkerId(older.worker.name, older.worker.incarnation + 1))
    attempts = [AttemptId("r1", 1), AttemptId("r2", 1)]
    for lease_id, (attempt, source) in enumerate(zip(attempts, (older, newer), strict=True), start=1):
        num_tokens = len(PROMPT) + 1
        reserve = Reserve(attempt=attempt, lease_id=lease_id, source=source, num_tokens=num_tokens, ttl_ms=TTL_MS)
        world.decode.command(reserve, body())
    granted = [m.attempt for _, m in world.messages if isinstance(m, ReserveGranted)]
    failed = [m.attempt for _, m in world.messages if isinstance(m, LegFailed)]
    assert granted == attempts and failed == attempts[:1]
    counts = world.decode.state.pool.counts()
    assert (counts.quarantined, counts.reserved) == (5, 5)


def test_peer_lost_twice_is_answered_twice() -> None:
    world = World()
    stranger = WorkerId("x", 3)
    for _ in range(2):
        world.decode.command(PeerLost(peer=stranger))
        world.run_later()
    assert [m for _, m in world.messages].count(PeerFenced(peer=stranger)) == 2


def test_coordinator_that_missed_a_fence_is_told_when_it_places_a_push_from_that_life() -> None:
    """It was away: without that word the life, which is well, would be refused here again and again."""
    world = World()
    fenced, source = world.prefill.worker, world.prefill.config.hello.ref
    world.decode.handle(ev.FenceDone(peer=world.prefill.peer))
    world.messages.clear()  # nobody heard of it
    reserve = Reserve(attempt=AttemptId("r", 1), lease_id=1, source=source, num_tokens=len(PROMPT) + 1, ttl_ms=1000)
    world.decode.command(reserve, body())
    told = [message for host, message in world.messages if host == world.decode.worker]
    assert told[0] == PeerFenced(peer=fenced)
    assert isinstance(told[1], ReserveRefused) and "fenced" in told[1].reason
    counts = world.decode.state.pool.counts()
    assert (counts.reserved, counts.quarantined) == (0, 0)


def test_failed_step_fails_its_attempts_and_many_in_a_row_end_the_worker() -> None:
    world = World()
    for index in range(3):
        request = world.submit(f"r{index}", body(), local=True)
        world.decode.fail_step()
        world.run_later()
        assert request.is_over or world.decode.shutdown_reason is not None
        if index < 2:
            assert request.failures[0].outcome is Outcome.INTERNAL and request.legs == {}
    assert world.decode.shutdown_reason is not None


def test_step_that_never_ends_ends_the_worker() -> None:
    """Its heartbeats go on, so that nobody else would ever notice, and its requests would wait for ever."""
    world = World(limits=AgentLimits(max_step_ns=5 * SECOND_NS))
    world.submit("r1", body(), local=True)
    world.advance(4 * SECOND_NS)
    world.decode.end_step()
    world.advance(4 * SECOND_NS)
    assert world.decode.shutdown_reason is None
    due_ns = world.decode.state.next_deadline_ns()
    assert due_ns is not None and due_ns <= world.now_ns + SECOND_NS
    world.advance(SECOND_NS)
    assert world.decode.shutdown_reason == "a step has not ended in 5 s"


@pytest.mark.parametrize("num_prompt_tokens", [96, 200])
def test_what_can_never_fit_is_refused_and_holds_nothing(num_prompt_tokens: int) -> None:
    world = World()
    local = world.submit("r1", body(tuple(range(num_prompt_tokens))), local=True)
    remote = world.submit("r2", body(tuple(range(num_prompt_tokens))))
    assert local.failures[0].outcome is Outcome.REJECTED_INVALID and not local.failures[0].retryable
    assert remote.refusals
    world.check_nothing_left()


def test_reservation_beyond_the_pool_is_refused_and_unpins() -> None:
    world = World(num_blocks=24)
    requests = [world.submit(f"r{i}", body(tuple(range(i, i + 60)))) for i in range(3)]
    refused = [request for request in requests if request.refusals]
    assert refused and isinstance(refused[0].refusals[0], ReserveRefused)
    world.settle()
    for request in requests:
        world.forget(request)
    world.check_nothing_left()


def test_command_without_its_body_fails_that_attempt_alone() -> None:
    world = World()
    attempt = AttemptId("r", 1)
    world.requests[attempt] = Request(attempt=attempt, body=body())
    world.decode.command(RunLocal(attempt=attempt))
    assert_failed_and_released(world, attempt)


def test_work_that_the_role_does_not_take_is_refused() -> None:
    world = World(accepts=(Reserve,))
    attempt = AttemptId("r", 1)
    world.requests[attempt] = Request(attempt=attempt, body=body())
    world.decode.command(RunLocal(attempt=attempt), body())
    failed = assert_failed_and_released(world, attempt)
    assert "takes no RunLocal" in failed.reason
    assert world.decode.state.num_legs() == 0 and world.decode.plan is None


def test_one_attempt_too_many_is_refused_and_nothing_of_it_is_waited_for() -> None:
    world = World(limits=AgentLimits(max_legs=1))
    first = world.submit("r1", body(), local=True)
    second = AttemptId("r2", 1)
    world.requests[second] = Request(attempt=second, body=body())
    world.decode.command(RunLocal(attempt=second), body())
    assert assert_failed_and_released(world, second).outcome is Outcome.REJECTED_OVERLOAD
    finish(world, first)


@pytest.mark.parametrize("local", [True, False])
def test_attempt_number_that_comes_again_is_refused(local: bool) -> None:
    """As from a coordinator that has begun a new life, while the tokens of the first one wait for their front."""
    world = World()
    first = world.submit("r", body(), local=True)
    world.settle()
    again = world.submit("r", body((7, 8, 9)), local=local)
    assert again.failures if local else again.refusals
    world.settle()
    assert world.front.token_ids("r") == expected(first.body)
    finish(world, first)


def assert_failed_and_released(world: World, attempt: AttemptId) -> LegFailed:
    """A worker that says only the first would be given up for not releasing what it never held."""
    (_, failed), (_, released) = world.messages[-2:]
    assert isinstance(failed, LegFailed) and failed.attempt == attempt
    assert released == LegReleased(attempt=attempt)
    return failed


# ---- the coordinator ---------------------------------------------------------------------------------------------


def test_commands_of_an_older_epoch_or_another_life_are_refused() -> None:
    world = World()
    decode = world.decode
    decode.command(WorkerWelcome(heartbeat_ms=1_000), epoch=5)
    decode.command(RunLocal(attempt=AttemptId("old", 1)), body(), epoch=4)
    other = Command(epoch=5, worker=WorkerId("d", 2), body=RunLocal(attempt=AttemptId("other", 1)))
    decode.handle(ev.CommandReceived(command=other, body=body()))
    assert decode.state.num_legs() == 0 and decode.plan is None


def test_heartbeats_carry_load_and_leases() -> None:
    world = World()
    request = world.submit("r", body())
    world.advance(SECOND_NS)
    beats = {worker: m for worker, m in world.messages if isinstance(m, Heartbeat)}
    (reserved,) = beats[world.decode.worker].leases
    assert (reserved.side, reserved.num_blocks, reserved.size_bytes) == ("reserved", 5, 320)
    assert reserved.attempt == request.attempt and reserved.peer == world.prefill.worker
    (held,) = beats[world.prefill.worker].leases
    assert (held.side, held.peer) == ("held", world.decode.worker)
    assert beats[world.decode.worker].load.blocks.reserved == 5
    finish(world, request)


def test_heartbeats_tell_what_the_worker_writes_over() -> None:
    world = World()
    request = world.submit("r", body())
    world.settle()
    world.advance(SECOND_NS)
    beats = {worker: m for worker, m in world.messages if isinstance(m, Heartbeat)}
    link = LinkReport(peer=world.decode.worker, transport="toy", bandwidth_bytes_per_s=TOY_BANDWIDTH_BYTES_PER_S)
    assert beats[world.prefill.worker].links == (link,)
    assert beats[world.decode.worker].links == ()
    peer = PeerId(world.decode.worker.name, world.decode.worker.incarnation)
    world.prefill.handle(ev.PeerGone(peer=peer, reason="toy"))
    assert world.prefill.state.links() == ()
    finish(world, request)


def test_load_reports_measured_costs_and_leaves_out_the_warm_up() -> None:
    world = World()
    host = world.decode
    request = world.submit("r", body(max_tokens=20), local=True)
    for index in range(30):
        if host.plan is None:
            break
        host.end_step(duration_ns=(1_000 if index < 6 else 4) * MILLISECOND_NS)
    load = host.state.load()
    assert load.decode_base_ms == 4.0 and load.decode_context_token_ms == 0.0 and load.num_steps == 22
    finish(world, request)


def test_reconnect_announces_what_is_held() -> None:
    world = World()
    request = world.submit("r", body(), local=True)
    world.decode.handle(ev.CoordinatorLost())
    world.decode.end_step()
    world.decode.handle(ev.CoordinatorConnected())
    hello = world.messages[-1][1]
    assert isinstance(hello, WorkerHello) and hello.inventory == (
        HeldLeg(attempt=request.attempt, half=Role.DECODE, stage=LegStage.RUNNING),
    )


def block_events(world: World, worker: WorkerId) -> list[BlockEvents]:
    return [said for teller, said in world.messages if teller == worker and isinstance(said, BlockEvents)]


def test_both_workers_tell_which_blocks_of_a_request_they_can_find() -> None:
    world = World()
    assert [said.is_snapshot for said in block_events(world, world.decode.worker)] == [True]
    request = world.submit("r", body(tuple(range(17)), max_tokens=6))
    world.settle()
    world.advance(SECOND_NS)
    told = {host.worker: block_events(world, host.worker)[-1] for host in world.hosts()}
    prompt_blocks = hash_blocks(range(17), BLOCK_SIZE, extra_key("toy"))
    (run,) = told[world.prefill.worker].stored
    assert (run.parent, run.hashes) == (ROOT_HASH, b"".join(prompt_blocks))
    # Decode has the blocks of the answer as well, but for its last token, whose KV is never computed.
    (run,) = told[world.decode.worker].stored
    answer = expected(request.body)
    assert run.hashes == b"".join(hash_blocks([*range(17), *answer[:-1]], BLOCK_SIZE, extra_key("toy")))
    numbers = [said.sequence_number for said in block_events(world, world.decode.worker)]
    assert numbers == list(range(1, len(numbers) + 1))
    finish(world, request)


def test_block_events_wait_for_a_coordinator_bounded_and_begin_anew_with_it() -> None:
    world = World(num_blocks=24)
    decode = world.decode
    decode.handle(ev.CoordinatorLost())
    num_told = len(block_events(world, decode.worker))
    for index in range(30):
        world.submit(f"r{index}", body((index, *range(12)), max_tokens=2), local=True)
        world.settle()
        world.advance(MILLISECOND_NS)
        assert decode.state.pool.num_pending_changes <= 2 * 24
    assert len(block_events(world, decode.worker)) == num_told
    decode.handle(ev.CoordinatorConnected())
    assert len(block_events(world, decode.worker)) == num_told
    decode.command(WorkerWelcome(heartbeat_ms=1_000))
    world.advance(SECOND_NS)
    told = block_events(world, decode.worker)[-1]
    assert told.is_snapshot and told.evicted == ()
    assert sum(len(run.hashes) // BLOCK_HASH_BYTES for run in told.stored) == decode.state.pool.num_indexed > 0


def test_a_snapshot_of_the_blocks_can_be_asked_for() -> None:
    world = World()
    world.submit("r", body(), local=True)
    world.settle()
    world.advance(SECOND_NS)
    world.decode.command(SendBlockSnapshot())
    world.advance(SECOND_NS)
    earlier, told = block_events(world, world.decode.worker)[-2:]
    assert told.is_snapshot and told.stored == earlier.stored
    assert told.sequence_number == earlier.sequence_number + 1


def test_load_reports_what_the_prefix_cache_has_saved() -> None:
    world = World()
    for index in range(2):
        request = world.submit(f"r{index}", body(tuple(range(17)), max_tokens=3))
        finish(world, request)
    # 16 of 17 tokens the second time, on both sides: decode had those blocks too and pinned them.
    for host in world.hosts():
        load = host.state.load()
        assert (load.prefix_query_tokens, load.prefix_hit_tokens) == (34, 16)


def test_worker_without_coordinator_ends_after_its_grace() -> None:
    world = World(limits=AgentLimits(coordinator_grace_ns=5 * SECOND_NS))
    decode = world.decode
    decode.handle(ev.CoordinatorLost())
    assert decode.state.next_deadline_ns() == world.now_ns + 5 * SECOND_NS
    world.now_ns += 4 * SECOND_NS
    decode.handle(ev.CoordinatorLost())
    decode.handle(ev.Tick())
    assert decode.shutdown_reason is None
    world.now_ns += SECOND_NS
    decode.handle(ev.Tick())
    assert decode.shutdown_reason == "no coordinator"


def test_refused_worker_ends() -> None:
    world = World()
    world.decode.command(WorkerRefused(reason="layout differs"))
    assert world.decode.shutdown_reason is not None and "layout differs" in world.decode.shutdown_reason


# ---- fronts ------------------------------------------------------------------------------------------------------


def test_front_that_reconnects_gets_the_rest_from_the_position_it_names() -> None:
    world = World()
    request = world.submit("r", body(), local=True)
    for _ in range(5):
        world.decode.end_step()
        world.run_later()
    num_before = len(world.front.token_ids("r"))
    world.decode.handle(ev.FrontDisconnected(front=FRONT))
    world.decode.unwritten_batches = 0
    world.settle()
    assert len(world.front.token_ids("r")) == num_before
    world.decode.handle(ev.FrontConnected(front=FRONT))
    watch = Watch(attempt=request.attempt, choice=0, next_position=num_before)
    world.front.runs.clear()
    world.decode.handle(ev.TokenRequestReceived(front=FRONT, request=watch))
    assert [run.position for run in world.front.runs] == [num_before]
    assert world.front.token_ids("r") == expected(request.body)
    assert world.front.finishes == {"r": Outcome.LENGTH}
    finish(world, request)


def test_front_that_does_not_read_gets_few_batches_and_then_loses_its_requests() -> None:
    limits = AgentLimits(max_batches_in_flight=2, max_stalled_tokens=5)
    world = World(limits=limits)
    world.decode.reads_at_once = False
    request = world.submit("r", body(max_tokens=40), local=True)
    world.settle()
    assert world.decode.unwritten_batches == 2
    assert request.failures[0].outcome is Outcome.CANCELLED and not request.failures[0].retryable
    assert len(world.front.token_ids("r")) == 2
    world.check_nothing_left()


def test_slow_front_gets_what_it_missed_in_one_batch() -> None:
    world = World(limits=AgentLimits(max_batches_in_flight=1))
    world.decode.reads_at_once = False
    request = world.submit("r", body(max_tokens=8), local=True)
    world.settle()
    assert len(world.front.token_ids("r")) == 1
    world.decode.batch_written()
    assert [len(run.tokens) for run in world.front.runs] == [1, 7]
    assert world.front.token_ids("r") == expected(request.body)
    finish(world, request)


def test_finished_records_go_after_their_time_or_at_their_number() -> None:
    world = World(limits=AgentLimits(max_finished_records=2, finished_record_ttl_ns=SECOND_NS))
    for index in range(3):
        world.submit(f"r{index}", body(), local=True)
        world.settle()
    assert world.decode.state.num_token_records() == 2
    world.advance(SECOND_NS)
    world.check_nothing_left()


def test_forgotten_running_record_goes_when_its_attempt_ends() -> None:
    world = World()
    request = world.submit("r", body(), local=True)
    world.decode.handle(ev.TokenRequestReceived(front=FRONT, request=Forget(attempt=request.attempt)))
    world.settle()
    world.check_nothing_left()


def test_another_front_can_take_a_watch_over() -> None:
    world = World()
    request = world.submit("r", body(), local=True)
    other = FrontId("front", 2)
    world.decode.handle(ev.FrontConnected(front=other))
    watch = Watch(attempt=request.attempt, choice=0, next_position=0)
    effects = world.decode.state.handle(world.now_ns, ev.TokenRequestReceived(front=other, request=watch))
    world.decode.state.check_invariants()
    assert effects == []
    world.decode.handle(ev.FrontDisconnected(front=FRONT))
    assert world.front.token_ids("r") == []


def test_one_front_too_many_is_told_so_and_one_that_returns_is_not() -> None:
    world = World(limits=AgentLimits(max_fronts=1))
    other = FrontId("other", 1)
    world.decode.handle(ev.FrontConnected(front=other))
    world.decode.handle(ev.FrontConnected(front=FRONT))
    assert world.decode.refused_fronts == [other]
    world.decode.handle(ev.FrontDisconnected(front=FRONT))
    world.decode.handle(ev.FrontConnected(front=other))
    assert world.decode.refused_fronts == [other]
