"""A process's Prometheus page: `GET /metrics` over HTTP, on the event loop that owns what is measured.

So a page is one moment's numbers without locks, and nothing is computed until somebody asks. One request a connection.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Final

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from cluster.wire.channels import LOOPBACK, PortInUseError

logger = logging.getLogger(__name__)

PATHS: Final = ("/metrics", "/")
MAX_REQUEST_BYTES: Final = 16 * 2**10
MAX_CONNECTIONS: Final = 32
REQUEST_TIMEOUT_S: Final = 5.0
"""For one request and its answer; whoever takes longer is cut off."""

Measure = Callable[[], Iterable[Metric]]


class MetricsServer:
    """Listens from its creation on, answers from `start` until `close`."""

    def __init__(self, host: str = LOOPBACK, port: int = 0) -> None:
        """Port 0 takes any free one. Raises: PortInUseError."""
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise PortInUseError(f"cannot serve metrics on {host}:{port}: {error.strerror or error}") from error
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._registry = CollectorRegistry(auto_describe=False)
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}

    async def start(self, measure: Measure) -> None:
        """`measure` is called on this loop for every page."""
        self._registry.register(_Measured(measure))
        self._server = await asyncio.start_server(self._answer, sock=self._socket, limit=MAX_REQUEST_BYTES)

    async def close(self) -> None:
        """Cuts off whoever is being answered."""
        if self._server is not None:
            self._server.close()
        self._socket.close()
        answering = [task for task in self._connections.values() if task is not None]
        for writer in self._connections:
            writer.transport.abort()
        if answering:
            await asyncio.wait(answering)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[writer] = asyncio.current_task()
        try:
            if len(self._connections) <= MAX_CONNECTIONS:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._response(head.decode("latin-1")))
                    await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            logger.debug("no metrics page for %s: %s", writer.get_extra_info("peername"), error)
        finally:
            del self._connections[writer]
            writer.close()

    def _response(self, head: str) -> bytes:
        request_line, _, rest = head.partition("\r\n")
        parts = request_line.split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/"):
            return _message(HTTPStatus.BAD_REQUEST)
        method, path = parts[0], parts[1].partition("?")[0]
        if path not in PATHS:
            return _message(HTTPStatus.NOT_FOUND)
        if method not in ("GET", "HEAD"):
            return _message(HTTPStatus.METHOD_NOT_ALLOWED)
        encode, content_type = choose_encoder(_header(rest, "accept"))
        return _message(HTTPStatus.OK, encode(self._registry), content_type, is_head=method == "HEAD")


class _Measured(Collector):
    def __init__(self, measure: Measure) -> None:
        self._measure = measure

    def collect(self) -> Iterable[Metric]:
        return self._measure()


def _header(head: str, name: str) -> str:
    """Its values joined, as if they had come in one line."""
    lines = (line.partition(":") for line in head.split("\r\n"))
    return ",".join(value.strip() for key, _, value in lines if key.strip().lower() == name)


def _message(
    status: HTTPStatus, body: bytes = b"", content_type: str = "text/plain; charset=utf-8", *, is_head: bool = False
) -> bytes:
    body = body or f"{status.phrase}\n".encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (b"" if is_head else body)
