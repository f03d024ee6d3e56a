"""The ucx transport between real processes: bytes, order, deaths, stops, fences, and what is left behind."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_transfer.checksum import as_memory, checksum
from kv_transfer.protocol.limits import SECOND_NS
from kv_transfer.transport.base import (
    Connected,
    ConnectFailed,
    Copy,
    Fenced,
    Notified,
    PeerGone,
    PeerId,
    TransportError,
    TransportEvent,
    UnknownPeerError,
    WriteCompleted,
    WriteFailed,
)
from kv_transfer.transport.shm_pool import PoolMemory, create_pool
from kv_transfer.transport.ucx import MAX_NOTIFY_BYTES, MAX_UNENDED_WRITES, PEER_TIMEOUT_NS, UcxTransport
from kv_transfer.transport.ucx_wire import Address, decode_endpoint, encode_endpoint

pytest.importorskip("ucxx", reason="the library ucxx is not installed: pip install baton-cluster[ucx]")

BLOCK = 360 * 1024
POOL = 16 * BLOCK
TIMEOUT_S = 30.0
SHORT_NS = SECOND_NS
"""A peer's timeout for the tests that wait for it."""
SPAWN = multiprocessing.get_context("spawn")
DECODE = PeerId("decode-0", 3)
PREFILL = PeerId("prefill-0", 5)


def fill(pool: PoolMemory, seed: int) -> None:
    as_memory(pool.mapping)[:] = np.random.default_rng(seed).integers(0, 256, pool.size_bytes, dtype=np.uint8)


def expected_pool(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, POOL, dtype=np.uint8).tobytes()


def child_main(me: PeerId, seed: int, peer_timeout_ns: int, pipe: Connection) -> None:
    """A worker process: does what it is told over `pipe`, reports its transport's events there."""
    pool = create_pool(POOL)
    fill(pool, seed)
    transport = UcxTransport(me, pool, peer_timeout_ns=peer_timeout_ns)
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
                hammer(transport, pipe, *args)
            else:
                pipe.send(("result", getattr(transport, method)(*args, **options)))
    transport.close()
    pool.close()
    pipe.close()


