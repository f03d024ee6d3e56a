"""The nccl transport for real: two processes, a GPU each. NCCL refuses two ranks on one GPU, so it takes two."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from kv_transfer.transport.base import (
    Connected,
    Copy,
    Fenced,
    Notified,
    PeerGone,
    PeerId,
    TransportEvent,
    WriteCompleted,
    WriteFailed,
)
from kv_transfer.transport.nccl import ChecksumUnavailableError, NcclTransport
from kv_transfer.transport.nccl_library import CudaNccl, why_not_nccl

BLOCK = 360 * 1024
POOL = 64 * BLOCK
TIMEOUT_S = 60.0
SPAWN = multiprocessing.get_context("spawn")
DECODE = PeerId("decode-0", 3)
PREFILL = PeerId("prefill-0", 5)
WRITER_GPU = 0
RECEIVER_GPU = 1


@pytest.fixture(autouse=True)
def gpu() -> None:
    """In place of this folder's own fixture: FlashInfer is not needed here, but a second GPU is."""
    reason = why_not_nccl()
    if reason is not None:
        pytest.skip(f"no NCCL to test: {reason}")
    if torch.cuda.device_count() < 2:
        pytest.skip("no NCCL to test: it takes two GPUs, and there is one")


def expected_pool(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, POOL, dtype=np.uint8)


def child_main(me: PeerId, device: int, seed: int, pipe: Connection) -> None:
    """A worker process: does what it is told over `pipe`, reports its transport's events there."""
    start = torch.from_numpy(expected_pool(seed)) if seed else torch.zeros(POOL, dtype=torch.uint8)
    pool = start.to(f"cuda:{device}")
    torch.cuda.synchronize(device)
    transport = NcclTransport(me, CudaNccl(pool))
    pipe.send(transport.endpoint())
    poller = select.poll()
    poller.register(transport.fileno(), select.POLLIN)
    poller.register(pipe.fileno(), select.POLLIN)
    while True:
        poller.poll()
        for event in transport.poll():
            pipe.send(event)
        if not pipe.poll():
            continue
        try:
            method, args, options = pipe.recv()
        except EOFError:
            break
        if method == "close":
            break
        if method == "hammer":
            hammer(transport, *args)
        elif method == "read":
            offset, size = args
            pipe.send(("result", pool[offset : offset + size].cpu().numpy()))
        elif method == "clear":
            pool.zero_()
            torch.cuda.synchronize(device)
            pipe.send(("result", None))
        else:
            try:
                pipe.send(("result", getattr(transport, method)(*args, **options)))
            except ChecksumUnavailableError as error:
                pipe.send(("result", error))
    transport.close()
    pipe.close()


def hammer(transport: NcclTransport, peer: PeerId) -> None:
    """Writes the whole pool over and over, until the connection ends; then waits to be killed."""
    num_pending = 0
    while True:
        while num_pending < 4:
            transport.write(peer, [Copy(0, 0, POOL)], b"")
            num_pending += 1
        select.select([transport.fileno()], [], [])
        for event in transport.poll():
            if isinstance(event, PeerGone):
                signal.pause()
            num_pending -= isinstance(event, WriteCompleted)


@dataclass
class Child:
    """The parent's handle on a worker process."""

    me: PeerId
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    endpoint: bytes
    events: list[TransportEvent]

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        self.pipe.send((method, args, options))
        while True:
            said = self.receive()
            if isinstance(said, tuple) and said[0] == "result":
                return said[1]
            self.events.append(said)

    def tell(self, method: str, *args: Any) -> None:
        self.pipe.send((method, args, {}))

    def receive(self) -> Any:
        assert self.pipe.poll(TIMEOUT_S), f"{self.me} says nothing"
        return self.pipe.recv()

    def wait_for(self, wanted: type[TransportEvent]) -> Any:
        while True:
            for position, event in enumerate(self.events):
                if isinstance(event, wanted):
                    return self.events.pop(position)
            self.events.append(self.receive())

    def kill(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


StartChild = Callable[..., Child]


@pytest.fixture
def start_child() -> Iterator[StartChild]:
    children: list[Child] = []

    def start(me: PeerId, device: int, seed: int = 0) -> Child:
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=child_main, args=(me, device, seed, theirs), daemon=True)
        process.start()
        theirs.close()
        assert ours.poll(TIMEOUT_S), f"{me} does not start"
        child = Child(me, process, ours, ours.recv(), [])
        children.append(child)
        return child

    yield start
    for child in children:
        if child.process.is_alive():
            child.process.kill()
        child.process.join(TIMEOUT_S)
        child.pipe.close()
        child.process.close()


@pytest.fixture
def writer(start_child: StartChild) -> Child:
    return start_child(PREFILL, WRITER_GPU, seed=1)


@pytest.fixture
def receiver(start_child: StartChild) -> Child:
    return start_child(DECODE, RECEIVER_GPU)


def connect(writer: Child, receiver: Child) -> None:
    writer.call("connect", receiver.me, receiver.endpoint)
    assert writer.wait_for(Connected) == Connected(peer=receiver.me)
    assert receiver.wait_for(Connected) == Connected(peer=writer.me)


