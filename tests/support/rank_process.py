"""Ranks of a gang as real processes, and their leaders in the process that starts them.

A rank has a pool, a transport and one machine, GangSender or GangReceiver. Its leader calls the machine's methods over
a pipe and hears over it what the machine tells an owner; the rest happens between the ranks.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from kv_transfer.checksum import as_memory, checksums
from kv_transfer.protocol.codec import decode, encode
from kv_transfer.protocol.gang import GangReceiver
from kv_transfer.protocol.gang_leader import (
    CancelAtRank,
    CommitAtRank,
    HandOutGrant,
    LeaderEffect,
    OpenAtRank,
    SourceLeader,
    TargetLeader,
)
from kv_transfer.protocol.gang_push import SourceEffect, TargetEffect
from kv_transfer.protocol.gang_sender import GangSender
from kv_transfer.protocol.limits import PushLimits
from kv_transfer.protocol.messages import (
    BlocksQuarantined,
    BlocksReleased,
    CancelWrite,
    ConnectPeer,
    FencePeer,
    FirstToken,
    Grant,
    PeerId,
    PushArrived,
    PushChunk,
    PushEffect,
    PushFailed,
    PushKey,
    SendMessage,
    SourceReleased,
    VerifyBlocks,
    WriteBlocks,
)
from kv_transfer.protocol.plan import summed_first
from kv_transfer.protocol.ranks import GangLayout, Rank, bad_blocks, pair_gangs, rank_of, rank_peer
from kv_transfer.protocol.sampling import Checksums
from kv_transfer.transport.backends import open_backend
from kv_transfer.transport.base import (
    Connected,
    ConnectFailed,
    Fenced,
    Notified,
    PeerGone,
    TransportEvent,
    UnknownPeerError,
    WriteCompleted,
)
from kv_transfer.transport.shm_pool import create_pool
from tests.support.shares import share_of

TIMEOUT_S = 30.0
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """What a rank's process is started with."""

    me: PeerId
    is_sender: bool
    transport: str
    sender: GangLayout
    receiver: GangLayout
    num_blocks: int
    limits: PushLimits
    checksums: Checksums


# ---- in the rank's process ---------------------------------------------------------------------------------------


