"""The nixl transport between real processes: bytes, order, deaths, fences, and what is left behind."""

from __future__ import annotations

import gc
import importlib.util
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kv_transfer.checksum import checksum
from kv_transfer.transport import nixl_write
from kv_transfer.transport.base import (
    Connected,
    ConnectFailed,
    Copy,
    Fenced,
    Notified,
    PeerGone,
    PeerId,
    UnknownPeerError,
    WriteCompleted,
    WriteFailed,
)
from kv_transfer.transport.nixl import MAX_NOTIFY_BYTES
from kv_transfer.transport.nixl_agent import LIBRARIES, NixlAgent
from kv_transfer.transport.nixl_limits import NixlLimits
from kv_transfer.transport.nixl_link import ControlLink, LinkEndedError
from kv_transfer.transport.nixl_wire import (
    BYE,
    Endpoint,
    Hello,
    decode_endpoint,
    encode_endpoint,
    encode_frame,
    encode_handshake,
)
from tests.support.transport_lives import TIMEOUT_S, Child, Kind, Life, children, link, pool_bytes

pytestmark = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in LIBRARIES), reason="the nixl library is not installed"
)

BLOCK = 360 * 1024
POOL = 16 * BLOCK
LIMITS = NixlLimits(heartbeat_interval_s=0.2, silence_timeout_s=1.5, transfer_timeout_s=2.5, connect_timeout_s=5.0)
KIND = Kind(path="kv_transfer.transport.nixl:NixlTransport", pool_size_bytes=POOL, options={"limits": LIMITS})
DECODE = PeerId("decode-0", 3)
PREFILL = PeerId("prefill-0", 5)

StartChild = Callable[..., Child]


@pytest.fixture
def start_child() -> Iterator[StartChild]:
    with children(KIND) as start:
        yield lambda me=PREFILL, seed=1: start(me, seed)


@pytest.fixture
def here() -> Iterator[Life]:
    life = Life(KIND, DECODE)
    yield life
    life.close()


@pytest.fixture
def writer() -> Iterator[Life]:
    life = Life(KIND, PREFILL, seed=2)
    yield life
    life.close()


