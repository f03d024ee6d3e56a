"""Whether an address that a worker advertises leads back to it, asked from here before anyone else is told of it."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import urllib.parse
from typing import Final

CONNECT_TIMEOUT_S: Final = 3.0


async def why_unreachable(address: str, stream_peer: str, timeout_s: float = CONNECT_TIMEOUT_S) -> str | None:
    """None if a TCP connection to `address` (host:port) can be made; otherwise a sentence that names the address tried.

    A loopback address always seems to lead somewhere, if only to somebody else on this host, so it is refused of a
    worker whose own control stream (`stream_peer`, as gRPC names it) comes from another host.
    """
    host, port = split_address(address)
    if host is None or port is None:
        return f"the advertised address {address!r} is not host:port"
    peer_host = peer_host_of(stream_peer)
    if is_loopback(host) and peer_host is not None and not is_loopback(peer_host):
        return f"the advertised address {address} is a loopback address, but the worker is at {peer_host}"
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"tried to connect to the advertised address {address}: no answer within {timeout_s:g} s"
    except OSError as error:
        # asyncio puts its own words into `strerror`.
        reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
        return f"tried to connect to the advertised address {address}: {reason}"
    writer.close()
    return None


def split_address(address: str) -> tuple[str | None, int | None]:
    """Host and port of `host:port` or `[v6]:port`; None for what is not there."""
    host, separator, port_text = address.rpartition(":")
    if not separator or not port_text.isascii() or not port_text.isdigit() or not 0 < int(port_text) < 65536:
        return None, None
    host = host.removeprefix("[").removesuffix("]")
    return (host or None), int(port_text)


def peer_host_of(stream_peer: str) -> str | None:
    """Host of a gRPC peer such as `ipv4:10.0.0.3:4711` or `ipv6:%5B::1%5D:4711`; None for other kinds."""
    kind, _, rest = stream_peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    host, _ = split_address(urllib.parse.unquote(rest))
    return host


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
