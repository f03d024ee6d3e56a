"""The shm transport between real processes: bytes, order, deaths, fences, and what is left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_transfer.checksum import as_memory, checksum
from kv_transfer.transport.base import (
    Connected,
    ConnectFailed,
    Copy,
    Fenced,
    Notified,
    PeerGone,
    PeerId,
    TransportEvent,
    UnknownPeerError,
    WriteCompleted,
    WriteFailed,
)
from kv_transfer.transport.shm import MAX_NOTIFY_BYTES, ShmTransport
from kv_transfer.transport.shm_pool import PoolMemory, PoolMemoryError, available_memory_bytes, create_pool, map_pool
from kv_transfer.transport.shm_wire import Endpoint, Hello, encode_endpoint, encode_frame

BLOCK = 360 * 1024
POOL = 16 * BLOCK
TIMEOUT_S = 30.0
SPAWN = multiprocessing.get_context("spawn")
DECODE = PeerId("decode-0", 3)
PREFILL = PeerId("prefill-0", 5)


def fill(pool: PoolMemory, seed: int) -> None:
    as_memory(pool.mapping)[:] = np.random.default_rng(seed).integers(0, 256, pool.size_bytes, dtype=np.uint8)


def child_main(me: PeerId, seed: int, pipe: Connection) -> None:
    """A worker process: does what it is told over `pipe`, reports its transport's events there."""
    pool = create_pool(POOL)
    fill(pool, seed)
    transport = ShmTransport(me, pool)
    pipe.send(transport.endpoint())
    poller = select.poll()
    poller.register(transport.fileno(), select.POLLIN)
    poller.register(pipe.fileno(), select.POLLIN)
    while True:
        poller.poll()
        for event in transport.poll():
            pipe.send(event)
        if pipe.poll():
            try:
                method, args, options = pipe.recv()
            except EOFError:
                break
            if method == "close":
                break
            if method == "hammer":
                hammer(transport, *args)
            else:
                pipe.send(("result", getattr(transport, method)(*args, **options)))
    transport.close()
    pool.close()
    pipe.close()


def hammer(transport: ShmTransport, peer: PeerId) -> None:
    """Writes the whole pool over and over, never stopping by itself."""
    copies = [Copy(0, 0, POOL)]
    pending = 0
    while True:
        while pending < 4:
            transport.write(peer, copies, b"")
            pending += 1
        pending -= sum(isinstance(event, WriteCompleted) for event in transport.poll())


@dataclass
class Child:
    """The parent's handle on a worker process."""

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
        assert self.pipe.poll(TIMEOUT_S), "the child says nothing"
        return self.pipe.recv()

    def wait_for(self, wanted: type[TransportEvent]) -> TransportEvent:
        while True:
            for position, event in enumerate(self.events):
                if isinstance(event, wanted):
                    return self.events.pop(position)
            self.events.append(self.receive())

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@pytest.fixture
def start_child() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(me: PeerId = PREFILL, seed: int = 1) -> Child:
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=child_main, args=(me, seed, theirs), daemon=True)
        process.start()
        theirs.close()
        assert ours.poll(TIMEOUT_S)
        child = Child(process, ours, ours.recv(), [])
        children.append(child)
        return child

    yield start
    for child in children:
        if child.process.is_alive():
            child.process.kill()
        child.process.join(TIMEOUT_S)
        child.pipe.close()
        child.process.close()