@pytest.fixture(params=["tcp", "shared memory"])
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which way UCX takes on one host: ours, or another that the environment may allow."""
    if request.param == "shared memory":
        monkeypatch.setenv("UCX_TLS", "^cma")
    return str(request.param)


def connect_child(here: Life, child: Child) -> None:
    child.call("connect", here.me, here.transport.endpoint())
    assert here.wait_for(Connected) == Connected(peer=PREFILL)
    assert child.wait_for(Connected) == Connected(peer=here.me)


def payload_of(event: object) -> bytes:
    assert isinstance(event, Notified)
    return event.payload


# ---- bytes and notifications -----------------------------------------------------------------------------------------


def test_blocks_are_written_and_summed(wire: str, here: Life, start_child: StartChild) -> None:
    child = start_child()
    connect_child(here, child)
    adjacent = [Copy(4 * BLOCK, 9 * BLOCK, BLOCK), Copy(5 * BLOCK, 10 * BLOCK, BLOCK), Copy(6 * BLOCK, 11 * BLOCK, 8)]
    copies = [Copy(3 * BLOCK, 7 * BLOCK, BLOCK), Copy(0, 2 * BLOCK, BLOCK), Copy(100, BLOCK + 8, 1001), *adjacent]
    handle = child.call("write", here.me, copies, b"chunk", num_sums=len(copies))
    payload = payload_of(here.wait_for(Notified))
    source = pool_bytes(1, POOL)
    pieces = [source[c.source_bytes : c.source_bytes + c.size_bytes] for c in copies]
    assert payload == b"chunk" + b"".join(checksum(piece).to_bytes(8, "little") for piece in pieces)
    expected = bytearray(POOL)
    for copy, piece in zip(copies, pieces, strict=True):
        expected[copy.target_bytes : copy.target_bytes + copy.size_bytes] = piece
    assert here.bytes_at(0, POOL) == expected, "each byte in its place, and none beside it"
    assert child.wait_for(WriteCompleted) == WriteCompleted(handle=handle)
    child.call("write", here.me, copies, b"without")
    assert payload_of(here.wait_for(Notified)) == b"without"


def test_notifications_arrive_in_order_and_after_their_bytes(here: Life, start_child: StartChild) -> None:
    child = start_child()
    connect_child(here, child)
    for number in range(60):
        copies = [Copy(number % 16 * BLOCK, number % 16 * BLOCK, BLOCK)] if number % 3 else []
        child.call("write", here.me, copies, number.to_bytes(2, "little"))
    source = pool_bytes(1, POOL)
    for number in range(60):
        assert int.from_bytes(payload_of(here.wait_for(Notified)), "little") == number
        if number % 3:
            start = number % 16 * BLOCK
            assert here.bytes_at(start, BLOCK) == source[start : start + BLOCK]


def test_receiver_answers_over_the_same_connection(here: Life, start_child: StartChild) -> None:
    child = start_child()
    connect_child(here, child)
    handle = here.transport.write(PREFILL, [], b"committed")
    assert here.wait_for(WriteCompleted) == WriteCompleted(handle=handle)
    assert child.wait_for(Notified) == Notified(peer=here.me, payload=b"committed")
    with pytest.raises(UnknownPeerError):  # it may answer, but not write: only the writer knows its peer's agent
        here.transport.write(PREFILL, [Copy(0, 0, 8)], b"")


def test_two_lives_write_to_each_other(here: Life, writer: Life) -> None:
    link(writer, here)
    link(here, writer)
    writer.transport.write(DECODE, [Copy(0, BLOCK, BLOCK)], b"there")
    assert payload_of(here.wait_for(Notified)) == b"there"
    here.transport.write(PREFILL, [Copy(BLOCK, 2 * BLOCK, BLOCK)], b"back")
    assert payload_of(writer.wait_for(Notified)) == b"back"
    assert writer.bytes_at(2 * BLOCK, BLOCK) == writer.bytes_at(0, BLOCK)


def test_a_large_write_is_cut_into_transfers(here: Life, writer: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_write, "MAX_TRANSFER_BYTES", BLOCK + 1000)
    link(writer, here)
    handle = writer.transport.write(DECODE, [Copy(0, 0, POOL)], b"", num_sums=1)
    assert writer.wait_for_write(handle) == WriteCompleted(handle=handle)
    source = writer.bytes_at(0, POOL)
    assert payload_of(here.wait_for(Notified)) == checksum(source).to_bytes(8, "little")
    assert here.bytes_at(0, POOL) == source


def test_cancelled_writes_end_and_send_nothing_if_they_fail(
    here: Life, writer: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_write, "MAX_TRANSFER_BYTES", BLOCK)
    link(writer, here)
    handles = [writer.transport.write(DECODE, [Copy(0, 0, POOL)], b"%d" % n) for n in range(30)]
    for handle in handles:
        writer.transport.cancel(handle)
    writer.transport.write(DECODE, [], b"last")
    ended = [writer.wait_for_write(handle) for handle in handles]
    failed = [event for event in ended if isinstance(event, WriteFailed)]
    assert failed and all(event.quiesced and event.reason == "cancelled" for event in failed)
    payloads: list[bytes] = []
    while b"last" not in payloads:
        payloads.append(payload_of(here.wait_for(Notified)))
    assert len(payloads) == 31 - len(failed)


# ---- connecting ------------------------------------------------------------------------------------------------------


def test_wrong_target_and_wrong_endpoint_are_refused(here: Life, writer: Life) -> None:
    stranger = PeerId("decode-0", 4)
    writer.transport.connect(stranger, here.transport.endpoint())
    while not writer.events:
        here.poll(0.01)
        writer.poll(0.01)
    failed = writer.wait_for(ConnectFailed)
    assert isinstance(failed, ConnectFailed) and "incarnation 3" in failed.reason
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    nobody = encode_endpoint(Endpoint(host="127.0.0.1", port=port, token="y"))
    for endpoint in (b"", b"nonsense", b'{"transport":"shm","version":1}', nobody):
        writer.transport.connect(stranger, endpoint)
        assert isinstance(writer.wait_for(ConnectFailed), ConnectFailed)
    assert not here.events


def test_host_that_does_not_answer_is_given_up(writer: Life) -> None:
    """Its port is open, but nobody accepts or says a word: as of a stopped process."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = encode_endpoint(Endpoint(host="127.0.0.1", port=mute.getsockname()[1], token="y"))
        writer.transport.connect(DECODE, endpoint)
        failed = writer.wait_for(ConnectFailed)
        assert isinstance(failed, ConnectFailed) and "silent" in failed.reason


