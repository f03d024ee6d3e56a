"""What two ends of an nccl connection say to each other over TCP. The KV itself does not pass here.

A frame is its length (u32, little-endian, of what follows), its kind (one byte) and its body. The writer connects and
says HELLO; the other end answers WELCOME, with the name of a communicator for both to make, or REFUSED. These three
are JSON; what follows is binary. When the first bytes have arrived through the communicator, the receiver says OPENED.

To write, the writer ANNOUNCEs a group: the target ranges, in the order in which it will send them. The receiver checks
them, posts the receives and says READY; only then does the writer post the sends, so that no kernel of it waits for a
receive that will never be posted. When its event says that the receives have ended, the receiver says ARRIVED, which
ends the group. The notification of a write travels in the announcement of its last group.

Either end says ENDED when it gives up the connection, and has then aborted its communicator; the receiver says QUIET
when nothing of it can land any more.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kv_transfer.transport.base import TransportError
from kv_transfer.transport.handshake import BetweenLives, build_message, check_version, decode_fields

PROTOCOL_VERSION = 1
HELLO = 1
WELCOME = 2
REFUSED = 3
OPENED = 4
ANNOUNCE = 5
READY = 6
ARRIVED = 7
NOTIFY = 8
PING = 9
ENDED = 10
QUIET = 11

MAX_ANNOUNCED_GROUPS = 4
"""Of one writer, that have not arrived."""
MAX_COPIES_PER_GROUP = 128
"""Sends or receives that one NCCL group holds."""
MAX_FRAME_BYTES = 256 * 1024
MAX_NOTIFY_BYTES = 64 * 1024 - 1
MAX_ENDPOINT_BYTES = 4096
MAX_REASON_BYTES = 1024
LENGTH = struct.Struct("<I")
_GROUP = struct.Struct("<Q")
_ANNOUNCE = struct.Struct("<Q?I")
_RANGE = struct.Struct("<QQ")


class NcclProtocolError(TransportError):
    """An endpoint or a frame that is not of this protocol or version, or that the peer may not send now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a worker life listens, and what a writer must know to be let in."""

    host: str
    port: int
    token: str
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(BetweenLives):
    """`token` is of the endpoint dialled, `library_version` of the writer's libnccl."""

    token: str
    library_version: str
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """`size_bytes` is of the receiver's pool, `unique_id` (hexadecimal) names the communicator."""

    size_bytes: int
    unique_id: str
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    reason: str
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """`ranges` are (offset, size) in bytes of the receiver's pool. `notify` is None except in a write's last group."""

    group: int
    ranges: tuple[tuple[int, int], ...]
    notify: bytes | None


def encode_endpoint(endpoint: Endpoint) -> bytes:
    return json.dumps({"transport": "nccl", **asdict(endpoint)}).encode()


def decode_endpoint(data: bytes) -> Endpoint:
    """Raises NcclProtocolError."""
    fields = _versioned(data[:MAX_ENDPOINT_BYTES])
    if fields.pop("transport", None) != "nccl":
        raise NcclProtocolError("this endpoint is not of an nccl transport")
    return build_message(Endpoint, fields, NcclProtocolError)


def encode_handshake(message: Hello | Welcome | Refused) -> bytes:
    kind = {Hello: HELLO, Welcome: WELCOME, Refused: REFUSED}[type(message)]
    return bytes([kind]) + json.dumps(asdict(message)).encode()


def decode_handshake(frame: bytes) -> Hello | Welcome | Refused:
    """Raises NcclProtocolError."""
    types: dict[int, type[Hello | Welcome | Refused]] = {HELLO: Hello, WELCOME: Welcome, REFUSED: Refused}
    message_type = types.get(frame[0])
    if message_type is None:
        raise NcclProtocolError("the connection did not begin with a handshake")
    return build_message(message_type, _versioned(frame[1:]), NcclProtocolError)


def encode_announcement(group: int, ranges: Sequence[tuple[int, int]], notify: bytes | None) -> bytes:
    head = bytes([ANNOUNCE]) + _ANNOUNCE.pack(group, notify is not None, len(ranges))
    return head + b"".join(_RANGE.pack(*item) for item in ranges) + (notify or b"")


def decode_announcement(frame: bytes) -> Announcement:
    """Raises NcclProtocolError."""
    start = 1 + _ANNOUNCE.size
    if len(frame) < start:
        raise NcclProtocolError("damaged announcement")
    group, is_last, num_ranges = _ANNOUNCE.unpack_from(frame, 1)
    end = start + num_ranges * _RANGE.size
    if len(frame) < end or (len(frame) > end and not is_last):
        raise NcclProtocolError("damaged announcement")
    ranges = tuple((offset, size) for offset, size in _RANGE.iter_unpack(frame[start:end]))
    return Announcement(group=group, ranges=ranges, notify=frame[end:] if is_last else None)


def encode_group(kind: int, group: int) -> bytes:
    """READY and ARRIVED."""
    return bytes([kind]) + _GROUP.pack(group)


def decode_group(frame: bytes) -> int:
    """Raises NcclProtocolError."""
    if len(frame) != 1 + _GROUP.size:
        raise NcclProtocolError("damaged frame")
    (group,) = _GROUP.unpack_from(frame, 1)
    return int(group)


def encode_ended(reason: str) -> bytes:
    return bytes([ENDED]) + reason.encode()[:MAX_REASON_BYTES]


def decode_ended(frame: bytes) -> str:
    return frame[1:].decode(errors="replace")


def _versioned(data: bytes) -> dict[str, Any]:
    fields = decode_fields(data, NcclProtocolError)
    check_version("nccl", fields.get("version"), PROTOCOL_VERSION, NcclProtocolError)
    return fields
