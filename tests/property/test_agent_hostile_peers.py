"""A worker whose peers say whatever they like, at any moment: it stays whole, and in the end nothing of it is held.

Only the coordinator and the worker's own engine and transport keep to the rules. Messages name pushes that exist, with
a wrong field now and then; peers connect, leave and are fenced without reason; lives follow each other under one name.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cluster.agent import effects as fx
from cluster.agent import events as ev
from cluster.agent.legs import push_key_of
from cluster.agent.state import WorkerState
from cluster.agent.translation import block_grants, pack_grants
from cluster.core.commands import (
    CancelLeg,
    Command,
    CommandBody,
    PeerLost,
    Prefill,
    Reserve,
    SenderStopped,
    WorkerWelcome,
)
from cluster.core.ids import AttemptId, Role, WorkerId
from cluster.core.messages import RankEndpoint, ReserveGranted, WorkerRef
from engine.core.request import RequestBody
from engine.core.sampling import SamplingParams
from engine.core.step import StepPlan
from kv_transfer.protocol.messages import (
    BlockGrant,
    FirstToken,
    LeaseRenew,
    PeerId,
    PushAbort,
    PushChunk,
    PushCommitted,
    PushEnd,
    PushKey,
    PushMessage,
    PushMissing,
    PushStop,
    VerifyBlocks,
    WriteBlocks,
)
from tests.support.toy_engine import ToyRunner
from tests.support.worker_pair import BLOCK_SIZE, NUM_LAYERS, SECOND_NS, worker_config

ME = WorkerId("me", 3)
PEERS = tuple(PeerId(name, incarnation) for name in ("x", "y") for incarnation in (1, 2))
NUM_HISTORIES = 24
NUM_STEPS = 150
MAX_DRAIN_STEPS = 1_000
MOST = 2**32 - 1


class Besieged:
    """One worker and those around it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_ns = 0
        self.state = WorkerState(worker_config(ME, Role.DECODE, num_blocks=30), 0)
        self.runner = ToyRunner(self.state.pool, BLOCK_SIZE, num_layers=NUM_LAYERS)
        self.plan: StepPlan | None = None
        self.sources: dict[AttemptId, PeerId] = {}
        self.attempts: list[AttemptId] = []
        self.grants: list[tuple[PushKey, int, tuple[BlockGrant, ...], PeerId]] = []
        self.writes: list[WriteBlocks] = []
        self.verifications: list[VerifyBlocks] = []
        self.fencing: list[PeerId] = []
        self.handle(ev.CoordinatorConnected())
        self.command(WorkerWelcome(heartbeat_ms=1_000))

    def handle(self, event: ev.Event) -> None:
        for effect in self.state.handle(self.now_ns, event):
            match effect:
                case fx.RunStep(plan=plan):
                    self.plan = plan
                case fx.WriteBlocks():
                    self.writes.append(effect)
                case fx.VerifyBlocks():
                    self.verifications.append(effect)
                case fx.FencePeer(peer=peer):
                    self.fencing.append(peer)
                case fx.ToCoordinator(message=ReserveGranted(attempt=attempt, lease_id=lease_id, blocks=blocks)):
                    self.grants.append((push_key_of(attempt), lease_id, block_grants(blocks), self.sources[attempt]))
                case fx.Shutdown(reason=reason):
                    raise AssertionError(f"the worker was talked into ending: {reason}")
                case _:
                    pass
        self.state.check_invariants()

    def command(self, body: CommandBody, request: RequestBody | None = None) -> None:
        self.handle(ev.CommandReceived(command=Command(epoch=1, worker=ME, body=body), body=request))

    # ---- those who keep to the rules ----

    def submit(self) -> None:
        peer, number = self.rng.choice(PEERS), len(self.attempts) + 1
        attempt, num_tokens = AttemptId(f"r{number}", 1), self.rng.choice((4, 8, 12))
        self.attempts.append(attempt)
        self.sources[attempt] = peer
        prompt = tuple(self.rng.randrange(3) for _ in range(num_tokens))
        request = RequestBody(prompt_ids=prompt, sampling=SamplingParams(max_tokens=3))
        endpoint = RankEndpoint(rank=0, transport="auto", endpoint=b"")
        worker = WorkerId(peer.name, peer.incarnation)
        ref = WorkerRef(worker=worker, token_address="", endpoints=(endpoint,))
        ttl_ms = self.rng.choice((10_000, 1))
        if self.rng.random() < 0.5:
            num_reserved = num_tokens + 1
            reserve = Reserve(attempt=attempt, lease_id=number, source=ref, num_tokens=num_reserved, ttl_ms=ttl_ms)
            self.command(reserve, request)
            return
        granted = tuple(BlockGrant(i, i, 7) for i in range(num_tokens // BLOCK_SIZE + 1))
        self.grants.append((push_key_of(attempt), number, granted, peer))
        prefill = Prefill(
            attempt=attempt,
            lease_id=number,
            destination=ref,
            num_cached_blocks=0,
            blocks=pack_grants(granted),
            ttl_ms=ttl_ms,
        )
        self.command(prefill, request)

    def work(self) -> None:
        if self.plan is not None:
            plan, self.plan = self.plan, None
            self.handle(ev.StepDone(result=self.runner.run(plan), duration_ns=1))
        elif self.writes:
            write = self.writes.pop(0)
            is_done = self.rng.random() < 0.8
            broken = ev.WriteBroken(write_id=write.write_id, quiesced=self.rng.random() < 0.5, reason="toy")
            self.handle(ev.WriteDone(write_id=write.write_id) if is_done else broken)
        elif self.verifications:
            effect = self.verifications.pop(0)
            bad = effect.block_ids if self.rng.random() < 0.1 else ()
            self.handle(ev.Verified(key=effect.key, chunk=effect.chunk, bad_block_ids=bad))
        elif self.fencing:
            self.handle(ev.FenceDone(peer=self.fencing.pop(0)))

    def end_something(self) -> None:
        if self.attempts:
            attempt = self.rng.choice(self.attempts)
            self.command(CancelLeg(attempt=attempt, reason="toy"))
            if self.rng.random() < 0.3:
                self.command(SenderStopped(attempt=attempt))

    def let_time_pass(self) -> None:
        deadline_ns = self.state.next_deadline_ns()
        if deadline_ns is not None and self.rng.random() < 0.7:
            self.now_ns = max(self.now_ns, deadline_ns)  # to the instant
        else:
            self.now_ns += self.rng.choice((1, SECOND_NS, 3 * SECOND_NS))
        self.handle(ev.Tick())

    # ---- those who do not ----

    def disturb_link(self) -> None:
        peer = self.rng.choice(PEERS)
        connected = ev.PeerConnected(peer=peer)
        gone, failed = ev.PeerGone(peer=peer, reason="toy"), ev.PeerConnectFailed(peer=peer, reason="toy")
        self.handle(self.rng.choice((connected, connected, gone, failed)))

    def say_anything(self) -> None:
        if self.grants:
            key, lease_id, blocks, peer = self.rng.choice(self.grants[-5:])
            if self.rng.random() < 0.05:
                peer, lease_id = self.rng.choice(PEERS), self.rng.choice((lease_id, lease_id + 1))
            self.handle(ev.PushReceived(peer=peer, message=self._message(key, lease_id, blocks)))

    def _message(self, key: PushKey, lease_id: int, blocks: tuple[BlockGrant, ...]) -> PushMessage:
        rng, number = self.rng, self.rng.randrange(len(blocks))
        first = FirstToken(choice=0, position=0, token_id=3)
        chunk = PushChunk(
            key=key,
            lease_id=lease_id,
            rank=0,
            chunk=rng.choice((number, number, number, MOST)),
            blocks=blocks[number : number + 1] if rng.random() < 0.95 else (BlockGrant(MOST, MOST, MOST),),
            first_layer=0,
            num_layers=rng.choice((NUM_LAYERS, NUM_LAYERS, NUM_LAYERS, 1, 60_000)),
            summed=rng.choice(((0,), (0,), (0,), (), (1,))),
            checksums=(1,) if rng.random() < 0.9 else (),
            round=rng.choice((0, 0, 0, 1, 2)),
        )
        end = PushEnd(
            key=key,
            lease_id=lease_id,
            rank=0,
            num_chunks=rng.choice((len(blocks), len(blocks), 0, MOST)),
            num_blocks=rng.choice((len(blocks), len(blocks) - 1, MOST)),
            num_tokens=rng.choice((4, 8, 12, MOST)),
            first_tokens=(first,) * rng.choice((0, 1, 1, 2)),
            round=rng.choice((0, 0, 1, 2)),
        )
        abort = PushAbort(key=key, lease_id=lease_id, stopped=rng.random() < 0.5, reason="")
        missing = PushMissing(key=key, lease_id=lease_id, chunks=(0, 0, number), round=rng.choice((1, 2, MOST)))
        sent_ns = rng.choice((self.now_ns, 0, 2**64 - 1))
        renewal = LeaseRenew(lease_ids=(lease_id, lease_id), sent_ns=sent_ns, is_reply=rng.random() < 0.5)
        stop, committed = PushStop(key=key, lease_id=lease_id, reason=""), PushCommitted(key=key, lease_id=lease_id)
        return rng.choice((chunk, chunk, chunk, end, end, abort, missing, renewal, stop, committed))

    # ---- the end ----

    def drain(self) -> None:
        for attempt in self.attempts:
            self.command(CancelLeg(attempt=attempt, reason="the end"))
        for peer in PEERS:
            self.command(PeerLost(peer=WorkerId(peer.name, peer.incarnation)))
        for _ in range(MAX_DRAIN_STEPS):
            if self.plan is None and not (self.writes or self.verifications or self.fencing):
                break
            self.work()


@pytest.mark.parametrize("seed", range(NUM_HISTORIES))
def test_whatever_peers_say_the_worker_stays_whole_and_lets_go_of_everything(seed: int) -> None:
    worker = Besieged(seed)
    actions: dict[Callable[[], None], int] = {
        worker.submit: 10,
        worker.say_anything: 45,
        worker.work: 25,
        worker.disturb_link: 8,
        worker.let_time_pass: 8,
        worker.end_something: 4,
    }
    for action in worker.rng.choices(list(actions), list(actions.values()), k=NUM_STEPS):
        action()
    worker.drain()
    counts = worker.state.pool.counts()
    assert worker.state.num_legs() == 0
    assert (counts.reserved, counts.quarantined, counts.active) == (0, 0, 0)
