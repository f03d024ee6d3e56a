"""The nccl transport through random histories, by seed: whatever happens, every write ends once and no byte strays."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest

from kv_transfer.transport.base import (
    Connected,
    Copy,
    Fenced,
    Notified,
    PeerGone,
    PeerId,
    WriteCompleted,
    WriteFailed,
)
from kv_transfer.transport.nccl_library import RECEIVER_RANK
from kv_transfer.transport.nccl_limits import NcclLimits
from tests.support.nccl_world import POOL, STEP_NS, Life, World

NUM_SEEDS = 60
NUM_ACTIONS = 120
NUM_WRITERS = 3
SLOT = 4096
"""Each write has a slot of its own in the receiver's pool, so that whatever lands in it is known to be its."""
DECODE = PeerId("decode-0", 1)
WAITS = [*((num, STEP_NS) for num in (1, 1, 2, 5, 10, 30, 100)), (60, 100 * STEP_NS)]
"""How long an action is left alone, as (steps, length of one): some waits outlast every limit on silence."""
SETTLE_STEPS = 30_000


class History:
    """Three writers and a receiver, what was asked of them, and what may never happen."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World()
        limits = NcclLimits(
            max_receiving_groups=self.rng.randint(1, 4), max_group_bytes=self.rng.choice([700, 1 << 20])
        )
        self.receiver = self.world.life(DECODE, limits=limits)
        self.writers = [
            self.world.life(PeerId(f"prefill-{index}", 1), seed=index + 1, limits=limits)
            for index in range(NUM_WRITERS)
        ]
        self.slots: dict[tuple[PeerId, int], int] = {}
        """(writer, handle) -> its slot."""
        self.next_slot = 0
        self.next_number = 0
        self.sealed: dict[int, bytes] = {}
        """Slots that nothing may change any more, with what they hold."""
        self.num_seen: dict[PeerId, int] = defaultdict(int)
        self.last_number: dict[PeerId, int] = {}
        self.ended: dict[tuple[PeerId, int], str] = {}
        self.fenced: set[PeerId] = set()
        self.dead: set[PeerId] = set()

    def slot_bytes(self, slot: int) -> bytes:
        return self.receiver.memory[slot * SLOT : (slot + 1) * SLOT].tobytes()

    def act(self) -> None:
        writer = self.rng.choice(self.writers)
        action = self.rng.choices(
            [
                self.write,
                self.notify,
                self.cancel,
                self.connect,
                self.pause,
                self.break_down,
                self.end_life,
                self.hinder,
            ],
            [12, 4, 2, 4, 2, 1, 1, 4],
        )[0]
        action(writer)
        num_steps, step_ns = self.rng.choice(WAITS)
        for _ in range(num_steps):
            self.world.step(step_ns)
            self.check_events()
        self.check_sealed()

    def write(self, writer: Life) -> None:
        link = writer.node._outbound.get(DECODE)
        if (link is None or link.writing is None) and self.rng.random() < 0.9:
            self.connect(writer)
            return
        if writer.is_stopped or self.next_slot == POOL // SLOT:
            return
        slot, self.next_slot = self.next_slot, self.next_slot + 1
        size = SLOT // 4
        copies = [Copy(slot * SLOT + part * size, slot * SLOT + part * size, size) for part in (2, 0, 3, 1)]
        self.next_number += 1
        # Known before the call: it may end within it.
        self.slots[writer.me, writer._handles + 1] = slot
        writer.write(DECODE, copies, self.next_number.to_bytes(4, "little") + slot.to_bytes(4, "little"))

    def notify(self, writer: Life) -> None:
        if not writer.is_stopped:
            self.next_number += 1
            writer.notify(DECODE, self.next_number.to_bytes(4, "little"))

    def cancel(self, writer: Life) -> None:
        if not writer.is_stopped:
            writer.node.cancel(self.rng.randint(1, writer._handles + 1))

    def connect(self, writer: Life) -> None:
        if writer.is_stopped:
            return
        if self.rng.random() < 0.1:
            writer.node.disconnect(DECODE, self.world.now_ns)
        writer.connect(self.receiver)

    def pause(self, writer: Life) -> None:
        life = self.rng.choice([writer, writer, self.receiver])
        life.is_stopped = not life.is_stopped and self.rng.random() < 0.5

    def break_down(self, writer: Life) -> None:
        if self.world.fabric.communicators:
            communicator = self.rng.choice(self.world.fabric.communicators[-4:])
            communicator.error = communicator.error or "it broke"

    def end_life(self, writer: Life) -> None:
        """A fence, or a death and then a fence; a successor comes in either case."""
        if self.receiver.is_stopped:
            return
        if self.rng.random() < 0.5:
            self.world.end(writer)
            self.dead.add(writer.me)
        self.receiver.fence(writer.me)
        if writer.me in self.dead:
            successor = self.world.life(PeerId(writer.me.name, writer.me.incarnation + 1), seed=self.rng.randint(1, 9))
            self.writers[self.writers.index(writer)] = successor

    def hinder(self, writer: Life) -> None:
        fabric = self.world.fabric
        fabric.is_moving = self.rng.random() < 0.8
        fabric.may_join = self.rng.random() < 0.9
        fabric.step_bytes = self.rng.choice([10, 1000, 1 << 16])
        fabric.num_settling_polls = self.rng.choice([0, 1, 20])
        fabric.num_abort_polls = self.rng.choice([0, 1, 50])

    def check_sealed(self) -> None:
        for slot, content in self.sealed.items():
            assert self.slot_bytes(slot) == content, f"slot {slot} has changed"

    def check_events(self) -> None:
        for writer in [*self.writers, *(life for life in self.world.lives if life.me != DECODE)]:
            self.check_ends(writer)
        events = self.receiver.events[self.num_seen[DECODE] :]
        self.num_seen[DECODE] = len(self.receiver.events)
        for event in events:
            if isinstance(event, Notified):
                self.check_notified(event)
            elif isinstance(event, Fenced):
                self.fenced.add(event.peer)
                for (peer, _), slot in self.slots.items():
                    if peer == event.peer:
                        self.sealed[slot] = self.slot_bytes(slot)

    def check_ends(self, writer: Life) -> None:
        events = writer.events[self.num_seen[writer.me] :]
        self.num_seen[writer.me] = len(writer.events)
        for event in events:
            if not isinstance(event, WriteCompleted | WriteFailed):
                assert not isinstance(event, Fenced)
                continue
            key = (writer.me, event.handle)
            assert key not in self.ended, f"{key} ended twice"
            self.ended[key] = type(event).__name__
            slot = self.slots[key]
            if isinstance(event, WriteCompleted):
                assert self.slot_bytes(slot) == writer.memory[slot * SLOT : (slot + 1) * SLOT].tobytes()
            if isinstance(event, WriteCompleted) or event.quiesced:
                self.sealed[slot] = self.slot_bytes(slot)

    def check_notified(self, event: Notified) -> None:
        number, slot = (int.from_bytes(event.payload[at : at + 4], "little") for at in (0, 4))
        assert number > self.last_number.get(event.peer, 0), "out of order, or twice"
        self.last_number[event.peer] = number
        assert event.peer not in self.fenced
        writer = next((life for life in self.world.lives if life.me == event.peer), None)
        if len(event.payload) == 8 and writer is not None:
            assert self.slot_bytes(slot) == writer.memory[slot * SLOT : (slot + 1) * SLOT].tobytes()

    def finish(self) -> None:
        """Everything may go on; then every write has ended, and nothing is held."""
        fabric = self.world.fabric
        fabric.is_moving = fabric.may_join = True
        for life in self.world.lives:
            life.is_stopped = False
        for _ in range(SETTLE_STEPS):
            self.world.step()
            self.check_events()
            if not any(life.node.is_busy or life.node._ending for life in self.world.lives):
                break
        self.check_sealed()
        for key in self.slots:
            assert key in self.ended or key[0] in self.dead, f"{key} never ended"
        assert not self.receiver.node._fencing and self.receiver.node._permits.num_taken == 0
        for communicator in fabric.of_rank(RECEIVER_RANK):
            assert communicator.has_stopped or communicator.is_dead or not communicator.runs, "a receive is left"
        gone, connected = (Counter(event.peer for event in self.receiver.of(kind)) for kind in (PeerGone, Connected))
        assert gone <= connected, "who never connected is not gone"


@pytest.mark.parametrize("first_seed", range(0, NUM_SEEDS, 10))
def test_random_histories(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 10):
        history = History(seed)
        try:
            for _ in range(NUM_ACTIONS):
                history.act()
            history.finish()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        finally:
            for life in history.world.lives:
                life.node.give_up()
