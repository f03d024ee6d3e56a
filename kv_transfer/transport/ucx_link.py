"""One ucx connection as frames in order, and how long ago its other end was heard."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from kv_transfer.checksum import Memory
from kv_transfer.transport.ucx_library import Endpoint, Transfer, UcxEndpointError
from kv_transfer.transport.ucx_wire import HEADER_BYTES, Frame, UcxProtocolError, decode_header, encode_frame

MAX_FRAMES_PER_TURN = 64
MAX_UNSENT_FRAMES = 256
"""Frames that UCX has taken and not sent; beyond it, writes and notifications wait (`is_full`)."""


class LinkLostError(Exception):
    """The connection has ended, or its other end broke the protocol."""


class Link:
    """Every method may raise LinkLostError, but for `close`. Times are of the owner's monotonic clock."""

    def __init__(self, endpoint: Endpoint, now_ns: int) -> None:
        self.endpoint = endpoint
        self.opened_ns = now_ns
        self.heard_ns = now_ns
        self.said_ns = now_ns
        self._saying: deque[Transfer] = deque()
        self._buffer: Memory = np.empty(HEADER_BYTES, dtype=np.uint8)
        self._hearing: Transfer | None = None
        self._header: Frame | None = None
        """The frame whose body is being heard."""

    @property
    def is_full(self) -> bool:
        self._let_go()
        return len(self._saying) >= MAX_UNSENT_FRAMES

    def say(self, frame: Frame, now_ns: int) -> None:
        self.said_ns = now_ns
        self._let_go()
        try:
            self._saying.append(self.endpoint.send_stream(encode_frame(frame)))
        except UcxEndpointError as error:
            raise LinkLostError(str(error)) from error

    def hear(self, now_ns: int, max_frames: int = MAX_FRAMES_PER_TURN) -> list[Frame]:
        """The frames that have arrived. What came before an end is heard before it."""
        frames: list[Frame] = []
        try:
            while len(frames) < max_frames and self._hear_part(frames):
                self.heard_ns = now_ns
            if not frames and not self.endpoint.is_alive:
                raise LinkLostError("the connection has ended")
        except (LinkLostError, UcxEndpointError, UcxProtocolError) as error:
            if not frames:
                raise LinkLostError(str(error)) from error
        return frames

    def close(self) -> None:
        """Breaks the connection. What UCX still works on ends later: see `has_settled`. Idempotent."""
        self.endpoint.close()

    def has_settled(self) -> bool:
        """After `close`: UCX has let go of every buffer."""
        self._let_go()
        return not self._saying and (self._hearing is None or self._hearing.has_ended)

    def _let_go(self) -> None:
        while self._saying and self._saying[0].has_ended:
            self._saying.popleft()

    def _hear_part(self, frames: list[Frame]) -> bool:
        """Takes a header or a body if one has arrived."""
        if self._hearing is None:
            self._hearing = self.endpoint.receive_stream(self._buffer)
        if not self._hearing.has_ended:
            return False
        if self._hearing.has_failed:
            raise LinkLostError("the connection has ended")
        self._hearing = None
        data = self._buffer.tobytes()
        if self._header is not None:
            header, body_bytes = self._header, 0
            frames.append(replace(header, body=data))
        else:
            header, body_bytes = decode_header(data)
            if body_bytes == 0:
                frames.append(header)
        self._header = header if body_bytes else None
        self._buffer = np.empty(body_bytes or HEADER_BYTES, dtype=np.uint8)
        return True
