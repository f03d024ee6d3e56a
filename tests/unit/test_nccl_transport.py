"""The nccl transport over a double of NCCL: what base.py promises, and NCCL's rules, step by step on a virtual clock.

Most tests drive the nodes of both ends by hand, so that every order of events can be had; the last ones run the real
thread. The TCP connections are real, over the loopback interface.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import pytest

from kv_transfer.checksum import checksum
from kv_transfer.transport.base import (
    Connected,
    ConnectFailed,
    Copy,
    Fenced,
    Notified,
    PeerGone,
    PeerId,
    Transport,
    TransportError,
    TransportEvent,
    UnknownPeerError,
    WriteCompleted,
    WriteFailed,
)
from kv_transfer.transport.nccl import ChecksumUnavailableError, NcclTransport
from kv_transfer.transport.nccl_library import RECEIVER_RANK, WRITER_RANK
from kv_transfer.transport.nccl_limits import MIB, SECOND_NS, NcclLimits
from kv_transfer.transport.nccl_wire import (
    ANNOUNCE,
    ARRIVED,
    LENGTH,
    MAX_COPIES_PER_GROUP,
    MAX_NOTIFY_BYTES,
    READY,
    Endpoint,
    Hello,
    NcclProtocolError,
    decode_announcement,
    decode_endpoint,
    decode_handshake,
    encode_announcement,
    encode_endpoint,
    encode_group,
    encode_handshake,
)
from kv_transfer.transport.nccl_writing import split_groups
from tests.support.fake_nccl import FakeFabric, FakeNccl
from tests.support.nccl_world import MAX_STEPS, POOL, STEP_NS, Life, World, pool_bytes

BLOCK = POOL // 16
DECODE = PeerId("decode-0", 3)
PREFILL = PeerId("prefill-0", 5)
TIMEOUT_S = 30.0

E = TypeVar("E", bound=TransportEvent)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


@pytest.fixture
def pair(world: World) -> tuple[Life, Life]:
    """A connected writer and receiver."""
    writer, receiver = world.life(PREFILL, seed=1), world.life(DECODE)
    join(world, writer, receiver)
    return writer, receiver


def join(world: World, writer: Life, receiver: Life) -> None:
    num_before = len(writer.of(Connected)), len(receiver.of(Connected))
    writer.connect(receiver)
    world.until(lambda: len(writer.of(Connected)) > num_before[0] and len(receiver.of(Connected)) > num_before[1])


def assert_copied(writer: Life, receiver: Life, copies: list[Copy]) -> None:
    for copy in copies:
        source = writer.memory[copy.source_bytes : copy.source_bytes + copy.size_bytes]
        assert np.array_equal(receiver.memory[copy.target_bytes : copy.target_bytes + copy.size_bytes], source)


# ---- connecting ------------------------------------------------------------------------------------------------


def test_both_ends_hear_of_a_connection_when_bytes_have_travelled(world: World) -> None:
    writer, receiver = world.life(PREFILL, seed=1), world.life(DECODE)
    world.fabric.is_moving = False
    writer.connect(receiver)
    world.run()
    assert [comm.calls for comm in world.fabric.communicators] == [["probe"], ["probe"]]
    assert writer.events == receiver.events == [], "a communicator that was made need not work"
    world.fabric.is_moving = True
    world.until(lambda: writer.events and receiver.events)
    assert writer.events == [Connected(peer=DECODE)] and receiver.events == [Connected(peer=PREFILL)]
    writer.connect(receiver)
    world.run()
    assert len(writer.events) == 1 and len(world.fabric.communicators) == 2, "connecting twice is a no-op"


def test_communicator_that_never_comes_up_fails_at_the_deadline(world: World) -> None:
    writer, receiver = world.life(PREFILL, seed=1), world.life(DECODE)
    world.fabric.may_join = False
    writer.connect(receiver)
    world.until(lambda: writer.events)
    assert NcclLimits().connect_timeout_ns <= world.now_ns <= NcclLimits().connect_timeout_ns + 10 * STEP_NS
    (failed,) = writer.of(ConnectFailed)
    assert failed.peer == DECODE and "both ends to join" in failed.reason
    world.run()
    assert receiver.events == []
    assert all(comm.is_aborted and comm.has_stopped for comm in world.fabric.communicators)
    world.fabric.may_join = True
    join(world, writer, receiver)
    assert len(world.fabric.communicators) == 4, "remade under a new name"


def test_error_while_a_communicator_is_made_fails_both_ends(world: World) -> None:
    writer, receiver = world.life(PREFILL, seed=1), world.life(DECODE)
    world.fabric.may_join = False
    writer.connect(receiver)
    world.until(lambda: len(world.fabric.communicators) == 2)
    world.fabric.communicators[0].error = "unhandled system error"
    world.until(lambda: writer.events)
    (failed,) = writer.of(ConnectFailed)
    assert "unhandled system error" in failed.reason
    world.run()
    assert receiver.events == [] and all(comm.is_aborted for comm in world.fabric.communicators)


def test_connection_that_breaks_as_it_opens_was_never_open(world: World) -> None:
    writer, receiver = world.life(PREFILL, seed=1), world.life(DECODE)
    writer.connect(receiver)
    world.until(lambda: [comm.calls for comm in world.fabric.communicators] == [["probe"], ["probe"]])
    writer.is_stopped = True
    receiver.node._inbound[PREFILL].session.control._socket.shutdown(socket.SHUT_WR)
    world.run()
    assert receiver.events == [], "no PeerGone without Connected"
    writer.is_stopped = False
    world.until(lambda: writer.of(ConnectFailed))


def test_address_without_a_listener_fails_at_once(world: World) -> None:
    writer, receiver = world.life(PREFILL), world.life(DECODE)
    nobody = socket.create_server(("127.0.0.1", 0))
    port = nobody.getsockname()[1]
    nobody.close()
    for host, text in (("127.0.0.1", "reach"), ("no.such.host", "numeric")):
        endpoint = encode_endpoint(Endpoint(host=host, port=port, token="x"))
        writer.node.connect(receiver.me, endpoint, world.now_ns)
        world.until(lambda: writer.events)
        (failed,) = writer.of(ConnectFailed)
        assert text in failed.reason
        writer.events.clear()


def test_listener_that_says_nothing_fails_at_the_silence_limit(world: World) -> None:
    writer = world.life(PREFILL)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = encode_endpoint(Endpoint(host="127.0.0.1", port=mute.getsockname()[1], token="x"))
        writer.node.connect(DECODE, endpoint, world.now_ns)
        world.until(lambda: writer.of(ConnectFailed))
    assert world.now_ns >= 9 * SECOND_NS


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        (b"", "damaged"),
        (b"[]", "damaged"),
        (b'{"transport":"nccl","version":9}', "version 9"),
        (b'{"transport":"shm","version":1}', "not of an nccl"),
        (b'{"transport":"nccl","version":1,"host":1,"port":2,"token":"x"}', "host"),
        (b'{"transport":"nccl","version":1,"host":"127.0.0.1","port":99999,"token":"x"}', "port"),
    ],
)
def test_endpoint_that_cannot_be_used_fails_its_connection(world: World, endpoint: bytes, text: str) -> None:
    writer = world.life(PREFILL)
    writer.node.connect(DECODE, endpoint, world.now_ns)
    (failed,) = writer.of(ConnectFailed)
    assert failed.peer == DECODE
    assert text in failed.reason


def test_wrong_target_token_and_version_are_refused_with_both_sides_values(world: World) -> None:
    receiver = world.life(DECODE)
    writer = world.life(PREFILL)
    old = world.life(PeerId("prefill-1", 1), version="2.20.1")
    stranger = PeerId("decode-0", 4)
    writer.node.connect(stranger, receiver.endpoint(), world.now_ns)
    old.connect(receiver)
    world.until(lambda: writer.events and old.events)
    assert "incarnation 3" in writer.of(ConnectFailed)[0].reason
    assert "2.20.1" in old.of(ConnectFailed)[0].reason and "2.99.0" in old.of(ConnectFailed)[0].reason
    writer.events.clear()
    guess = Endpoint(host=receiver.node.endpoint.host, port=receiver.node.endpoint.port, token="guess")
    writer.node.connect(DECODE, encode_endpoint(guess), world.now_ns)
    world.until(lambda: writer.events)
    assert "refused" in writer.of(ConnectFailed)[0].reason
    assert receiver.events == [] and world.fabric.communicators == []


def framed(frame: bytes) -> bytes:
    return LENGTH.pack(len(frame)) + frame


def hello_bytes(**changes: object) -> bytes:
    fields: dict[str, object] = {
        "writer_name": "x",
        "writer_incarnation": 1,
        "target_name": DECODE.name,
        "target_incarnation": DECODE.incarnation,
        "token": "guess",
        "library_version": "2.99.0",
        "version": 1,
    }
    return framed(b"\x01" + json.dumps(fields | changes).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        framed(b"\x08hello"),
        framed(b"\x01[]"),
        framed(b"\x01" + b"[" * 200_000),
        hello_bytes(),
        hello_bytes(token="\ud800"),
        hello_bytes(writer_name=7),
        hello_bytes(writer_incarnation=-1),
        hello_bytes(writer_incarnation=True),
        hello_bytes(version=2),
        hello_bytes(more=1),
        hello_bytes() * 2,
    ],
)
def test_strangers_are_turned_away(world: World, data: bytes) -> None:
    receiver = world.life(DECODE)
    with socket.create_connection((receiver.node.endpoint.host, receiver.node.endpoint.port)) as stranger:
        stranger.sendall(data)
        stranger.settimeout(TIMEOUT_S)
        world.run(10)
        received = b""
        with contextlib.suppress(ConnectionResetError):  # it is closed with bytes of ours unread
            while piece := stranger.recv(1000):
                received += piece
        assert received == b"" or received[LENGTH.size] == 3
    assert receiver.events == []


def test_strangers_are_bounded_in_number_and_time(world: World) -> None:
    receiver = world.life(DECODE, limits=NcclLimits(max_strangers=3))
    where = (receiver.node.endpoint.host, receiver.node.endpoint.port)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(where)) for _ in range(5)]
        world.run(5)
        assert [stranger.recv(1) for stranger in strangers[:2]] == [b"", b""]
        world.run(11_000)
        assert [stranger.recv(1) for stranger in strangers[2:]] == [b"", b"", b""]


# ---- writing ---------------------------------------------------------------------------------------------------


def test_bytes_land_in_place_and_the_notification_carries_their_sums(world: World, pair: tuple[Life, Life]) -> None:
    writer, receiver = pair
    copies = [Copy(3 * BLOCK, 7 * BLOCK, BLOCK), Copy(0, 2 * BLOCK, BLOCK), Copy(100, BLOCK + 8, 1000)]
    handle = writer.write(DECODE, copies, b"chunk", num_sums=2)
    world.until(lambda: receiver.of(Notified) and writer.of(WriteCompleted))
    pieces = [writer.memory[c.source_bytes : c.source_bytes + c.size_bytes] for c in copies[:2]]
    sums = b"".join(checksum(piece).to_bytes(8, "little") for piece in pieces)
    assert receiver.of(Notified) == [Notified(peer=PREFILL, payload=b"chunk" + sums)]
    assert writer.of(WriteCompleted) == [WriteCompleted(handle=handle)]
    assert_copied(writer, receiver, copies)
    assert not receiver.memory[:BLOCK].any(), "a byte landed beside its block"


def test_notification_waits_for_the_receivers_event(world: World, pair: tuple[Life, Life]) -> None:
    writer, receiver = pair
    world.fabric.is_moving = False
    writer.write(DECODE, [Copy(0, 0, BLOCK)], b"write")
    writer.notify(DECODE, b"alone")
    world.run()
    world.fabric.move()  # into the library's buffer: the sender's kernel has ended
    sender = world.fabric.of_rank(WRITER_RANK)[0]
    world.run()
    assert not sender.runs
    assert receiver.payloads == [] and writer.of(WriteCompleted) == [], "sender done is not delivery"
    world.fabric.move()
    world.until(lambda: writer.of(WriteCompleted))
    assert receiver.payloads == [b"write", b"alone"]
    assert_copied(writer, receiver, [Copy(0, 0, BLOCK)])


@pytest.mark.parametrize("num_settling_polls", [(0, 0), (0, 40), (40, 0)])
def test_notifications_arrive_in_the_order_of_posting_after_their_bytes(
    world: World, pair: tuple[Life, Life], num_settling_polls: tuple[int, int]
) -> None:
    """However long NCCL takes to settle at either end: the double lets nobody call it earlier."""
    writer, receiver = pair
    for communicator in world.fabric.communicators:
        communicator.num_settling_polls = num_settling_polls[communicator.rank]
    for number in range(60):
        at = number % 16 * BLOCK
        if number % 3:
            writer.write(DECODE, [Copy(at, at, BLOCK)], bytes([number]))
        else:
            writer.notify(DECODE, bytes([number]))
    num_seen = 0
    for _ in range(MAX_STEPS):
        if num_seen == 60:
            break
        world.step()
        for number, payload in enumerate(receiver.payloads[num_seen:], num_seen):
            assert payload == bytes([number])
            if number % 3:
                assert_copied(writer, receiver, [Copy(number % 16 * BLOCK, number % 16 * BLOCK, BLOCK)])
        num_seen = len(receiver.payloads)
    world.until(lambda: len(writer.of(WriteCompleted)) == 40)


def test_no_send_is_posted_before_its_receive(world: World, pair: tuple[Life, Life]) -> None:
    writer, receiver = pair
    receiver.is_stopped = True
    writer.write(DECODE, [Copy(0, 0, BLOCK)], b"")
    world.run()
    assert world.fabric.of_rank(WRITER_RANK)[0].calls == ["probe"]
    receiver.is_stopped = False
    world.until(lambda: writer.of(WriteCompleted))
    assert world.fabric.of_rank(WRITER_RANK)[0].calls == ["probe", "send"]
    assert world.fabric.of_rank(RECEIVER_RANK)[0].calls == ["probe", "receive"]


def test_receiver_answers_over_the_same_connection(world: World, pair: tuple[Life, Life]) -> None:
    writer, receiver = pair
    receiver.notify(PREFILL, b"committed")
    world.until(lambda: writer.of(Notified))
    assert writer.of(Notified) == [Notified(peer=DECODE, payload=b"committed")]
    handle = receiver.write(PREFILL, [Copy(0, 0, 8)], b"")
    assert receiver.of(WriteFailed) == [WriteFailed(handle=handle, quiesced=True, reason="the connection has ended")], (
        "it may answer, but not write"
    )


def test_both_directions_have_a_communicator_of_their_own(world: World, pair: tuple[Life, Life]) -> None:
    writer, receiver = pair
    join(world, receiver, writer)
    assert len(world.fabric.communicators) == 4
    there, back = [Copy(0, 0, POOL // 2)], [Copy(POOL // 2, POOL // 2, BLOCK)]
    receiver.memory[POOL // 2 :] = 7
    for _ in range(8):
        writer.write(DECODE, there, b"there")
        receiver.write(PREFILL, back, b"back")
    world.until(lambda: len(writer.of(WriteCompleted)) == len(receiver.of(WriteCompleted)) == 8)
    assert_copied(writer, receiver, there)
    assert_copied(receiver, writer, back)
    receiver.fence(PREFILL)
    world.until(lambda: receiver.of(Fenced))


def test_receives_into_one_gpu_are_bounded_and_fairly_shared(world: World) -> None:
    receiver = world.life(DECODE, limits=NcclLimits(max_receiving_groups=2))
    writers = [world.life(PeerId(f"prefill-{index}", 1), seed=index + 1) for index in range(4)]
    for writer in writers:
        join(world, writer, receiver)
    world.fabric.is_moving = False
    for index, writer in enumerate(writers):
        for _ in range(3):
            writer.write(DECODE, [Copy(index * BLOCK, index * BLOCK, BLOCK)], b"%d" % index)
    world.run()
    receives = sum(comm.calls.count("receive") for comm in world.fabric.of_rank(RECEIVER_RANK))
    assert receives == 2
    world.fabric.is_moving = True
    world.until(lambda: len(receiver.payloads) == 12)
    assert set(receiver.payloads[:4]) == {b"0", b"1", b"2", b"3"}, "one after the other had its turn"
    for index, writer in enumerate(writers):
        assert_copied(writer, receiver, [Copy(index * BLOCK, index * BLOCK, BLOCK)])


def test_cancelled_writes_end_as_failed_and_send_nothing(world: World, pair: tuple[Life, Life]) -> None:
    writer, receiver = pair
    handles = [writer.write(DECODE, [Copy(0, 0, BLOCK)], bytes([n])) for n in range(30)]
    world.step()  # some are announced now: these arrive
    for handle in handles:
        writer.node.cancel(handle)
    writer.node.cancel(999)
    world.until(lambda: len(writer.events) == 31)
    failed = writer.of(WriteFailed)
    assert len(failed) == 26 and all(event.quiesced and event.reason == "cancelled" for event in failed)
    assert receiver.payloads == [bytes([n]) for n in range(4)]


def test_cancelled_write_whose_first_groups_travel_ends_when_they_have(world: World, pair: tuple[Life, Life]) -> None:
    writer, receiver = pair
    world.fabric.is_moving = False
    scattered = [Copy(n * 1024, n * 1024, 512) for n in range(6 * MAX_COPIES_PER_GROUP)]
    writer.write(DECODE, scattered, b"never")
    world.run()
    writer.node.cancel(1)
    world.run()
    assert writer.of(WriteFailed) == []
    world.fabric.is_moving = True
    world.until(lambda: writer.of(WriteFailed))
    assert writer.of(WriteFailed) == [WriteFailed(handle=1, quiesced=True, reason="cancelled")]
    writer.write(DECODE, [Copy(0, 0, 8)], b"next")
    world.until(lambda: receiver.payloads)
    assert receiver.payloads == [b"next"]


def test_large_writes_become_groups_of_bounded_number_and_size(world: World) -> None:
    copies = [Copy(n, 1000 + n, 1) for n in range(100)] + [Copy(2 * n, 3 * n, 1) for n in range(300)]
    groups = list(split_groups([*copies, Copy(5, 5, 0)], MIB))
    assert len(groups[0]) == MAX_COPIES_PER_GROUP and groups[0][0] == Copy(0, 1000, 100), "neighbours are merged"
    assert [len(group) for group in groups] == [128, 128, 45]
    assert list(split_groups([Copy(0, 50, 25)], 10)) == [[Copy(0, 50, 10)], [Copy(10, 60, 10)], [Copy(20, 70, 5)]]
    limits = NcclLimits(max_group_bytes=10_000)
    writer, receiver = world.life(PREFILL, seed=1, limits=limits), world.life(DECODE)
    join(world, writer, receiver)
    writer.write(DECODE, [Copy(0, 0, POOL)], b"all")
    world.until(lambda: writer.of(WriteCompleted))
    assert receiver.payloads == [b"all"] and np.array_equal(writer.memory, receiver.memory)
    assert max(world.fabric.of_rank(WRITER_RANK)[0].sizes) == 10_000


def test_range_outside_of_the_receivers_pool_ends_the_connection(world: World, pair: tuple[Life, Life]) -> None:
    """The transport checks it, too: this is a writer that does not."""
    writer, receiver = pair
    handle = writer.write(DECODE, [Copy(0, POOL - 4, 8)], b"")
    world.until(lambda: writer.of(PeerGone) and receiver.of(PeerGone))
    assert "outside of the pool" in receiver.of(PeerGone)[0].reason
    assert writer.of(WriteFailed)[0] == WriteFailed(handle=handle, quiesced=True, reason=writer.of(PeerGone)[0].reason)
    assert world.fabric.of_rank(WRITER_RANK)[0].calls == ["probe"] and not receiver.memory.any()


# ---- fences ----------------------------------------------------------------------------------------------------


def test_fence_of_a_life_that_never_connected(world: World) -> None:
    receiver, writer = world.life(DECODE), world.life(PREFILL)
    receiver.fence(PREFILL)
    receiver.fence(PREFILL)
    world.run()
    receiver.fence(PREFILL)
    world.run()
    assert receiver.events == [Fenced(peer=PREFILL)]
    writer.connect(receiver)
    world.until(lambda: writer.events)
    assert "fenced" in writer.of(ConnectFailed)[0].reason and world.fabric.communicators == []


@pytest.mark.parametrize("num_moves", range(8))
def test_no_byte_lands_after_the_fence(world: World, pair: tuple[Life, Life], num_moves: int) -> None:
    """At whatever moment of a write: the receive's kernel runs on for a while after the abort, and the fence waits."""
    writer, receiver = pair
    world.fabric.is_moving = False
    world.fabric.num_abort_polls = 20
    handles = [writer.write(DECODE, [Copy(0, 0, POOL)], b"late") for _ in range(3)]
    world.run()
    for _ in range(num_moves):
        world.fabric.move(POOL // 5)
        world.step()
    receiver.fence(PREFILL)
    world.run(5)
    assert receiver.of(Fenced) == [] and receiver.of(PeerGone)
    before = receiver.memory.copy()
    world.fabric.move()  # into the library's buffer
    world.fabric.move()
    assert num_moves > 5 or not np.array_equal(before, receiver.memory), "the double is not late enough"
    world.until(lambda: receiver.of(Fenced))
    receiver.memory[:] = 0  # the blocks are granted to somebody else
    num_notified = len(receiver.payloads)
    world.fabric.is_moving = True
    world.until(lambda: len(writer.of(WriteFailed)) + len(writer.of(WriteCompleted)) == len(handles))
    world.run()
    assert not receiver.memory.any() and len(receiver.payloads) == num_notified
    assert all(event.quiesced for event in writer.of(WriteFailed)), "the receiver said QUIET"
    assert writer.of(PeerGone) == [PeerGone(peer=DECODE, reason="fenced")]
    writer.events.clear()
    writer.connect(receiver)
    world.until(lambda: writer.of(ConnectFailed))
    assert not receiver.memory.any()


def test_fence_of_a_stopped_writer_holds_when_it_wakes(world: World, pair: tuple[Life, Life]) -> None:
    writer, receiver = pair
    world.fabric.is_moving = False
    handle = writer.write(DECODE, [Copy(0, 0, POOL)], b"late")
    world.run()
    world.fabric.move(POOL // 2)
    writer.is_stopped = True
    receiver.fence(PREFILL)
    world.fabric.is_moving = True
    world.until(lambda: receiver.of(Fenced))
    receiver.memory[:] = 0
    world.run(6_000)
    writer.is_stopped = False
    world.until(lambda: writer.of(WriteFailed))
    assert writer.of(WriteFailed)[0].handle == handle
    assert not receiver.memory.any() and receiver.payloads == []


def test_fence_while_the_communicator_is_being_made(world: World) -> None:
    writer, receiver = world.life(PREFILL, seed=1), world.life(DECODE)
    world.fabric.may_join = False
    writer.connect(receiver)
    world.until(lambda: len(world.fabric.communicators) == 2)
    receiver.fence(PREFILL)
    world.until(lambda: receiver.of(Fenced) and writer.of(ConnectFailed))
    assert receiver.events == [Fenced(peer=PREFILL)], "who never connected is not gone"
    assert all(comm.is_aborted for comm in world.fabric.communicators)


def test_fence_does_not_complete_while_an_abort_hangs(world: World, pair: tuple[Life, Life]) -> None:
    _, receiver = pair
    world.fabric.num_abort_polls = 10**9
    receiver.fence(PREFILL)
    world.run(20_000)
    assert receiver.of(Fenced) == [], "then its blocks stay quarantined"
    assert not receiver.node.is_busy, "it is asked about now and then"
    world.fabric.of_rank(RECEIVER_RANK)[0]._abort_left = 0
    world.until(lambda: receiver.of(Fenced))


def test_fence_leaves_other_writers_alone(world: World) -> None:
    receiver = world.life(DECODE, limits=NcclLimits(max_receiving_groups=1))
    writer, other, waiting = world.life(PREFILL, seed=1), world.life(PeerId("b", 1), seed=2), world.life(PeerId("c", 1))
    for life in (writer, other, waiting):
        join(world, life, receiver)
    world.fabric.step_bytes = 1000
    writer.write(DECODE, [Copy(0, 0, POOL // 2)], b"fenced")
    world.run(10)
    waiting.write(DECODE, [Copy(0, 0, POOL // 2)], b"fenced in the queue")
    world.run(10)
    receiver.fence(waiting.me)
    for _ in range(3):
        other.write(DECODE, [Copy(POOL // 2, POOL // 2, POOL // 2)], b"lives")
    world.run(10)
    assert receiver.payloads == []
    receiver.fence(PREFILL)
    world.until(lambda: len(receiver.of(Fenced)) == 2 and len(receiver.payloads) == 3)
    assert receiver.payloads == [b"lives"] * 3, "what the fenced one had taken of the GPU is free again"
    assert_copied(other, receiver, [Copy(POOL // 2, POOL // 2, POOL // 2)])


# ---- failures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [RECEIVER_RANK, WRITER_RANK])
def test_asynchronous_error_ends_the_connection_which_is_then_remade(
    world: World, pair: tuple[Life, Life], rank: int
) -> None:
    writer, receiver = pair
    world.fabric.step_bytes = 1000
    handle = writer.write(DECODE, [Copy(0, 0, POOL)], b"never")
    world.run(30)
    world.fabric.of_rank(rank)[0].error = "remote process exited or there was a network error"
    world.until(lambda: writer.of(WriteFailed) and receiver.of(PeerGone))
    assert "network error" in writer.of(PeerGone)[0].reason and "network error" in receiver.of(PeerGone)[0].reason
    assert (writer.of(WriteFailed)[0].handle, writer.of(WriteFailed)[0].quiesced) == (handle, True)
    assert receiver.payloads == []
    world.until(lambda: all(comm.has_stopped for comm in world.fabric.communicators))
    world.fabric.step_bytes = 1 << 16
    writer.events.clear()
    receiver.events.clear()
    join(world, writer, receiver)
    assert len(world.fabric.communicators) == 4
    writer.write(DECODE, [Copy(0, 0, POOL)], b"again")
    world.until(lambda: receiver.payloads)
    assert np.array_equal(writer.memory, receiver.memory)


def test_event_of_operations_that_were_given_up_delivers_nothing(world: World, pair: tuple[Life, Life]) -> None:
    """An event is done also when its kernel has left because of an error, which may be known no earlier than that."""
    writer, receiver = pair
    world.fabric.is_moving = False
    writer.write(DECODE, [Copy(0, 0, BLOCK)], b"never")
    world.run()
    world.fabric.of_rank(RECEIVER_RANK)[0].gives_up_with = "internal error"
    world.until(lambda: writer.of(WriteFailed))
    assert receiver.payloads == [] and writer.of(WriteCompleted) == []


def test_group_that_does_not_arrive_ends_the_connection(world: World, pair: tuple[Life, Life]) -> None:
    writer, receiver = pair
    world.fabric.is_moving = False
    start_ns = world.now_ns
    writer.write(DECODE, [Copy(0, 0, BLOCK)], b"never")
    world.until(lambda: writer.of(WriteFailed))
    assert 10 * SECOND_NS <= world.now_ns - start_ns <= 11 * SECOND_NS
    assert "did not arrive within 10.0 s" in writer.of(PeerGone)[0].reason
    assert receiver.of(PeerGone) and all(comm.is_aborted for comm in world.fabric.communicators)


def test_killed_writer_is_noticed_and_its_successor_welcome(world: World, pair: tuple[Life, Life]) -> None:
    writer, receiver = pair
    world.fabric.step_bytes = 1000
    writer.write(DECODE, [Copy(0, 0, POOL)], b"never")
    world.run(20)
    world.end(writer)
    world.until(lambda: receiver.of(PeerGone))
    receiver.fence(PREFILL)
    world.until(lambda: receiver.of(Fenced))
    receiver.memory[:] = 0
    world.fabric.step_bytes = 1 << 16
    successor = world.life(PeerId(PREFILL.name, PREFILL.incarnation + 1), seed=2)
    join(world, successor, receiver)
    assert not receiver.memory.any()
    successor.write(DECODE, [Copy(0, 0, POOL)], b"new")
    world.until(lambda: receiver.payloads)
    assert receiver.of(Notified)[-1].peer == successor.me and np.array_equal(successor.memory, receiver.memory)


def test_killed_receiver_is_noticed_and_its_writes_are_not_called_quiet(world: World, pair: tuple[Life, Life]) -> None:
    writer, receiver = pair
    world.fabric.is_moving = False
    sent = writer.write(DECODE, [Copy(0, 0, POOL)], b"never")
    world.run()
    for number in range(4):
        writer.write(DECODE, [Copy(0, 0, 8)], bytes([number]))
    world.end(receiver)
    world.until(lambda: len(writer.of(WriteFailed)) == 5)
    failed = {event.handle: event.quiesced for event in writer.of(WriteFailed)}
    assert failed == {sent: False, sent + 1: True, sent + 2: True, sent + 3: True, sent + 4: True}
    assert len(writer.of(PeerGone)) == 1


@pytest.mark.parametrize("is_writer_stopped", [True, False])
def test_silent_peer_is_gone_within_five_seconds(
    world: World, pair: tuple[Life, Life], is_writer_stopped: bool
) -> None:
    writer, receiver = pair
    world.run(20_000)
    assert writer.of(PeerGone) == receiver.of(PeerGone) == [], "idle is not silent"
    stopped, other = (writer, receiver) if is_writer_stopped else (receiver, writer)
    stopped.is_stopped = True
    start_ns = world.now_ns
    world.until(lambda: other.of(PeerGone))
    assert world.now_ns - start_ns <= 5 * SECOND_NS
    assert "said nothing" in other.of(PeerGone)[0].reason
    stopped.is_stopped = False
    world.until(lambda: stopped.of(PeerGone))


def test_write_that_arrived_while_its_connection_ended_is_done(world: World, pair: tuple[Life, Life]) -> None:
    writer, receiver = pair
    handle = writer.write(DECODE, [Copy(0, 0, BLOCK)], b"arrived")
    world.until(lambda: world.fabric.of_rank(WRITER_RANK)[0].calls == ["probe", "send"])
    writer.is_stopped = True
    world.until(lambda: receiver.payloads)
    writer.node.disconnect(DECODE, world.now_ns)
    writer.is_stopped = False
    world.until(lambda: writer.of(WriteCompleted) or writer.of(WriteFailed))
    assert writer.of(WriteCompleted) == [WriteCompleted(handle=handle)]


def test_writer_of_a_silent_receiver_gives_up_waiting_for_its_word(world: World, pair: tuple[Life, Life]) -> None:
    writer, receiver = pair
    world.fabric.is_moving = False
    writer.write(DECODE, [Copy(0, 0, POOL)], b"never")
    world.run()
    receiver.is_stopped = True
    world.until(lambda: writer.of(WriteFailed))
    assert not writer.of(WriteFailed)[0].quiesced


def test_newer_incarnation_ends_the_older_ones_connections(world: World, pair: tuple[Life, Life]) -> None:
    writer, receiver = pair
    writer.is_stopped = True
    successor = world.life(PeerId(PREFILL.name, PREFILL.incarnation + 1), seed=2)
    join(world, successor, receiver)
    assert [event.peer for event in receiver.of(PeerGone)] == [PREFILL]
    writer.is_stopped = False
    world.until(lambda: writer.of(PeerGone))


def test_life_that_connects_anew_replaces_its_old_connection(world: World, pair: tuple[Life, Life]) -> None:
    writer, receiver = pair
    writer.node.disconnect(DECODE, world.now_ns)
    writer.connect(receiver)
    world.until(lambda: len(writer.of(Connected)) == 2)
    world.until(lambda: len(receiver.of(Connected)) == 2)
    assert len(receiver.of(PeerGone)) == 1 and writer.of(PeerGone) == []
    writer.write(DECODE, [Copy(0, 0, BLOCK)], b"x")
    world.until(lambda: receiver.payloads)


def test_disconnect_ends_both_directions_and_tells_the_other_end(world: World, pair: tuple[Life, Life]) -> None:
    writer, receiver = pair
    join(world, receiver, writer)
    writer.node.disconnect(DECODE, world.now_ns)
    world.until(lambda: receiver.of(PeerGone))
    world.run()
    assert receiver.of(PeerGone) == [PeerGone(peer=PREFILL, reason="disconnected")] and writer.of(PeerGone) == []
    world.until(lambda: all(comm.has_stopped for comm in world.fabric.communicators))


def test_disconnect_while_connecting_fails_the_connection(world: World) -> None:
    writer, receiver = world.life(PREFILL), world.life(DECODE)
    world.fabric.may_join = False
    writer.connect(receiver)
    world.until(lambda: len(world.fabric.communicators) == 2)
    writer.node.disconnect(DECODE, world.now_ns)
    assert writer.events == [ConnectFailed(peer=DECODE, reason="disconnected")]
    world.until(lambda: all(comm.has_stopped for comm in world.fabric.communicators))
    assert receiver.events == [] and len(writer.events) == 1


def test_queue_that_nobody_takes_is_bounded(world: World) -> None:
    writer, receiver = world.life(PREFILL, seed=1, limits=NcclLimits(max_waiting=10)), world.life(DECODE)
    join(world, writer, receiver)
    for _ in range(20):
        writer.write(DECODE, [Copy(0, 0, 8)], b"")
    world.until(lambda: len(writer.of(WriteFailed)) == 20)
    assert "waiting" in writer.of(PeerGone)[0].reason


# ---- a peer that breaks the protocol -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (encode_announcement(1, [(0, 8)], b""), "group 1"),
        (encode_announcement(0, [(0, 0)], b""), "outside"),
        (encode_announcement(0, [(POOL, 1)], b""), "outside"),
        (encode_announcement(0, [(2**64 - 1, 2)], b""), "outside"),
        (encode_announcement(0, [(0, 1)] * 129, b""), "more than"),
        (bytes([ANNOUNCE]), "damaged"),
        (bytes([ANNOUNCE]) + bytes(100), "damaged"),
        (encode_group(READY, 0), "kind 6"),
        (b"\xff", "kind 255"),
    ],
)
def test_receiver_ends_a_connection_that_breaks_the_protocol(
    world: World, pair: tuple[Life, Life], frame: bytes, text: str
) -> None:
    writer, receiver = pair
    writer.node._outbound[DECODE].session.send(frame)
    world.until(lambda: receiver.of(PeerGone))
    assert text in receiver.of(PeerGone)[0].reason and receiver.payloads == []


@pytest.mark.parametrize("frame", [encode_group(READY, 3), encode_group(ARRIVED, 0), bytes([READY]), b"\xff"])
def test_writer_ends_a_connection_that_breaks_the_protocol(world: World, pair: tuple[Life, Life], frame: bytes) -> None:
    writer, receiver = pair
    receiver.node._inbound[PREFILL].session.send(frame)
    world.until(lambda: writer.of(PeerGone))


def test_what_is_written_down_is_read_again() -> None:
    endpoint = Endpoint(host="::1", port=7, token="t")
    assert decode_endpoint(encode_endpoint(endpoint)) == endpoint
    hello = Hello(
        writer_name="w", writer_incarnation=1, target_name="t", target_incarnation=2, token="x", library_version="2"
    )
    assert decode_handshake(encode_handshake(hello)) == hello
    announced = decode_announcement(encode_announcement(3, [(1, 2), (3, 4)], None))
    assert (announced.group, announced.ranges, announced.notify) == (3, ((1, 2), (3, 4)), None)
    with pytest.raises(NcclProtocolError, match="damaged"):
        decode_announcement(encode_announcement(3, [(1, 2)], None) + b"x")


# ---- the thread --------------------------------------------------------------------------------------------------


class Threaded:
    """A life with its real thread."""

    def __init__(self, fabric: FakeFabric, me: PeerId, seed: int = 0) -> None:
        self.me = me
        self.memory = pool_bytes(seed)
        self.library = FakeNccl(fabric, self.memory)
        self.transport = NcclTransport(me, self.library)
        self.events: list[TransportEvent] = []

    def wait_for(self, kind: type[E]) -> E:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            for position, event in enumerate(self.events):
                if isinstance(event, kind):
                    del self.events[position]
                    return event
            left = deadline - time.monotonic()
            assert left > 0, f"no {kind.__name__}, only {self.events}"
            select.select([self.transport.fileno()], [], [], left)
            self.events += self.transport.poll()


@pytest.fixture
def threaded() -> Iterator[tuple[Threaded, Threaded]]:
    fabric = FakeFabric()
    writer, receiver = Threaded(fabric, PREFILL, seed=1), Threaded(fabric, DECODE)
    writer.transport.connect(DECODE, receiver.transport.endpoint())
    writer.wait_for(Connected)
    receiver.wait_for(Connected)
    yield writer, receiver
    writer.transport.close()
    receiver.transport.close()


def test_transport_over_its_thread(threaded: tuple[Threaded, Threaded]) -> None:
    writer, receiver = threaded
    transport: Transport = writer.transport
    copies = [Copy(0, BLOCK, BLOCK), Copy(5 * BLOCK, 0, BLOCK)]
    handle = transport.write(DECODE, copies, b"chunk", num_sums=len(copies))
    notified = receiver.wait_for(Notified)
    assert notified.payload[:5] == b"chunk" and len(notified.payload) == 21
    assert np.array_equal(receiver.memory[BLOCK : 2 * BLOCK], writer.memory[:BLOCK])
    assert writer.wait_for(WriteCompleted) == WriteCompleted(handle=handle)
    answer = receiver.transport.write(PREFILL, [], b"committed")
    assert receiver.wait_for(WriteCompleted) == WriteCompleted(handle=answer)
    assert writer.wait_for(Notified) == Notified(peer=DECODE, payload=b"committed")
    transport.write(DECODE, [Copy(0, 0, 0)], b"empty", num_sums=1)
    assert receiver.wait_for(Notified).payload == b"empty" + checksum(b"").to_bytes(8, "little")


def test_wrong_arguments_raise_at_once(threaded: tuple[Threaded, Threaded]) -> None:
    writer, receiver = threaded
    for copy in (Copy(POOL - 1, 0, 2), Copy(0, POOL - 1, 2), Copy(-1, 0, 1), Copy(0, -8, 8), Copy(0, 8, -1)):
        with pytest.raises(ValueError, match="copies"):
            writer.transport.write(DECODE, [copy], b"")
    with pytest.raises(ValueError, match="notify"):
        writer.transport.write(DECODE, [], bytes(MAX_NOTIFY_BYTES + 1))
    with pytest.raises(ValueError, match="notify"):
        writer.transport.write(DECODE, [Copy(0, 0, 8)], bytes(MAX_NOTIFY_BYTES), num_sums=1)
    with pytest.raises(UnknownPeerError):
        writer.transport.write(PeerId("decode-0", 2), [], b"")
    with pytest.raises(UnknownPeerError):
        receiver.transport.write(PREFILL, [Copy(0, 0, 8)], b"")
    writer.transport.write(DECODE, [], bytes(MAX_NOTIFY_BYTES))
    assert len(receiver.wait_for(Notified).payload) == MAX_NOTIFY_BYTES


def test_checksums_of_a_pool_that_only_a_gpu_reads_are_refused(threaded: tuple[Threaded, Threaded]) -> None:
    writer, receiver = threaded
    writer.library.host_memory = None
    with pytest.raises(ChecksumUnavailableError, match="GPU"):
        writer.transport.write(DECODE, [Copy(0, 0, 8)], b"", num_sums=1)
    writer.transport.write(DECODE, [Copy(0, 0, 8)], b"unsummed")
    assert receiver.wait_for(Notified).payload == b"unsummed"


def test_fence_over_threads(threaded: tuple[Threaded, Threaded]) -> None:
    writer, receiver = threaded
    handles = [writer.transport.write(DECODE, [Copy(0, 0, POOL)], b"") for _ in range(40)]
    receiver.wait_for(Notified)
    receiver.transport.fence(PREFILL)
    receiver.wait_for(Fenced)
    receiver.memory[:] = 0
    writer.wait_for(PeerGone)
    ended = [writer.wait_for(WriteCompleted | WriteFailed) for _ in handles]  # type: ignore[arg-type]
    assert any(isinstance(event, WriteFailed) for event in ended)
    assert not receiver.memory.any()
    with pytest.raises(UnknownPeerError):
        writer.transport.write(DECODE, [], b"")


def test_bug_in_the_thread_reaches_the_caller(threaded: tuple[Threaded, Threaded]) -> None:
    writer, _ = threaded
    before, threading.excepthook = threading.excepthook, lambda _: None
    try:
        writer.transport._post(lambda _: [].pop())
        writer.transport._thread.join(TIMEOUT_S)
    finally:
        threading.excepthook = before
    with pytest.raises(RuntimeError, match="thread has failed"):
        writer.transport.poll()


def test_close_gives_everything_back() -> None:
    def resources() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = resources()
    fabric = FakeFabric()
    writer, receiver, third = (Threaded(fabric, PeerId(name, 1), seed=1) for name in ("a", "b", "c"))
    for source, target in ((writer, receiver), (receiver, writer), (writer, third)):
        source.transport.connect(target.me, target.transport.endpoint())
        source.wait_for(Connected)
        target.wait_for(Connected)
    for _ in range(10):
        writer.transport.write(receiver.me, [Copy(0, 0, POOL)], b"x")
    fabric.may_join = False
    third.transport.connect(receiver.me, receiver.transport.endpoint())
    nowhere = Endpoint(host="127.0.0.1", port=1, token="")
    third.transport.connect(PeerId("nobody", 1), encode_endpoint(nowhere))
    third.wait_for(ConnectFailed)
    writer.transport.close()
    writer.transport.close()
    assert writer.transport.poll() == []
    receiver.wait_for(PeerGone)
    third.wait_for(PeerGone)
    third.transport.close()
    receiver.transport.close()
    assert all(comm.is_aborted and comm.has_stopped for comm in fabric.communicators)
    assert resources() == before


def test_address_that_is_not_ours_is_refused() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError, match=r"cannot listen at 192\.0\.2\.1"):
        NcclTransport(DECODE, FakeNccl(FakeFabric(), pool_bytes(0)), host="192.0.2.1")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
