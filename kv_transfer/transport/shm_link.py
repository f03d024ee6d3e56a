"""One SEQPACKET connection, without blocking: frames go out in the order in which they were posted."""

from __future__ import annotations

import logging
import socket
from collections import deque
from dataclasses import dataclass, field

from kv_transfer.transport.base import PeerId
from kv_transfer.transport.shm_copier import Region
from kv_transfer.transport.shm_wire import MAX_FRAME_BYTES

MAX_QUEUED_FRAMES = 4096
"""Frames that wait for the peer to read; one more and it counts as gone."""
MAX_FRAMES_PER_POLL = 256
_TRUNCATED = int(socket.MSG_TRUNC)
"""A plain number: that of `socket` is an enum, whose operators are written in Python."""


_log = logging.getLogger(__name__)


class LinkClosedError(Exception):
    """The other end has closed the connection, or broke it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Outgoing:
    """A frame, and whether what it tells of has happened: a notification waits for its copies."""

    frame: bytes
    is_ready: bool


@dataclass(slots=True, kw_only=True, eq=False)
class Link:
    """`region` is the peer's pool where this end is the writer. `num_jobs` copies into it have not ended."""

    peer: PeerId
    connection: socket.socket
    region: Region | None = None
    num_jobs: int = 0
    queue: deque[Outgoing] = field(default_factory=deque)
    is_full: bool = False
    """The kernel takes no more for now: flush again when the connection is writable."""

    def flush(self) -> None:
        """Sends what is ready. Raises: LinkClosedError."""
        self.is_full = False
        while self.queue and self.queue[0].is_ready:
            try:
                self.connection.send(self.queue[0].frame)
            except BlockingIOError:
                self.is_full = True
                return
            except OSError as error:
                raise LinkClosedError(str(error)) from error
            self.queue.popleft()

    def receive(self) -> tuple[list[bytes], str | None]:
        """The frames that have arrived, and why the connection has ended if it has."""
        frames: list[bytes] = []
        while len(frames) < MAX_FRAMES_PER_POLL:
            try:
                data, _, flags, _ = self.connection.recvmsg(MAX_FRAME_BYTES)
            except BlockingIOError:
                return frames, None
            except OSError as error:
                return frames, str(error)
            if not data:
                return frames, "closed"
            if flags & _TRUNCATED:
                return frames, f"sent a frame of more than {MAX_FRAME_BYTES} bytes"
            frames.append(data)
        return frames, None


def send_last_word(connection: socket.socket, frame: bytes) -> None:
    """Sends without minding whether it is heard."""
    try:
        connection.send(frame)
    except OSError as error:
        _log.debug("a last word was not heard: %s", error)
