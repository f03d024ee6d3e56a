"""Lives of a sender and of a receiver of pushes, for `push_world`: memory, block pool, transport and real machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.core.block_pool import BlockPool, StaleGenerationError
from kv_transfer.checksum import as_memory, checksums
from kv_transfer.protocol.codec import MalformedMessageError, encode
from kv_transfer.protocol.codec import decode as decode_message
from kv_transfer.protocol.layout import KVLayout, LayerGroup
from kv_transfer.protocol.limits import MILLISECOND_NS, PushLimits
from kv_transfer.protocol.messages import (
    BlockGrant,
    BlocksQuarantined,
    BlocksReleased,
    CancelWrite,
    ConnectPeer,
    FencePeer,
    FirstToken,
    Grant,
    PeerId,
    PushArrived,
    PushEffect,
    PushFailed,
    PushKey,
    SendMessage,
    SourceReleased,
    VerifyBlocks,
    WriteBlocks,
)
from kv_transfer.protocol.plan import plan_block_copies
from kv_transfer.protocol.receiver import PushReceiver
from kv_transfer.protocol.sampling import Checksums
from kv_transfer.protocol.sender import PushSender
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
    from tests.support.push_world import World

NUM_BLOCKS = 12
LAYOUT = KVLayout(
    groups=(
        LayerGroup(num_layers=2, num_kv_heads=1, head_dim=4),
        LayerGroup(num_layers=3, num_kv_heads=2, head_dim=2),
        LayerGroup(num_layers=1, num_kv_heads=1, head_dim=8),
    ),
    block_size=1,
    dtype="bfloat16",
)
NUM_LAYERS = LAYOUT.num_layers
BLOCK_SIZE_BYTES = LAYOUT.block_size_bytes
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
SOMEBODY_ELSE = PushKey("somebody else", 1)
"""Holds blocks that were granted again although a push held them."""

Action = Callable[[], None]


@dataclass(slots=True)
class Source:
    """A push at its sender: which pool blocks hold its KV, and how far it is."""

    grant: Grant
    num_blocks: int
    block_ids: list[int]
    content: list[bytes]
    num_given: int = 0
    is_released: bool = False
    failures: int = 0


@dataclass(slots=True)
class Outcome:
    committed: int = 0
    failed: int = 0


class Prefill:
    """A sender's life: pool, transport, machine. Plays WorkerState's part for one half of a push."""

    def __init__(self, world: World, me: PeerId) -> None:
        self.world = world
        self.me = me
        self.pool = bytearray(NUM_BLOCKS * BLOCK_SIZE_BYTES)
        self.free = list(range(NUM_BLOCKS))
        self.transport = LoopbackTransport(world.hub, me, memoryview(self.pool))
        self.machine = PushSender(LIMITS, Checksums.FULL, block_size_bytes=BLOCK_SIZE_BYTES, num_layers=NUM_LAYERS)
        self.sources: dict[PushKey, Source] = {}
        self.writes: dict[int, int] = {}
        self.handles: dict[int, int] = {}

    def start(self, grant: Grant, num_blocks: int) -> None:
        if len(self.free) < num_blocks:
            self.world.sender_stopped(grant)
            return
        block_ids = [self.free.pop() for _ in range(num_blocks)]
        content = [self.world.rng.randbytes(BLOCK_SIZE_BYTES) for _ in block_ids]
        self.sources[grant.key] = Source(grant, num_blocks, block_ids, content)
        self.run(self.machine.open(self.world.now_ns, grant, num_blocks))

    def put(self, block_id: int, data: bytes) -> None:
        self.pool[block_id * BLOCK_SIZE_BYTES : (block_id + 1) * BLOCK_SIZE_BYTES] = data

    def compute(self, key: PushKey) -> None:
        """One more chunk of the prompt is done; after the last one, the push is finished."""
        source = self.sources.get(key)
        if source is None or source.is_released:
            return
        left = source.num_blocks - source.num_given
        if left > 0:
            indices = list(range(source.num_given, source.num_given + self.world.rng.randint(1, left)))
            source.num_given += len(indices)
            self.compute_layers(key, indices, 0)
        else:
            first = FirstToken(choice=0, position=0, token_id=7)
            self.run(self.machine.finish(self.world.now_ns, key, source.num_blocks, [first]))

    def compute_layers(self, key: PushKey, indices: list[int], first_layer: int) -> None:
        """The chunk's next layers are done, often all of them at once; what comes after them is not there yet."""
        source, rng = self.sources[key], self.world.rng
        if source.is_released:
            return
        stop = rng.choice([NUM_LAYERS, rng.randint(first_layer + 1, NUM_LAYERS)])
        layers = range(first_layer, stop)
        for index in indices:
            start, size = LAYOUT.layers_slice(0, layers)
            at = source.block_ids[index] * BLOCK_SIZE_BYTES + start
            self.pool[at : at + size] = source.content[index][start : start + size]
        rng.shuffle(indices)
        ready = [(index, source.block_ids[index]) for index in indices]
        is_whole = len(layers) == NUM_LAYERS
        self.world.counts["layer group"] += not is_whole
        self.run(self.machine.blocks_ready(self.world.now_ns, key, ready, None if is_whole else layers))
        after_ns = rng.randrange(4 * MILLISECOND_NS)
        if stop < NUM_LAYERS:
            self.world.later(after_ns, lambda: self.compute_layers(key, indices, stop), self.me)
        else:
            self.world.later(after_ns, lambda: self.compute(key), self.me)

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
                self.world.counts["malformed"] += 1

    def forget_write(self, handle: int) -> int:
        write_id = self.writes.pop(handle)
        del self.handles[write_id]
        return write_id

    def run(self, effects: list[PushEffect]) -> None:
        for effect in effects:
            self.perform(effect)
        self.machine.check_invariants()

    def perform(self, effect: PushEffect) -> None:
        if isinstance(effect, ConnectPeer):
            self.world.note_dialled(effect.peer)
            self.transport.connect(effect.peer, endpoint_of(effect.peer))
        elif isinstance(effect, SendMessage):
            self.world.send(self.transport, effect)
        elif isinstance(effect, WriteBlocks):
            self.write(effect)
        elif isinstance(effect, CancelWrite):
            if effect.write_id in self.handles:
                self.transport.cancel(self.handles[effect.write_id])
        elif isinstance(effect, PushFailed):
            self.sources[effect.key].failures += 1
        else:
            assert isinstance(effect, SourceReleased)
            self.release(effect)

    def write(self, effect: WriteBlocks) -> None:
        pairs = list(zip(effect.source_blocks, [b.block_id for b in effect.message.blocks], strict=True))
        try:
            copies = plan_block_copies(pairs, LAYOUT, effect.message.layers)
            handle = self.transport.write(effect.peer, copies, encode(effect.message), num_sums=len(copies))
        except UnknownPeerError:
            # The connection broke and its PeerGone is on its way.
            self.world.later(0, lambda: self.write_refused(effect.write_id), self.me)
            return
        self.writes[handle] = effect.write_id
        self.handles[effect.write_id] = handle
        self.world.writers[handle] = effect.message
        self.world.wrote(self, effect.peer)

    def write_refused(self, write_id: int) -> None:
        self.run(self.machine.on_write_failed(self.world.now_ns, write_id, True, "not connected"))

    def release(self, effect: SourceReleased) -> None:
        source = self.sources[effect.key]
        assert not source.is_released, "a source is released once"
        assert effect.committed or source.failures == 1, "a push that fails says so once"
        source.is_released = True
        for block_id in source.block_ids:
            self.put(block_id, self.world.rng.randbytes(BLOCK_SIZE_BYTES))
            self.free.append(block_id)
        if effect.committed:
            assert self.world.outcomes[effect.key].committed == 1, "the receiver has not committed"
        elif effect.settled:
            self.world.sender_stopped(source.grant)