class Here:
    """A life in the test's own process."""

    def __init__(self, me: PeerId = DECODE, seed: int = 0) -> None:
        self.me = me
        self.pool = create_pool(POOL)
        if seed:
            fill(self.pool, seed)
        self.transport = ShmTransport(me, self.pool)
        self.events: list[TransportEvent] = []

    def bytes_at(self, offset: int, size: int) -> bytes:
        return bytes(self.pool.mapping[offset : offset + size])

    def wait_for(self, wanted: type[TransportEvent]) -> TransportEvent:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            for position, event in enumerate(self.events):
                if isinstance(event, wanted):
                    return self.events.pop(position)
            left = deadline - time.monotonic()
            assert left > 0, f"no {wanted.__name__}, only {self.events}"
            select.select([self.transport.fileno()], [], [], left)
            self.events += self.transport.poll()

    def answer_hello(self) -> None:
        """Accepts a connection and reads its first word."""
        for _ in range(2):
            assert select.select([self.transport.fileno()], [], [], TIMEOUT_S)[0]
            self.events += self.transport.poll()

    def close(self) -> None:
        self.transport.close()
        self.pool.close()


@pytest.fixture
def here() -> Iterator[Here]:
    life = Here()
    yield life
    life.close()


def expected_pool(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, POOL, dtype=np.uint8).tobytes()


def connect_child(here: Here, child: Child) -> None:
    child.call("connect", here.me, here.transport.endpoint())
    assert here.wait_for(Connected) == Connected(peer=PREFILL)
    assert child.wait_for(Connected) == Connected(peer=here.me)


def test_blocks_are_copied_once_and_summed(here: Here, start_child: Callable[..., Child]) -> None:
    child = start_child()
    connect_child(here, child)
    copies = [Copy(3 * BLOCK, 7 * BLOCK, BLOCK), Copy(0, 2 * BLOCK, BLOCK), Copy(100, BLOCK + 8, 1000)]
    handle = child.call("write", here.me, copies, b"chunk", checksum=True)
    notified = here.wait_for(Notified)
    assert isinstance(notified, Notified) and notified.peer == PREFILL
    source = expected_pool(1)
    pieces = [source[c.source_bytes : c.source_bytes + c.size_bytes] for c in copies]
    assert notified.payload == b"chunk" + b"".join(checksum(piece).to_bytes(8, "little") for piece in pieces)
    for copy, piece in zip(copies, pieces, strict=True):
        assert here.bytes_at(copy.target_bytes, copy.size_bytes) == piece
    assert here.bytes_at(0, BLOCK) == bytes(BLOCK), "a byte landed beside its block"
    assert child.wait_for(WriteCompleted) == WriteCompleted(handle=handle)


def test_notifications_arrive_in_order_and_after_their_bytes(here: Here, start_child: Callable[..., Child]) -> None:
    child = start_child()
    connect_child(here, child)
    for number in range(60):  # many more than the kernel queues, so the writer must hold some back
        copies = [Copy(number % 16 * BLOCK, number % 16 * BLOCK, BLOCK)] if number % 3 else []
        child.call("write", here.me, copies, number.to_bytes(2, "little"))
    source = expected_pool(1)
    for number in range(60):
        notified = here.wait_for(Notified)
        assert isinstance(notified, Notified) and int.from_bytes(notified.payload, "little") == number
        if number % 3:
            start = number % 16 * BLOCK
            assert here.bytes_at(start, BLOCK) == source[start : start + BLOCK]


def test_receiver_answers_over_the_same_connection(here: Here, start_child: Callable[..., Child]) -> None:
    child = start_child()
    connect_child(here, child)
    handle = here.transport.write(PREFILL, [], b"committed")
    assert here.wait_for(WriteCompleted) == WriteCompleted(handle=handle)
    assert child.wait_for(Notified) == Notified(peer=here.me, payload=b"committed")
    with pytest.raises(UnknownPeerError):  # it may answer, but not write: only the writer has mapped
        here.transport.write(PREFILL, [Copy(0, 0, 8)], b"")


def test_killed_writer_is_noticed_and_its_fence_completes(here: Here, start_child: Callable[..., Child]) -> None:
    child = start_child()
    connect_child(here, child)
    child.kill()
    gone = here.wait_for(PeerGone)
    assert isinstance(gone, PeerGone) and gone.peer == PREFILL
    here.transport.fence(PREFILL)
    assert here.wait_for(Fenced) == Fenced(peer=PREFILL)
    with pytest.raises(UnknownPeerError):
        here.transport.write(PREFILL, [], b"")


