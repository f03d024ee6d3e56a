"""What two ends of an `auto` connection say to each other, inside the notifications of whichever backend carries them.

Every notification begins with one byte that tells the owner's payloads from the self-test's. The writer PROBEs, the
other end answers PROBED, and when the writer has made its choice it says CHOSEN.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from kv_transfer.transport.base import TransportError

PROTOCOL_VERSION = 1
MAX_ENDPOINT_BYTES = 4096
MAX_POOL_BYTES = 1 << 62
"""No pool is as large, and sums of offsets and sizes below it fit into the integers of any backend."""

PAYLOAD = b"\x00"
PROBE = b"\x01"
PROBED = b"\x02"
CHOSEN = b"\x03"

_log = logging.getLogger(__name__)
_MAGIC = b"BTNA"
_HEADER = struct.Struct("<4sBQQB")
"""Magic, version, probe area's offset and size in bytes, number of backends."""
_ENTRY = struct.Struct("<BH")
"""Length of a backend's name and of its endpoint, which follow."""
_NUMBER = struct.Struct("<I")


class AutoProtocolError(TransportError):
    """An endpoint that is not of this protocol or version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoEndpoint:
    """Where a worker life is reached: one endpoint a backend, in its order of preference, and its probe area."""

    probe_offset_bytes: int
    probe_size_bytes: int
    endpoints: tuple[tuple[str, bytes], ...]

    def of(self, backend: str) -> bytes | None:
        return next((endpoint for name, endpoint in self.endpoints if name == backend), None)


def compose_endpoint(probe_offset_bytes: int, probe_size_bytes: int, endpoints: Mapping[str, bytes]) -> bytes:
    """Of as many backends as fit into MAX_ENDPOINT_BYTES; of those that come first rather than of later ones."""
    fitting: tuple[tuple[str, bytes], ...] = ()
    composed = b""
    for name, data in endpoints.items():
        longer = encode_endpoint(
            AutoEndpoint(
                probe_offset_bytes=probe_offset_bytes,
                probe_size_bytes=probe_size_bytes,
                endpoints=(*fitting, (name, data)),
            )
        )
        if len(longer) > MAX_ENDPOINT_BYTES:
            _log.warning("the endpoint of transport %s is too long to be told, with %d bytes", name, len(data))
            continue
        fitting, composed = (*fitting, (name, data)), longer
    return composed


def encode_endpoint(endpoint: AutoEndpoint) -> bytes:
    parts = [
        _HEADER.pack(
            _MAGIC,
            PROTOCOL_VERSION,
            endpoint.probe_offset_bytes,
            endpoint.probe_size_bytes,
            len(endpoint.endpoints),
        )
    ]
    for name, data in endpoint.endpoints:
        parts += [_ENTRY.pack(len(name), len(data)), name.encode("ascii"), data]
    return b"".join(parts)


def decode_endpoint(data: bytes) -> AutoEndpoint:
    """Raises: AutoProtocolError."""
    try:
        magic, version, offset_bytes, size_bytes, num_backends = _HEADER.unpack_from(data)
    except struct.error as error:
        raise AutoProtocolError("this endpoint is not of an auto transport") from error
    if magic != _MAGIC:
        raise AutoProtocolError("this endpoint is not of an auto transport")
    if version != PROTOCOL_VERSION:
        raise AutoProtocolError(f"auto protocol version {version}, where this worker speaks {PROTOCOL_VERSION}")
    endpoints = []
    position = _HEADER.size
    try:
        for _ in range(num_backends):
            name_size, data_size = _ENTRY.unpack_from(data, position)
            position += _ENTRY.size
            name = data[position : position + name_size].decode("ascii")
            position += name_size
            endpoints.append((name, data[position : position + data_size]))
            position += data_size
    except (struct.error, UnicodeDecodeError) as error:
        raise AutoProtocolError("damaged endpoint") from error
    if position != len(data) or not 0 < size_bytes <= MAX_POOL_BYTES or offset_bytes > MAX_POOL_BYTES:
        raise AutoProtocolError("damaged endpoint")
    return AutoEndpoint(probe_offset_bytes=offset_bytes, probe_size_bytes=size_bytes, endpoints=tuple(endpoints))


def encode_number(kind: bytes, number: int) -> bytes:
    """A PROBE or PROBED."""
    return kind + _NUMBER.pack(number)
