"""What is the shm transport's own, beyond the conformance suite: deaths, kills, strangers, and peers in one process."""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kv_transfer.transport import shm_copier
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
from kv_transfer.transport.shm_copier import Copier, CopyJob
from kv_transfer.transport.shm_pool import PoolMemoryError, available_memory_bytes, create_pool, map_pool
from kv_transfer.transport.shm_wire import Endpoint, Hello, encode_endpoint, encode_frame
from tests.support.transport_wires import POOL_BYTES as POOL
from tests.support.transport_wires import TIMEOUT_S, ProcessLife, ProcessWire, content

DECODE = PeerId("decode-0", 3)
PREFILL = PeerId("prefill-0", 5)


@pytest.fixture(scope="module")
def wire() -> Iterator[ProcessWire]:
    wire = ProcessWire("shm")
    yield wire
    wire.close()


@pytest.fixture
def start_child(wire: ProcessWire) -> Iterator[Callable[..., ProcessLife]]:
    def start(me: PeerId = PREFILL, seed: int = 1) -> ProcessLife:
        return wire.start(me, seed)

    yield start
    wire.end_test()


class Here:
    """A life in the test's own process."""

    def __init__(self, me: PeerId = DECODE, seed: int = 0) -> None:
        self.me = me
        self.pool = create_pool(POOL)
        self.pool.mapping[:] = content(seed)
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


def connect_child(here: Here, child: ProcessLife) -> None:
    child.call("connect", here.me, here.transport.endpoint())
    assert here.wait_for(Connected) == Connected(peer=PREFILL)
    assert child.wait_for(Connected) == Connected(peer=here.me)


def test_receiver_answers_over_the_same_connection(here: Here, start_child: Callable[..., ProcessLife]) -> None:
    child = start_child()
    connect_child(here, child)
    handle = here.transport.write(PREFILL, [], b"committed")
    assert here.wait_for(WriteCompleted) == WriteCompleted(handle=handle)
    assert child.wait_for(Notified) == Notified(peer=here.me, payload=b"committed")
    with pytest.raises(UnknownPeerError):  # it may answer, but not write: only the writer has mapped
        here.transport.write(PREFILL, [Copy(0, 0, 8)], b"")


def test_killed_writer_is_noticed_and_its_fence_completes(here: Here, start_child: Callable[..., ProcessLife]) -> None:
    child = start_child()
    connect_child(here, child)
    child.kill()
    gone = here.wait_for(PeerGone)
    assert isinstance(gone, PeerGone) and gone.peer == PREFILL
    here.transport.fence(PREFILL)
    assert here.wait_for(Fenced) == Fenced(peer=PREFILL)
    with pytest.raises(UnknownPeerError):
        here.transport.write(PREFILL, [], b"")


def test_killed_receiver_is_noticed_by_the_writer(start_child: Callable[..., ProcessLife]) -> None:
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


def test_fence_is_the_writers_death(here: Here, start_child: Callable[..., ProcessLife]) -> None:
    child = start_child()
    connect_child(here, child)
    child.flood(here.me)
    here.wait_for(Notified)
    here.transport.fence(PREFILL)
    assert here.wait_for(Fenced) == Fenced(peer=PREFILL)
    child.process.join(TIMEOUT_S)
    assert child.process.exitcode == -signal.SIGKILL


def test_fenced_life_that_was_never_let_in_is_not_killed(here: Here, start_child: Callable[..., ProcessLife]) -> None:
    here.transport.fence(PREFILL)
    assert here.wait_for(Fenced) == Fenced(peer=PREFILL)
    child = start_child()
    child.call("connect", here.me, here.transport.endpoint())
    here.answer_hello()
    failed = child.wait_for(ConnectFailed)
    assert isinstance(failed, ConnectFailed) and "fenced" in failed.reason
    assert child.process.is_alive()


def test_writer_that_left_in_order_is_not_killed_by_a_fence(
    here: Here, start_child: Callable[..., ProcessLife]
) -> None:
    child = start_child()
    connect_child(here, child)
    child.call("disconnect", here.me)
    here.wait_for(PeerGone)
    here.transport.fence(PREFILL)
    assert here.wait_for(Fenced) == Fenced(peer=PREFILL)
    assert child.call("endpoint") == child.endpoint