def test_killed_receiver_is_noticed_by_the_writer(start_child: Callable[..., Child]) -> None:
    child = start_child(DECODE)
    here = Here(PREFILL, seed=1)
    try:
        here.transport.connect(DECODE, child.endpoint)
        here.wait_for(Connected)
        child.kill()
        assert here.wait_for(PeerGone) == PeerGone(peer=DECODE, reason="closed")
        here.transport.connect(DECODE, child.endpoint)
        failed = here.wait_for(ConnectFailed)
        assert isinstance(failed, ConnectFailed) and failed.peer == DECODE
    finally:
        here.close()


def test_fence_ends_a_writer_in_full_flight(here: Here, start_child: Callable[..., Child]) -> None:
    child = start_child()
    connect_child(here, child)
    child.tell("hammer", here.me)
    for _ in range(20):
        here.wait_for(Notified)
    here.transport.fence(PREFILL)
    assert here.wait_for(Fenced) == Fenced(peer=PREFILL)
    here.pool.mapping[:] = bytes(POOL)
    time.sleep(0.05)  # nothing may land: a real late write needs real time
    assert here.bytes_at(0, POOL) == bytes(POOL)
    child.process.join(TIMEOUT_S)
    assert child.process.exitcode == -signal.SIGKILL


def test_fence_ends_a_stopped_writer(here: Here, start_child: Callable[..., Child]) -> None:
    child = start_child()
    connect_child(here, child)
    child.tell("hammer", here.me)
    here.wait_for(Notified)
    child.kill(signal.SIGSTOP)
    time.sleep(0.05)
    here.pool.mapping[:] = bytes(POOL)  # the blocks are given to somebody else, too early
    here.transport.fence(PREFILL)
    assert here.wait_for(Fenced) == Fenced(peer=PREFILL)
    with suppress(ProcessLookupError):
        child.kill(signal.SIGCONT)
    here.pool.mapping[:] = bytes(POOL)
    time.sleep(0.05)
    assert here.bytes_at(0, POOL) == bytes(POOL)


def test_fenced_life_is_refused_and_the_next_one_welcome(here: Here, start_child: Callable[..., Child]) -> None:
    here.transport.fence(PREFILL)  # before it ever connected
    assert here.wait_for(Fenced) == Fenced(peer=PREFILL)
    old = start_child()
    old.call("connect", here.me, here.transport.endpoint())
    here.answer_hello()
    failed = old.wait_for(ConnectFailed)
    assert isinstance(failed, ConnectFailed) and "fenced" in failed.reason
    assert old.process.is_alive(), "who was never given the pool is not killed"
    again = PeerId(PREFILL.name, PREFILL.incarnation + 1)
    new = start_child(again)
    new.call("connect", here.me, here.transport.endpoint())
    assert here.wait_for(Connected) == Connected(peer=again)


def test_writer_that_left_in_order_is_not_killed_by_a_fence(here: Here, start_child: Callable[..., Child]) -> None:
    child = start_child()
    connect_child(here, child)
    child.call("disconnect", here.me)
    here.wait_for(PeerGone)
    here.transport.fence(PREFILL)
    assert here.wait_for(Fenced) == Fenced(peer=PREFILL)
    assert child.call("endpoint") == child.endpoint