class RankProcess:
    def __init__(self, config: RankConfig, pipe: Connection) -> None:
        self.config = config
        self.pipe = pipe
        self.number = rank_of(config.me)
        self.pairs = pair_gangs(config.sender, config.receiver)
        self.endpoints: dict[PeerId, bytes] = {}
        self.handles: dict[int, int] = {}
        self.writes: dict[int, int] = {}
        self.damaged: int | None = None
        own = config.sender if config.is_sender else config.receiver
        self.block_size = own.rank_layout().block_size_bytes
        pool = create_pool(config.num_blocks * self.block_size)
        self.memory = as_memory(pool.mapping)
        self.transport = open_backend(config.transport, config.me, pool)
        num_layers = own.layout.num_layers
        self.machine: GangSender | GangReceiver
        if config.is_sender:
            self.machine = GangSender(config.limits, config.checksums, self.number, num_layers=num_layers)
        else:
            self.machine = GangReceiver(config.limits, config.checksums, num_layers=num_layers)

    def run(self) -> None:
        self.pipe.send(self.transport.endpoint())
        poller = select.poll()
        poller.register(self.transport.fileno(), select.POLLIN)
        poller.register(self.pipe.fileno(), select.POLLIN)
        while True:
            deadline_ns = self.machine.next_deadline_ns()
            wait_ms = None if deadline_ns is None else max(0, deadline_ns - time.monotonic_ns()) // 1_000_000 + 1
            poller.poll(wait_ms)
            for event in self.transport.poll():
                self.on_event(event)
            self.perform(self.machine.on_tick(time.monotonic_ns()))
            while self.pipe.poll():
                try:
                    method, args, is_call = self.pipe.recv()
                except EOFError:
                    return
                answer = self.call(method, args)
                if is_call:
                    self.pipe.send(("answer", answer))

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        """One of our own commands, or a method of the machine."""
        own = getattr(self, f"do_{method}", None)
        if own is not None:
            return own(*args)
        self.perform(getattr(self.machine, method)(time.monotonic_ns(), *args))
        return None

    def do_endpoints(self, endpoints: dict[PeerId, bytes]) -> None:
        self.endpoints = endpoints

    def do_put(self, block_id: int, data: bytes) -> None:
        start = block_id * self.block_size
        self.memory[start : start + self.block_size] = np.frombuffer(data, dtype=np.uint8)

    def do_get(self, block_id: int) -> bytes:
        return self.memory[block_id * self.block_size : (block_id + 1) * self.block_size].tobytes()

    def do_damage(self, block_id: int) -> None:
        """From now on a byte of that block is wrong whenever it has been written the first time in a push."""
        self.damaged = block_id

    def do_count(self) -> tuple[int, int]:
        """Open pushes and leases."""
        self.machine.check_invariants()
        return self.machine.num_pushes, len(self.machine.leases(time.monotonic_ns()))

    def on_event(self, event: TransportEvent) -> None:
        now_ns, machine = time.monotonic_ns(), self.machine
        if isinstance(event, Connected):
            self.perform(machine.on_connected(now_ns, event.peer))
        elif isinstance(event, PeerGone):
            self.perform(machine.on_peer_gone(now_ns, event.peer, event.reason))
        elif isinstance(event, Notified):
            message = decode(event.payload)
            if isinstance(message, PushChunk) and message.round == 0:
                self.damage(message)
            self.perform(machine.on_message(now_ns, event.peer, message))
        elif isinstance(event, Fenced):
            assert isinstance(machine, GangReceiver)
            self.perform(machine.on_fenced(now_ns, event.peer))
        elif isinstance(event, ConnectFailed):
            assert isinstance(machine, GangSender)
            self.perform(machine.on_connect_failed(now_ns, event.peer, event.reason))
        elif event.handle in self.writes:
            assert isinstance(machine, GangSender)
            write_id = self.writes.pop(event.handle)
            del self.handles[write_id]
            if isinstance(event, WriteCompleted):
                self.perform(machine.on_write_completed(now_ns, write_id))
            else:
                self.perform(machine.on_write_failed(now_ns, write_id, event.quiesced, event.reason))

    def damage(self, chunk: PushChunk) -> None:
        if self.damaged in [block.block_id for block in chunk.blocks]:
            self.memory[self.damaged * self.block_size] ^= 1

    def perform(self, effects: Sequence[PushEffect]) -> None:
        for effect in effects:
            match effect:
                case ConnectPeer(peer=peer):
                    self.transport.connect(peer, self.endpoints[peer])
                case SendMessage():
                    self.send(effect)
                case WriteBlocks():
                    self.write(effect)
                case CancelWrite(write_id=write_id):
                    if write_id in self.handles:
                        self.transport.cancel(self.handles[write_id])
                case VerifyBlocks():
                    self.verify(effect)
                case FencePeer(peer=peer):
                    self.transport.fence(peer)
                case _:
                    self.pipe.send(("told", effect))

    def send(self, effect: SendMessage) -> None:
        try:
            self.transport.write(effect.peer, [], encode(effect.message))
        except UnknownPeerError:
            return  # it has just gone, and the machine will hear of it

    def write(self, effect: WriteBlocks) -> None:
        pair = self.pairs.pair(self.number, rank_of(effect.peer))
        message = replace(effect.message, num_pieces=pair.num_pieces(effect.message.layers))
        pairs = list(zip(effect.source_blocks, (block.block_id for block in message.blocks), strict=True))
        copies, num_sums = pair.copies(summed_first(pairs, message.summed), message.layers), message.num_checksums
        try:
            handle = self.transport.write(effect.peer, copies, encode(message), num_sums=num_sums)
        except UnknownPeerError as error:
            assert isinstance(self.machine, GangSender)
            now_ns = time.monotonic_ns()
            self.perform(self.machine.on_write_failed(now_ns, effect.write_id, True, str(error)))
            return
        self.handles[effect.write_id] = handle
        self.writes[handle] = effect.write_id

    def verify(self, effect: VerifyBlocks) -> None:
        assert isinstance(self.machine, GangReceiver)
        ranges = self.pairs.pair(effect.rank, self.number).target_ranges(effect.block_ids, effect.layers)
        bad = bad_blocks(effect.block_ids, checksums(self.memory, ranges), effect.checksums)
        self.perform(self.machine.on_verified(time.monotonic_ns(), effect.key, effect.chunk, bad, effect.rank))


