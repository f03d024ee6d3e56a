"""Two gangs of ranks over a faulty network, with memories where late writes really land and a careless coordinator.

A history is a seed. Each rank has a memory, a transport and a machine (GangSender or GangReceiver); each gang's leader
keeps the blocks for all of its ranks and talks to them in order and without loss. Ranks sleep and die; a gang that
has lost a rank goes on for a while, as its processes would, and is then replaced by its next life.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kv_transfer.protocol.layout import KVLayout, LayerGroup
from kv_transfer.protocol.limits import MILLISECOND_NS
from kv_transfer.protocol.messages import (
    Grant,
    PeerId,
    PushKey,
)
from kv_transfer.protocol.plan import Copy
from kv_transfer.protocol.ranks import GangPair, RankPair, pair_gangs
from kv_transfer.transport.loopback import LoopbackFaults, LoopbackHub
from tests.support.gang_lives import Gang, Outcome, ReceivingGang, SendingGang
from tests.support.gang_ranks import NUM_BLOCKS, Action, Member, ReceivingMember, SendingMember

MAX_STEPS = 40_000


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
