"""What two ends of a ucx connection say to each other: frames on the connection's own ordered stream.

The writer connects and says HELLO; the other end answers WELCOME or REFUSED. Then, for every write:

    writer    WRITE    the target ranges, piece by piece
    receiver  GRANT    so many pieces may come, the first of them with this tag (the receives are posted by then)
    writer    ...      each granted piece as one tagged message; after the last one NOTIFY with the write's payload
    receiver  DONE     all bytes are in place; the notification is delivered when NOTIFY has come as well

A writer that gives a write up says ABANDON and sends empty messages for what is granted and not sent, so that no
posted receive is left behind; ABANDONED is the receiver's word that nothing more will land. NOTIFY with write id 0
belongs to no write. PING says that its sender lives.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kv_transfer.transport.base import PeerId, TransportError

PROTOCOL_VERSION = 1
MAX_ENDPOINT_BYTES = 4096
MAX_PIECES_PER_WRITE = 65_536
PIECE_BYTES = 16
"""Of the table in WRITE: target offset and size, a u64 each."""
MAX_BODY_BYTES = MAX_PIECES_PER_WRITE * PIECE_BYTES
MAX_NOTIFY_BYTES = 64 * 1024

HELLO = 1
WELCOME = 2
REFUSED = 3
WRITE = 4
GRANT = 5
NOTIFY = 6
DONE = 7
ABANDON = 8
ABANDONED = 9
PING = 10

_HEADER = struct.Struct("<BxxxIQQQ")
HEADER_BYTES = _HEADER.size
_NUMBERS = ("version", "port", "size_bytes", "writer_incarnation", "target_incarnation")

T = TypeVar("T")


class UcxProtocolError(TransportError):
    """An endpoint or a frame that is not of this protocol or version, or breaks its rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """`count` and `tag` are of GRANT: the pieces granted in all, and the first piece's tag."""

    kind: int
    write_id: int = 0
    count: int = 0
    tag: int = 0
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a worker life listens (an IPv4 address), and what it will expect to hear."""

    host: str
    port: int
    token: str
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """`token` is of the endpoint dialled."""

    writer_name: str
    writer_incarnation: int
    target_name: str
    target_incarnation: int
    token: str
    version: int = PROTOCOL_VERSION

    @property
    def writer(self) -> PeerId:
        return PeerId(self.writer_name, self.writer_incarnation)

    @property
    def target(self) -> PeerId:
        return PeerId(self.target_name, self.target_incarnation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """`size_bytes` is of the pool that may be written."""

    size_bytes: int
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    reason: str
    version: int = PROTOCOL_VERSION


_GREETINGS: dict[int, type[Hello | Welcome | Refused]] = {HELLO: Hello, WELCOME: Welcome, REFUSED: Refused}


def encode_endpoint(endpoint: Endpoint) -> bytes:
    return json.dumps({"transport": "ucx", **asdict(endpoint)}).encode()


def decode_endpoint(data: bytes) -> Endpoint:
    """Raises: UcxProtocolError."""
    fields = _fields(data[:MAX_ENDPOINT_BYTES])
    if fields.pop("transport", None) != "ucx":
        raise UcxProtocolError("this endpoint is not of a ucx transport")
    return _build(Endpoint, fields)


def encode_frame(frame: Frame) -> bytes:
    return _HEADER.pack(frame.kind, len(frame.body), frame.write_id, frame.count, frame.tag) + frame.body


def decode_header(data: bytes) -> tuple[Frame, int]:
    """The frame without its body, and the body's size. Raises: UcxProtocolError."""
    kind, body_bytes, write_id, count, tag = _HEADER.unpack(data)
    if not HELLO <= kind <= PING:
        raise UcxProtocolError(f"frame of unknown kind {kind}")
    if body_bytes > MAX_BODY_BYTES:
        raise UcxProtocolError(f"frame of {body_bytes} bytes, more than {MAX_BODY_BYTES}")
    return Frame(kind=kind, write_id=write_id, count=count, tag=tag), body_bytes


def encode_greeting(greeting: Hello | Welcome | Refused) -> Frame:
    kind = next(kind for kind, greeting_type in _GREETINGS.items() if greeting_type is type(greeting))
    return Frame(kind=kind, body=json.dumps(asdict(greeting)).encode())


def decode_greeting(frame: Frame) -> Hello | Welcome | Refused:
    """Raises: UcxProtocolError."""
    greeting_type = _GREETINGS.get(frame.kind)
    if greeting_type is None:
        raise UcxProtocolError("the connection did not begin with a handshake")
    return _build(greeting_type, _fields(frame.body))


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


def _fields(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise UcxProtocolError("damaged handshake") from error
    if not isinstance(fields, dict):
        raise UcxProtocolError("damaged handshake")
    if fields.get("version") != PROTOCOL_VERSION:
        raise UcxProtocolError(
            f"ucx protocol version {fields.get('version')}, where this worker speaks {PROTOCOL_VERSION}"
        )
    return fields


def _build(greeting_type: type[T], fields: dict[str, Any]) -> T:
    try:
        greeting = greeting_type(**fields)
    except TypeError as error:
        raise UcxProtocolError("damaged handshake") from error
    for name, value in fields.items():
        expected = int if name in _NUMBERS else str
        if type(value) is not expected:
            raise UcxProtocolError(f"damaged handshake: {name}")
    return greeting
