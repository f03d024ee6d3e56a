"""The simulator sees broken rules: each test breaks one on purpose and expects a history to go wrong.

A rule whose breaking nothing notices is either not needed or not tested.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from cluster.agent.last_chunks import LastChunks
from cluster.agent.leg_control import LegControl
from cluster.agent.outbox import Outbox
from cluster.agent.pushes import Pushes
from cluster.front.request import FrontRequest
from cluster.front.request_answers import Answers
from cluster.sim import engine_model
from cluster.sim.history import HistoryError, run_scenario, run_seed
from cluster.sim.kernel import MILLISECOND_NS, SECOND_NS
from cluster.sim.scenario import FaultKind, Request, Scenario
from cluster.sim.transport import Fenced, SimTransport
from cluster.sim.world import World
from engine.core.block_pool import BlockPool, BlockState
from engine.core.request import RequestBody
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.core.step import SequenceStep
from kv_transfer.protocol.messages import PushEnd
from kv_transfer.protocol.receiver import PushReceiver
from kv_transfer.protocol.receiver_push import IncomingPush
from kv_transfer.protocol.sender_push import OutgoingPush
from tests.sim.worlds import ARRIVAL_NS, ask, count, fault, finish, make_world, run_until


def first_failure(histories: list[Callable[[], object]]) -> str:
    """What the first history that goes wrong says."""
    for history in histories:
        try:
            history()
        except HistoryError as error:
            return str(error)
    pytest.fail(f"{len(histories)} histories did not notice")


def seeds(number: int) -> list[Callable[[], object]]:
    return [lambda seed=seed: run_seed(seed) for seed in range(number)]  # type: ignore[misc]


@pytest.mark.bad_day(1, 7)
def test_freeing_reserved_blocks_before_the_sender_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    cancel = PushReceiver.cancel

    def cancel_and_free(self: PushReceiver, now_ns: int, key: Any, reason: str) -> Any:
        return cancel(self, now_ns, key, reason) + self.on_sender_stopped(now_ns, key)

    monkeypatch.setattr(PushReceiver, "cancel", cancel_and_free)
    assert "lands in block" in first_failure(seeds(400))


def test_a_fence_that_does_not_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(self: SimTransport, peer: Any) -> None:
        self._after(0, lambda: self._report(Fenced(peer=peer)))

    monkeypatch.setattr(SimTransport, "fence", pretend)
    assert "lands in block" in first_failure(seeds(400))


@pytest.mark.bad_day(4)
def test_a_commit_that_does_not_look_at_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserved blocks are given to somebody else behind the push's back: the generation is the last guard."""

    def commit_blindly(self: BlockPool, blocks: Any) -> None:
        for block_id, _generation in blocks:
            self._move(block_id, BlockState.ACTIVE)
            self._num_users[block_id] = 1

    for module in ("cluster.sim.history", "tests.sim.worlds"):
        monkeypatch.setattr(f"{module}.watch_landings", lambda world: None)
    world = make_world(ask(0, num_prompt_tokens=40))
    steal_reserved_blocks(world)
    finish(world)
    assert count(world, "LegFailed", "generation") > 0, "the attempt fails closed"

    monkeypatch.setattr(BlockPool, "commit", commit_blindly)
    world = make_world(ask(0, num_prompt_tokens=40))
    steal_reserved_blocks(world)
    finish(world)
    assert count(world, "LegFailed") == 0, "and without the check nothing does"


def steal_reserved_blocks(world: World) -> None:
    """Once decode has reserved, its pool frees the blocks and reserves the same ones for somebody else."""
    node = world.worker("d0")
    assert node is not None
    pool = node.state.pool
    run_until(world, lambda: pool.counts().reserved > 0)
    block_ids = [block_id for block_id in range(pool.num_blocks) if pool.state(block_id) is BlockState.RESERVED]
    pool.release_reserved(block_ids)
    assert sorted(block_id for block_id, _ in pool.reserve(len(block_ids))) == block_ids


@pytest.mark.bad_day(4, 20)
def test_blocks_that_are_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    on_verified = PushReceiver.on_verified

    def believe(self: PushReceiver, now_ns: int, key: Any, chunk: int, _bad: Any) -> Any:
        return on_verified(self, now_ns, key, chunk, ())

    monkeypatch.setattr(PushReceiver, "on_verified", believe)
    assert "was given token" in first_failure(seeds(400))


