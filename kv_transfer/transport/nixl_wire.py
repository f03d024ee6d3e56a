"""What two ends of a nixl connection say to each other over TCP: a length, a kind, a body.

The writer connects and says HELLO; the other end answers WELCOME with the metadata of the agent that it made for this
connection, or REFUSED. The writer sends a probe through nixl itself; when that has arrived the other end says READY.
From then on both send NOTIFY, and PING when they have said nothing else for a while. The writer says ACTIVE before it
posts a transfer and QUIET after its last one has landed, so that the other end need not poll in between. LEAVE asks
the other end to let go; BYE says that it has: its agent is destroyed, and nothing can land through it any more.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any

from kv_transfer.transport.base import TransportError
from kv_transfer.transport.handshake import MAX_NUMBER, BetweenLives, build_message, check_version, decode_fields

PROTOCOL_VERSION = 1
HELLO = 1
WELCOME = 2
REFUSED = 3
READY = 4
NOTIFY = 5
PING = 6
ACTIVE = 7
QUIET = 8
LEAVE = 9
BYE = 10

MAX_BODY_BYTES = 64 * 1024
MAX_ENDPOINT_BYTES = 4096
HEADER = struct.Struct("<IB")
"""The body's size in bytes, and the kind."""


class NixlProtocolError(TransportError):
    """An endpoint or a frame that is not of this protocol or version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a worker life listens, and what a writer must prove to know."""

    host: str
    port: int
    token: str
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(BetweenLives):
    """`token` is of the endpoint dialled."""

    token: str
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The pool as the writer will address it. `metadata` is the agent's, in hexadecimal."""

    base_address: int
    size_bytes: int
    metadata: str
    version: int = PROTOCOL_VERSION

    def agent_metadata(self) -> bytes:
        """Raises NixlProtocolError."""
        try:
            return bytes.fromhex(self.metadata)
        except ValueError as error:
            raise NixlProtocolError("damaged handshake: metadata") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    reason: str
    version: int = PROTOCOL_VERSION


_HANDSHAKE: dict[int, type[Hello | Welcome | Refused]] = {HELLO: Hello, WELCOME: Welcome, REFUSED: Refused}


def encode_endpoint(endpoint: Endpoint) -> bytes:
    return json.dumps({"transport": "nixl", **asdict(endpoint)}).encode()


def decode_endpoint(data: bytes) -> Endpoint:
    """Raises NixlProtocolError."""
    fields = _versioned(data[:MAX_ENDPOINT_BYTES])
    if fields.pop("transport", None) != "nixl":
        raise NixlProtocolError("this endpoint is not of a nixl transport")
    return build_message(Endpoint, fields, NixlProtocolError)


def encode_frame(kind: int, body: bytes = b"") -> bytes:
    return HEADER.pack(len(body), kind) + body


def encode_handshake(frame: Hello | Welcome | Refused) -> bytes:
    kind = {Hello: HELLO, Welcome: WELCOME, Refused: REFUSED}[type(frame)]
    return encode_frame(kind, json.dumps(asdict(frame)).encode())


def decode_handshake(kind: int, body: bytes) -> Hello | Welcome | Refused:
    """Raises NixlProtocolError."""
    frame_type = _HANDSHAKE.get(kind)
    if frame_type is None:
        raise NixlProtocolError("the connection did not begin with a handshake")
    message = build_message(frame_type, _versioned(body), NixlProtocolError)
    if isinstance(message, Welcome) and message.base_address + message.size_bytes > MAX_NUMBER:
        raise NixlProtocolError("damaged handshake: base_address")
    return message


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames (kind, body) that are complete now. Raises: NixlProtocolError for one that is too large."""
        self._buffer += data
        frames: list[tuple[int, bytes]] = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            size_bytes, kind = HEADER.unpack_from(self._buffer, start)
            if size_bytes > MAX_BODY_BYTES:
                raise NixlProtocolError(f"a frame of {size_bytes} bytes, where {MAX_BODY_BYTES} are the limit")
            end = start + HEADER.size + size_bytes
            if end > len(self._buffer):
                break
            frames.append((kind, bytes(self._buffer[start + HEADER.size : end])))
            start = end
        del self._buffer[:start]
        return frames


def _versioned(data: bytes) -> dict[str, Any]:
    fields = decode_fields(data, NixlProtocolError)
    check_version("nixl", fields.get("version"), PROTOCOL_VERSION, NixlProtocolError)
    return fields
