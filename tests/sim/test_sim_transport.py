"""The simulated push transport keeps the contract of kv_transfer.transport.base, faults included."""

from __future__ import annotations

import dataclasses

import pytest

from cluster.sim.fabric import DataFaults, Fabric, Family
from cluster.sim.kernel import MILLISECOND_NS, SECOND_NS, Kernel
from cluster.sim.kv_memory import KVMemory, checksum
from cluster.sim.network import Network
from cluster.sim.process import Process
from cluster.sim.trace import Trace
from cluster.sim.transport import Delivered, SimTransport
from kv_transfer.protocol.messages import BlockGrant, LeaseRenew, PushChunk, PushKey
from kv_transfer.transport.base import (
    Connected,
    ConnectFailed,
    Copy,
    Fenced,
    PeerGone,
    PeerId,
    UnknownPeerError,
    WriteCompleted,
    WriteFailed,
)

SENDER, RECEIVER = PeerId("p0", 1), PeerId("d0", 1)
NUM_BLOCKS, BLOCK_SIZE = 8, 2


class Rig:
    """A sender and a receiver; `seen` are the events of each, in order."""

    def __init__(self, family: Family, seed: int = 1) -> None:
        self.kernel = Kernel(seed, max_events=10_000, trace=Trace())
        self.network = Network(self.kernel)
        self.fabric = Fabric(self.kernel, self.network, family)
        self.seen: dict[PeerId, list[object]] = {SENDER: [], RECEIVER: []}
        self.sender, self.sender_memory = self._make(SENDER, 11)
        self.receiver, self.receiver_memory = self._make(RECEIVER, 22)

    def _make(self, me: PeerId, rubbish: int) -> tuple[SimTransport, KVMemory]:
        memory = KVMemory(NUM_BLOCKS, BLOCK_SIZE, rubbish)
        process = Process(self.kernel, me.name, me.incarnation)
        transport = SimTransport(self.fabric, process, me, memory, lambda: self.seen[me].extend(transport.poll()))
        return transport, memory

    def run(self, duration_ns: int = 10 * SECOND_NS) -> None:
        self.kernel.run_until(self.kernel.now_ns + duration_ns)

    def connect(self) -> None:
        self.sender.connect(RECEIVER, self.receiver.endpoint())
        self.run(10 * MILLISECOND_NS)
        assert self.seen == {SENDER: [Connected(peer=RECEIVER)], RECEIVER: [Connected(peer=SENDER)]}
        for events in self.seen.values():
            events.clear()

    def write(self, source: int = 0, target: int = 5) -> int:
        size = self.sender_memory.block_size_bytes
        return self.sender.write(RECEIVER, [Copy(source * size, target * size, size)], make_chunk(target))

    @property
    def has_landed(self) -> bool:
        return self.receiver_memory.block(5) == self.sender_memory.block(0)


def make_chunk(target: int) -> PushChunk:
    return PushChunk(
        key=PushKey("r", 1),
        lease_id=1,
        rank=0,
        chunk=0,
        blocks=(BlockGrant(0, target, 1),),
        first_layer=0,
        num_layers=1,
        summed=(0,),
    )


@pytest.fixture(params=list(Family))
def rig(request: pytest.FixtureRequest) -> Rig:
    rig = Rig(request.param)
    rig.connect()
    return rig


def test_a_write_lands_and_then_its_message_arrives_with_the_sums(rig: Rig) -> None:
    handle = rig.write()
    rig.run()
    assert rig.seen[SENDER] == [WriteCompleted(handle=handle)]
    sums = (checksum(rig.sender_memory.block(0)),)
    message = dataclasses.replace(make_chunk(5), checksums=sums)
    assert rig.seen[RECEIVER] == [Delivered(peer=SENDER, message=message)]
    assert rig.has_landed


def test_a_message_without_data(rig: Rig) -> None:
    rig.sender.write(RECEIVER, (), LeaseRenew(lease_ids=(1,), sent_ns=3))
    rig.run()
    assert rig.seen[RECEIVER] == [Delivered(peer=SENDER, message=LeaseRenew(lease_ids=(1,), sent_ns=3))]


def test_a_life_that_is_not_connected_is_unknown(rig: Rig) -> None:
    with pytest.raises(UnknownPeerError):
        rig.sender.write(PeerId("d0", 2), (), make_chunk(5))