def test_peers_in_one_process_are_fenced_without_a_kill(here: Here) -> None:
    writer = Here(PREFILL, seed=2)
    try:
        writer.transport.connect(DECODE, here.transport.endpoint())
        here.wait_for(Connected)
        writer.wait_for(Connected)
        handles = [writer.transport.write(DECODE, [Copy(0, 0, POOL)], b"") for _ in range(40)]
        here.transport.fence(PREFILL)
        here.wait_for(Fenced)
        here.pool.mapping[:] = bytes(POOL)
        writer.wait_for(PeerGone)
        ended = [writer.wait_for(WriteCompleted | WriteFailed) for _ in handles]  # type: ignore[arg-type]
        assert any(isinstance(event, WriteFailed) and event.quiesced for event in ended)
        assert here.bytes_at(0, POOL) == bytes(POOL)
        here.events.clear()
        writer.transport.connect(DECODE, here.transport.endpoint())
        here.answer_hello()
        writer.wait_for(ConnectFailed)
        assert not any(isinstance(event, Connected) for event in here.events)
    finally:
        writer.close()


def test_cancelled_writes_end_as_failed_and_send_nothing(here: Here) -> None:
    writer = Here(PREFILL, seed=2)
    try:
        writer.transport.connect(DECODE, here.transport.endpoint())
        here.wait_for(Connected)
        writer.wait_for(Connected)
        handles = [writer.transport.write(DECODE, [Copy(0, 0, POOL)], b"%d" % n) for n in range(30)]
        for handle in handles[1:]:
            writer.transport.cancel(handle)
        writer.transport.write(DECODE, [], b"last")
        ended = [writer.wait_for(WriteCompleted | WriteFailed) for _ in range(31)]  # type: ignore[arg-type]
        failed = [event for event in ended if isinstance(event, WriteFailed)]
        assert failed and all(event.quiesced and event.reason == "cancelled" for event in failed)
        payloads: list[bytes] = []
        while b"last" not in payloads:
            notified = here.wait_for(Notified)
            assert isinstance(notified, Notified)
            payloads.append(notified.payload)
        assert len(payloads) == 31 - len(failed)
    finally:
        writer.close()


def test_peer_that_reads_nothing_is_given_up(here: Here) -> None:
    writer = Here(PREFILL)
    try:
        writer.transport.connect(DECODE, here.transport.endpoint())
        here.wait_for(Connected)
        writer.wait_for(Connected)
        with pytest.raises(UnknownPeerError):
            for _ in range(10_000):
                writer.transport.write(DECODE, [], bytes(100))
        gone = writer.wait_for(PeerGone)
        assert isinstance(gone, PeerGone) and "unread" in gone.reason
    finally:
        writer.close()


def test_wrong_target_and_wrong_endpoint_are_refused(here: Here) -> None:
    writer = Here(PREFILL)
    stranger = PeerId("decode-0", 4)
    try:
        writer.transport.connect(stranger, here.transport.endpoint())
        here.answer_hello()
        failed = writer.wait_for(ConnectFailed)
        assert isinstance(failed, ConnectFailed) and "incarnation 3" in failed.reason
        for endpoint in (b"", b"nonsense", b'{"transport":"nixl"}', encode_endpoint(Endpoint(address="x", token="y"))):
            writer.transport.connect(stranger, endpoint)
            assert isinstance(writer.wait_for(ConnectFailed), ConnectFailed)
    finally:
        writer.close()


