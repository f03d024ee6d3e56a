"""Pushes over a faulty network, with memories where late writes really land and a careless coordinator.

A history is a seed: a few prefill and decode lives (`push_lives`), pushes that begin, are cancelled or paused at any
moment, lives that are killed, sleep and start again at their old address, and a network that drops, delays, duplicates,
reorders, corrupts and cuts. It ends when nobody has anything left to do. It must hold throughout that a committed block
equals its source bit for bit and that no byte lands in a block that its writer has no right to any more; and at the end
that every push has ended on both sides, every lease is released, every block is free, and nobody waits.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from engine.core.block_pool import BlockState
from kv_transfer.protocol.codec import encode
from kv_transfer.protocol.limits import MILLISECOND_NS
from kv_transfer.protocol.messages import Grant, PeerId, PushChunk, PushKey, SendMessage
from kv_transfer.protocol.plan import Copy
from kv_transfer.transport.base import UnknownPeerError
from kv_transfer.transport.loopback import LoopbackFaults, LoopbackHub, LoopbackTransport
from tests.support.push_lives import BLOCK_SIZE_BYTES, LAYOUT, LIMITS, NUM_BLOCKS, Action, Decode, Outcome, Prefill

MAX_STEPS = 20_000
FAULTS = (
    "drop",
    "delay",
    "duplicate",
    "reorder",
    "corrupt",
    "stray",
    "cut",
    "sender killed",
    "sender killed unnoticed",
    "receiver killed",
    "receiver started again",
    "old life dialled",
    "sender paused",
    "receiver paused",
    "late write",
    "write into quarantine",
    "shut_out",
    "grant again",
)
"""What is injected, as `World.counts` names it once a history is over."""


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


@dataclass
class World:
    """The network, the lives, and a careless coordinator."""

    seed: int
    now_ns: int = 0
    num_leases: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    outcomes: dict[PushKey, Outcome] = field(default_factory=dict)
    content: dict[PushKey, list[bytes]] = field(default_factory=dict)
    writers: dict[int, PushChunk] = field(default_factory=dict)
    held_back: set[int] = field(default_factory=set)
    """Writes that were in flight when their sender was paused."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.hub = LoopbackHub(self.rng, pick_faults(self.rng), self.check_landing)
        self.timers: list[tuple[int, int, Action, PeerId | None]] = []
        self.num_timers = 0
        self.prefills: dict[str, Prefill] = {}
        self.decodes: dict[str, Decode] = {}
        self.asleep: dict[PeerId, list[Action]] = {}
        for number in range(self.rng.randint(1, 2)):
            self.start(PeerId(f"p{number}", 1))
        for number in range(self.rng.randint(1, 2)):
            self.start(PeerId(f"d{number}", 1))
        self.trouble = self.rng.choice([0.0, 0.0, 0.1, 0.4])
        self.num_ambushes = 0

    # ---- lives -----------------------------------------------------------------------------------------------

    def start(self, me: PeerId) -> None:
        if me.name.startswith("p"):
            self.prefills[me.name] = Prefill(self, me)
        else:
            self.decodes[me.name] = Decode(self, me)
            self.counts["receiver started again"] += me.incarnation > 1

    def life(self, peer: PeerId) -> Prefill | Decode | None:
        worker = self.prefills.get(peer.name) or self.decodes.get(peer.name)
        return worker if worker is not None and worker.me == peer else None

    def fenced(self, peer: PeerId) -> None:
        """A life that one receiver has shut out is replaced, at once or after it may have woken up and written on."""
        after_ns = self.rng.choice([0, self.rng.randrange(200 * MILLISECOND_NS)])
        self.later(after_ns, lambda: self.kill(peer, "sender replaced"), peer)

    def kill(self, peer: PeerId, count_as: str) -> None:
        """The next life follows at the same address: at once, some time later, or never."""
        if self.life(peer) is None:
            return
        is_noticed = self.rng.random() < 0.7
        self.counts[count_as] += 1
        self.counts["sender killed unnoticed"] += not is_noticed and peer.name in self.prefills
        self.asleep.pop(peer, None)
        self.hub.crash(peer, is_noticed=is_noticed)
        if self.prefills.pop(peer.name, None) is None:
            for key in self.outcomes_at(peer):
                self.outcomes[key].failed += 1  # the life that would have told is gone
            del self.decodes[peer.name]
        again = PeerId(peer.name, peer.incarnation + 1)
        if self.rng.random() < 0.9:
            self.later(self.rng.choice([0, self.rng.randrange(100 * MILLISECOND_NS)]), lambda: self.start(again))

    def outcomes_at(self, peer: PeerId) -> list[PushKey]:
        machine = self.decodes[peer.name].machine
        return [view.key for view in machine.leases(self.now_ns) if view.state == "receiving"]

    def note_dialled(self, peer: PeerId) -> None:
        decode = self.decodes.get(peer.name)
        self.counts["old life dialled"] += decode is not None and decode.me > peer

    def sleep(self, peer: PeerId, duration_ns: int) -> None:
        if peer not in self.asleep:
            self.asleep[peer] = []
            self.hub.pause(peer)
            prefill = self.prefills.get(peer.name)
            self.counts["receiver paused" if prefill is None else "sender paused"] += 1
            self.held_back.update(() if prefill is None else prefill.writes)
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
        if not self.decodes or not self.prefills:
            return
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
        """Now, or as soon as something is in flight again."""
        workers = self.workers()
        if self.rng.random() < 0.5:
            self.num_ambushes += 1
        elif workers:
            self.trouble_for(self.rng.choice(workers))

    def wrote(self, prefill: Prefill, receiver: PeerId) -> None:
        """Whoever has just posted a write, or is written to, may be in for trouble."""
        decode = self.life(receiver)
        if self.num_ambushes and decode is not None:
            self.num_ambushes -= 1
            victim = self.rng.choice([prefill, prefill, decode])
            after_ns = self.rng.choice([0, self.rng.randrange(MILLISECOND_NS)])
            self.later(after_ns, lambda: self.trouble_for(victim), victim.me)

    def trouble_for(self, worker: Prefill | Decode) -> None:
        what = self.rng.random()
        if what < 0.3:
            self.kill(worker.me, "sender killed" if isinstance(worker, Prefill) else "receiver killed")
        elif what < 0.8:
            # Shorter than a lease, until it has run out, and until the life may have been fenced for it.
            longest_ns = self.rng.choice([LIMITS.lease_ttl_ns // 4, LIMITS.lease_ttl_ns, 4 * LIMITS.lease_ttl_ns])
            self.sleep(worker.me, self.rng.randrange(longest_ns))
        else:
            for prefill in self.prefills.values():
                for decode in self.decodes.values():
                    self.hub.cut(prefill.me, decode.me, "trouble")
                    self.counts["cut"] += 1

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
        self.counts.update(self.hub.num_injected)

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
        decode, message = self.decodes[target.name], self.writers[handle]
        block_id = copy.target_bytes // BLOCK_SIZE_BYTES
        owner = decode.owners.get(block_id)
        assert decode.me == target, f"a write of {message.key} to {target} lands at {decode.me}"
        assert owner == message.key, f"a write of {message.key} lands in block {block_id} of {owner}"
        self.counts["late write"] += handle in self.held_back
        self.counts["write into quarantine"] += decode.pool.state(block_id) is BlockState.QUARANTINED
        assert (copy.target_bytes, copy.size_bytes) == LAYOUT.layers_slice(block_id, message.layers)

    def check_rest(self) -> None:
        for decode in self.decodes.values():
            assert decode.machine.num_pushes == 0 and decode.machine.leases(self.now_ns) == [], "a lease is left"
            assert decode.machine.next_deadline_ns() is None, "somebody waits"
            decode.pool.check_invariants()
            assert decode.pool.counts().free == NUM_BLOCKS and not decode.owners, "a block is lost"
        for prefill in self.prefills.values():
            assert prefill.machine.num_pushes == 0 and prefill.machine.leases(self.now_ns) == [], "a lease is left"
            assert prefill.machine.next_deadline_ns() is None and not prefill.writes, "somebody waits"
            assert all(source.is_released for source in prefill.sources.values())
            assert sorted(prefill.free) == list(range(NUM_BLOCKS))
        for key, outcome in self.outcomes.items():
            assert outcome.committed + outcome.failed <= 2 and outcome.committed <= 1, key
            assert outcome.committed + outcome.failed >= 1, f"{key} ended without a word"


def run_history(seed: int) -> World:
    """The history of a seed, to its end."""
    world = World(seed)
    try:
        world.run()
    except Exception as error:
        error.add_note(f"replay with: run_history({seed})")
        raise
    return world