class Decode:
    """A receiver's life, likewise, with a pool that knows whose every block is."""

    def __init__(self, world: World, me: PeerId) -> None:
        self.world = world
        self.me = me
        self.memory = bytearray(NUM_BLOCKS * BLOCK_SIZE_BYTES)
        self.pool = BlockPool(NUM_BLOCKS, max_reserved_blocks=NUM_BLOCKS)
        self.owners: dict[int, PushKey] = {}
        """Of reserved and quarantined blocks: whose push alone may write there."""
        self.transport = LoopbackTransport(world.hub, me, memoryview(self.memory))
        self.machine = PushReceiver(LIMITS, Checksums.FULL, num_layers=NUM_LAYERS)

    def reserve(self, key: PushKey, sender: PeerId) -> None:
        rng = self.world.rng
        num_blocks = rng.randint(0, 6)
        num_cached = rng.choice([0, 0, rng.randint(0, num_blocks)])
        num_granted = num_blocks - num_cached + rng.randint(0, 1)
        if self.pool.num_reservable < num_granted or not self.machine.can_grant:
            return
        reserved = self.pool.reserve(num_granted)
        rng.shuffle(reserved)
        blocks = [BlockGrant(num_cached + offset, *pair) for offset, pair in enumerate(reserved)]
        self.owners.update({block_id: key for block_id, _ in reserved})
        self.world.num_leases += 1
        grant = Grant(
            key=key,
            lease_id=self.world.num_leases,
            receiver=self.me,
            sender=sender,
            blocks=tuple(blocks),
            ttl_ns=LIMITS.lease_ttl_ns,
        )
        self.world.outcomes[key] = Outcome()
        self.run(self.machine.open(self.world.now_ns, grant))
        if self.world.outcomes[key].failed == 0:  # a grant that was refused at once is never handed out
            self.world.granted(grant, num_blocks)

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
                self.world.counts["malformed"] += 1

    def run(self, effects: list[PushEffect]) -> None:
        for effect in effects:
            self.perform(effect)
        self.machine.check_invariants()

    def perform(self, effect: PushEffect) -> None:
        if isinstance(effect, SendMessage):
            self.world.send(self.transport, effect)
        elif isinstance(effect, VerifyBlocks):
            self.world.later(self.world.rng.randrange(MILLISECOND_NS), lambda: self.verify(effect), self.me)
        elif isinstance(effect, PushArrived):
            self.commit(effect)
        elif isinstance(effect, PushFailed):
            self.world.outcomes[effect.key].failed += 1
        elif isinstance(effect, BlocksQuarantined):
            self.pool.quarantine(effect.block_ids)
        elif isinstance(effect, FencePeer):
            self.world.counts["fence"] += 1
            self.transport.fence(effect.peer)
        else:
            assert isinstance(effect, BlocksReleased)
            self.pool.release_reserved(effect.block_ids)
            for block_id in effect.block_ids:
                assert self.owners.pop(block_id) in (effect.key, SOMEBODY_ELSE)

    def verify(self, effect: VerifyBlocks) -> None:
        ranges = [LAYOUT.layers_slice(block_id, effect.layers) for block_id in effect.block_ids]
        sums = checksums(as_memory(self.memory), ranges)
        bad = tuple(b for b, s, e in zip(effect.block_ids, sums, effect.checksums, strict=True) if s != e)
        self.run(self.machine.on_verified(self.world.now_ns, effect.key, effect.chunk, bad))

    def commit(self, effect: PushArrived) -> None:
        now_ns = self.world.now_ns
        if effect.blocks and self.world.rng.random() < 0.02:
            self.grant_again(effect.blocks)
        try:
            self.pool.commit([(block.block_id, block.generation) for block in effect.blocks])
        except StaleGenerationError as error:
            self.run(self.machine.commit_failed(now_ns, effect.key, str(error)))
            return
        content = self.world.content[effect.key]
        assert effect.num_tokens == len(content)
        for block in effect.blocks:
            assert self.owners.pop(block.block_id) == effect.key, "a block that is somebody else's is committed"
            start = block.block_id * BLOCK_SIZE_BYTES
            if block.index < len(content):
                assert bytes(self.memory[start : start + BLOCK_SIZE_BYTES]) == content[block.index], "wrong bytes"
                self.world.counts["committed block"] += 1
        self.world.outcomes[effect.key].committed += 1
        self.run(self.machine.committed(now_ns, effect.key))
        for block in effect.blocks:
            self.world.later(self.world.rng.randrange(9 * MILLISECOND_NS), self.freeing(block.block_id), self.me)

    def grant_again(self, blocks: tuple[BlockGrant, ...]) -> None:
        """A bug of ours, say: a block is given to somebody else just before its commit, when nothing is in flight."""
        block_id = self.world.rng.choice(blocks).block_id
        self.pool.release_reserved([block_id])
        assert [again for again, _ in self.pool.reserve(1)] == [block_id]
        self.owners[block_id] = SOMEBODY_ELSE
        self.world.counts["grant again"] += 1

    def freeing(self, block_id: int) -> Action:
        return lambda: self.pool.release([block_id])