@pytest.mark.parametrize(
    "frame",
    [
        b"\x04hello",
        b"\x01{",
        b"\x01[]",
        b"\x01{}",
        b"\xff",
        encode_frame(
            Hello(
                writer_name="x",
                writer_incarnation=1,
                target_name=DECODE.name,
                target_incarnation=DECODE.incarnation,
                token="guess",
                writer_token="",
            )
        ),
    ],
)
def test_strangers_are_turned_away(here: Here, frame: bytes) -> None:
    address = here.transport.endpoint().decode().split('"address": "')[1].split('"')[0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(TIMEOUT_S)
        stranger.connect("\0" + address)
        stranger.send(frame)
        here.answer_hello()
        answer, fds, _, _ = socket.recv_fds(stranger, 1000, 4)
        assert answer[0] == 3 and fds == []
        assert stranger.recv(10) == b""
    assert here.events == []


def test_ranges_outside_of_the_pools_raise(here: Here) -> None:
    writer = Here(PREFILL)
    try:
        writer.transport.connect(DECODE, here.transport.endpoint())
        here.wait_for(Connected)
        writer.wait_for(Connected)
        for copy in (Copy(POOL - 1, 0, 2), Copy(0, POOL - 1, 2), Copy(-1, 0, 1), Copy(0, -8, 8)):
            with pytest.raises(ValueError, match="copies"):
                writer.transport.write(DECODE, [copy], b"")
        with pytest.raises(ValueError, match="notify"):
            writer.transport.write(DECODE, [], bytes(MAX_NOTIFY_BYTES + 1))
        with pytest.raises(UnknownPeerError):
            writer.transport.write(PeerId("decode-0", 2), [], b"")
        writer.transport.write(DECODE, [], bytes(MAX_NOTIFY_BYTES))
        notified = here.wait_for(Notified)
        assert isinstance(notified, Notified) and len(notified.payload) == MAX_NOTIFY_BYTES
    finally:
        writer.close()


def descriptors_and_maps() -> tuple[int, int, int]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("baton-kv-pool")
    threads = sum(1 for task in Path("/proc/self/task").iterdir() if "kv-" in (task / "comm").read_text())
    return len(os.listdir("/proc/self/fd")), maps, threads


def test_close_gives_everything_back(start_child: Callable[..., Child]) -> None:
    child = start_child(DECODE)
    before = descriptors_and_maps()
    writer, reader = Here(PREFILL, seed=1), Here(PeerId("decode-1", 1))
    writer.transport.connect(DECODE, child.endpoint)
    writer.wait_for(Connected)
    writer.transport.connect(reader.me, reader.transport.endpoint())
    reader.wait_for(Connected)
    writer.wait_for(Connected)
    for _ in range(10):
        writer.transport.write(DECODE, [Copy(0, 0, POOL)], b"x")
        writer.transport.write(reader.me, [Copy(0, 0, POOL)], b"x")
    assert descriptors_and_maps()[1] == 4
    writer.transport.connect(PeerId("nobody", 1), encode_endpoint(Endpoint(address="nobody", token="")))
    writer.close()
    writer.transport.close()
    reader.wait_for(PeerGone)
    reader.close()
    assert descriptors_and_maps() == before
    child.wait_for(PeerGone)
    child.tell("close")
    child.process.join(TIMEOUT_S)
    assert child.process.exitcode == 0


def test_pool_that_does_not_fit_is_refused() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PoolMemoryError, match="does not fit"):
        create_pool(available_memory_bytes() + (1 << 30))
    with pytest.raises(ValueError, match="size_bytes"):
        create_pool(0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_pool_cannot_shrink_under_its_peers() -> None:
    pool = create_pool(1 << 20)
    try:
        with pytest.raises(OSError):
            os.ftruncate(pool.fd, 0)
        with pytest.raises(PoolMemoryError, match="bytes"):
            map_pool(pool.fd, 1 << 21)
        mapping = map_pool(pool.fd, 1 << 20)
        mapping[5] = 7
        assert pool.mapping[5] == 7
        mapping.close()
    finally:
        pool.close()
    fd = os.memfd_create("x", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 4096)
        with pytest.raises(PoolMemoryError, match="shrink"):
            map_pool(fd, 4096)
    finally:
        os.close(fd)


def test_forked_child_does_not_inherit_the_pool() -> None:
    """A child of a fenced writer must not be able to write on: the mapping is absent in it."""
    flags = ""
    pool = create_pool(1 << 20)
    try:
        smaps = Path("/proc/self/smaps").read_text()
        section = smaps[smaps.index("baton-kv-pool") :]
        flags = section[section.index("VmFlags:") :].splitlines()[0]
    finally:
        pool.close()
    assert " dc" in flags
