"""A TCP connection that carries frames without blocking."""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
from collections.abc import Callable

from kv_transfer.transport.base import TransportError
from kv_transfer.transport.nccl_wire import LENGTH, MAX_FRAME_BYTES, NcclProtocolError

MAX_UNSENT_BYTES = 16 << 20
"""What waits for the peer to read; more, and it counts as gone."""
_RECEIVE_BYTES = 256 * 1024

_log = logging.getLogger(__name__)


class ControlClosedError(TransportError):
    """The other end has closed the connection, broke it, or reads nothing."""


class ControlConnection:
    """Frames go out in the order in which they were sent; while it is connecting, they wait.

    `watch` has a handler called when there is something to do: `flush`, then `receive` unless it is still connecting.
    """

    def __init__(self, connection: socket.socket, *, is_connecting: bool = False) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self.is_connecting = is_connecting
        self._unsent = bytearray()
        self._received = bytearray()
        self.is_closed = False
        self._selector: selectors.BaseSelector | None = None
        self._handler: Callable[[int], None] | None = None
        self._watched = 0
        if not is_connecting:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect_to(cls, host: str, port: int) -> ControlConnection:
        """`host` is a numeric address: a name would have to be looked up, which blocks. Raises: ControlClosedError."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except (OSError, ValueError, OverflowError) as error:
            raise ControlClosedError(f"{host}:{port} is not a numeric address: {error}") from error
        family, kind, protocol, _, address = found[0]
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        try:
            connection.connect(address)
        except BlockingIOError:
            return cls(connection, is_connecting=True)
        except (OSError, OverflowError) as error:
            connection.close()
            raise ControlClosedError(f"{host}:{port} cannot be reached: {error}") from error
        return cls(connection)

    def watch(self, selector: selectors.BaseSelector, handler: Callable[[int], None]) -> None:
        """Until it is closed. `handler` replaces an earlier one, and takes the time in ns."""
        self._selector, self._handler = selector, handler
        self._update_watch()

    def send(self, frame: bytes) -> None:
        """Raises: ControlClosedError."""
        assert 0 < len(frame) <= MAX_FRAME_BYTES, f"a frame of {len(frame)} bytes"
        self._unsent += LENGTH.pack(len(frame)) + frame
        if len(self._unsent) > MAX_UNSENT_BYTES:
            raise ControlClosedError(f"it leaves {MAX_UNSENT_BYTES >> 20} MiB unread")
        self.flush()

    def flush(self) -> None:
        """Sends what the kernel takes. Raises: ControlClosedError."""
        try:
            self._flush()
        except BlockingIOError:
            _log.debug("the peer reads slowly; the selector tells when more can be sent")
        except OSError as error:
            raise ControlClosedError((error.strerror or str(error)).lower()) from error
        self._update_watch()

    def receive(self) -> tuple[list[bytes], str | None]:
        """The frames that have arrived, and why the connection has ended if it has. Raises: NcclProtocolError."""
        ended = None
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
            ended = None if data else "closed"
        except BlockingIOError:
            data = b""
        except OSError as error:
            data, ended = b"", (error.strerror or str(error)).lower()
        self._received += data
        return self._take_frames(), ended

    def close(self) -> None:
        """Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            if self._selector is not None:
                self._selector.unregister(self._socket)
            self._socket.close()

    def _on_ready(self, now_ns: int) -> None:
        """Called by whoever runs the selector."""
        if not self.is_closed and self._handler is not None:  # else an earlier handler of this round has closed it
            self._handler(now_ns)

    def _flush(self) -> None:
        if self.is_connecting:
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, f"cannot be reached: {os.strerror(error)}")
            try:
                self._socket.getpeername()
            except OSError as not_yet:
                if not_yet.errno == errno.ENOTCONN:
                    return
                raise
            self.is_connecting = False
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while self._unsent:
            sent = self._socket.send(self._unsent)
            del self._unsent[:sent]

    def _update_watch(self) -> None:
        if self._selector is None or self.is_closed:
            return
        wanted = selectors.EVENT_READ
        if self.is_connecting or self._unsent:
            wanted |= selectors.EVENT_WRITE
        if not self._watched:
            self._selector.register(self._socket, wanted, self._on_ready)
        elif wanted != self._watched:
            self._selector.modify(self._socket, wanted, self._on_ready)
        self._watched = wanted

    def _take_frames(self) -> list[bytes]:
        frames = []
        start = 0
        while len(self._received) - start >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._received, start)
            if not 0 < size <= MAX_FRAME_BYTES:
                raise NcclProtocolError(f"a frame of {size} bytes")
            end = start + LENGTH.size + size
            if len(self._received) < end:
                break
            frames.append(bytes(self._received[start + LENGTH.size : end]))
            start = end
        del self._received[:start]
        return frames
