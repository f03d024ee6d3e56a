"""What two ends of a ucx connection say to each other.

The end that connects sends one HELLO on the connection's stream; it names the link id by which this end will know
the connection. All else are frames, cut into packets: messages with one fixed tag, which arrive in order and carry the
link id that their receiver has given. The answer is WELCOME, with the other end's link id, or REFUSED. Then, for every
write:

    writer    WRITE    the target ranges, piece by piece; `ucx_pieces` says which of them share a message
    receiver  GRANT    so many messages may come, the first of them with this tag (the receives are posted by then)
    writer    ...      the granted messages, a tag each; after the last one NOTIFY with the write's payload
    receiver  DONE     all bytes are in place; the notification is delivered when NOTIFY has come as well

A writer that gives a write up says ABANDON and sends empty messages for what is granted and not sent, so that no
posted receive is left behind; ABANDONED is the receiver's word that nothing more will land. NOTIFY with write id 0
belongs to no write. PING says that its sender lives.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.transport.base import TransportError
from kv_transfer.transport.handshake import BetweenLives, build_message, check_version, decode_fields

PROTOCOL_VERSION = 1
MAX_ENDPOINT_BYTES = 4096
MAX_PIECES_PER_WRITE = 65_536
PIECE_BYTES = 16
"""Of the table in WRITE: target offset and size, a u64 each."""
MAX_BODY_BYTES = MAX_PIECES_PER_WRITE * PIECE_BYTES
MAX_NOTIFY_BYTES = 64 * 1024
HELLO_BYTES = 1024
"""Always so many, so that one receive takes it."""
PACKET_BYTES = 4000
"""Less than what UCX would announce first (`ucx_library.OPTIONS`)."""
PACKET_TAG = 1

WELCOME = 1
REFUSED = 2
WRITE = 3
GRANT = 4
NOTIFY = 5
DONE = 6
ABANDON = 7
ABANDONED = 8
PING = 9

_MAX_U64 = (1 << 64) - 1
_MAGIC = b"BKVU"
_HELLO = struct.Struct("<4sHxxQ")
"""Magic, version and its sender's link id: the same in every version, so that any version can be refused."""
_PACKET = struct.Struct("<QB?xxIQQQ")
"""Link id, kind, whether more of the frame follows, bytes of body in this packet, write id, count, tag."""


class UcxProtocolError(TransportError):
    """An endpoint or a frame that is not of this protocol or version, or breaks its rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """`count` and `tag` are of GRANT: the messages granted in all, and the first one's tag."""

    kind: int
    write_id: int = 0
    count: int = 0
    tag: int = 0
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a worker life listens (an IPv4 address), and what it will expect to hear."""

    host: str
    port: int
    token: str
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(BetweenLives):
    """`token` is of the endpoint dialled."""

    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """`size_bytes` is of the pool that may be written, `link_id` its sender's."""

    size_bytes: int
    link_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    reason: str


def encode_endpoint(address: Address) -> bytes:
    return json.dumps({"transport": "ucx", **asdict(address)}).encode()


def decode_endpoint(data: bytes) -> Address:
    """Raises: UcxProtocolError."""
    fields = decode_fields(data[:MAX_ENDPOINT_BYTES], UcxProtocolError)
    if fields.pop("transport", None) != "ucx":
        raise UcxProtocolError("this endpoint is not of a ucx transport")
    check_version("ucx", fields.get("version"), PROTOCOL_VERSION, UcxProtocolError)
    return build_message(Address, fields, UcxProtocolError)


def encode_packets(frame: Frame, link_id: int) -> Iterator[bytes]:
    """At least one, of at most PACKET_BYTES each."""
    room_bytes = PACKET_BYTES - _PACKET.size
    for start in range(0, max(1, len(frame.body)), room_bytes):
        part = frame.body[start : start + room_bytes]
        has_more = start + room_bytes < len(frame.body)
        header = _PACKET.pack(link_id, frame.kind, has_more, len(part), frame.write_id, frame.count, frame.tag)
        yield header + part


