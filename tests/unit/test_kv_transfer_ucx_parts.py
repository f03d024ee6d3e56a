"""The ucx backend's parts without its library: what goes over the wire, how ranges share messages, both ends' books."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.checksum import Memory, checksum
from kv_transfer.transport import ucx_pieces, ucx_reader, ucx_writer
from kv_transfer.transport.base import Copy, TransportEvent, WriteCompleted, WriteFailed
from kv_transfer.transport.ucx_link import Link, LinkLostError
from kv_transfer.transport.ucx_pieces import (
    MAX_PACKED_BYTES,
    MAX_PIECE_BYTES,
    PACKED_BELOW_BYTES,
    Staging,
    cut_pieces,
    gather,
    group_pieces,
    scatter,
)
from kv_transfer.transport.ucx_reader import Reader
from kv_transfer.transport.ucx_wire import (
    ABANDON,
    ABANDONED,
    DONE,
    GRANT,
    HELLO_BYTES,
    MAX_NOTIFY_BYTES,
    NOTIFY,
    PACKET_BYTES,
    PACKET_TAG,
    PING,
    WELCOME,
    WRITE,
    Address,
    Frame,
    Hello,
    Refused,
    UcxProtocolError,
    Welcome,
    decode_answer,
    decode_endpoint,
    decode_hello,
    decode_hello_link_id,
    decode_link_id,
    decode_packet,
    decode_pieces,
    encode_answer,
    encode_endpoint,
    encode_hello,
    encode_packets,
    encode_pieces,
)
from kv_transfer.transport.ucx_writer import MAX_OPEN_WRITES, PostedWrite, Writer

POOL = 1 << 20
HELLO = Hello(writer_name="p", writer_incarnation=1, target_name="d", target_incarnation=2, token="t")


# ---- the wire ------------------------------------------------------------------------------------------------


@given(st.binary(max_size=3 * PACKET_BYTES), st.integers(0, 2**64 - 1))
def test_frames_survive_being_cut_into_packets(body: bytes, link_id: int) -> None:
    frame = Frame(kind=NOTIFY, write_id=7, count=3, tag=9, body=body)
    packets = list(encode_packets(frame, link_id))
    parts = [decode_packet(packet.ljust(PACKET_BYTES, b"?")) for packet in packets]
    assert all(len(packet) <= PACKET_BYTES and decode_link_id(packet) == link_id for packet in packets)
    assert [has_more for _, has_more in parts] == [True] * (len(parts) - 1) + [False]
    assert b"".join(part.body for part, _ in parts) == body
    assert {(part.kind, part.write_id, part.count, part.tag) for part, _ in parts} == {(NOTIFY, 7, 3, 9)}


def test_handshake_survives_the_wire() -> None:
    data = encode_hello(HELLO, 5)
    assert len(data) == HELLO_BYTES and decode_hello(data) == HELLO and decode_hello_link_id(data) == 5
    for answer in (Welcome(size_bytes=10, link_id=2**64 - 1), Refused(reason="no")):
        assert decode_answer(encode_answer(answer)) == answer
    address = Address(host="10.0.0.1", port=80, token="x")
    assert decode_endpoint(encode_endpoint(address)) == address


def test_another_version_is_told_apart_from_noise() -> None:
    data = encode_hello(HELLO, 5)
    newer = data[:4] + (9).to_bytes(2, "little") + data[6:]
    assert decode_hello_link_id(newer) == 5, "it can be answered"
    with pytest.raises(UcxProtocolError, match="version 9"):
        decode_hello(newer)
    with pytest.raises(UcxProtocolError):
        decode_hello_link_id(b"GET / HTTP/1.1".ljust(HELLO_BYTES))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"token": 5}', "[" * 1000, "\x00", '{"writer_name": "x"}'])
def test_damaged_handshakes_are_refused(text: str) -> None:
    data = (encode_hello(HELLO, 5)[:16] + text.encode()).ljust(HELLO_BYTES)
    with pytest.raises(UcxProtocolError):
        decode_hello(data)
    with pytest.raises(UcxProtocolError):
        decode_answer(Frame(kind=WELCOME, body=text.encode()))
    with pytest.raises(UcxProtocolError):
        decode_endpoint(text.encode())


def test_limits_of_the_wire() -> None:
    with pytest.raises(UcxProtocolError, match="names"):
        encode_hello(Hello(**{**asdict(HELLO), "writer_name": "x" * HELLO_BYTES}), 1)
    with pytest.raises(UcxProtocolError):
        decode_packet(bytes(PACKET_BYTES))
    for link_id, size_bytes in ((-1, 5), (2**64, 5), (1, 0)):
        with pytest.raises(UcxProtocolError):
            decode_answer(encode_answer(Welcome(size_bytes=size_bytes, link_id=link_id)))


@pytest.mark.parametrize("piece", [(0, 0), (POOL, 1), (POOL - 1, 2), (2**64 - 1, 2), (1, 2**64 - 1), (0, POOL + 1)])
def test_pieces_outside_of_the_pool_are_refused(piece: tuple[int, int]) -> None:
    with pytest.raises(UcxProtocolError, match="outside"):
        decode_pieces(encode_pieces(np.array([(0, 5), piece], dtype=np.uint64)), POOL)
    with pytest.raises(UcxProtocolError):
        decode_pieces(b"", POOL)
    with pytest.raises(UcxProtocolError):
        decode_pieces(bytes(17), POOL)


# ---- messages ------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([1, 100, 30_000, PACKED_BELOW_BYTES - 1, PACKED_BELOW_BYTES, 400_000]), max_size=60))
def test_messages_cover_the_pieces_in_order(sizes: list[int]) -> None:
    messages = group_pieces(np.array(sizes, dtype=np.uint64))
    assert [position for first, end, _ in messages for position in range(first, end)] == list(range(len(sizes)))
    for first, end, size_bytes in messages:
        assert size_bytes == sum(sizes[first:end])
        if end > first + 1:
            assert size_bytes <= MAX_PACKED_BYTES and max(sizes[first:end]) < PACKED_BELOW_BYTES
    for (first, end, size_bytes), (next_first, _, _) in itertools.pairwise(messages):
        if sizes[end - 1] < PACKED_BELOW_BYTES and sizes[next_first] < PACKED_BELOW_BYTES:
            assert size_bytes + sizes[next_first] > MAX_PACKED_BYTES, f"message {first} had room for one more"


def test_neighbours_are_merged_and_long_ranges_cut() -> None:
    size = MAX_PIECE_BYTES
    pieces = cut_pieces([Copy(0, 50, size), Copy(size, 50 + size, 10), Copy(5, 5, 1)])
    assert pieces.tolist() == [[0, 50, size], [size, 50 + size, 10], [5, 5, 1]]


def test_gathered_pieces_scatter_to_where_they_belong() -> None:
    rng = np.random.default_rng(3)
    source, target = rng.integers(0, 256, 5000, dtype=np.uint8), np.zeros(5000, dtype=np.uint8)
    offsets, targets, sizes = (np.array(x, dtype=np.uint64) for x in ([9, 4000, 77], [1, 2000, 900], [100, 999, 1]))
    buffer = Staging().take()
    gather(buffer, source, offsets, sizes)
    scatter(target, buffer, targets, sizes)
    expected = np.zeros(5000, dtype=np.uint8)
    for offset, to, size in zip(offsets.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        expected[to : to + size] = source[offset : offset + size]
    assert (target == expected).all()


# ---- both ends, on a wire of memory ----------------------------------------------------------------------------


class FakeTransfer:
    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.size_bytes = len(memory)
        self.has_ended = False
        self.has_failed = False


class Wire:
    """Carries one direction's tagged messages when it is told to: packets in order, data in any."""

    def __init__(self) -> None:
        self.is_alive = True
        self.far_link: Link | None = None
        self.packets: deque[bytes] = deque()
        self.sent: dict[int, FakeTransfer] = {}
        self.posted: dict[int, FakeTransfer] = {}

    def send_tagged(self, memory: Any, tag: int) -> FakeTransfer:
        transfer = FakeTransfer(memory)
        if tag == PACKET_TAG:
            transfer.has_ended = True
            self.packets.append(bytes(memory).ljust(PACKET_BYTES))
        else:
            assert self.sent.setdefault(tag, transfer) is transfer, "a tag was used twice"
        return transfer

    def deliver_packet(self) -> None:
        assert self.far_link is not None
        if self.packets:
            self.far_link.take(self.packets.popleft(), 0)

    def deliver(self, tag: int) -> None:
        sent, posted = self.sent.pop(tag), self.posted.pop(tag)  # a KeyError: sent before it was granted
        posted.memory[: sent.size_bytes] = sent.memory
        sent.has_ended = posted.has_ended = True


