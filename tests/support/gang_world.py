"""Two gangs of ranks over a faulty network, with memories where late writes really land and a careless coordinator.

A history is a seed. Each rank has a memory, a transport and a machine (GangSender or GangReceiver); each gang's leader
keeps the blocks for all of its ranks and talks to them in order and without loss. Ranks sleep and die; a gang that
has lost a rank goes on for a while, as its processes would, and is then replaced by its next life.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kv_transfer.checksum import as_memory, checksums
from kv_transfer.protocol.codec import MalformedMessageError, encode
from kv_transfer.protocol.codec import decode as decode_message
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
from kv_transfer.protocol.gang_sender import GangSender
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
from kv_transfer.protocol.plan import Copy
from kv_transfer.protocol.ranks import GangLayout, GangPair, Rank, RankPair, bad_blocks, pair_gangs, rank_of, rank_peer
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
from kv_transfer.transport.loopback import LoopbackFaults, LoopbackHub, LoopbackTransport
from tests.support.shares import share_of

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
MAX_STEPS = 40_000

Action = Callable[[], None]


def pick_faults(rng: random.Random) -> LoopbackFaults:
    """Quiet networks, networks with one fault, networks with all."""
    kinds = ("drop", "duplicate", "delay", "corrupt", "stray", "cut")
    chosen = rng.choice([(), *[(kind,) for kind in kinds], kinds])
    chances = {kind: rng.choice([0.01, 0.05, 0.15]) * (0.1 if kind == "cut" else 1) for kind in chosen}
    return LoopbackFaults(
        latency_ns=rng.choice([1_000, MILLISECOND_NS]),
        jitter_ns=rng.choice([0, MILLISECOND_NS, 8 * MILLISECOND_NS]),
        max_delay_ns=rng.choice([MILLISECOND_NS, 60 * MILLISECOND_NS]),
        **chances,
    )


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
        self.machine = GangSender(LIMITS, True, number, num_layers=self.world.layout.num_layers)
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
                self.transport.connect(effect.peer, b"")
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
            handle = self.transport.write(effect.peer, copies, encode(message), checksum=True)
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
        self.machine = GangReceiver(LIMITS, True, num_layers=self.world.layout.num_layers)

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


@dataclass(slots=True)
class Source:
    grant: Grant
    block_ids: list[int]
    content: list[bytes]
    num_given: int = 0
    num_failures: int = 0


class Gang:
    """One life of a worker: its ranks, and the blocks that its leader keeps for all of them."""

    def __init__(self, world: World, me: PeerId, num_ranks: int) -> None:
        self.world = world
        self.me = me
        self.layout = GangLayout(model="m", layout=world.layout, num_ranks=num_ranks)
        self.free = list(range(NUM_BLOCKS))
        self.is_failing = False
        self.has_ended = False

    @property
    def members(self) -> list[Member]:
        raise NotImplementedError

    def hear(self, rank: int, effect: PushEffect) -> None:
        raise NotImplementedError

    def lose(self, rank: int) -> None:
        """That rank's process dies; the others find out, and some time later the whole gang is replaced."""
        member = self.members[rank]
        if self.has_ended or member.is_dead:
            return
        member.is_dead = True
        self.world.asleep.pop(member.me, None)
        self.world.hub.crash(member.me)
        self.on_rank_lost(rank)
        if not self.is_failing:
            self.is_failing = True
            self.world.later(self.world.rng.randrange(100 * MILLISECOND_NS), lambda: self.world.replace_gang(self))

    def on_rank_lost(self, rank: int) -> None:
        raise NotImplementedError


