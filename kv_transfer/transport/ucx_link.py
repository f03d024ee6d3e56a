"""One ucx connection as frames in order, and how long ago its other end was heard."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from kv_transfer.checksum import Memory
from kv_transfer.transport.ucx_library import Endpoint, Transfer, UcxEndpointError, Worker
from kv_transfer.transport.ucx_wire import (
    MAX_BODY_BYTES,
    PACKET_BYTES,
    Frame,
    UcxProtocolError,
    decode_packet,
    encode_packets,
)

NUM_POSTED_PACKETS = 16
"""Receives that wait for packets, so that few come unexpected, which costs a copy."""
MAX_FRAMES_PER_TURN = 64
MAX_UNSENT_PACKETS = 256
"""Packets that UCX has taken and not sent; beyond it, writes and notifications wait (`is_full`)."""


class LinkLostError(Exception):
    """The connection has ended, or its other end broke the protocol."""


class Link:
    """`say` and `hear` may raise LinkLostError. Times are of the owner's monotonic clock."""

    def __init__(self, worker: Worker, endpoint: Endpoint, now_ns: int) -> None:
        """Raises: LinkLostError."""
        self.endpoint = endpoint
        self.hear_tag = worker.take_tags(1)
        self.say_tag = 0
        """What the other end hears, once it has told."""
        self.opened_ns = now_ns
        self.heard_ns = now_ns
        self.said_ns = now_ns
        self._worker = worker
        self._saying: deque[Transfer] = deque()
        self._hearing: deque[tuple[Transfer, Memory]] = deque()
        self._parts: list[bytes] = []
        """Of a frame whose last packet has not arrived."""
        for _ in range(NUM_POSTED_PACKETS):
            self._post(np.empty(PACKET_BYTES, dtype=np.uint8))

    @property
    def is_full(self) -> bool:
        self._let_go()
        return len(self._saying) >= MAX_UNSENT_PACKETS

    def introduce(self, hello: bytes) -> None:
        """The first word of the end that connects, before it knows the other's tag."""
        try:
            self._saying.append(self.endpoint.send_stream(hello))
        except UcxEndpointError as error:
            raise LinkLostError(str(error)) from error

    def say(self, frame: Frame, now_ns: int) -> None:
        assert self.say_tag, "the other end has not told its tag"
        self.said_ns = now_ns
        self._let_go()
        try:
            for packet in encode_packets(frame):
                self._saying.append(self.endpoint.send_tagged(packet, self.say_tag))
        except UcxEndpointError as error:
            raise LinkLostError(str(error)) from error

    def hear(self, now_ns: int, max_frames: int = MAX_FRAMES_PER_TURN) -> list[Frame]:
        """The frames that have arrived. What came before an end is heard before it."""
        frames: list[Frame] = []
        try:
            while len(frames) < max_frames and self._hearing[0][0].has_ended:
                self.heard_ns = now_ns
                self._hear_packet(frames)
            if not frames and not self.endpoint.is_alive:
                raise LinkLostError("the connection has ended")
        except (LinkLostError, UcxEndpointError, UcxProtocolError) as error:
            if not frames:
                raise LinkLostError(str(error)) from error
        return frames

    def close(self) -> None:
        """Breaks the connection. What UCX still works on ends later: see `has_settled`. Idempotent."""
        self.endpoint.close()
        self._hearing.extend(self._worker.drain(self.hear_tag, PACKET_BYTES))

    def has_settled(self) -> bool:
        """After `close`: UCX has let go of every buffer."""
        self._let_go()
        while self._hearing and self._hearing[0][0].has_ended:
            self._hearing.popleft()
        return not self._saying and not self._hearing

    def _post(self, slot: Memory) -> None:
        try:
            self._hearing.append((self.endpoint.receive_tagged(slot, self.hear_tag), slot))
        except UcxEndpointError as error:
            raise LinkLostError(str(error)) from error

    def _hear_packet(self, frames: list[Frame]) -> None:
        transfer, slot = self._hearing[0]
        if transfer.has_failed:
            raise LinkLostError("the connection has ended")
        self._hearing.popleft()
        frame, has_more = decode_packet(slot.tobytes())
        self._post(slot)
        if has_more or self._parts:
            self._parts.append(frame.body)
            if len(self._parts) * PACKET_BYTES > 2 * MAX_BODY_BYTES:
                raise UcxProtocolError(f"a frame of more than {MAX_BODY_BYTES} bytes")
        if not has_more:
            frames.append(replace(frame, body=b"".join(self._parts)) if self._parts else frame)
            self._parts = []

    def _let_go(self) -> None:
        while self._saying and self._saying[0].has_ended:
            self._saying.popleft()
