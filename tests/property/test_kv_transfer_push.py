"""PushSender and PushReceiver over a faulty network, with memories where late writes really land.

Each history is a seed: a few prefill and decode lives, pushes that begin, are cancelled or paused at any moment, lives
that crash or sleep, and a network that drops, delays, duplicates, reorders, corrupts and cuts. A history ends when
both sides are at rest. It must hold throughout that a committed block equals its source bit for bit, that no byte
lands in a block that its writer has no right to any more, and that every push ends on both sides.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

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
    PushChunk,
    PushEffect,
    PushFailed,
    PushKey,
    SendMessage,
    SourceReleased,
    VerifyBlocks,
    WriteBlocks,
)
from kv_transfer.protocol.plan import Copy, plan_block_copies
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
from kv_transfer.transport.loopback import LoopbackFaults, LoopbackHub, LoopbackTransport, endpoint_of

NUM_HISTORIES = 400
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
MAX_STEPS = 20_000

Action = Callable[[], None]


def pick_faults(rng: random.Random) -> LoopbackFaults:
    """Quiet networks, networks with one fault, networks with all."""
    kinds = ("drop", "duplicate", "delay", "corrupt", "stray", "cut")
    chosen = rng.choice([(), *[(kind,) for kind in kinds], kinds])
    chances = {kind: rng.choice([0.02, 0.1, 0.3]) * (0.1 if kind == "cut" else 1) for kind in chosen}
    return LoopbackFaults(
        latency_ns=rng.choice([1_000, MILLISECOND_NS]),
        jitter_ns=rng.choice([0, MILLISECOND_NS, 8 * MILLISECOND_NS]),
        max_delay_ns=rng.choice([MILLISECOND_NS, 60 * MILLISECOND_NS]),
        **chances,
    )


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
class Target:
    """A reserved block at the receiver. `owner` None = free, or committed and not the writer's business any more."""

    generation: int = 0
    owner: PushKey | None = None


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
        self.world.num_groups += not is_whole
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
                self.world.num_malformed += 1

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
            handle = self.transport.write(effect.peer, copies, encode(effect.message), checksum=True)
        except UnknownPeerError:
            # The connection broke and its PeerGone is on its way.
            self.world.later(0, lambda: self.write_refused(effect.write_id), self.me)
            return
        self.writes[handle] = effect.write_id
        self.handles[effect.write_id] = handle
        self.world.writers[handle] = effect.message

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
        self.pool = bytearray(NUM_BLOCKS * BLOCK_SIZE_BYTES)
        self.blocks = [Target() for _ in range(NUM_BLOCKS)]
        self.free = list(range(NUM_BLOCKS))
        self.quarantined: dict[int, PushKey] = {}
        self.transport = LoopbackTransport(world.hub, me, memoryview(self.pool))
        self.machine = PushReceiver(LIMITS, Checksums.FULL, num_layers=NUM_LAYERS)

    def reserve(self, key: PushKey, sender: PeerId) -> None:
        rng = self.world.rng
        num_blocks = rng.randint(0, 6)
        num_cached = rng.choice([0, 0, rng.randint(0, num_blocks)])
        num_granted = num_blocks - num_cached + rng.randint(0, 1)
        if len(self.free) < num_granted or not self.machine.can_grant:
            return
        rng.shuffle(self.free)
        blocks = []
        for offset in range(num_granted):
            block_id = self.free.pop()
            target = self.blocks[block_id]
            target.generation += 1
            target.owner = key
            blocks.append(BlockGrant(num_cached + offset, block_id, target.generation))
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
                self.world.num_malformed += 1

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
            self.quarantined.update(dict.fromkeys(effect.block_ids, effect.key))
        elif isinstance(effect, FencePeer):
            self.transport.fence(effect.peer)
        else:
            assert isinstance(effect, BlocksReleased)
            for block_id in effect.block_ids:
                assert self.blocks[block_id].owner == effect.key
                self.quarantined.pop(block_id, None)
                self.give_back(block_id)

    def verify(self, effect: VerifyBlocks) -> None:
        ranges = [LAYOUT.layers_slice(block_id, effect.layers) for block_id in effect.block_ids]
        sums = checksums(as_memory(self.pool), ranges)
        bad = tuple(b for b, s, e in zip(effect.block_ids, sums, effect.checksums, strict=True) if s != e)
        self.run(self.machine.on_verified(self.world.now_ns, effect.key, effect.chunk, bad))

    def commit(self, effect: PushArrived) -> None:
        now_ns = self.world.now_ns
        if self.world.rng.random() < 0.02:
            self.run(self.machine.commit_failed(now_ns, effect.key, "by the dice"))
            return
        content = self.world.content[effect.key]
        assert effect.num_tokens == len(content)
        for block in effect.blocks:
            target = self.blocks[block.block_id]
            assert target.owner == effect.key and target.generation == block.generation
            assert block.block_id not in self.quarantined
            start = block.block_id * BLOCK_SIZE_BYTES
            if block.index < len(content):
                assert bytes(self.pool[start : start + BLOCK_SIZE_BYTES]) == content[block.index], "wrong bytes"
            target.owner = None
        self.world.outcomes[effect.key].committed += 1
        self.run(self.machine.committed(now_ns, effect.key))
        for block in effect.blocks:
            self.world.later(self.world.rng.randrange(9 * MILLISECOND_NS), self.freeing(block.block_id), self.me)

    def freeing(self, block_id: int) -> Action:
        return lambda: self.give_back(block_id)

    def give_back(self, block_id: int) -> None:
        self.blocks[block_id].owner = None
        self.free.append(block_id)


