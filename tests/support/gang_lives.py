"""Lives of two gangs: their ranks, and the blocks that each leader keeps for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_transfer.protocol.gang_leader import (
    CancelAtRank,
    CommitAtRank,
    HandOutGrant,
    LeaderEffect,
    OpenAtRank,
    SourceLeader,
    TargetLeader,
)
from kv_transfer.protocol.limits import MILLISECOND_NS
from kv_transfer.protocol.messages import (
    BlockGrant,
    BlocksQuarantined,
    BlocksReleased,
    FirstToken,
    Grant,
    PeerId,
    PushArrived,
    PushEffect,
    PushFailed,
    PushKey,
    SourceReleased,
)
from kv_transfer.protocol.ranks import GangLayout, Rank
from tests.support.gang_ranks import LIMITS, NUM_BLOCKS, Action, Member, ReceivingMember, SendingMember
from tests.support.shares import share_of

if TYPE_CHECKING:
    from tests.support.gang_world import World


@dataclass(slots=True)
class Outcome:
    committed: int = 0
    failed: int = 0


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