def test_library_that_blocks_for_long_does_not_delay_the_word(
    here: Life, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """As it does when the address for data of a peer cannot be reached though its control connection can."""
    hold = 2.0
    add_peer = NixlAgent.add_peer

    def slow(self: NixlAgent, metadata: bytes) -> str:
        time.sleep(hold)
        return add_peer(self, metadata)

    monkeypatch.setattr(NixlAgent, "add_peer", slow)
    hasty = Kind(path=KIND.path, pool_size_bytes=POOL, options={"limits": NixlLimits(connect_timeout_s=1.2)})
    writer = Life(hasty, PREFILL)
    request.addfinalizer(writer.close)
    started_s = time.monotonic()
    writer.transport.connect(DECODE, here.transport.endpoint())
    while not writer.events:
        here.poll(0.01)
        writer.poll(0.01)
    assert time.monotonic() - started_s < hold, "the caller was told before the library came back"
    failed = writer.wait_for(ConnectFailed)
    assert isinstance(failed, ConnectFailed) and "within" in failed.reason
    assert not any(isinstance(event, Connected) for event in here.events)


@pytest.mark.parametrize(
    "frame",
    [
        encode_frame(5, b"hello"),
        encode_frame(1, b"{"),
        encode_frame(1, b"[]"),
        encode_frame(1, b"{}"),
        encode_frame(255),
        b"\xff" * 16,
        encode_handshake(
            Hello(
                writer_name="x",
                writer_incarnation=1,
                target_name=DECODE.name,
                target_incarnation=DECODE.incarnation,
                token="guess",
            )
        ),
    ],
)
def test_strangers_are_turned_away(here: Life, frame: bytes) -> None:
    where = decode_endpoint(here.transport.endpoint())
    with socket.create_connection((where.host, where.port), TIMEOUT_S) as stranger:
        stranger.sendall(frame)
        here.poll(TIMEOUT_S)
        deadline_s = time.monotonic() + TIMEOUT_S
        answer = b""
        while time.monotonic() < deadline_s:
            here.poll(0.01)
            if select.select([stranger], [], [], 0)[0]:
                data = stranger.recv(1000)
                answer += data
                if not data:
                    break
        assert b"metadata" not in answer and time.monotonic() < deadline_s
    assert here.events == []


def test_life_that_connects_anew_has_lost_its_connection(here: Life, writer: Life) -> None:
    link(writer, here)
    where = decode_endpoint(here.transport.endpoint())
    hello = Hello(
        writer_name=PREFILL.name,
        writer_incarnation=PREFILL.incarnation,
        target_name=DECODE.name,
        target_incarnation=DECODE.incarnation,
        token=where.token,
    )
    with socket.create_connection((where.host, where.port), TIMEOUT_S) as again:
        again.sendall(encode_handshake(hello))
        assert here.wait_for(PeerGone) == PeerGone(peer=PREFILL, reason="it connects anew")
        assert isinstance(writer.wait_for(PeerGone), PeerGone)
        here.transport.fence(PREFILL)
        assert here.wait_for(Fenced) == Fenced(peer=PREFILL)
        again.settimeout(TIMEOUT_S)
        while again.recv(1000):
            pass


def test_last_words_are_heard(here: Life, writer: Life) -> None:
    link(writer, here)
    link(here, writer)
    writer.transport.write(DECODE, [], b"abort")
    writer.transport.disconnect(DECODE)
    assert payload_of(here.wait_for(Notified)) == b"abort"
    assert isinstance(here.wait_for(PeerGone), PeerGone)
    link(writer, here)
    here.transport.write(PREFILL, [], b"committed")
    here.transport.close()
    assert payload_of(writer.wait_for(Notified)) == b"committed"
    assert isinstance(writer.wait_for(PeerGone), PeerGone)


def test_ranges_outside_of_the_pools_raise(here: Life, writer: Life) -> None:
    link(writer, here)
    for copy in (Copy(POOL - 1, 0, 2), Copy(0, POOL - 1, 2), Copy(-1, 0, 1), Copy(0, -8, 8), Copy(0, 0, 0)):
        with pytest.raises(ValueError, match="copies"):
            writer.transport.write(DECODE, [copy], b"")
    with pytest.raises(ValueError, match="notify"):
        writer.transport.write(DECODE, [], bytes(MAX_NOTIFY_BYTES + 1))
    with pytest.raises(UnknownPeerError):
        writer.transport.write(PeerId("decode-0", 2), [], b"")
    writer.transport.write(DECODE, [], bytes(MAX_NOTIFY_BYTES))
    assert len(payload_of(here.wait_for(Notified))) == MAX_NOTIFY_BYTES


def test_idle_connection_outlives_the_silence_limit(here: Life, writer: Life) -> None:
    link(writer, here)
    deadline_s = time.monotonic() + 1.5 * LIMITS.silence_timeout_s
    while time.monotonic() < deadline_s:
        for life in (here, writer):
            life.poll(0.05)
            assert life.events == []


# ---- deaths ----------------------------------------------------------------------------------------------------------


def test_killed_writer_is_noticed_and_its_fence_completes(here: Life, start_child: StartChild) -> None:
    child = start_child()
    connect_child(here, child)
    child.kill()
    gone = here.wait_for(PeerGone)
    assert isinstance(gone, PeerGone) and gone.peer == PREFILL
    here.transport.fence(PREFILL)
    assert here.wait_for(Fenced) == Fenced(peer=PREFILL)
    with pytest.raises(UnknownPeerError):
        here.transport.write(PREFILL, [], b"")


def test_killed_receiver_fails_the_write_and_its_next_life_is_welcome(writer: Life, start_child: StartChild) -> None:
    child = start_child(DECODE)
    writer.transport.connect(DECODE, child.endpoint)
    writer.wait_for(Connected)
    child.kill(signal.SIGSTOP)
    handle = writer.transport.write(DECODE, [Copy(0, 0, POOL)], b"x")
    child.kill()
    failed = writer.wait_for_write(handle)
    assert isinstance(failed, WriteFailed) and not failed.quiesced
    gone = writer.wait_for(PeerGone)
    assert isinstance(gone, PeerGone) and gone.peer == DECODE
    writer.transport.connect(DECODE, child.endpoint)
    assert isinstance(writer.wait_for(ConnectFailed), ConnectFailed)
    again = PeerId(DECODE.name, DECODE.incarnation + 1)
    new = start_child(again)
    writer.transport.connect(again, new.endpoint)
    assert writer.wait_for(Connected) == Connected(peer=again)
    handle = writer.transport.write(again, [Copy(0, 0, POOL)], b"x")
    assert writer.wait_for_write(handle) == WriteCompleted(handle=handle)
    assert new.call("pool") == writer.bytes_at(0, POOL)


def test_stopped_receiver_is_given_up_in_time(wire: str, writer: Life, start_child: StartChild) -> None:
    child = start_child(DECODE)
    writer.transport.connect(DECODE, child.endpoint)
    writer.wait_for(Connected)
    child.kill(signal.SIGSTOP)
    handle = writer.transport.write(DECODE, [Copy(0, 0, POOL)], b"x")
    failed = writer.wait_for_write(handle)
    assert isinstance(failed, WriteFailed) and not failed.quiesced
    gone = writer.wait_for(PeerGone)
    assert isinstance(gone, PeerGone) and gone.peer == DECODE and "silent" in gone.reason


def test_peer_that_talks_but_takes_no_data_is_given_up(
    here: Life, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    hasty = Kind(path=KIND.path, pool_size_bytes=POOL, options={"limits": NixlLimits(transfer_timeout_s=0.5)})
    writer = Life(hasty, PREFILL)
    request.addfinalizer(writer.close)
    link(writer, here)
    monkeypatch.setattr(NixlAgent, "progress", lambda self: [])
    handle = writer.transport.write(DECODE, [Copy(0, 0, POOL)], b"x")
    failed = writer.wait_for_write(handle)
    assert isinstance(failed, WriteFailed) and failed.quiesced, "the other end has let go of its agent"
    gone = writer.wait_for(PeerGone)
    assert isinstance(gone, PeerGone) and "has not landed" in gone.reason
    assert isinstance(here.wait_for(PeerGone), PeerGone)


def test_peer_whose_owner_reads_nothing_is_given_up(here: Life, writer: Life) -> None:
    link(writer, here)
    deadline_s = time.monotonic() + TIMEOUT_S
    with pytest.raises(UnknownPeerError):
        while time.monotonic() < deadline_s:
            writer.transport.write(DECODE, [], bytes(100))
    gone = writer.wait_for(PeerGone)
    assert isinstance(gone, PeerGone) and "unread" in gone.reason


def test_disconnect_settles_what_is_in_flight(here: Life, writer: Life) -> None:
    link(writer, here)
    handles = [writer.transport.write(DECODE, [Copy(0, 0, POOL)], b"x") for _ in range(3)]
    writer.transport.disconnect(DECODE)
    for handle in handles:
        ended = writer.wait_for_write(handle)
        assert isinstance(ended, WriteCompleted) or ended.quiesced
    assert isinstance(here.wait_for(PeerGone), PeerGone)
    here.pool.mapping[:] = bytes(POOL)
    time.sleep(0.05)  # nothing may land: a real late write needs real time
    assert here.bytes_at(0, POOL) == bytes(POOL)
    assert not any(isinstance(event, PeerGone) for event in writer.events), "who leaves is not told"
    link(writer, here)


# ---- fences ----------------------------------------------------------------------------------------------------------


def test_fence_stops_a_writer_in_full_flight(wire: str, here: Life, start_child: StartChild) -> None:
    child = start_child()
    connect_child(here, child)
    child.tell("hammer", here.me, [Copy(0, 0, POOL)])
    for _ in range(10):
        here.wait_for(Notified)
    here.transport.fence(PREFILL)
    assert here.wait_for(Fenced) == Fenced(peer=PREFILL)
    here.pool.mapping[:] = bytes(POOL)
    time.sleep(0.05)  # nothing may land: a real late write needs real time
    assert here.bytes_at(0, POOL) == bytes(POOL)
    assert isinstance(child.wait_for(PeerGone), PeerGone)
    assert child.process.is_alive(), "a fence by nixl kills nobody"


@pytest.mark.parametrize("delay_s", [0.0, 0.0007, 0.0023])
def test_fence_stops_a_stopped_writer(wire: str, here: Life, start_child: StartChild, delay_s: float) -> None:
    child = start_child()
    connect_child(here, child)
    child.tell("hammer", here.me, [Copy(0, 0, POOL)])
    here.wait_for(Notified)
    time.sleep(delay_s)  # so that it is stopped at one point or another of a write
    child.kill(signal.SIGSTOP)
    here.transport.fence(PREFILL)
    assert here.wait_for(Fenced) == Fenced(peer=PREFILL)
    regranted = pool_bytes(9, POOL)
    here.pool.mapping[:] = regranted
    child.kill(signal.SIGCONT)
    assert isinstance(child.wait_for(PeerGone), PeerGone), "it has woken up, and tried"
    assert here.bytes_at(0, POOL) == regranted
    child.call("connect", here.me, here.transport.endpoint())
    while not child.pipe.poll():
        here.poll(0.01)
    failed = child.wait_for(ConnectFailed)
    assert isinstance(failed, ConnectFailed) and "fenced" in failed.reason


def test_stopped_writer_is_noticed_in_time(here: Life, start_child: StartChild) -> None:
    child = start_child()
    connect_child(here, child)
    child.kill(signal.SIGSTOP)
    gone = here.wait_for(PeerGone)
    assert isinstance(gone, PeerGone) and "silent" in gone.reason
    child.kill(signal.SIGCONT)
    assert isinstance(child.wait_for(PeerGone), PeerGone)
    connect_child(here, child)  # it was not fenced


def test_fenced_life_is_refused_and_the_next_one_welcome(here: Life, start_child: StartChild) -> None:
    here.transport.fence(PREFILL)  # before it ever connected
    assert here.wait_for(Fenced) == Fenced(peer=PREFILL)
    old = start_child()
    old.call("connect", here.me, here.transport.endpoint())
    while not old.pipe.poll():
        here.poll(0.01)
    failed = old.wait_for(ConnectFailed)
    assert isinstance(failed, ConnectFailed) and "fenced" in failed.reason
    again = PeerId(PREFILL.name, PREFILL.incarnation + 1)
    new = start_child(again, 4)
    new.call("connect", here.me, here.transport.endpoint())
    assert here.wait_for(Connected) == Connected(peer=again)
    assert new.wait_for(Connected) == Connected(peer=here.me)
    new.call("write", here.me, [Copy(0, 0, POOL)], b"x")
    here.wait_for(Notified)
    assert here.bytes_at(0, POOL) == pool_bytes(4, POOL)
    here.transport.fence(PREFILL)
    assert not here.events, "a fence is reported once"


def test_fence_of_one_does_not_disturb_another(here: Life, writer: Life) -> None:
    other = Life(KIND, PeerId("prefill-1", 1), seed=3)
    try:
        link(writer, here)
        link(other, here)
        handles = [other.transport.write(DECODE, [Copy(0, 0, POOL)], b"%d" % n) for n in range(4)]
        writer.transport.write(DECODE, [Copy(0, 0, POOL)], b"x")
        here.transport.fence(PREFILL)
        here.wait_for(Fenced)
        assert all(other.wait_for_write(handle) == WriteCompleted(handle=handle) for handle in handles)
        assert here.bytes_at(0, POOL) == other.bytes_at(0, POOL)
        writer.wait_for(PeerGone)
    finally:
        other.close()


# ---- what is left ----------------------------------------------------------------------------------------------------


def descriptors_and_threads() -> tuple[int, int]:
    gc.collect()
    threads = sum(1 for task in Path("/proc/self/task").iterdir() if "kv-nixl" in (task / "comm").read_text())
    return len(os.listdir("/proc/self/fd")), threads


def test_close_gives_everything_back(start_child: StartChild) -> None:
    child = start_child(DECODE)
    counts: list[tuple[int, int]] = []
    for _ in range(2):  # what the library keeps for the process, the first round has made
        counts.append(descriptors_and_threads())
        writer, reader = Life(KIND, PREFILL, seed=1), Life(KIND, PeerId("decode-1", 1))
        writer.transport.connect(DECODE, child.endpoint)
        writer.wait_for(Connected)
        link(writer, reader)
        for _ in range(10):
            writer.transport.write(DECODE, [Copy(0, 0, POOL)], b"x")
            writer.transport.write(reader.me, [Copy(0, 0, POOL)], b"x")
        writer.transport.connect(PeerId("nobody", 1), encode_endpoint(Endpoint(host="127.0.0.1", port=1, token="")))
        writer.close()
        writer.transport.close()
        assert isinstance(reader.wait_for(PeerGone), PeerGone)
        assert isinstance(child.wait_for(PeerGone), PeerGone)
        reader.close()
    counts.append(descriptors_and_threads())
    assert counts[1] == counts[2]
    child.tell("close")
    child.process.join(TIMEOUT_S)
    assert child.process.exitcode == 0


@pytest.mark.timeout(60)
def test_silence_is_noticed_when_it_has_lasted_and_not_at_the_next_heartbeat() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        wake_fd = os.eventfd(0)
        control = ControlLink(connection, wake_fd, NixlLimits(heartbeat_interval_s=1000, silence_timeout_s=0.05))
        with pytest.raises(LinkEndedError, match="silent"):
            while True:
                control.receive()
                control.wait(1000)
        control.close(BYE)
        os.close(wake_fd)


def test_environment_that_allows_writes_past_the_fence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kv_transfer.transport.nixl_agent import NixlError

    for names in ("all", "cma,tcp", "sm,tcp", "^tcp"):
        monkeypatch.setenv("UCX_TLS", names)
        with pytest.raises(NixlError, match="UCX_TLS"):
            Life(KIND, DECODE)


def test_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from kv_transfer.transport import nixl_agent

    monkeypatch.setattr(nixl_agent, "LIBRARIES", ("nixl_of_nowhere",))
    with pytest.raises(nixl_agent.NixlError, match=r"baton-cluster\[nixl\]"):
        Life(KIND, DECODE)