def test_peers_in_one_process_are_fenced_without_a_kill(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Here(PREFILL, seed=2)
    is_fenced = threading.Event()
    copy = Copier._do

    def copy_late(copier: Copier, job: CopyJob) -> None:
        """The copy thread comes to it only after the fence."""
        is_fenced.wait(TIMEOUT_S)
        copy(copier, job)

    try:
        writer.transport.connect(DECODE, here.transport.endpoint())
        here.wait_for(Connected)
        writer.wait_for(Connected)
        writer.transport.write(DECODE, [Copy(0, 0, POOL)], b"")
        writer.wait_for(WriteCompleted)
        monkeypatch.setattr(Copier, "_do", copy_late)
        handles = [writer.transport.write(DECODE, [Copy(0, 0, POOL)], b"") for _ in range(40)]
        here.transport.fence(PREFILL)
        here.wait_for(Fenced)
        here.pool.mapping[:] = bytes(POOL)
        is_fenced.set()
        writer.wait_for(PeerGone)
        ended = [writer.wait_for(WriteCompleted | WriteFailed) for _ in handles]  # type: ignore[arg-type]
        assert all(isinstance(event, WriteFailed) and event.quiesced for event in ended)
        assert here.bytes_at(0, POOL) == bytes(POOL)
        here.events.clear()
        writer.transport.connect(DECODE, here.transport.endpoint())
        here.answer_hello()
        writer.wait_for(ConnectFailed)
        assert not any(isinstance(event, Connected) for event in here.events)
    finally:
        is_fenced.set()
        writer.close()


def test_cancelled_writes_end_as_failed_and_send_nothing(here: Here) -> None:
    writer = Here(PREFILL, seed=2)
    try:
        writer.transport.connect(DECODE, here.transport.endpoint())
        here.wait_for(Connected)
        writer.wait_for(Connected)
        region = writer.transport._outbound[DECODE].region
        assert region is not None
        with region.lock:  # so that no copy begins before the others are cancelled, however fast they are
            handles = [writer.transport.write(DECODE, [Copy(0, 0, POOL)], b"%d" % n) for n in range(30)]
            for handle in handles[1:]:
                writer.transport.cancel(handle)
        writer.transport.write(DECODE, [], b"last")
        ended = [writer.wait_for(WriteCompleted | WriteFailed) for _ in range(31)]  # type: ignore[arg-type]
        failed = [event for event in ended if isinstance(event, WriteFailed)]
        assert [event.handle for event in failed] == handles[1:]
        assert all(event.quiesced and event.reason == "cancelled" for event in failed)
        payloads: list[bytes] = []
        while b"last" not in payloads:
            notified = here.wait_for(Notified)
            assert isinstance(notified, Notified)
            payloads.append(notified.payload)
        assert len(payloads) == 31 - len(failed)
    finally:
        writer.close()


def test_write_that_cannot_be_copied_fails_alone(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Here(PREFILL, seed=2)
    try:
        writer.transport.connect(DECODE, here.transport.endpoint())
        here.wait_for(Connected)
        writer.wait_for(Connected)
        with monkeypatch.context() as without_memory:
            without_memory.setattr(shm_copier, "copy_ranges", _raise_memory_error)
            handle = writer.transport.write(DECODE, [Copy(0, 0, POOL)], b"one")
            failed = writer.wait_for(WriteFailed)
        assert failed == WriteFailed(handle=handle, quiesced=True, reason="MemoryError: no memory is left")
        writer.transport.write(DECODE, [Copy(0, 0, POOL)], b"other")
        writer.wait_for(WriteCompleted)
        assert here.wait_for(Notified) == Notified(peer=PREFILL, payload=b"other")
        assert here.bytes_at(0, POOL) == content(2)
    finally:
        writer.close()


def _raise_memory_error(*_: object, **__: object) -> list[int]:
    raise MemoryError("no memory is left")


@pytest.mark.parametrize(
    "copy",
    [Copy(0, (1 << 63) - 1, 100), Copy((1 << 63) - 1, 0, 100), Copy(0, 1 << 63, 1), Copy(1, 1, (1 << 63) - 1)],
    ids=["target", "source", "more than 63 bits", "size"],
)
def test_numbers_at_the_end_of_the_integers_are_outside_of_every_pool(here: Here, copy: Copy) -> None:
    writer = Here(PREFILL)
    try:
        writer.transport.connect(DECODE, here.transport.endpoint())
        here.wait_for(Connected)
        writer.wait_for(Connected)
        with pytest.raises(ValueError, match="outside of"):
            writer.transport.write(DECODE, [copy], b"")
    finally:
        writer.close()


def test_without_a_descriptor_left_connecting_fails(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_socket(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "no descriptor is left")

    with monkeypatch.context() as without_descriptors:
        without_descriptors.setattr(socket, "socket", no_socket)
        here.transport.connect(PREFILL, b"")
    failed = here.wait_for(ConnectFailed)
    assert isinstance(failed, ConnectFailed) and "no descriptor is left" in failed.reason


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


def test_another_user_is_refused_before_it_has_said_anything(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    address = here.transport.endpoint().decode().split('"address": "')[1].split('"')[0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger, monkeypatch.context() as other_user:
        stranger.settimeout(TIMEOUT_S)
        stranger.connect("\0" + address)
        other_user.setattr(os, "geteuid", lambda: os.getuid() + 1)
        here.events += here.transport.poll()
        assert b"belongs to user" in stranger.recv(1000) and stranger.recv(10) == b""
    assert here.events == []


def test_notifications_are_as_large_as_a_frame(here: Here) -> None:
    writer = Here(PREFILL)
    try:
        writer.transport.connect(DECODE, here.transport.endpoint())
        here.wait_for(Connected)
        writer.wait_for(Connected)
        with pytest.raises(ValueError, match="notify"):
            writer.transport.write(DECODE, [], bytes(MAX_NOTIFY_BYTES + 1))
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


def test_close_gives_everything_back(start_child: Callable[..., ProcessLife]) -> None:
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
    child.close()


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
