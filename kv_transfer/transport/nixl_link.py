"""The control connection under a nixl connection: frames both ways without blocking, and who is silent for too long.

Belongs to one thread. What is said is sent by `flush`, so that several frames leave together.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections import deque

from kv_transfer.transport.base import TransportError
from kv_transfer.transport.nixl_limits import NixlLimits
from kv_transfer.transport.nixl_wire import PING, FrameReader, encode_frame

RECEIVE_BYTES = 256 * 1024


class LinkEndedError(TransportError):
    """The other end has closed the connection, broke it, or has been silent for too long."""


class ControlLink:
    """Over a connected socket. Whoever writes to `wake_fd` (an eventfd) ends a `wait`."""

    def __init__(self, connection: socket.socket, wake_fd: int, limits: NixlLimits) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._wake_fd = wake_fd
        self._limits = limits
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._failure = ""
        """Why nothing can be sent any more."""
        self.frames: deque[tuple[int, bytes]] = deque()
        """What has arrived and was not yet taken: (kind, body)."""
        self._epoll = select.epoll()
        self._epoll.register(wake_fd, select.EPOLLIN)
        self._epoll.register(connection.fileno(), select.EPOLLIN)
        self._heard_s = self._said_s = time.monotonic()
        self.is_full = False
        """The kernel takes no more for now."""

    def say(self, kind: int, body: bytes = b"") -> None:
        self.say_frame(encode_frame(kind, body))

    def say_frame(self, frame: bytes) -> None:
        self._unsent += frame

    def flush(self) -> None:
        was_full, self.is_full = self.is_full, False
        while self._unsent and not self.is_full:
            try:
                del self._unsent[: self._connection.send(self._unsent)]
                self._said_s = time.monotonic()
            except BlockingIOError:
                self.is_full = True
            except OSError as error:  # the other end may have said why before it closed: `receive` comes to that
                self._failure = str(error)
                self._unsent.clear()
        if self.is_full != was_full:
            mask = select.EPOLLIN | (select.EPOLLOUT if self.is_full else 0)
            self._epoll.modify(self._connection.fileno(), mask)

    def receive(self) -> None:
        """Takes in what has arrived and keeps up the heartbeat. Raises: LinkEndedError, NixlProtocolError."""
        if time.monotonic() - self._said_s >= self._limits.heartbeat_interval_s and not self._unsent:
            self.say(PING)
        try:
            data = self._connection.recv(RECEIVE_BYTES)
        except BlockingIOError:
            silence_s = time.monotonic() - self._heard_s
            if silence_s >= self._limits.silence_timeout_s:
                raise LinkEndedError(f"silent for {silence_s:.1f} s") from None
            if self._failure:
                raise LinkEndedError(self._failure) from None
            return
        except OSError as error:
            raise LinkEndedError(str(error)) from error
        if not data:
            raise LinkEndedError(self._failure or "closed")
        self._heard_s = time.monotonic()
        self.frames += self._reader.feed(data)

    def wait(self, timeout_s: float) -> None:
        """Returns when there is something to receive or to do, and in time for the heartbeat and for silence."""
        patience_s = max(0.0, self._heard_s + self._limits.silence_timeout_s - time.monotonic())
        for fd, _ in self._epoll.poll(min(timeout_s, self._limits.heartbeat_interval_s, patience_s)):
            if fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)

    def close(self, kind: int, body: bytes = b"") -> None:
        """Says a last word, if the other end still listens."""
        self.say(kind, body)
        self.flush()
        self._epoll.close()
        self._connection.close()


def open_connection(host: str, port: int, wake_fd: int, timeout_s: float) -> socket.socket:
    """Connects over TCP; a word to `wake_fd` ends it early. Raises: OSError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except ValueError as error:  # of a name that none can have
        raise OSError(f"{host!r} is no host: {error}") from error
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        failure = connection.connect_ex(address)
        if failure == errno.EINPROGRESS:
            poller = select.poll()
            poller.register(connection.fileno(), select.POLLOUT)
            poller.register(wake_fd, select.POLLIN)
            ready = [fd for fd, _ in poller.poll(timeout_s * 1e3)]
            if connection.fileno() not in ready:
                raise OSError("given up" if ready else f"no answer from {host} within {timeout_s:g} s")
            failure = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            raise OSError(f"{host} port {port}: {os.strerror(failure)}")
    except OSError:
        connection.close()
        raise
    return connection