def hammer(transport: UcxTransport, pipe: Connection, peer: PeerId) -> None:
    """Writes the whole pool over and over until the peer is gone; reports how that showed."""
    copies = [Copy(block * BLOCK, block * BLOCK, BLOCK) for block in range(0, POOL // BLOCK, 2)]
    copies += [Copy(block * BLOCK, block * BLOCK, BLOCK) for block in range(1, POOL // BLOCK, 2)]
    pending = 0
    while True:
        with suppress(UnknownPeerError):  # PeerGone has been polled, and ends this below
            while pending < 4:
                transport.write(peer, copies, b"")
                pending += 1
        select.select([transport.fileno()], [], [], TIMEOUT_S)
        for event in transport.poll():
            pending -= isinstance(event, WriteCompleted | WriteFailed)
            if not isinstance(event, WriteCompleted):
                pipe.send(event)
            if isinstance(event, PeerGone):
                return


@dataclass
class Child:
    """The parent's handle on a worker process."""

    process: multiprocessing.process.BaseProcess
    pipe: Connection
    endpoint: bytes
    events: list[TransportEvent] = field(default_factory=list)

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

    def wait_for(self, wanted: type[TransportEvent]) -> Any:
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

    def start(me: PeerId = PREFILL, seed: int = 1, peer_timeout_ns: int = PEER_TIMEOUT_NS) -> Child:
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=child_main, args=(me, seed, peer_timeout_ns, theirs), daemon=True)
        process.start()
        theirs.close()
        assert ours.poll(TIMEOUT_S)
        child = Child(process, ours, ours.recv())
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

    def __init__(self, me: PeerId = DECODE, seed: int = 0, peer_timeout_ns: int = PEER_TIMEOUT_NS) -> None:
        self.me = me
        self.pool = create_pool(POOL)
        if seed:
            fill(self.pool, seed)
        self.transport = UcxTransport(me, self.pool, peer_timeout_ns=peer_timeout_ns)
        self.events: list[TransportEvent] = []

    def bytes_at(self, offset: int, size: int) -> bytes:
        return bytes(self.pool.mapping[offset : offset + size])

    def wait_for(self, wanted: type[TransportEvent]) -> Any:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            for position, event in enumerate(self.events):
                if isinstance(event, wanted):
                    return self.events.pop(position)
            left = deadline - time.monotonic()
            assert left > 0, f"no {wanted.__name__}, only {self.events}"
            select.select([self.transport.fileno()], [], [], left)
            self.events += self.transport.poll()

    def check_invariants(self) -> None:
        """Also those of the engine, in its own thread."""
        self.transport.check_invariants()
        failures: list[BaseException] = []
        ended, ending = os.pipe()

        def check() -> None:
            try:
                self.transport._engine.check_invariants()
            except AssertionError as error:
                failures.append(error)
            finally:
                os.close(ending)

        self.transport._engine.submit(check)
        os.read(ended, 1)
        os.close(ended)
        assert not failures, failures

    def close(self) -> None:
        self.check_invariants()
        self.transport.close()
        self.pool.close()


@pytest.fixture
def start_here() -> Iterator[Callable[..., Here]]:
    lives: list[Here] = []

    def start(*args: Any, **options: Any) -> Here:
        lives.append(Here(*args, **options))
        return lives[-1]

    yield start
    for life in lives:
        life.close()


@pytest.fixture
def here(start_here: Callable[..., Here]) -> Here:
    return start_here()


@pytest.fixture
def writer(start_here: Callable[..., Here]) -> Here:
    return start_here(PREFILL, seed=2)


def connect_child(here: Here, child: Child) -> None:
    child.call("connect", here.me, here.transport.endpoint())
    assert here.wait_for(Connected) == Connected(peer=PREFILL)
    assert child.wait_for(Connected) == Connected(peer=here.me)


def connect(writer: Here, reader: Here) -> None:
    writer.transport.connect(reader.me, reader.transport.endpoint())
    assert reader.wait_for(Connected) == Connected(peer=writer.me)
    assert writer.wait_for(Connected) == Connected(peer=reader.me)


def sums_of(source: bytes, copies: list[Copy]) -> bytes:
    pieces = [source[c.source_bytes : c.source_bytes + c.size_bytes] for c in copies]
    return b"".join(checksum(piece).to_bytes(8, "little") for piece in pieces)


def test_scattered_and_adjacent_copies_arrive_bit_equal(here: Here, start_child: Callable[..., Child]) -> None:
    child = start_child()
    connect_child(here, child)
    copies = [
        Copy(3 * BLOCK, 7 * BLOCK, BLOCK),
        Copy(4 * BLOCK, 8 * BLOCK, BLOCK),  # adjacent to the first one on both sides
        Copy(5 * BLOCK, 10 * BLOCK, BLOCK),  # on one
        Copy(0, 2 * BLOCK, BLOCK),
        Copy(100, BLOCK + 8, 1000),
        Copy(7, 12 * BLOCK + 1, 1),
    ]
    handle = child.call("write", here.me, copies, b"chunk", num_sums=len(copies))
    source = expected_pool(1)
    assert here.wait_for(Notified) == Notified(peer=PREFILL, payload=b"chunk" + sums_of(source, copies))
    expected = bytearray(POOL)
    for copy in copies:
        data = source[copy.source_bytes : copy.source_bytes + copy.size_bytes]
        expected[copy.target_bytes : copy.target_bytes + copy.size_bytes] = data
    assert here.bytes_at(0, POOL) == bytes(expected), "a byte is wrong, or landed beside its block"
    assert child.wait_for(WriteCompleted) == WriteCompleted(handle=handle)


def test_long_and_many_small_ranges(here: Here, start_child: Callable[..., Child]) -> None:
    child = start_child()
    connect_child(here, child)
    source = expected_pool(1)
    child.call("write", here.me, [Copy(0, 0, POOL)], b"whole")
    here.wait_for(Notified)
    assert here.bytes_at(0, POOL) == source
    sizes = [1, 100, 4095, 4096, 8192, 16_484]  # on both sides of what UCX moves in one packet
    copies = [Copy(number * 20_000, (number * 7 % 250) * 20_000, sizes[number % len(sizes)]) for number in range(250)]
    here.pool.mapping[:] = bytes(POOL)
    child.call("write", here.me, copies, b"small", num_sums=len(copies))
    assert here.wait_for(Notified).payload == b"small" + sums_of(source, copies)
    for copy in copies:
        data = source[copy.source_bytes : copy.source_bytes + copy.size_bytes]
        assert here.bytes_at(copy.target_bytes, copy.size_bytes) == data


def test_notifications_arrive_in_order_and_after_their_bytes(here: Here, start_child: Callable[..., Child]) -> None:
    child = start_child()
    connect_child(here, child)
    for number in range(60):  # many more than may be open at once
        copies = [Copy(number % 16 * BLOCK, number % 16 * BLOCK, BLOCK)] if number % 3 else []
        child.call("write", here.me, copies, number.to_bytes(2, "little"))
    source = expected_pool(1)
    for number in range(60):
        assert int.from_bytes(here.wait_for(Notified).payload, "little") == number
        if number % 3:
            start = number % 16 * BLOCK
            assert here.bytes_at(start, BLOCK) == source[start : start + BLOCK]


def test_receiver_answers_over_the_same_connection(here: Here, start_child: Callable[..., Child]) -> None:
    child = start_child()
    connect_child(here, child)
    handle = here.transport.write(PREFILL, [], b"committed")
    assert here.wait_for(WriteCompleted) == WriteCompleted(handle=handle)
    assert child.wait_for(Notified) == Notified(peer=here.me, payload=b"committed")
    with pytest.raises(UnknownPeerError):  # it may answer, but only the end that connected writes
        here.transport.write(PREFILL, [Copy(0, 0, 8)], b"")


def test_both_directions_at_once(here: Here, writer: Here) -> None:
    connect(writer, here)
    connect(here, writer)
    writer.transport.write(DECODE, [Copy(0, BLOCK, BLOCK)], b"there")
    here.transport.write(PREFILL, [Copy(3 * BLOCK, 3 * BLOCK, BLOCK)], b"back")
    assert here.wait_for(Notified).payload == b"there"
    assert writer.wait_for(Notified).payload == b"back"
    assert here.bytes_at(BLOCK, BLOCK) == writer.bytes_at(0, BLOCK)
    assert writer.bytes_at(3 * BLOCK, BLOCK) == bytes(BLOCK)


def test_killed_writer_is_noticed_and_fenced_at_once(
    start_here: Callable[..., Here], start_child: Callable[..., Child]
) -> None:
    here = start_here(peer_timeout_ns=100 * SECOND_NS)  # it is its end that is noticed, not its silence
    child = start_child()
    connect_child(here, child)
    child.tell("hammer", here.me)
    here.wait_for(Notified)
    child.kill()
    assert here.wait_for(PeerGone).peer == PREFILL
    here.transport.fence(PREFILL)
    assert here.wait_for(Fenced) == Fenced(peer=PREFILL)
    with pytest.raises(UnknownPeerError):
        here.transport.write(PREFILL, [], b"")


def test_killed_receiver_fails_what_it_was_sent(writer: Here, start_child: Callable[..., Child]) -> None:
    child = start_child(DECODE)
    writer.transport.connect(DECODE, child.endpoint)
    writer.wait_for(Connected)
    child.kill(signal.SIGSTOP)  # so that nothing completes before it dies
    handle = writer.transport.write(DECODE, [Copy(0, 0, POOL)], b"")
    child.kill()
    assert writer.wait_for(WriteFailed).handle == handle
    assert writer.wait_for(PeerGone).peer == DECODE
    writer.transport.connect(DECODE, child.endpoint)
    assert writer.wait_for(ConnectFailed).peer == DECODE


def test_fence_ends_a_writer_in_full_flight(here: Here, start_child: Callable[..., Child]) -> None:
    child = start_child()
    connect_child(here, child)
    child.tell("hammer", here.me)
    for _ in range(20):
        here.wait_for(Notified)
    here.transport.fence(PREFILL)
    assert here.wait_for(Fenced) == Fenced(peer=PREFILL)
    here.pool.mapping[:] = bytes(POOL)
    time.sleep(0.1)  # nothing may land: a real late write needs real time
    assert here.bytes_at(0, POOL) == bytes(POOL)
    assert child.wait_for(PeerGone).peer == here.me
    failed = child.wait_for(WriteFailed)
    assert not failed.quiesced or failed.reason
    assert child.process.is_alive(), "the fence of ucx is the receiver's own act"


@pytest.mark.parametrize("stop_after_s", [0.001, 0.004, 0.02])
def test_stopped_writer_that_wakes_after_the_fence_writes_nothing(
    here: Here, start_child: Callable[..., Child], stop_after_s: float
) -> None:
    child = start_child()
    connect_child(here, child)
    child.tell("hammer", here.me)
    here.wait_for(Notified)
    time.sleep(stop_after_s)  # anywhere within a write
    child.kill(signal.SIGSTOP)
    here.transport.fence(PREFILL)
    assert here.wait_for(Fenced) == Fenced(peer=PREFILL)
    granted_again = bytes(range(256)) * (POOL // 256)
    here.pool.mapping[:] = granted_again
    child.kill(signal.SIGCONT)
    assert child.wait_for(PeerGone).peer == here.me
    time.sleep(0.05)
    assert here.bytes_at(0, POOL) == granted_again
    here.events.clear()
    child.call("connect", here.me, here.transport.endpoint())
    assert "fenced" in child.wait_for(ConnectFailed).reason
    assert here.events == []


def test_stopped_peers_are_given_up_after_the_timeout(
    start_here: Callable[..., Here], start_child: Callable[..., Child]
) -> None:
    here = start_here(PREFILL, seed=1, peer_timeout_ns=SHORT_NS)
    child = start_child(DECODE, peer_timeout_ns=SHORT_NS)
    here.transport.connect(DECODE, child.endpoint)
    here.wait_for(Connected)
    time.sleep(1.5 * SHORT_NS / SECOND_NS)
    assert here.transport.poll() == [], "an idle connection must live on"
    child.kill(signal.SIGSTOP)
    handle = here.transport.write(DECODE, [Copy(0, 0, BLOCK)], b"")
    failed = here.wait_for(WriteFailed)
    assert (failed.handle, failed.quiesced) == (handle, True), "nothing was granted, so nothing was sent"
    gone = here.wait_for(PeerGone)
    assert gone.peer == DECODE and "not heard" in gone.reason
    child.kill(signal.SIGCONT)
    assert child.wait_for(PeerGone).peer == PREFILL


def test_restart_under_the_same_name(here: Here, start_child: Callable[..., Child]) -> None:
    here.transport.fence(PREFILL)  # before it ever connected
    assert here.wait_for(Fenced) == Fenced(peer=PREFILL)
    old = start_child()
    old.call("connect", here.me, here.transport.endpoint())
    assert "fenced" in old.wait_for(ConnectFailed).reason
    again = PeerId(PREFILL.name, PREFILL.incarnation + 1)
    new = start_child(again, seed=3)
    new.call("connect", here.me, here.transport.endpoint())
    assert here.wait_for(Connected) == Connected(peer=again)
    new.wait_for(Connected)
    new.call("write", here.me, [Copy(0, 0, BLOCK)], b"new")
    assert here.wait_for(Notified) == Notified(peer=again, payload=b"new")
    assert here.bytes_at(0, BLOCK) == expected_pool(3)[:BLOCK]


def test_receiver_restarts_under_the_same_name(writer: Here, start_child: Callable[..., Child]) -> None:
    old = start_child(DECODE)
    writer.transport.connect(DECODE, old.endpoint)
    writer.wait_for(Connected)
    old.kill()
    writer.wait_for(PeerGone)
    again = PeerId(DECODE.name, DECODE.incarnation + 1)
    new = start_child(again)
    writer.transport.connect(again, new.endpoint)
    assert writer.wait_for(Connected) == Connected(peer=again)
    handle = writer.transport.write(again, [Copy(0, 0, BLOCK)], b"x")
    assert writer.wait_for(WriteCompleted) == WriteCompleted(handle=handle)
    assert new.wait_for(Notified) == Notified(peer=PREFILL, payload=b"x")


def test_connection_broken_at_one_end_is_replaced(here: Here, writer: Here) -> None:
    connect(writer, here)
    writer.transport.disconnect(DECODE)
    writer.transport.connect(DECODE, here.transport.endpoint())
    assert here.wait_for(PeerGone).peer == PREFILL
    assert here.wait_for(Connected) == Connected(peer=PREFILL)
    writer.wait_for(Connected)
    writer.transport.write(DECODE, [], b"again")
    assert here.wait_for(Notified) == Notified(peer=PREFILL, payload=b"again")
    writer.transport.connect(DECODE, here.transport.endpoint())  # a second time: nothing happens
    writer.transport.write(DECODE, [], b"still")
    assert here.wait_for(Notified) == Notified(peer=PREFILL, payload=b"still")
    assert writer.events == [] or all(isinstance(event, WriteCompleted) for event in writer.events)


def test_cancelled_writes_end_quiesced_and_send_nothing(here: Here, writer: Here) -> None:
    connect(writer, here)
    copies = [Copy(block * BLOCK, block * BLOCK, BLOCK) for block in range(0, 16, 2)]
    handles = [writer.transport.write(DECODE, copies, b"%d" % number) for number in range(40)]
    for handle in handles[1:]:
        writer.transport.cancel(handle)
    last = writer.transport.write(DECODE, [], b"last")
    ended: dict[int, Any] = {}
    while len(ended) < 41:
        event = writer.wait_for(WriteCompleted | WriteFailed)  # type: ignore[arg-type]
        ended[event.handle] = event
    failed = [event for event in ended.values() if isinstance(event, WriteFailed)]
    assert failed and all(event.quiesced and event.reason == "cancelled" for event in failed)
    payloads: list[bytes] = []
    while b"last" not in payloads:
        payloads.append(here.wait_for(Notified).payload)
    completed = [b"%d" % number for number, handle in enumerate(handles) if handle not in {e.handle for e in failed}]
    assert payloads == [*completed, b"last"] and isinstance(ended[last], WriteCompleted)
    here.pool.mapping[:] = bytes(POOL)
    writer.transport.write(DECODE, [Copy(0, 5 * BLOCK, BLOCK)], b"after")
    assert here.wait_for(Notified).payload == b"after"
    assert here.bytes_at(5 * BLOCK, BLOCK) == writer.bytes_at(0, BLOCK)
    assert here.bytes_at(0, 5 * BLOCK) == bytes(5 * BLOCK), "a cancelled write landed late"


def test_peer_that_takes_nothing_is_given_up(start_child: Callable[..., Child], writer: Here) -> None:
    child = start_child(DECODE)
    writer.transport.connect(DECODE, child.endpoint)
    writer.wait_for(Connected)
    child.kill(signal.SIGSTOP)
    with pytest.raises(UnknownPeerError):
        for _ in range(MAX_UNENDED_WRITES + 1):
            writer.transport.write(DECODE, [Copy(0, 0, 8)], b"")
    assert "unread" in writer.wait_for(PeerGone).reason


def test_unreachable_wrong_and_foreign_endpoints_fail(here: Here, start_here: Callable[..., Here]) -> None:
    writer = start_here(PREFILL, peer_timeout_ns=SHORT_NS)
    stranger = PeerId("decode-0", 4)
    writer.transport.connect(stranger, here.transport.endpoint())
    assert "incarnation 3" in writer.wait_for(ConnectFailed).reason
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        known = decode_endpoint(here.transport.endpoint())
        for endpoint in (
            b"",
            b"nonsense",
            b'{"transport":"nixl"}',
            encode_endpoint(Address(host=known.host, port=known.port, token="guess")),
            encode_endpoint(Address(host=known.host, port=known.port, token=known.token, version=9)),
            encode_endpoint(Address(host="127.0.0.1", port=port, token="")),
            encode_endpoint(Address(host="127.0.0.1", port=silent.getsockname()[1], token="")),
            encode_endpoint(Address(host="192.0.2.1", port=port, token="")),  # nobody's address (RFC 5737)
        ):
            writer.transport.connect(stranger, endpoint)
            assert writer.wait_for(ConnectFailed).peer == stranger
    assert here.transport.poll() == []


def test_noise_on_the_listening_port_disturbs_nobody(here: Here, writer: Here) -> None:
    where = decode_endpoint(here.transport.endpoint())
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff" * 5000):
        with socket.create_connection((where.host, where.port), TIMEOUT_S) as stranger, suppress(OSError):
            stranger.sendall(noise)
    connect(writer, here)
    writer.transport.write(DECODE, [], b"well")
    assert here.wait_for(Notified).payload == b"well"


def test_bad_arguments_raise(here: Here, writer: Here) -> None:
    connect(writer, here)
    for copy in (Copy(POOL - 1, 0, 2), Copy(0, POOL - 1, 2), Copy(-1, 0, 1), Copy(0, -8, 8), Copy(0, 0, 0)):
        with pytest.raises(ValueError, match="copies"):
            writer.transport.write(DECODE, [copy], b"")
    with pytest.raises(ValueError, match="notify"):
        writer.transport.write(DECODE, [], bytes(MAX_NOTIFY_BYTES + 1))
    with pytest.raises(UnknownPeerError):
        writer.transport.write(PeerId("decode-0", 2), [], b"")
    with pytest.raises(ValueError, match="host"):
        UcxTransport(PREFILL, here.pool, host="::1")
    writer.transport.write(DECODE, [], bytes(MAX_NOTIFY_BYTES))
    assert len(here.wait_for(Notified).payload) == MAX_NOTIFY_BYTES


def test_dead_thread_is_told_to_the_owner() -> None:
    life = Here()

    def fail() -> None:
        raise RuntimeError("made up")

    life.transport._engine.submit(fail)
    assert select.select([life.transport.fileno()], [], [], TIMEOUT_S)[0]
    with pytest.raises(TransportError, match="died"):
        life.transport.poll()
    life.transport.close()
    life.pool.close()


def num_descriptors_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), sum(thread.name == "kv-ucx" for thread in threading.enumerate())


def test_close_gives_everything_back(start_child: Callable[..., Child]) -> None:
    child = start_child(DECODE)
    for round_ in range(2):
        before = num_descriptors_and_threads()
        writer, reader = Here(PREFILL, seed=1), Here(PeerId("decode-1", 1))
        writer.transport.connect(DECODE, child.endpoint)
        writer.wait_for(Connected)
        connect(writer, reader)
        for peer in (DECODE, reader.me):
            writer.transport.write(peer, [Copy(0, 0, POOL)], b"x")
            writer.wait_for(WriteCompleted)
        writer.close()
        writer.transport.close()
        reader.wait_for(PeerGone)
        reader.close()
        if round_:  # the first one also loads the library
            assert num_descriptors_and_threads() == before
        child.wait_for(PeerGone)
    child.tell("close")
    child.process.join(TIMEOUT_S)
    assert child.process.exitcode == 0


def test_close_in_the_middle_of_everything(start_child: Callable[..., Child]) -> None:
    child = start_child(DECODE)
    writer = Here(PREFILL, seed=1)
    writer.transport.connect(DECODE, child.endpoint)
    writer.wait_for(Connected)
    for _ in range(20):
        writer.transport.write(DECODE, [Copy(0, 0, POOL)], b"x")
    assert child.wait_for(Notified) == Notified(peer=PREFILL, payload=b"x")
    writer.transport.connect(PeerId("nobody", 1), encode_endpoint(Address(host="192.0.2.1", port=9, token="")))
    writer.close()
    assert num_descriptors_and_threads()[1] == 0
    assert child.wait_for(PeerGone).peer == PREFILL


def run_script(script: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=environment)


def test_importing_leaves_the_environment_alone() -> None:
    script = (
        "import os; os.environ['UCX_MAX_RNDV_RAILS'] = '3'; before = dict(os.environ)\n"
        "from kv_transfer.transport.ucx_library import load; load()\n"
        "assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())"
    )
    subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=60, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )


def test_missing_library_names_the_extra() -> None:
    script = (
        "import sys; sys.modules['ucxx'] = None\n"
        "from kv_transfer.transport.base import PeerId, TransportError\n"
        "from kv_transfer.transport.shm_pool import create_pool\n"
        "from kv_transfer.transport.ucx import UcxTransport\n"
        "try:\n    UcxTransport(PeerId('a', 1), create_pool(4096))\n"
        "except TransportError as error:\n    assert 'baton-cluster[ucx]' in str(error), error\n"
        "else:\n    raise SystemExit('it started without its library')"
    )
    subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=60, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