def rank_main(config: RankConfig, pipe: Connection) -> None:
    RankProcess(config, pipe).run()


# ---- in the leaders' process -------------------------------------------------------------------------------------


@dataclass
class RankHandle:
    """The leader's hold on one rank's process."""

    process: multiprocessing.process.BaseProcess
    pipe: Connection
    endpoint: bytes
    told: list[PushEffect] = field(default_factory=list)
    """What its machine has said and its leader has not heard yet."""
    is_lost: bool = False

    def call(self, method: str, *args: Any) -> Any:
        self.pipe.send((method, args, True))
        while True:
            assert self.pipe.poll(TIMEOUT_S), f"the rank does not answer {method}"
            kind, content = self.pipe.recv()
            if kind == "answer":
                return content
            self.told.append(content)

    def tell(self, method: str, *args: Any) -> None:
        """As `call`, without an answer, because the rank may be dead or stopped; its pipe tells sooner or later."""
        with suppress(OSError):
            self.pipe.send((method, args, False))

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


class Gangs:
    """A sending and a receiving gang. Their owner commits whatever arrives, and remembers everything it hears."""

    def __init__(
        self,
        transport: str,
        sender: GangLayout,
        receiver: GangLayout,
        *,
        num_blocks: int,
        limits: PushLimits,
        checksums: Checksums,
    ) -> None:
        self.sender, self.receiver = PeerId("prefill-0", 3), PeerId("decode-0", 5)
        self.layout = sender.layout
        self.pairs = pair_gangs(sender, receiver)
        self.source_leader = SourceLeader(limits)
        self.target_leader = TargetLeader(limits)
        self.heard_at_sender: list[PushEffect] = []
        self.heard_at_receiver: list[PushEffect] = []
        self.granted: list[Grant] = []
        self.processes: list[RankHandle] = []
        config = functools.partial(
            RankConfig,
            transport=transport,
            sender=sender,
            receiver=receiver,
            num_blocks=num_blocks,
            limits=limits,
            checksums=checksums,
        )
        sender_peers = [rank_peer(self.sender, rank) for rank in range(sender.num_ranks)]
        receiver_peers = [rank_peer(self.receiver, rank) for rank in range(receiver.num_ranks)]
        self.senders = [self._start(config(me=me, is_sender=True)) for me in sender_peers]
        self.receivers = [self._start(config(me=me, is_sender=False)) for me in receiver_peers]
        for rank in self.processes:
            assert rank.pipe.poll(TIMEOUT_S), "a rank does not start"
            rank.endpoint = rank.pipe.recv()
        endpoints = {me: rank.endpoint for me, rank in zip(receiver_peers, self.receivers, strict=True)}
        for rank in self.senders:
            rank.call("endpoints", endpoints)

    def _start(self, config: RankConfig) -> RankHandle:
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=rank_main, args=(config, theirs), daemon=True)
        process.start()
        theirs.close()
        rank = RankHandle(process, ours, b"")
        self.processes.append(rank)
        return rank

    def close(self) -> None:
        for rank in self.processes:
            if rank.process.is_alive():
                rank.process.kill()
            rank.process.join(TIMEOUT_S)
            rank.pipe.close()
            rank.process.close()

    # ---- a push ----------------------------------------------------------------------------------------------

    def open(self, grant: Grant, num_blocks: int) -> None:
        """At every rank, the receivers first."""
        self._lead_target(self.target_leader.open(grant, range(len(self.receivers))))
        assert self.granted == [grant]
        self.granted.clear()
        writing = {rank: self.pairs.receiver_ranks(rank) for rank in range(len(self.senders))}
        writing = {rank: receivers for rank, receivers in writing.items() if receivers}
        assert self.source_leader.open(grant.key, list(writing)) == []
        for rank, receivers in writing.items():
            self.senders[rank].call("open", grant, num_blocks, receivers)

    def give(self, key: PushKey, blocks: Sequence[tuple[int, int]], layers: range | None = None) -> None:
        for rank in self.senders:
            rank.call("blocks_ready", key, list(blocks), layers)

    def finish(self, key: PushKey, num_tokens: int) -> None:
        for rank in self.senders:
            rank.call("finish", key, num_tokens, [FirstToken(choice=0, position=0, token_id=7)])

    def put(self, block_id: int, whole_block: bytes) -> None:
        """Each sender rank computes its own heads of it."""
        for number, rank in enumerate(self.senders):
            rank.call("put", block_id, share_of(self.layout, whole_block, Rank(number, len(self.senders))))

    def expected(self, receiver_rank: int, whole_block: bytes) -> bytes:
        return share_of(self.layout, whole_block, Rank(receiver_rank, len(self.receivers)))

    # ---- leading ---------------------------------------------------------------------------------------------

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Leads both gangs until then."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            self._hear()
            if is_done():
                return
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"heard only {self.heard_at_sender} and {self.heard_at_receiver}"
            living = [rank for rank in self.processes if not rank.is_lost]
            wait([rank.pipe for rank in living], left_s)
            for rank in living:
                self._receive(rank)

    def has_ended(self) -> bool:
        """Whether no rank holds anything, as far as the leaders know."""
        return self.source_leader.num_pushes == self.target_leader.num_pushes == 0

    def _receive(self, rank: RankHandle) -> None:
        try:
            while rank.pipe.poll():
                rank.told.append(rank.pipe.recv()[1])
        except (EOFError, OSError):
            rank.is_lost = True
            if rank in self.senders:
                self._lead_source(self.source_leader.on_rank_lost(self.senders.index(rank), "its process died"))
            else:
                self._lead_target(self.target_leader.on_rank_lost(self.receivers.index(rank), "its process died"))

    def _hear(self) -> None:
        for number, rank in enumerate(self.senders):
            while rank.told:
                self._lead_source(self.source_leader.on_rank(number, _source(rank.told.pop(0))))
        for number, rank in enumerate(self.receivers):
            while rank.told:
                self._lead_target(self.target_leader.on_rank(number, _target(rank.told.pop(0))))

    def _lead_source(self, effects: Sequence[LeaderEffect]) -> None:
        for effect in effects:
            if isinstance(effect, CancelAtRank):
                self.senders[effect.rank].tell("cancel", effect.key, effect.reason)
            else:
                assert isinstance(effect, PushFailed | SourceReleased)
                self.heard_at_sender.append(effect)
        self.source_leader.check_invariants()

    def _lead_target(self, effects: Sequence[LeaderEffect]) -> None:
        for effect in effects:
            match effect:
                case OpenAtRank(rank=rank, grant=grant):
                    self.receivers[rank].call("open", grant, self.pairs.sender_ranks(rank))
                    self._lead_target(self.target_leader.on_opened(rank, grant.key))
                case HandOutGrant(grant=grant):
                    self.granted.append(grant)
                case CommitAtRank(rank=rank, key=key):
                    self.receivers[rank].tell("committed", key)
                case CancelAtRank(rank=rank, key=key, reason=reason):
                    self.receivers[rank].tell("cancel", key, reason)
                case PushArrived(key=key):
                    self.heard_at_receiver.append(effect)
                    self._lead_target(self.target_leader.committed(key))
                case PushFailed() | BlocksQuarantined() | BlocksReleased():
                    self.heard_at_receiver.append(effect)
                case _:
                    raise AssertionError(f"a leader asks for {effect}")
        self.target_leader.check_invariants()


def _source(effect: PushEffect) -> SourceEffect:
    assert isinstance(effect, PushFailed | SourceReleased)
    return effect


def _target(effect: PushEffect) -> TargetEffect:
    assert isinstance(effect, PushArrived | PushFailed | BlocksQuarantined | BlocksReleased)
    return effect