class SendingGang(Gang):
    def __init__(self, world: World, me: PeerId, num_ranks: int) -> None:
        super().__init__(world, me, num_ranks)
        self.leader = SourceLeader(LIMITS)
        self.ranks = [SendingMember(self, number) for number in range(num_ranks)]
        self.sources: dict[PushKey, Source] = {}

    @property
    def members(self) -> list[Member]:
        return [*self.ranks]

    def start(self, grant: Grant, num_blocks: int) -> None:
        receivers = {rank: self.world.pairs.receiver_ranks(rank) for rank in range(len(self.ranks))}
        writing = [rank for rank, theirs in receivers.items() if theirs]
        if self.is_failing or len(self.free) < num_blocks:
            self.world.sender_stopped(grant)
            return
        effects = self.leader.open(grant.key, writing)
        if effects:
            self.world.sender_stopped(grant)
            return
        block_ids = [self.free.pop() for _ in range(num_blocks)]
        content = [self.world.rng.randbytes(self.world.layout.block_size_bytes) for _ in block_ids]
        self.sources[grant.key] = Source(grant, block_ids, content)
        self.world.content[grant.key] = content
        for rank in writing:
            self.tell_open(rank, grant, num_blocks, receivers[rank])
        self.compute(grant.key)

    def tell_open(self, rank: int, grant: Grant, num_blocks: int, receivers: dict[int, int]) -> None:
        member = self.ranks[rank]
        member.tell(lambda: member.run(member.machine.open(self.world.now_ns, grant, num_blocks, receivers)))

    def compute(self, key: PushKey) -> None:
        """Every rank computes one more chunk of the prompt; after the last one, the push is finished."""
        source = self.sources.get(key)
        if source is None or self.has_ended:
            return
        left = len(source.block_ids) - source.num_given
        count = self.world.rng.randint(1, left) if left else 0
        indices = range(source.num_given, source.num_given + count)
        source.num_given += count
        is_last = source.num_given == len(source.block_ids)
        for member in self.ranks:
            if self.world.pairs.receiver_ranks(member.number):
                member.tell(self.computing(member, source, indices, is_last))
        if not is_last:
            self.world.later(self.world.rng.randrange(4 * MILLISECOND_NS), lambda: self.compute(key))

    def computing(self, member: SendingMember, source: Source, indices: range, is_last: bool) -> Action:
        num_layers = self.world.layout.num_layers
        cut = self.world.rng.randrange(num_layers)
        layer_groups = (range(cut), range(cut, num_layers)) if cut else (None,)

        def compute() -> None:
            key, now_ns = source.grant.key, self.world.now_ns
            if key not in self.sources:
                return  # released meanwhile: the blocks may be somebody else's
            rank = Rank(member.number, len(self.ranks))
            for index in indices:
                member.put(source.block_ids[index], share_of(self.world.layout, source.content[index], rank))
            ready = [(index, source.block_ids[index]) for index in indices]
            for layers in layer_groups if ready else ():
                member.run(member.machine.blocks_ready(now_ns, key, ready, layers))
            if is_last:
                first = FirstToken(choice=0, position=0, token_id=7)
                member.run(member.machine.finish(now_ns, key, len(source.block_ids), [first]))

        return compute

    def hear(self, rank: int, effect: PushEffect) -> None:
        assert isinstance(effect, PushFailed | SourceReleased)
        self.world.deliver_to(self, lambda: self.run(self.leader.on_rank(rank, effect)))

    def on_rank_lost(self, rank: int) -> None:
        self.world.deliver_to(self, lambda: self.run(self.leader.on_rank_lost(rank, "its process died")))

    def cancel(self, key: PushKey) -> None:
        self.run(self.leader.cancel(key, "client left"))

    def run(self, effects: list[LeaderEffect]) -> None:
        for effect in effects:
            if isinstance(effect, CancelAtRank):
                self.tell_cancel(effect)
            elif isinstance(effect, PushFailed):
                self.sources[effect.key].num_failures += 1
            else:
                assert isinstance(effect, SourceReleased)
                self.release(effect)
        self.leader.check_invariants()

    def tell_cancel(self, effect: CancelAtRank) -> None:
        member = self.ranks[effect.rank]
        member.tell(lambda: member.run(member.machine.cancel(self.world.now_ns, effect.key, effect.reason)))

    def release(self, effect: SourceReleased) -> None:
        source = self.sources.pop(effect.key)
        assert effect.committed or source.num_failures == 1, "a push that fails says so once"
        for block_id in source.block_ids:
            for member in self.ranks:
                member.put(block_id, self.world.rng.randbytes(member.block_size))
            self.free.append(block_id)
        if effect.committed:
            assert self.world.outcomes[effect.key].committed == 1, "the receiver has not committed"
        elif effect.settled:
            self.world.sender_stopped(source.grant)


@dataclass(slots=True)
class Target:
    """A block at the receiver. `owner` None = free, or committed and not the writer's business any more."""

    generation: int = 0
    owner: PushKey | None = None
    is_quarantined: bool = False