def test_blocks_arrive_before_their_notification(writer: Child, receiver: Child) -> None:
    connect(writer, receiver)
    copies = [Copy(3 * BLOCK, 7 * BLOCK, BLOCK), Copy(0, 2 * BLOCK, BLOCK), Copy(100, BLOCK + 8, 1001)]
    handle = writer.call("write", DECODE, copies, b"chunk")
    assert receiver.wait_for(Notified) == Notified(peer=PREFILL, payload=b"chunk")
    source = expected_pool(1)
    for copy in copies:
        arrived = receiver.call("read", copy.target_bytes, copy.size_bytes)
        assert np.array_equal(arrived, source[copy.source_bytes : copy.source_bytes + copy.size_bytes])
    assert not receiver.call("read", 0, BLOCK).any(), "a byte landed beside its block"
    assert writer.wait_for(WriteCompleted) == WriteCompleted(handle=handle)
    receiver.call("write", PREFILL, [], b"committed")
    assert writer.wait_for(Notified) == Notified(peer=DECODE, payload=b"committed")


def test_both_directions_at_once(start_child: StartChild, writer: Child) -> None:
    other = start_child(DECODE, RECEIVER_GPU, seed=2)
    connect(writer, other)
    connect(other, writer)
    half = POOL // 2
    for number in range(50):
        writer.call("write", DECODE, [Copy(0, 0, half)], bytes([number]))
        other.call("write", PREFILL, [Copy(half, half, half)], bytes([number]))
    for life in (writer, other):
        assert [life.wait_for(Notified).payload for _ in range(50)] == [bytes([number]) for number in range(50)]
    assert np.array_equal(other.call("read", 0, half), expected_pool(1)[:half])
    assert np.array_equal(writer.call("read", half, half), expected_pool(2)[half:])


def test_fence_ends_a_writer_in_full_flight(writer: Child, receiver: Child) -> None:
    connect(writer, receiver)
    writer.tell("hammer", DECODE)
    for _ in range(20):
        receiver.wait_for(Notified)
    receiver.call("fence", PREFILL)
    assert receiver.wait_for(Fenced) == Fenced(peer=PREFILL)
    receiver.call("clear")
    time.sleep(0.2)  # nothing may land: a real late write needs real time
    assert not receiver.call("read", 0, POOL).any()


def test_fence_of_a_stopped_writer_holds_when_it_wakes(writer: Child, receiver: Child) -> None:
    connect(writer, receiver)
    writer.tell("hammer", DECODE)
    receiver.wait_for(Notified)
    writer.kill(signal.SIGSTOP)
    receiver.call("fence", PREFILL)
    assert receiver.wait_for(Fenced) == Fenced(peer=PREFILL)
    receiver.call("clear")
    writer.kill(signal.SIGCONT)
    time.sleep(0.5)
    assert not receiver.call("read", 0, POOL).any()


def test_killed_writer_is_noticed_and_its_successor_welcome(
    start_child: StartChild, writer: Child, receiver: Child
) -> None:
    connect(writer, receiver)
    writer.tell("hammer", DECODE)
    receiver.wait_for(Notified)
    writer.kill(signal.SIGKILL)
    assert receiver.wait_for(PeerGone).peer == PREFILL
    receiver.call("fence", PREFILL)
    assert receiver.wait_for(Fenced) == Fenced(peer=PREFILL)
    successor = start_child(PeerId(PREFILL.name, PREFILL.incarnation + 1), WRITER_GPU, seed=3)
    connect(successor, receiver)
    receiver.events.clear()
    successor.call("write", DECODE, [Copy(0, 0, POOL)], b"new")
    assert receiver.wait_for(Notified) == Notified(peer=successor.me, payload=b"new")
    assert np.array_equal(receiver.call("read", 0, POOL), expected_pool(3))


def test_killed_receiver_fails_the_writes_in_flight(writer: Child, receiver: Child) -> None:
    connect(writer, receiver)
    receiver.kill(signal.SIGSTOP)
    handle = writer.call("write", DECODE, [Copy(0, 0, POOL)], b"never")
    receiver.kill(signal.SIGKILL)
    assert writer.wait_for(PeerGone).peer == DECODE
    assert writer.wait_for(WriteFailed).handle == handle
    writer.tell("close")
    writer.process.join(TIMEOUT_S)
    assert writer.process.exitcode == 0


def test_checksums_are_refused(writer: Child, receiver: Child) -> None:
    connect(writer, receiver)
    refused = writer.call("write", DECODE, [Copy(0, 0, BLOCK)], b"", num_sums=1)
    assert isinstance(refused, ChecksumUnavailableError)


def test_close_is_in_order_and_prompt(writer: Child, receiver: Child) -> None:
    connect(writer, receiver)
    for child, other in ((writer, receiver), (receiver, None)):
        child.tell("close")
        child.process.join(TIMEOUT_S)
        assert child.process.exitcode == 0
        if other is not None:
            assert other.wait_for(PeerGone).peer == child.me