def test_source_blocks_that_are_let_go_before_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks_ready = Pushes.blocks_ready

    def let_go(self: Pushes, now_ns: int, key: Any, blocks: Any, layers: Any = None) -> None:
        blocks_ready(self, now_ns, key, blocks, layers)
        self._pool.release(self._sources[key])
        self._sources[key] = []

    monkeypatch.setattr(Pushes, "blocks_ready", let_go)
    first_failure(seeds(400))


def test_layers_that_are_pushed_before_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    layers_written = LastChunks.layers_written

    def run_ahead(self: LastChunks, now_ns: int, num_layers: int) -> None:
        ahead = min(num_layers + 1, len(self._every_layer))
        if ahead > self._num_layers_given:
            layers_written(self, now_ns, ahead)

    monkeypatch.setattr(LastChunks, "layers_written", run_ahead)
    assert "was given token" in first_failure(seeds(100))


def test_a_commit_without_the_last_group_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender forgets what the step wrote last. The receiver counts layers, and that is the only guard."""
    give = OutgoingPush.give

    def give_all_but_the_last(self: OutgoingPush, blocks: Any, layers: range) -> None:
        give(self, blocks, layers)
        if layers.start > 0 and layers.stop == self.num_layers:
            self.pending = deque(piece for piece in self.pending if piece.layers != layers)

    def hold_every_block(self: IncomingPush, end: PushEnd) -> bool:
        counted = [block.index for block in self.grant.blocks if block.index < end.num_blocks]
        return not self.lost_chunks(end.num_chunks) and sorted(self.layers_arrived) == counted

    monkeypatch.setattr(OutgoingPush, "give", give_all_but_the_last)
    monkeypatch.setattr(OutgoingPush, "_check_layers", lambda self: None)
    world = make_world(ask(0, num_prompt_tokens=40))
    run_until(world, lambda: count(world, "LegFailed", "do not cover the granted blocks") > 0)
    assert count(world, "Committed") == 0, "the attempt fails closed"

    monkeypatch.setattr(IncomingPush, "is_complete", hold_every_block)
    assert "was given token" in first_failure([lambda: run_scenario(Scenario(seed=1, requests=(ask(0),)))])


def decode_workers_that_come_back() -> list[Callable[[], object]]:
    """A decode worker is stopped in the middle of an answer, is given up, and wakes beside its slower successor."""
    histories: list[Callable[[], object]] = []
    for number in range(40):
        pause_ns = ARRIVAL_NS + 60 * MILLISECOND_NS
        scenario = Scenario(
            seed=number,
            num_decode=2,
            num_variants=3,
            can_kill=False,
            heartbeat_timeout_s=0.2,
            requests=(ask(0, max_tokens=40),),
            faults=(
                fault(FaultKind.PAUSE, pause_ns, "d0", duration_ns=(230 + 2 * number) * MILLISECOND_NS),
                fault(FaultKind.SLOW_ENGINE, pause_ns, "d1", duration_ns=SECOND_NS, amount=8.0),
            ),
        )
        histories.append(lambda scenario=scenario: run_scenario(scenario))  # type: ignore[misc]
    return histories


def test_tokens_of_a_stale_attempt_that_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was given up wakes beside its successor; arithmetic is inexact, so the two answers differ."""
    on_run = FrontRequest._on_run

    def accept(self: FrontRequest, now_ns: int, event: Any, out: Any) -> None:
        if self._legs:
            run = dataclasses.replace(event.run, attempt=self._attempt_id())
            event = dataclasses.replace(event, worker=self._legs[-1].ref.worker, run=run)
        on_run(self, now_ns, event, out)

    for history in decode_workers_that_come_back():
        history()
    monkeypatch.setattr(FrontRequest, "_on_run", accept)
    monkeypatch.setattr(Outbox, "_forget", lambda self, attempt: None)
    first_failure(decode_workers_that_come_back())


