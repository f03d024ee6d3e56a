"""What two ends of a shm connection say to each other: one frame a SEQPACKET message, its first byte the kind.

The writer connects and says HELLO; the other end answers WELCOME, with its pool's descriptor attached, or REFUSED.
From then on both send NOTIFY frames. A writer that leaves in order says BYE after it has unmapped the pool.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from kv_transfer.transport.base import TransportError
from kv_transfer.transport.handshake import BetweenLives, build_message, check_version, decode_fields

PROTOCOL_VERSION = 1
HELLO = 1
WELCOME = 2
REFUSED = 3
NOTIFY = 4
BYE = 5
MAX_FRAME_BYTES = 64 * 1024
MAX_ENDPOINT_BYTES = 4096


class ShmProtocolError(TransportError):
    """An endpoint or a frame that is not of this protocol or version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a worker life listens: a name in the abstract socket namespace, and what it will prove to know."""

    address: str
    token: str
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(BetweenLives):
    """`token` is of the endpoint dialled; `writer_token` names the writer's own end to peers in one process."""

    token: str
    writer_token: str
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    size_bytes: int
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    reason: str
    version: int = PROTOCOL_VERSION


def encode_endpoint(endpoint: Endpoint) -> bytes:
    return json.dumps({"transport": "shm", **asdict(endpoint)}).encode()


def decode_endpoint(data: bytes) -> Endpoint:
    """Raises ShmProtocolError."""
    fields = _versioned(data[:MAX_ENDPOINT_BYTES])
    if fields.pop("transport", None) != "shm":
        raise ShmProtocolError("this endpoint is not of a shm transport")
    return build_message(Endpoint, fields, ShmProtocolError)


def encode_frame(frame: Hello | Welcome | Refused) -> bytes:
    kind = {Hello: HELLO, Welcome: WELCOME, Refused: REFUSED}[type(frame)]
    return bytes([kind]) + json.dumps(asdict(frame)).encode()


def decode_frame(data: bytes) -> Hello | Welcome | Refused:
    """Raises ShmProtocolError."""
    types: dict[int, type[Hello | Welcome | Refused]] = {HELLO: Hello, WELCOME: Welcome, REFUSED: Refused}
    frame_type = types.get(data[0]) if data else None
    if frame_type is None:
        raise ShmProtocolError("the connection did not begin with a handshake")
    return build_message(frame_type, _versioned(data[1:]), ShmProtocolError)


def _versioned(data: bytes) -> dict[str, Any]:
    fields = decode_fields(data, ShmProtocolError)
    check_version("shm", fields.get("version"), PROTOCOL_VERSION, ShmProtocolError)
    return fields
