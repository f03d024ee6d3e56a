"""Ranks over a faulty network: each has a memory, a transport, a machine, and an inbox that its leader fills."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kv_transfer.checksum import as_memory, checksums
from kv_transfer.protocol.codec import MalformedMessageError, encode
from kv_transfer.protocol.codec import decode as decode_message
from kv_transfer.protocol.gang import GangReceiver
from kv_transfer.protocol.gang_sender import GangSender
from kv_transfer.protocol.limits import MILLISECOND_NS, PushLimits
from kv_transfer.protocol.messages import (
    CancelWrite,
    ConnectPeer,
    FencePeer,
    PushEffect,
    SendMessage,
    VerifyBlocks,
    WriteBlocks,
)
from kv_transfer.protocol.ranks import bad_blocks, rank_of, rank_peer
from kv_transfer.protocol.sampling import Checksums
from kv_transfer.transport.base import (
    Connected,
    ConnectFailed,
    Fenced,
    Notified,
    PeerGone,
    TransportEvent,
    UnknownPeerError,
    WriteCompleted,
    WriteFailed,
)
from kv_transfer.transport.loopback import LoopbackTransport, endpoint_of

if TYPE_CHECKING:
    from tests.support.gang_lives import Gang

NUM_BLOCKS = 12
LIMITS = PushLimits(
    lease_ttl_ns=40 * MILLISECOND_NS,
    max_pushes=6,
    max_inflight_writes=2,
    max_blocks_per_write=2,
    write_timeout_ns=30 * MILLISECOND_NS,
    end_resend_interval_ns=5 * MILLISECOND_NS,
    max_end_sends=6,
    max_missing_rounds=4,
    stop_resend_interval_ns=5 * MILLISECOND_NS,
    stop_timeout_ns=30 * MILLISECOND_NS,
    max_quarantined_blocks=8,
)

Action = Callable[[], None]


class Member:
    """One rank of a life: a process, with its memory, its transport, and an inbox that its leader fills."""

    def __init__(self, gang: Gang, number: int) -> None:
        self.gang = gang
        self.world = gang.world
        self.number = number
        self.me = rank_peer(gang.me, number)
        self.inbox: deque[tuple[int, Action]] = deque()
        self.is_dead = False
        self.block_size = gang.layout.rank_layout().block_size_bytes
        self.memory = bytearray(NUM_BLOCKS * self.block_size)
        self.transport = LoopbackTransport(self.world.hub, self.me, memoryview(self.memory))

    @property
    def is_awake(self) -> bool:
        return not self.is_dead and self.me not in self.world.asleep

    def tell(self, action: Action) -> None:
        after_ns = self.world.rng.randrange(MILLISECOND_NS)
        last_ns = self.inbox[-1][0] if self.inbox else 0
        self.inbox.append((max(last_ns, self.world.now_ns + after_ns), action))

    def report(self, effect: PushEffect) -> None:
        """To the leader, in order."""
        self.gang.hear(self.number, effect)

    def get(self, block_id: int) -> bytes:
        return bytes(self.memory[block_id * self.block_size : (block_id + 1) * self.block_size])

    def put(self, block_id: int, data: bytes) -> None:
        assert len(data) == self.block_size
        self.memory[block_id * self.block_size : (block_id + 1) * self.block_size] = data

    def run(self, effects: list[PushEffect]) -> None:
        raise NotImplementedError

    def send(self, effect: SendMessage) -> None:
        try:
            self.transport.write(effect.peer, [], encode(effect.message))
        except UnknownPeerError:
            return  # as the protocol says: swallowed


class SendingMember(Member):
    def __init__(self, gang: Gang, number: int) -> None:
        super().__init__(gang, number)
        self.machine = GangSender(LIMITS, Checksums.FULL, number, num_layers=self.world.layout.num_layers)
        self.writes: dict[int, int] = {}
        self.handles: dict[int, int] = {}

    def handle(self, event: TransportEvent) -> None:
        now_ns, machine = self.world.now_ns, self.machine
        if isinstance(event, Connected):
            self.run(machine.on_connected(now_ns, event.peer))
        elif isinstance(event, ConnectFailed):
            self.run(machine.on_connect_failed(now_ns, event.peer, event.reason))
        elif isinstance(event, PeerGone):
            self.run(machine.on_peer_gone(now_ns, event.peer, event.reason))
        elif isinstance(event, WriteCompleted) and event.handle in self.writes:
            self.run(machine.on_write_completed(now_ns, self.forget_write(event.handle)))
        elif isinstance(event, WriteFailed) and event.handle in self.writes:
            write_id = self.forget_write(event.handle)
            self.run(machine.on_write_failed(now_ns, write_id, event.quiesced, event.reason))
        elif isinstance(event, Notified):
            try:
                self.run(machine.on_message(now_ns, event.peer, decode_message(event.payload)))
            except MalformedMessageError:
                self.world.num_malformed += 1

    def forget_write(self, handle: int) -> int:
        write_id = self.writes.pop(handle)
        del self.handles[write_id]
        return write_id

    def run(self, effects: list[PushEffect]) -> None:
        for effect in effects:
            if isinstance(effect, ConnectPeer):
                self.transport.connect(effect.peer, endpoint_of(effect.peer))
            elif isinstance(effect, SendMessage):
                self.send(effect)
            elif isinstance(effect, WriteBlocks):
                self.write(effect)
            elif isinstance(effect, CancelWrite):
                if effect.write_id in self.handles:
                    self.transport.cancel(self.handles[effect.write_id])
            else:
                self.report(effect)
        self.machine.check_invariants()

    def write(self, effect: WriteBlocks) -> None:
        pair = self.world.pair(self.number, rank_of(effect.peer))
        layers, targets = effect.message.layers, [block.block_id for block in effect.message.blocks]
        copies = pair.copies(zip(effect.source_blocks, targets, strict=True), layers)
        message = replace(effect.message, num_pieces=pair.num_pieces(layers))
        try:
            handle = self.transport.write(effect.peer, copies, encode(message), num_sums=len(copies))
        except UnknownPeerError:
            # The connection broke and its PeerGone is on its way.
            self.world.later(0, lambda: self.refuse_write(effect.write_id))
            return
        self.writes[handle] = effect.write_id
        self.handles[effect.write_id] = handle
        self.world.writers[handle] = (effect.message.key, pair, layers)

    def refuse_write(self, write_id: int) -> None:
        if not self.is_dead:
            self.run(self.machine.on_write_failed(self.world.now_ns, write_id, True, "not connected"))


class ReceivingMember(Member):
    def __init__(self, gang: Gang, number: int) -> None:
        super().__init__(gang, number)
        self.machine = GangReceiver(LIMITS, Checksums.FULL, num_layers=self.world.layout.num_layers)

    def handle(self, event: TransportEvent) -> None:
        now_ns, machine = self.world.now_ns, self.machine
        if isinstance(event, Connected):
            self.run(machine.on_connected(now_ns, event.peer))
        elif isinstance(event, PeerGone):
            self.run(machine.on_peer_gone(now_ns, event.peer, event.reason))
        elif isinstance(event, Fenced):
            self.run(machine.on_fenced(now_ns, event.peer))
            self.world.fenced(event.peer)
        elif isinstance(event, Notified):
            try:
                self.run(machine.on_message(now_ns, event.peer, decode_message(event.payload)))
            except MalformedMessageError:
                self.world.num_malformed += 1

    def run(self, effects: list[PushEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendMessage):
                self.send(effect)
            elif isinstance(effect, VerifyBlocks):
                self.tell(self.verifying(effect))
            elif isinstance(effect, FencePeer):
                self.transport.fence(effect.peer)
            else:
                self.report(effect)
        self.machine.check_invariants()

    def verifying(self, effect: VerifyBlocks) -> Action:
        return lambda: self.verify(effect)

    def verify(self, effect: VerifyBlocks) -> None:
        ranges = self.world.pair(effect.rank, self.number).target_ranges(effect.block_ids, effect.layers)
        bad = bad_blocks(effect.block_ids, checksums(as_memory(self.memory), ranges), effect.checksums)
        self.run(self.machine.on_verified(self.world.now_ns, effect.key, effect.chunk, bad, effect.rank))