class ReceivingGang(Gang):
    def __init__(self, world: World, me: PeerId, num_ranks: int) -> None:
        super().__init__(world, me, num_ranks)
        self.leader = TargetLeader(LIMITS)
        self.ranks = [ReceivingMember(self, number) for number in range(num_ranks)]
        self.blocks = [Target() for _ in range(NUM_BLOCKS)]
        self.open_keys: dict[PushKey, None] = {}

    @property
    def members(self) -> list[Member]:
        return [*self.ranks]

    def reserve(self, key: PushKey, sender: PeerId) -> None:
        rng = self.world.rng
        num_blocks = rng.randint(0, 6)
        num_cached = rng.choice([0, 0, rng.randint(0, num_blocks)])
        num_granted = num_blocks - num_cached + rng.randint(0, 1)
        if self.is_failing or len(self.free) < num_granted or key in self.world.outcomes:
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
        self.open_keys[key] = None
        self.world.num_blocks[key] = num_blocks
        self.run(self.leader.open(grant, range(len(self.ranks))))

    def tell_open(self, effect: OpenAtRank) -> None:
        key = effect.grant.key
        member, senders = self.ranks[effect.rank], self.world.pairs.sender_ranks(effect.rank)

        def open_there() -> None:
            member.run(member.machine.open(self.world.now_ns, effect.grant, senders))
            self.world.deliver_to(self, lambda: self.run(self.leader.on_opened(effect.rank, key)))

        member.tell(open_there)

    def hear(self, rank: int, effect: PushEffect) -> None:
        assert isinstance(effect, PushArrived | PushFailed | BlocksQuarantined | BlocksReleased)
        self.world.deliver_to(self, lambda: self.run(self.leader.on_rank(rank, effect)))

    def on_rank_lost(self, rank: int) -> None:
        self.world.deliver_to(self, lambda: self.run(self.leader.on_rank_lost(rank, "its process died")))

    def cancel(self, key: PushKey) -> None:
        self.run(self.leader.cancel(key, "client left"))

    def sender_stopped(self, key: PushKey) -> None:
        for member in self.ranks:
            self.tell_stopped(member, key)

    def tell_stopped(self, member: ReceivingMember, key: PushKey) -> None:
        member.tell(lambda: member.run(member.machine.on_sender_stopped(self.world.now_ns, key)))

    def run(self, effects: list[LeaderEffect]) -> None:
        for effect in effects:
            if isinstance(effect, CancelAtRank | CommitAtRank):
                self.tell_end(effect)
            elif isinstance(effect, OpenAtRank):
                self.tell_open(effect)
            elif isinstance(effect, HandOutGrant):
                self.world.granted(effect.grant)
            elif isinstance(effect, PushArrived):
                self.commit(effect)
            elif isinstance(effect, PushFailed):
                self.world.outcomes[effect.key].failed += 1
            elif isinstance(effect, BlocksQuarantined):
                for block_id in effect.block_ids:
                    self.blocks[block_id].is_quarantined = True
            else:
                assert isinstance(effect, BlocksReleased)
                del self.open_keys[effect.key]
                for block_id in effect.block_ids:
                    assert self.blocks[block_id].owner == effect.key
                    self.give_back(block_id)
        self.leader.check_invariants()

    def tell_end(self, effect: CancelAtRank | CommitAtRank) -> None:
        member = self.ranks[effect.rank]
        if isinstance(effect, CommitAtRank):
            member.tell(lambda: member.run(member.machine.committed(self.world.now_ns, effect.key)))
        else:
            member.tell(lambda: member.run(member.machine.cancel(self.world.now_ns, effect.key, effect.reason)))

    def commit(self, effect: PushArrived) -> None:
        if self.world.rng.random() < 0.02:
            self.run(self.leader.commit_failed(effect.key, "by the dice"))
            return
        content = self.world.content[effect.key]
        assert effect.num_tokens == effect.num_blocks == len(content)
        for block in effect.blocks:
            target = self.blocks[block.block_id]
            assert target.owner == effect.key and target.generation == block.generation
            assert not target.is_quarantined
            for member in self.ranks if block.index < len(content) else ():
                wanted = share_of(self.world.layout, content[block.index], Rank(member.number, len(self.ranks)))
                assert member.get(block.block_id) == wanted, "wrong bytes"
            target.owner = None
        self.world.outcomes[effect.key].committed += 1
        del self.open_keys[effect.key]
        self.run(self.leader.committed(effect.key))
        for block in effect.blocks:
            self.world.later(self.world.rng.randrange(9 * MILLISECOND_NS), self.freeing(block.block_id))

    def freeing(self, block_id: int) -> Action:
        return lambda: self.give_back(block_id)

    def give_back(self, block_id: int) -> None:
        self.blocks[block_id].owner = None
        self.blocks[block_id].is_quarantined = False
        self.free.append(block_id)