class FarEnd:
    """What the reader posts its receives on: the writer's wire, seen from the other side."""

    def __init__(self, to_writer: Wire, from_writer: Wire) -> None:
        self.is_alive = True
        self.send_tagged = to_writer.send_tagged
        self._from_writer = from_writer

    def receive_tagged(self, memory: Memory, tag: int) -> FakeTransfer:
        transfer = FakeTransfer(memory)
        assert self._from_writer.posted.setdefault(tag, transfer) is transfer
        return transfer


class Tags:
    def __init__(self) -> None:
        self.next_tag = 16

    def take_tags(self, num_tags: int) -> int:
        first, self.next_tag = self.next_tag, self.next_tag + num_tags
        return first


class Pair:
    """A writer and a reader, joined."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.wire_back = Wire()
        near: Any = self.wire
        far: Any = FarEnd(self.wire_back, self.wire)
        self.near_link, self.far_link = Link(near, 0), Link(far, 0)
        self.near_link.peer_link_id, self.far_link.peer_link_id = self.far_link.link_id, self.near_link.link_id
        self.wire.far_link, self.wire_back.far_link = self.far_link, self.near_link
        self.source = np.random.default_rng(1).integers(1, 256, POOL, dtype=np.uint8)
        self.target = np.zeros(POOL, dtype=np.uint8)
        self.events: list[TransportEvent] = []
        self.payloads: list[bytes] = []
        self.on_payload: Callable[[bytes], None] = self.payloads.append
        tags: Any = Tags()
        self.writer = Writer(self.near_link, self.source, Staging(), self.events.append)
        self.reader = Reader(self.far_link, self.target, Staging(), tags, lambda payload: self.on_payload(payload))
        self.handle = 0

    def post(self, copies: list[Copy], notify: bytes, *, num_sums: int = 0) -> int:
        self.handle += 1
        self.writer.post(PostedWrite(handle=self.handle, copies=tuple(copies), notify=notify, num_sums=num_sums))
        return self.handle

    def turn_writer(self) -> bool:
        frames = self.near_link.hear()
        for frame in frames:
            self.writer.take(frame)
        has_moved = self.writer.advance(0)
        self.writer.check_invariants()
        return has_moved or bool(frames)

    def turn_reader(self) -> bool:
        frames = self.far_link.hear()
        for frame in frames:
            self.reader.take(frame, 0)
        has_moved = self.reader.advance(0)
        self.reader.check_invariants()
        return has_moved or bool(frames)

    def carry(self) -> bool:
        """Delivers all that is on its way."""
        has_moved = bool(self.wire.sent or self.wire.packets or self.wire_back.packets)
        for wire in (self.wire, self.wire_back):
            while wire.packets:
                wire.deliver_packet()
        for tag in list(self.wire.sent):
            self.wire.deliver(tag)
        return has_moved

    def run(self) -> None:
        """Until nothing moves any more."""
        while self.carry() | self.turn_writer() | self.turn_reader():
            pass


@contextmanager
def tight_limits() -> Iterator[None]:
    """So that windows fill, messages are many, and sums take turns."""
    with (
        mock.patch.object(ucx_pieces, "PACKED_BELOW_BYTES", 3000),
        mock.patch.object(ucx_pieces, "MAX_PACKED_BYTES", 6000),
        mock.patch.object(ucx_pieces, "MAX_PIECE_BYTES", 8000),
        mock.patch.object(ucx_reader, "MAX_POSTED_MESSAGES", 3),
        mock.patch.object(ucx_writer, "MAX_SUMMED_BYTES", 1),
        mock.patch.object(ucx_writer, "MAX_SENT_PER_TURN", 2),
    ):
        yield


def _copies(rng: random.Random, slot: int) -> list[Copy]:
    """Into a target area of their own, so that what landed can be told apart."""
    area = POOL // 64
    copies = []
    at = slot * area
    while at < (slot + 1) * area and len(copies) < 6:
        size = min(rng.choice([1, 50, 4000, area]), (slot + 1) * area - at)
        copies.append(Copy(rng.randrange(POOL - size), at, size))
        at += size + rng.choice([0, 0, 13])
    return copies


class Posted:
    """A write of the test, with what its notification must say."""

    def __init__(self, pair: Pair, rng: random.Random, slot: int) -> None:
        self.copies = _copies(rng, slot) if rng.random() < 0.8 else []
        notify = b"%d:" % slot
        num_sums = rng.choice((0, rng.randint(0, len(self.copies)), len(self.copies)))
        self.payload = notify + _sums(pair.source, self.copies[:num_sums])
        self.handle = pair.post(self.copies, notify, num_sums=num_sums)

    def is_in_place(self, pair: Pair) -> bool:
        return all(
            (_at(pair.target, c.target_bytes, c) == _at(pair.source, c.source_bytes, c)).all() for c in self.copies
        )


def _at(memory: Memory, offset: int, copy: Copy) -> Memory:
    return memory[offset : offset + copy.size_bytes]


def _sums(source: Memory, copies: list[Copy]) -> bytes:
    return b"".join(checksum(_at(source, copy.source_bytes, copy)).to_bytes(8, "little") for copy in copies)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_any_order_of_steps_and_cancels_keeps_the_contract(seed: int) -> None:
    with tight_limits():
        check_history(random.Random(seed))


def check_history(rng: random.Random) -> None:
    pair = Pair()
    posted: list[Posted] = []

    def on_payload(payload: bytes) -> None:
        write = posted[int(payload[: payload.index(b":")])]
        assert payload == write.payload and write.is_in_place(pair), "told before all bytes were there"
        pair.payloads.append(payload)

    pair.on_payload = on_payload
    steps = [pair.turn_writer, pair.turn_reader, pair.wire.deliver_packet, pair.wire_back.deliver_packet]
    for _ in range(rng.randrange(50, 400)):
        kind = rng.randrange(10)
        if kind == 0 and len(posted) < 64:
            posted.append(Posted(pair, rng, len(posted)))
        elif kind == 1 and posted:
            pair.writer.cancel(rng.choice(posted).handle, 0)
        elif kind < 4 and pair.wire.sent:
            pair.wire.deliver(rng.choice(list(pair.wire.sent)))
        else:
            rng.choice(steps)()
    pair.run()
    ended = {event.handle: event for event in pair.events if isinstance(event, WriteCompleted | WriteFailed)}
    assert len(ended) == len(pair.events) == len(posted), "every write ends once"
    assert all(event.quiesced for event in ended.values() if isinstance(event, WriteFailed))
    completed = [write for write in posted if isinstance(ended[write.handle], WriteCompleted)]
    assert pair.payloads == [write.payload for write in completed], "told in order, and of completed writes only"
    aimed_at = np.zeros(POOL, dtype=bool)
    for copy in itertools.chain.from_iterable(write.copies for write in posted):
        aimed_at[copy.target_bytes : copy.target_bytes + copy.size_bytes] = True
    assert not pair.target[~aimed_at].any(), "a byte landed where no write was aimed"
    assert not pair.wire.posted and not pair.wire.sent, "a receive was left behind"
    assert pair.writer.has_settled() and pair.reader.has_settled()


def test_lost_connection_fails_every_write_honestly() -> None:
    pair = Pair()
    sent = pair.post([Copy(0, 0, POOL // 2)], b"")
    pair.turn_writer()
    pair.carry()
    pair.turn_reader()
    pair.wire_back.deliver_packet()
    pair.turn_writer()
    announced = pair.post([Copy(0, POOL // 2, 8)], b"")
    pair.turn_writer()
    waiting = [pair.post([Copy(0, 0, 8)], b"") for _ in range(MAX_OPEN_WRITES)]
    pair.turn_writer()
    assert not pair.writer.has_settled(), "UCX still reads the source"
    pair.writer.fail("lost")
    assert [(event.handle, event.quiesced) for event in pair.events if isinstance(event, WriteFailed)] == [
        (sent, False),
        (announced, True),
        *((handle, True) for handle in waiting),
    ]
    assert not pair.reader.has_settled(), "a receive is still posted"
    for transfer in pair.wire.posted.values():
        transfer.has_ended = transfer.has_failed = True
    with pytest.raises(LinkLostError):
        pair.reader.advance(0)
    assert pair.reader.has_settled()


WRITE_8 = Frame(kind=WRITE, write_id=1, body=encode_pieces(np.array([(0, 8)], dtype=np.uint64)))


@pytest.mark.parametrize(
    "frames",
    [
        [WRITE_8, WRITE_8],
        [Frame(kind=WRITE, write_id=0, body=WRITE_8.body)],
        [Frame(kind=WRITE, write_id=1, body=encode_pieces(np.array([(0, MAX_PIECE_BYTES + 1)], dtype=np.uint64)))],
        [Frame(kind=WRITE, write_id=number, body=WRITE_8.body) for number in range(1, MAX_OPEN_WRITES + 2)],
        [Frame(kind=NOTIFY, write_id=1)],
        [WRITE_8, Frame(kind=NOTIFY, write_id=1), Frame(kind=NOTIFY, write_id=1)],
        [WRITE_8, Frame(kind=NOTIFY, write_id=1), Frame(kind=ABANDON, write_id=1)],
        [WRITE_8, Frame(kind=ABANDON, write_id=1), Frame(kind=ABANDON, write_id=1)],
        [Frame(kind=NOTIFY, body=bytes(MAX_NOTIFY_BYTES + 1))],
        [Frame(kind=ABANDON, write_id=1)],
        [WRITE_8, *(Frame(kind=NOTIFY) for _ in range(4096))],
    ],
)
def test_reader_refuses_what_breaks_the_protocol(frames: list[Frame]) -> None:
    pair = Pair()
    for frame in frames[:-1]:
        pair.reader.take(frame, 0)
    with pytest.raises(UcxProtocolError):
        pair.reader.take(frames[-1], 0)


def test_end_that_connected_takes_notifications_only() -> None:
    pair = Pair()
    tags: Any = Tags()
    reader = Reader(pair.near_link, None, Staging(), tags, pair.payloads.append)
    reader.take(Frame(kind=NOTIFY, body=b"x"), 0)
    reader.advance(0)
    assert pair.payloads == [b"x"]
    with pytest.raises(UcxProtocolError):
        reader.take(WRITE_8, 0)


@pytest.mark.parametrize(
    "frame",
    [
        Frame(kind=GRANT, write_id=2, count=1, tag=20),
        Frame(kind=GRANT, write_id=1, count=0, tag=20),
        Frame(kind=GRANT, write_id=1, count=2, tag=20),
        Frame(kind=DONE, write_id=1),
        Frame(kind=ABANDONED, write_id=1),
    ],
)
def test_writer_refuses_what_breaks_the_protocol(frame: Frame) -> None:
    pair = Pair()
    assert pair.post([Copy(0, 0, 8)], b"") == 1
    pair.turn_writer()
    with pytest.raises(UcxProtocolError):
        pair.writer.take(frame)


def test_damaged_packets_end_a_link_after_what_came_before() -> None:
    pair = Pair()
    (packet,) = encode_packets(Frame(kind=PING), pair.far_link.link_id)
    pair.far_link.take(packet, 5)
    pair.far_link.take(bytes(PACKET_BYTES), 6)
    assert [frame.kind for frame in pair.far_link.hear()] == [PING] and pair.far_link.heard_ns == 6
    with pytest.raises(LinkLostError, match="damaged"):
        pair.far_link.hear()