@dataclass
class World:
    """The network, the lives, and a careless coordinator."""

    seed: int
    now_ns: int = 0
    num_leases: int = 0
    num_malformed: int = 0
    num_groups: int = 0
    """Times that some layers of a chunk were ready before others."""
    outcomes: dict[PushKey, Outcome] = field(default_factory=dict)
    content: dict[PushKey, list[bytes]] = field(default_factory=dict)
    writers: dict[int, PushChunk] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.hub = LoopbackHub(self.rng, pick_faults(self.rng), self.check_landing)
        self.timers: list[tuple[int, int, Action, PeerId | None]] = []
        self.num_timers = 0
        self.prefills: dict[str, Prefill] = {}
        self.decodes: dict[str, Decode] = {}
        self.asleep: dict[PeerId, list[Action]] = {}
        for number in range(self.rng.randint(1, 2)):
            self.start_prefill(PeerId(f"p{number}", 1))
        for number in range(self.rng.randint(1, 2)):
            self.start_decode(PeerId(f"d{number}", 1))
        self.trouble = self.rng.choice([0.0, 0.0, 0.1, 0.3])

    # ---- lives -----------------------------------------------------------------------------------------------

    def start_prefill(self, me: PeerId) -> None:
        self.prefills[me.name] = Prefill(self, me)

    def start_decode(self, me: PeerId) -> None:
        self.decodes[me.name] = Decode(self, me)

    def life(self, peer: PeerId) -> Prefill | Decode | None:
        worker = self.prefills.get(peer.name) or self.decodes.get(peer.name)
        return worker if worker is not None and worker.me == peer else None

    def fenced(self, peer: PeerId) -> None:
        """A life that one receiver has shut out is replaced."""
        if self.life(peer) is not None:
            self.restart(peer)

    def restart(self, peer: PeerId) -> None:
        self.asleep.pop(peer, None)
        self.hub.crash(peer)
        again = PeerId(peer.name, peer.incarnation + 1)
        if peer.name in self.prefills:
            self.start_prefill(again)
        else:
            for key in self.outcomes_at(peer):
                self.outcomes[key].failed += 1  # the life that would have told is gone
            self.start_decode(again)

    def outcomes_at(self, peer: PeerId) -> list[PushKey]:
        machine = self.decodes[peer.name].machine
        return [view.key for view in machine.leases(self.now_ns) if view.state == "receiving"]

    def sleep(self, peer: PeerId, duration_ns: int) -> None:
        if peer not in self.asleep:
            self.asleep[peer] = []
            self.hub.pause(peer)
            self.later(duration_ns, lambda: self.wake(peer))

    def wake(self, peer: PeerId) -> None:
        if peer in self.asleep and self.life(peer) is not None:
            self.hub.resume(peer)
            for action in self.asleep.pop(peer):
                self.later(self.rng.randrange(MILLISECOND_NS), action, peer)

    # ---- the coordinator's part ------------------------------------------------------------------------------

    def beginning(self, number: int) -> Action:
        return lambda: self.begin(PushKey(f"r{number}", 1))

    def begin(self, key: PushKey) -> None:
        decode = self.rng.choice(list(self.decodes.values()))
        prefill = self.rng.choice(list(self.prefills.values()))
        self.deliver(decode.me, lambda: decode.reserve(key, prefill.me))
        if self.rng.random() < 0.3:
            self.later(self.rng.randrange(15 * MILLISECOND_NS), lambda: self.cancel(key, decode.me, prefill.me))

    def granted(self, grant: Grant, num_blocks: int) -> None:
        """Tells the sender, most of the time, and sooner or later."""
        if self.rng.random() < 0.03:
            return
        delay_ns = self.rng.choice(
            [0, self.rng.randrange(5 * MILLISECOND_NS), self.rng.randrange(200 * MILLISECOND_NS)]
        )
        self.later(delay_ns, lambda: self.begin_prefill(grant, num_blocks), grant.sender)

    def begin_prefill(self, grant: Grant, num_blocks: int) -> None:
        prefill = self.life(grant.sender)
        if not isinstance(prefill, Prefill):
            return
        prefill.start(grant, num_blocks)
        source = prefill.sources.get(grant.key)
        if source is not None:
            self.content[grant.key] = source.content
            prefill.compute(grant.key)

    def cancel(self, key: PushKey, *peers: PeerId) -> None:
        for peer in peers:
            if self.rng.random() < 0.3:
                continue  # this leg is not told, or much later
            self.deliver(peer, self.cancelling(key, peer))

    def cancelling(self, key: PushKey, peer: PeerId) -> Action:
        def cancel() -> None:
            worker = self.life(peer)
            if worker is not None:
                worker.run(worker.machine.cancel(self.now_ns, key, "client left"))

        return cancel

    def sender_stopped(self, grant: Grant) -> None:
        """The sender's word reaches the receiver through the coordinator, if it does."""
        if self.rng.random() < 0.5:
            self.deliver(grant.receiver, lambda: self.relay_stopped(grant))

    def relay_stopped(self, grant: Grant) -> None:
        decode = self.life(grant.receiver)
        if isinstance(decode, Decode):
            decode.run(decode.machine.on_sender_stopped(self.now_ns, grant.key))

    def make_trouble(self) -> None:
        worker = self.rng.choice(self.workers())
        what = self.rng.random()
        if what < 0.3:
            self.restart(worker.me)
        elif what < 0.8:
            self.sleep(worker.me, self.rng.randrange(150 * MILLISECOND_NS))
        else:
            for prefill in self.prefills.values():
                for decode in self.decodes.values():
                    self.hub.cut(prefill.me, decode.me, "trouble")

    # ---- time ------------------------------------------------------------------------------------------------

    def later(self, after_ns: int, action: Action, peer: PeerId | None = None) -> None:
        """Runs `action` then; as something that life `peer` does, if given."""
        self.num_timers += 1
        self.timers.append((self.now_ns + after_ns, self.num_timers, action, peer))

    def deliver(self, peer: PeerId, action: Action) -> None:
        self.later(self.rng.randrange(MILLISECOND_NS), action, peer)

    def send(self, transport: LoopbackTransport, effect: SendMessage) -> None:
        try:
            transport.write(effect.peer, [], encode(effect.message))
        except UnknownPeerError:
            return  # as the protocol says: swallowed

    def run(self) -> None:
        for number in range(self.rng.randint(3, 14)):
            at_ns = self.rng.randrange(60 * MILLISECOND_NS)
            self.later(at_ns, self.beginning(number))
            if self.rng.random() < self.trouble:
                self.later(at_ns + self.rng.randrange(20 * MILLISECOND_NS), self.make_trouble)
        for _ in range(MAX_STEPS):
            due_ns = self.next_due_ns()
            if due_ns is None:
                break
            self.now_ns = max(self.now_ns, due_ns)
            self.step()
        else:
            raise AssertionError("the history does not end")
        self.check_rest()

    def next_due_ns(self) -> int | None:
        dues: list[int | None] = [timer[0] for timer in self.timers]
        dues.append(self.hub.next_due_ns())
        dues += [worker.machine.next_deadline_ns() for worker in self.workers_awake()]
        return min((due for due in dues if due is not None), default=None)

    def workers_awake(self) -> list[Prefill | Decode]:
        return [worker for worker in self.workers() if worker.me not in self.asleep]

    def workers(self) -> list[Prefill | Decode]:
        return [*self.prefills.values(), *self.decodes.values()]

    def step(self) -> None:
        self.hub.advance(self.now_ns)
        due = sorted((timer for timer in self.timers if timer[0] <= self.now_ns), key=lambda timer: timer[:2])
        self.timers = [timer for timer in self.timers if timer[0] > self.now_ns]
        for _, _, action, peer in due:
            if peer is not None and self.life(peer) is None:
                continue
            if peer in self.asleep:
                self.asleep[peer].append(action)
            else:
                action()
        for worker in self.workers_awake():
            for event in worker.transport.poll():
                if self.life(worker.me) is worker and worker.me not in self.asleep:
                    worker.handle(event)
            if self.life(worker.me) is worker:
                worker.run(worker.machine.on_tick(self.now_ns))

    # ---- what must hold --------------------------------------------------------------------------------------

    def check_landing(self, handle: int, source: PeerId, target: PeerId, copy: Copy) -> None:
        """Bytes land: in the layers that were meant, of a block that is still the writer's, reserved or quarantined."""
        decode = self.life(target)
        assert isinstance(decode, Decode)
        block_id = copy.target_bytes // BLOCK_SIZE_BYTES
        owner, message = decode.blocks[block_id].owner, self.writers[handle]
        assert owner == message.key, f"a write of {message.key} lands in block {block_id} of {owner}"
        assert (copy.target_bytes, copy.size_bytes) == LAYOUT.layers_slice(block_id, message.layers)

    def check_rest(self) -> None:
        for decode in self.decodes.values():
            assert decode.machine.num_pushes == 0 and decode.machine.leases(self.now_ns) == []
            assert sorted(decode.free) == list(range(NUM_BLOCKS)), "a block is lost"
            assert not decode.quarantined
        for prefill in self.prefills.values():
            assert prefill.machine.num_pushes == 0 and not prefill.writes
            assert all(source.is_released for source in prefill.sources.values())
            assert sorted(prefill.free) == list(range(NUM_BLOCKS))
        for key, outcome in self.outcomes.items():
            assert outcome.committed + outcome.failed <= 2 and outcome.committed <= 1, key
            assert outcome.committed + outcome.failed >= 1, f"{key} ended without a word"


def run_history(seed: int) -> World:
    world = World(seed)
    try:
        world.run()
    except Exception as error:
        error.add_note(f"replay with: run_history({seed})")
        raise
    return world


@pytest.mark.parametrize("start", range(0, NUM_HISTORIES, 50))
def test_histories(start: int) -> None:
    for seed in range(start, start + 50):
        run_history(seed)


def test_histories_see_commits_failures_and_damage() -> None:
    """The histories would prove nothing if everything, or nothing, went wrong."""
    worlds = [run_history(seed) for seed in range(1000, 1060)]
    outcomes = [outcome for world in worlds for outcome in world.outcomes.values()]
    committed = sum(outcome.committed for outcome in outcomes)
    assert committed > len(outcomes) // 4
    assert sum(outcome.failed for outcome in outcomes) > len(outcomes) // 10
    assert sum(world.num_malformed for world in worlds) > 0
    assert sum(world.num_groups for world in worlds) > 100