def decode_link_id(packet: bytes) -> int:
    return int.from_bytes(packet[:8], "little")


def decode_packet(packet: bytes) -> tuple[Frame, bool]:
    """A frame or a part of one, and whether more of it follows. `packet` may be longer. Raises: UcxProtocolError."""
    _, kind, has_more, body_bytes, write_id, count, tag = _PACKET.unpack_from(packet)
    if not WELCOME <= kind <= PING or body_bytes > len(packet) - _PACKET.size or tag + count > _MAX_U64:
        raise UcxProtocolError(f"damaged packet of kind {kind}")
    body = packet[_PACKET.size : _PACKET.size + body_bytes]
    return Frame(kind=kind, write_id=write_id, count=count, tag=tag, body=body), has_more


def encode_hello(hello: Hello, link_id: int) -> bytes:
    """Raises: UcxProtocolError if the names in it are too long."""
    data = _HELLO.pack(_MAGIC, PROTOCOL_VERSION, link_id) + json.dumps(asdict(hello)).encode()
    if len(data) > HELLO_BYTES:
        raise UcxProtocolError(f"HELLO of {len(data)} bytes, more than {HELLO_BYTES}: the workers' names are too long")
    return data.ljust(HELLO_BYTES)


def decode_hello_link_id(data: bytes) -> int:
    """Of the sender of this HELLO, whatever its version. Raises: UcxProtocolError."""
    magic, _, link_id = _HELLO.unpack_from(data)
    if magic != _MAGIC:
        raise UcxProtocolError("the connection did not begin with HELLO")
    return int(link_id)


def decode_hello(data: bytes) -> Hello:
    """Raises: UcxProtocolError."""
    _, version, _ = _HELLO.unpack_from(data)
    check_version("ucx", version, PROTOCOL_VERSION, UcxProtocolError)
    return build_message(Hello, decode_fields(data[_HELLO.size :], UcxProtocolError), UcxProtocolError)


def encode_answer(answer: Welcome | Refused) -> Frame:
    kind = WELCOME if isinstance(answer, Welcome) else REFUSED
    return Frame(kind=kind, body=json.dumps(asdict(answer)).encode())


def decode_answer(frame: Frame) -> Welcome | Refused:
    """Raises: UcxProtocolError."""
    if frame.kind == REFUSED:
        return build_message(Refused, decode_fields(frame.body, UcxProtocolError), UcxProtocolError)
    if frame.kind == WELCOME:
        welcome = build_message(Welcome, decode_fields(frame.body, UcxProtocolError), UcxProtocolError)
        if welcome.size_bytes > 0 and 0 <= welcome.link_id <= _MAX_U64:
            return welcome
    raise UcxProtocolError("the other end does not speak this protocol")


def encode_pieces(pieces: npt.NDArray[np.uint64]) -> bytes:
    """`pieces` is [num_pieces, 2]: target offset, size in bytes."""
    return pieces.astype("<u8").tobytes()


def decode_pieces(body: bytes, pool_size_bytes: int) -> npt.NDArray[np.uint64]:
    """[num_pieces, 2]: target offset, size in bytes; all of them within the pool. Raises: UcxProtocolError."""
    if not body or len(body) % PIECE_BYTES:
        raise UcxProtocolError("damaged table of pieces")
    pieces = np.frombuffer(body, dtype="<u8").reshape(-1, 2).astype(np.uint64)
    offsets, sizes = pieces[:, 0], pieces[:, 1]
    limit = np.uint64(pool_size_bytes)
    if (sizes == 0).any() or (sizes > limit).any() or (offsets > limit - np.minimum(sizes, limit)).any():
        raise UcxProtocolError(f"a piece is outside of the pool of {pool_size_bytes} bytes")
    return pieces
