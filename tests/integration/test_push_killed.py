"""Workers killed and stopped in mid-push, with real processes: who is left keeps its promises.

Blocks come back by deadline and fence, a restarted peer is taken as a new life, every end of a push is defined, and a
sender whose receiver fails lets its blocks go.

The sender is throttled, so that a signal lands between the first write and the commit; each test counts that it does.
After each loss: nothing stays held, other requests' pushes arrive bit-equal, and blocks that were granted again keep
what was pushed into them, whatever the stopped sender does when it wakes up.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kv_transfer.protocol.limits import SECOND_NS
from kv_transfer.protocol.messages import PeerId, PushKey
from kv_transfer.transport.backends import why_unavailable
from tests.support.push_process import LIMITS, WIRES, CommittedHere, FailedHere, PushWorker, Wire, Wrote
from tests.support.soak import NUM_KILLED_PUSHES, NUM_KILLED_REMOTE_PUSHES

VICTIM_BLOCKS = 48
OTHER_BLOCKS = 24
QUICK_BLOCKS = 6
MAX_DELAY_S = 0.150
"""From the first write to the signal: less than a third of what the victim takes; the other push is under way, too."""
WAKE_UP_S = 0.05
"""What a stopped process is given to do harm when it wakes up: a real late write needs real time."""
LONG_TTL_NS = 20 * SECOND_NS
"""Of pushes that are to arrive, also on a machine that stands still for a second. The leases of victims are short."""
MIN_LANDED_SHARE = 0.9


class Fleet:
    """Two senders, of which one is slow, and two receivers. Who is lost is replaced by a next life, started ahead."""

    def __init__(self, wire: Wire) -> None:
        self.num_histories = NUM_KILLED_PUSHES if wire.copies_itself else NUM_KILLED_REMOTE_PUSHES
        self._wire = wire
        self._numbers = itertools.count(1)
        self._spares: dict[str, PushWorker] = {}
        self._connected: set[tuple[PeerId, PeerId]] = set()
        self.workers = {name: self._start(name, 1) for name in ("slow", "sender", "receiver", "witness")}

    def __getitem__(self, name: str) -> PushWorker:
        return self.workers[name]

    def start_spare(self, name: str) -> None:
        self._spares[name] = self._start(name, self.workers[name].me.incarnation + 1)

    def replace(self, name: str) -> None:
        self.workers[name].close()
        self.workers[name] = self._spares.pop(name)

    def connect(self, *pairs: tuple[str, str]) -> None:
        for sender, receiver in pairs:
            pair = (self[sender].me, self[receiver].me)
            if pair not in self._connected:
                self._connected.add(pair)
                self.push(sender, receiver, 1).check_arrived()

    def push(
        self,
        sender: str,
        receiver: str,
        num_blocks: int,
        *,
        is_paced: bool = False,
        ttl_ns: int = LONG_TTL_NS,
    ) -> Push:
        number = next(self._numbers)
        push = Push(PushKey(f"r{number}", 1), number, self[sender], self[receiver])
        assert push.sender.endpoint, "a lease runs from its grant, so its sender must have started"
        grant = push.receiver.call("reserve", push.key, number, push.sender.me, num_blocks, ttl_ns)
        push.block_ids = tuple(block.block_id for block in grant.blocks)
        push.sender.call("push", grant, push.receiver.endpoint, push.seed, is_paced)
        return push

    def close(self) -> None:
        for worker in [*self.workers.values(), *self._spares.values()]:
            worker.close()

    def _start(self, name: str, incarnation: int) -> PushWorker:
        return PushWorker(PeerId(name, incarnation), self._wire, is_slow=name == "slow")


class Push:
    """One that is under way, or was."""

    def __init__(self, key: PushKey, seed: int, sender: PushWorker, receiver: PushWorker) -> None:
        self.key = key
        self.seed = seed
        self.sender = sender
        self.receiver = receiver
        self.block_ids: tuple[int, ...] = ()

    def is_written_to(self) -> bool:
        """Waits for its first write. False if its short lease ran out before that."""
        return isinstance(self.sender.wait_for(Wrote, FailedHere, key=self.key), Wrote)

    def is_committed(self) -> bool:
        """How it ends at the receiver."""
        return isinstance(self.receiver.wait_for(CommittedHere, FailedHere, key=self.key), CommittedHere)

    def check_arrived(self, *, keeps: bool = False) -> None:
        assert self.is_committed(), f"{self.key}: {self.receiver.wait_for(FailedHere, key=self.key).reason}"
        assert self.receiver.call("differing_blocks", self.key, self.seed) == []
        if not keeps:
            self.receiver.call("release", self.key)

    def check_unchanged(self) -> None:
        assert self.receiver.call("differing_blocks", self.key, self.seed) == [], "a byte changed after the commit"
        self.receiver.call("release", self.key)


@pytest.fixture(
    params=[wire for wire in WIRES if wire.copies_itself or NUM_KILLED_REMOTE_PUSHES], ids=lambda wire: wire.name
)
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    reason = why_unavailable(request.param.name)
    if reason is not None:
        pytest.skip(reason)
    fleet = Fleet(request.param)
    yield fleet
    fleet.close()


def check_share(num_landed: int, num_histories: int) -> None:
    print(f"{num_landed} of {num_histories} signals landed between the first write and the commit")
    assert num_landed >= int(MIN_LANDED_SHARE * num_histories)


@pytest.mark.bad_day(1, 5, 7)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_sender_is_lost_in_mid_push(fleet: Fleet, number: signal.Signals) -> None:
    delays = random.Random(1)
    num_landed = 0
    for _ in range(fleet.num_histories):
        fleet.start_spare("slow")
        fleet.connect(("slow", "receiver"), ("sender", "receiver"))
        other = fleet.push("sender", "receiver", OTHER_BLOCKS, is_paced=True)
        victim = fleet.push("slow", "receiver", VICTIM_BLOCKS, ttl_ns=LIMITS.lease_ttl_ns)
        if not victim.is_written_to():
            other.check_arrived()
            fleet["receiver"].wait_until_nothing_is_held()
            fleet.replace("slow")
            continue
        time.sleep(delays.uniform(0, MAX_DELAY_S))
        victim.sender.signal(number)
        fleet.push("sender", "receiver", QUICK_BLOCKS).check_arrived()
        other.check_arrived()
        if victim.is_committed():
            victim.check_arrived()
        else:
            num_landed += 1
            fleet["receiver"].wait_until_nothing_is_held()
            successor = fleet.push("sender", "receiver", VICTIM_BLOCKS + OTHER_BLOCKS + QUICK_BLOCKS)
            assert set(victim.block_ids) <= set(successor.block_ids), "the lost push's blocks are not granted again"
            successor.check_arrived(keeps=True)
            with suppress(ProcessLookupError):  # the fence may be its death
                victim.sender.signal(signal.SIGCONT)
            time.sleep(WAKE_UP_S)
            successor.check_unchanged()
        fleet["sender"].wait_until_nothing_is_held()
        fleet.replace("slow")
    check_share(num_landed, fleet.num_histories)


@pytest.mark.bad_day(5, 7, 16)
def test_receiver_is_killed_in_mid_push(fleet: Fleet) -> None:
    delays = random.Random(2)
    num_landed = 0
    for _ in range(fleet.num_histories):
        fleet.start_spare("receiver")
        fleet.connect(("slow", "receiver"), ("slow", "witness"), ("sender", "witness"))
        other = fleet.push("sender", "witness", OTHER_BLOCKS, is_paced=True)
        victim = fleet.push("slow", "receiver", VICTIM_BLOCKS, ttl_ns=LIMITS.lease_ttl_ns)
        if not victim.is_written_to():
            other.check_arrived()
            fleet.replace("receiver")
            continue
        time.sleep(delays.uniform(0, MAX_DELAY_S))
        victim.receiver.signal(signal.SIGKILL)
        if not victim.receiver.has_said(CommittedHere, victim.key):
            num_landed += 1
            victim.sender.wait_for(FailedHere, key=victim.key)
        other.check_arrived()
        for sender in ("slow", "sender"):
            fleet.push(sender, "witness", QUICK_BLOCKS).check_arrived()
            fleet[sender].wait_until_nothing_is_held()
        fleet["witness"].wait_until_nothing_is_held()
        fleet.replace("receiver")
    check_share(num_landed, fleet.num_histories)


@pytest.mark.bad_day(7, 16)
def test_receiver_is_stopped_in_mid_push(fleet: Fleet) -> None:
    """Both leases run out, each on its side's own clock, and a receiver that wakes up gives back what it reserved.

    It may fence the sender for it, whose next life then follows."""
    delays = random.Random(3)
    num_landed = 0
    for _ in range(fleet.num_histories):
        fleet.start_spare("slow")
        fleet.connect(("slow", "receiver"), ("slow", "witness"), ("sender", "witness"))
        other = fleet.push("sender", "witness", OTHER_BLOCKS, is_paced=True)
        victim = fleet.push("slow", "receiver", VICTIM_BLOCKS, ttl_ns=LIMITS.lease_ttl_ns)
        if not victim.is_written_to():
            other.check_arrived()
            fleet["receiver"].wait_until_nothing_is_held()
            fleet.replace("slow")
            continue
        time.sleep(delays.uniform(0, MAX_DELAY_S))
        victim.receiver.signal(signal.SIGSTOP)
        if not victim.receiver.has_said(CommittedHere, victim.key):
            num_landed += 1
            victim.sender.wait_for(FailedHere, key=victim.key)
        other.check_arrived()
        for sender in ("slow", "sender"):
            fleet.push(sender, "witness", QUICK_BLOCKS).check_arrived()
            fleet[sender].wait_until_nothing_is_held()
        victim.receiver.signal(signal.SIGCONT)
        if victim.is_committed():
            victim.check_arrived()
        fleet["receiver"].wait_until_nothing_is_held()
        fleet["witness"].wait_until_nothing_is_held()
        fleet.replace("slow")
        fleet.connect(("slow", "receiver"))  # which proves that it takes pushes again
    check_share(num_landed, fleet.num_histories)
