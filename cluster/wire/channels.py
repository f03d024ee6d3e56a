"""The one place where gRPC channels and servers are made: limits, keepalive and trailers for all of them."""

from __future__ import annotations

import grpc
import grpc.aio

MESSAGE_LIMIT_BYTES = 16 * 2**20
KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
MAX_DEADLINE_S = 30 * 24 * 3600.0
"""A client's deadline further away than this counts as none; the coordinator is told it in 32 bits of milliseconds. (A
client must not name one beyond the year 2262 either: gRPC counts nanoseconds in 64 bits, and it would have passed.)"""
LOOPBACK = "127.0.0.1"
RETRY_AFTER_TRAILER = "baton-retry-after-ms"
"""Trailer of a refused call: in how many milliseconds to try again."""
REFUSAL_CAUSE_TRAILER = "baton-refusal-cause"
"""Trailer of a refused call: why (cluster.core.ids.RefusalCause)."""

_COMMON: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
)
_CHANNEL: tuple[tuple[str, int], ...] = (
    *_COMMON,
    # Every part has its own connection, so that one slow stream cannot hold another's flow control.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_SERVER: tuple[tuple[str, int], ...] = (
    *_COMMON,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    # A second process on the same port must fail, not share it.
    ("grpc.so_reuseport", 0),
)


class PortInUseError(RuntimeError):
    """The address cannot be listened on."""


def make_channel(address: str) -> grpc.aio.Channel:
    """A channel for asyncio code; it connects when first used."""
    return grpc.aio.insecure_channel(address, options=_CHANNEL)


def make_sync_channel(address: str) -> grpc.Channel:
    """A channel for the command line."""
    return grpc.insecure_channel(address, options=_CHANNEL)


def make_server() -> grpc.aio.Server:
    return grpc.aio.server(options=_SERVER)


def bind(server: grpc.aio.Server, host: str = LOOPBACK, port: int = 0) -> int:
    """Listens on host:port (0: any free port) and returns the port.

    Raises: PortInUseError.
    """
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise PortInUseError(
            f"cannot listen on {host}:{port}: the port is in use or the address is not ours"
        ) from error
    if bound == 0:
        raise PortInUseError(f"cannot listen on {host}:{port}: the port is in use or the address is not ours")
    return bound