def test_tokens_taken_by_arrival_instead_of_position(monkeypatch: pytest.MonkeyPatch) -> None:
    on_run = FrontRequest._on_run

    def append(self: FrontRequest, now_ns: int, event: Any, out: Any) -> None:
        run = dataclasses.replace(event.run, position=self.num_delivered)
        on_run(self, now_ns, dataclasses.replace(event, run=run), out)

    monkeypatch.setattr(FrontRequest, "_on_run", append)
    assert "was given" in first_failure(seeds(20))


def ask_for_three(**options: Any) -> list[Callable[[], object]]:
    """Histories of requests for three answers, with and without a prefill worker; some lose their decode worker."""
    histories: list[Callable[[], object]] = []
    for number in range(12):
        requests = [ask(index, num_prompt_tokens=13 + index, num_choices=3) for index in range(2)]
        crash = fault(FaultKind.CRASH, ARRIVAL_NS + (10 + 8 * number) * MILLISECOND_NS, "d0")
        scenario = Scenario(
            seed=number,
            num_prefill=number % 2,
            num_decode=2,
            requests=tuple(_sampled(request, **options) for request in requests),
            faults=(crash,) if number % 3 else (),
        )
        histories.append(lambda scenario=scenario: run_scenario(scenario))  # type: ignore[misc]
    return histories


def _sampled(request: Request, **options: Any) -> Request:
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, temperature=1.0, **options))


def test_answers_that_share_more_than_their_full_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block is each one's own: what one writes into it, another must not read."""
    fork = Sequence.fork

    def fork_and_share_the_last_block(self: Sequence, sibling: Any, block_size: int) -> Sequence:
        other = fork(self, sibling, block_size)
        num_blocks = self.num_computed // block_size + 1
        other.block_table = self.block_table[:num_blocks]
        return other

    for history in ask_for_three():
        history()
    monkeypatch.setattr(Sequence, "fork", fork_and_share_the_last_block)
    monkeypatch.setattr(Scheduler, "check_invariants", lambda self: None)
    first_failure(ask_for_three())


def test_answers_that_all_draw_the_same_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = engine_model._sample

    def sample_as_the_first(step: SequenceStep, context: Any, variant: int) -> Any:
        key = dataclasses.replace(step.key, choice=0)
        return sample(dataclasses.replace(step, key=key, twins=tuple(0 for _ in step.twins)), context, variant)

    monkeypatch.setattr(engine_model, "_sample", sample_as_the_first)
    assert "/1 was given token" in first_failure(ask_for_three())


def test_answers_that_lose_what_they_had_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure every answer goes on where it was, not where the one with least was."""
    body = Answers.body

    def forget_the_others(self: Answers) -> RequestBody:
        told = body(self)
        siblings = tuple(dataclasses.replace(sibling, delivered_ids=told.delivered_ids) for sibling in told.siblings)
        return dataclasses.replace(told, siblings=siblings)

    monkeypatch.setattr(Answers, "body", forget_the_others)
    monkeypatch.setattr(Answers, "fit", lambda self, body: True)
    monkeypatch.setattr(FrontRequest, "check_invariants", lambda self: None)
    first_failure(ask_for_three(stop_token_ids=(5, 6, 7, 8, 9, 10)))


def test_scores_that_come_from_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are found have no logits: a prompt that takes them has tokens without a score."""
    for history in ask_for_three(prompt_logprobs=0):
        history()
    whole = property(lambda self: self.num_tokens - 1)
    monkeypatch.setattr(Sequence, "num_matchable_tokens", whole)
    first_failure([lambda: run_scenario(twice_the_same_prompt())])


def twice_the_same_prompt() -> Scenario:
    first, later = ask(0), dataclasses.replace(ask(0, arrival_ns=SECOND_NS), request_id="later")
    return Scenario(seed=1, requests=(first, _sampled(later, prompt_logprobs=0)))


def test_answers_that_are_shown_before_the_prompts_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "has_scores", property(lambda self: True))
    assert "scores" in first_failure(ask_for_three(prompt_logprobs=0))


def test_a_worker_that_ignores_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LegControl, "cancel", lambda self, now_ns, attempt, reason: None)
    scenario = Scenario(seed=1, requests=(ask(0, max_tokens=40, leave_after_tokens=3),), max_model_tokens=64)
    slow = dataclasses.replace(scenario, cost=dataclasses.replace(scenario.cost, base_ns=100 * MILLISECOND_NS))
    assert "is held" in first_failure([lambda: run_scenario(slow)])