def test_a_connection_to_another_life_or_a_dead_one_fails(rig: Rig) -> None:
    rig.sender.connect(PeerId("d0", 2), b"d0#2")
    rig.run()
    assert rig.seen[SENDER] == [ConnectFailed(peer=PeerId("d0", 2), reason="no such endpoint")]


def test_a_stopped_receiver_lets_a_connection_time_out() -> None:
    rig = Rig(Family.REMOTE)
    rig.receiver.process.pause()
    rig.sender.connect(RECEIVER, rig.receiver.endpoint())
    rig.run()
    rig.receiver.process.resume()
    rig.run()
    assert rig.seen == {SENDER: [ConnectFailed(peer=RECEIVER, reason="timed out")], RECEIVER: []}


def test_writes_of_a_stopped_sender_land_when_it_continues_unless_fenced() -> None:
    rig = Rig(Family.SHARED_MEMORY)
    rig.connect()
    rig.write()
    rig.sender.process.pause()
    rig.run()
    assert not rig.has_landed
    rig.sender.process.resume()
    assert rig.has_landed


def test_the_fence_of_shared_memory_is_the_senders_death() -> None:
    rig = Rig(Family.SHARED_MEMORY)
    rig.connect()
    rig.write()
    rig.sender.process.pause()
    rig.receiver.fence(SENDER)
    rig.run()
    assert rig.seen[RECEIVER] == [Fenced(peer=SENDER)]
    assert not rig.sender.process.alive
    assert not rig.has_landed


def test_a_remote_write_lands_although_its_sender_is_dead_unless_fenced() -> None:
    rig = Rig(Family.REMOTE)
    rig.connect()
    rig.write()
    rig.sender.process.exit("killed")
    rig.run()
    assert rig.has_landed

    rig = Rig(Family.REMOTE)
    rig.connect()
    rig.fabric.faults.slow_write = 1.0
    rig.write()
    rig.receiver.fence(SENDER)
    rig.run()
    assert not rig.has_landed
    assert rig.sender.process.alive
    assert Fenced(peer=SENDER) in rig.seen[RECEIVER]
    assert PeerGone(peer=RECEIVER, reason="fenced by peer") in rig.seen[SENDER]


def test_a_fenced_life_is_not_let_in_again(rig: Rig) -> None:
    rig.receiver.fence(SENDER)
    rig.run()
    rig.seen[SENDER].clear()
    if rig.sender.process.alive:
        rig.sender.connect(RECEIVER, rig.receiver.endpoint())
        rig.run()
        assert rig.seen[SENDER] == [ConnectFailed(peer=RECEIVER, reason="refused: fenced")]


def test_the_fence_of_a_life_that_never_connected_kills_nobody(rig: Rig) -> None:
    stranger = PeerId("p9", 1)
    rig.receiver.fence(stranger)
    rig.receiver.fence(stranger)
    rig.run()
    rig.receiver.fence(stranger)
    rig.run()
    assert rig.seen[RECEIVER] == [Fenced(peer=stranger), Fenced(peer=stranger)]
    assert rig.sender.process.alive


@pytest.mark.parametrize("fault", [field.name for field in dataclasses.fields(DataFaults)])
@pytest.mark.parametrize("family", list(Family))
def test_each_fault_does_what_it_says(fault: str, family: Family) -> None:
    rig = Rig(family)
    rig.connect()
    setattr(rig.fabric.faults, fault, 1.0)
    rig.write()
    rig.run()
    notices = [event for event in rig.seen[RECEIVER] if isinstance(event, Delivered)]
    failures = [event for event in rig.seen[SENDER] if isinstance(event, WriteFailed)]
    assert len(notices) == {"lose_notice": 0, "repeat_notice": 2, "fail_write": 0}.get(fault, len(notices))
    assert bool(failures) == (fault == "fail_write")
    assert fault not in ("corrupt", "skip_data") or not rig.has_landed
    if fault == "cut":
        assert PeerGone(peer=RECEIVER, reason="connection lost") in rig.seen[SENDER]


def test_a_cancelled_write_of_a_local_sender_does_not_land() -> None:
    rig = Rig(Family.SHARED_MEMORY)
    rig.connect()
    handle = rig.write()
    rig.sender.cancel(handle)
    rig.run()
    assert not rig.has_landed
    assert [type(event) for event in rig.seen[SENDER]] == [WriteFailed]