@dataclass(slots=True)
class Outcome:
    committed: int = 0
    failed: int = 0


@dataclass
class World:
    """The network, one life of each gang at a time, and the clock."""

    seed: int
    num_senders: int
    num_receivers: int
    num_kv_heads: int
    now_ns: int = 0
    num_leases: int = 0
    num_malformed: int = 0
    num_losses: int = 0
    outcomes: dict[PushKey, Outcome] = field(default_factory=dict)
    num_blocks: dict[PushKey, int] = field(default_factory=dict)
    content: dict[PushKey, list[bytes]] = field(default_factory=dict)
    writers: dict[int, tuple[PushKey, RankPair, range]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        shared = LayerGroup(num_layers=2, num_kv_heads=self.num_kv_heads, head_dim=2)
        single = LayerGroup(num_layers=1, num_kv_heads=1, head_dim=2)  # held by every rank
        self.layout = KVLayout(groups=(shared, single), block_size=1, dtype="bfloat16")
        self.hub = LoopbackHub(self.rng, pick_faults(self.rng), self.check_landing)
        self.timers: list[tuple[int, int, Action]] = []
        self.num_timers = 0
        self.asleep: dict[PeerId, None] = {}
        self.sending = SendingGang(self, PeerId("p0", 1), self.num_senders)
        self.receiving = ReceivingGang(self, PeerId("d0", 1), self.num_receivers)
        self.pairs: GangPair = pair_gangs(self.sending.layout, self.receiving.layout)
        self.trouble = self.rng.choice([0.0, 0.0, 0.1, 0.3])

    def pair(self, sender_rank: int, receiver_rank: int) -> RankPair:
        return self.pairs.pair(sender_rank, receiver_rank)

    # ---- lives -----------------------------------------------------------------------------------------------

    def replace_gang(self, gang: Gang) -> None:
        if gang.has_ended:
            return
        gang.has_ended = True
        for member in gang.members:
            self.asleep.pop(member.me, None)
            if not member.is_dead:
                member.is_dead = True
                self.hub.crash(member.me)
        again = PeerId(gang.me.name, gang.me.incarnation + 1)
        if gang is self.sending:
            self.sending = SendingGang(self, again, self.num_senders)
            return
        for key in self.receiving.open_keys:
            if not self.outcomes[key].failed:
                self.outcomes[key].failed += 1  # the life that would have told is gone
        self.receiving = ReceivingGang(self, again, self.num_receivers)

    def fenced(self, peer: PeerId) -> None:
        """A process that one receiver has shut out is gone, and its gang with it."""
        for member in self.sending.members:
            if member.me == peer:
                self.sending.lose(member.number)

    def make_trouble(self) -> None:
        member = self.rng.choice(self.everybody())
        what = self.rng.random()
        if what < 0.3:
            self.num_losses += 1
            member.gang.lose(member.number)
        elif what < 0.8:
            self.sleep(member, self.rng.randrange(150 * MILLISECOND_NS))
        else:
            self.hub.cut(
                self.rng.choice(self.sending.members).me, self.rng.choice(self.receiving.members).me, "trouble"
            )

    def sleep(self, member: Member, duration_ns: int) -> None:
        if member.is_awake:
            self.asleep[member.me] = None
            self.hub.pause(member.me)
            self.later(duration_ns, lambda: self.wake(member))

    def wake(self, member: Member) -> None:
        if member.me in self.asleep and not member.is_dead:
            del self.asleep[member.me]
            self.hub.resume(member.me)

    # ---- the coordinator's part ------------------------------------------------------------------------------

    def begin(self, key: PushKey) -> None:
        self.receiving.reserve(key, self.sending.me)
        if self.rng.random() < 0.3:
            self.later(self.rng.randrange(15 * MILLISECOND_NS), lambda: self.cancel(key))

    def granted(self, grant: Grant) -> None:
        """Tells the sender, most of the time, and sooner or later."""
        num_blocks = self.num_blocks[grant.key]
        if self.rng.random() < 0.03:
            return
        late_ns = self.rng.randrange(200 * MILLISECOND_NS) if self.rng.random() < 0.2 else 0
        self.later(self.rng.randrange(5 * MILLISECOND_NS) + late_ns, lambda: self.begin_prefill(grant, num_blocks))

    def begin_prefill(self, grant: Grant, num_blocks: int) -> None:
        if self.sending.me == grant.sender:
            self.sending.start(grant, num_blocks)

    def cancel(self, key: PushKey) -> None:
        for gang in (self.sending, self.receiving):
            if self.rng.random() > 0.3:  # else this leg is not told
                self.deliver_to(gang, self.cancelling(gang, key))

    def cancelling(self, gang: SendingGang | ReceivingGang, key: PushKey) -> Action:
        return lambda: gang.cancel(key)

    def sender_stopped(self, grant: Grant) -> None:
        """The sender's word reaches the receiver through the coordinator, if it does."""
        if self.rng.random() < 0.5 and self.receiving.me == grant.receiver:
            gang = self.receiving
            self.deliver_to(gang, lambda: gang.sender_stopped(grant.key))

    # ---- time ------------------------------------------------------------------------------------------------

    def later(self, after_ns: int, action: Action) -> None:
        self.num_timers += 1
        self.timers.append((self.now_ns + after_ns, self.num_timers, action))

    def deliver_to(self, gang: Gang, action: Action) -> None:
        """To a gang's leader, in the order of sending."""

        def act() -> None:
            if not gang.has_ended:
                action()

        self.later(0, act)

    def run(self) -> None:
        for number in range(self.rng.randint(3, 10)):
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

    def beginning(self, number: int) -> Action:
        return lambda: self.begin(PushKey(f"r{number}", 1))

    def next_due_ns(self) -> int | None:
        dues: list[int | None] = [timer[0] for timer in self.timers]
        dues.append(self.hub.next_due_ns())
        for member in self.members_awake():
            dues.append(member.inbox[0][0] if member.inbox else None)
            dues.append(member.machine.next_deadline_ns())
        return min((due for due in dues if due is not None), default=None)

    def everybody(self) -> list[SendingMember | ReceivingMember]:
        return [*self.sending.ranks, *self.receiving.ranks]

    def members_awake(self) -> list[SendingMember | ReceivingMember]:
        return [member for member in self.everybody() if member.is_awake]

    def step(self) -> None:
        self.hub.advance(self.now_ns)
        due = sorted((timer for timer in self.timers if timer[0] <= self.now_ns), key=lambda timer: timer[:2])
        self.timers = [timer for timer in self.timers if timer[0] > self.now_ns]
        for _, _, action in due:
            action()
        for member in self.members_awake():
            for event in member.transport.poll():
                if member.is_awake:
                    member.handle(event)
            while member.is_awake and member.inbox and member.inbox[0][0] <= self.now_ns:
                member.inbox.popleft()[1]()
            if member.is_awake:
                member.run(member.machine.on_tick(self.now_ns))

    # ---- what must hold --------------------------------------------------------------------------------------

    def check_landing(self, handle: int, source: PeerId, target: PeerId, copy: Copy) -> None:
        """A byte lands: it must be of the heads that its writer owes, in a block that is still the writer's."""
        key, pair, layers = self.writers[handle]
        block_id, offset = divmod(copy.target_bytes, pair.target_layout.block_size_bytes)
        assert (offset, copy.size_bytes) in [(piece.target_bytes, piece.size_bytes) for piece in pair.pieces(layers)]
        assert target in [member.me for member in self.receiving.members]
        owner = self.receiving.blocks[block_id].owner
        assert owner == key, f"a write of {key} by {source} lands in block {block_id} of {owner}"

    def check_rest(self) -> None:
        for member in self.everybody():
            assert member.is_awake and not member.inbox
            assert member.machine.num_pushes == 0 and member.machine.leases(self.now_ns) == []
        assert self.sending.leader.num_pushes == self.receiving.leader.num_pushes == 0
        assert not self.sending.sources and not self.receiving.open_keys
        assert sorted(self.sending.free) == sorted(self.receiving.free) == list(range(NUM_BLOCKS)), "a block is lost"
        for key, outcome in self.outcomes.items():
            assert outcome.committed + outcome.failed <= 2 and outcome.committed <= 1, key
            assert outcome.committed + outcome.failed >= 1, f"{key} ended without a word"
