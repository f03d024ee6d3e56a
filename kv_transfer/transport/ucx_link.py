"""One ucx connection as frames in order, and how long ago its other end was heard.

The packets of all connections arrive in one row of receives (`Mailroom`), so that a turn in which nothing has come
costs one look, however many peers there are.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import replace

import numpy as np

from kv_transfer.checksum import Memory
from kv_transfer.transport.ucx_library import Endpoint, Transfer, UcxEndpointError, Worker
from kv_transfer.transport.ucx_wire import (
    MAX_BODY_BYTES,
    PACKET_BYTES,
    PACKET_TAG,
    Frame,
    UcxProtocolError,
    decode_link_id,
    decode_packet,
    encode_packets,
)

NUM_POSTED_PACKETS = 64
"""Receives that wait for packets, so that few come unexpected, which costs a copy."""
MAX_PACKETS_PER_TURN = 256
MAX_UNSENT_PACKETS = 256
"""Packets that UCX has taken and not sent; beyond it, writes and notifications wait (`is_full`)."""


class LinkLostError(Exception):
    """The connection has ended, or its other end broke the protocol."""


class Link:
    """`say` and `hear` may raise LinkLostError. Times are of the owner's monotonic clock."""

    def __init__(self, endpoint: Endpoint, now_ns: int) -> None:
        self.endpoint = endpoint
        self.link_id = secrets.randbits(63)
        """By which the other end addresses us. Not to be guessed, and no former connection had it."""
        self.peer_link_id: int | None = None
        """By which it is addressed, once it has told."""
        self.opened_ns = now_ns
        self.heard_ns = now_ns
        self.said_ns = now_ns
        self._saying: deque[Transfer] = deque()
        self._heard: list[Frame] = []
        self._parts: list[bytes] = []
        """Of a frame whose last packet has not arrived."""
        self._violation: str | None = None

    @property
    def is_full(self) -> bool:
        return len(self._saying) >= MAX_UNSENT_PACKETS and not self._let_go()

    def introduce(self, hello: bytes) -> None:
        """The first word of the end that connects, before it knows how to address the other."""
        try:
            self._saying.append(self.endpoint.send_stream(hello))
        except UcxEndpointError as error:
            raise LinkLostError(str(error)) from error

    def say(self, frame: Frame, now_ns: int) -> None:
        assert self.peer_link_id is not None, "the other end has not told its link id"
        self.said_ns = now_ns
        try:
            for packet in encode_packets(frame, self.peer_link_id):
                self._saying.append(self.endpoint.send_tagged(packet, PACKET_TAG))
        except UcxEndpointError as error:
            raise LinkLostError(str(error)) from error
        if len(self._saying) > MAX_UNSENT_PACKETS // 2:
            self._let_go()

    def take(self, packet: bytes, now_ns: int) -> None:
        """From the mailroom. What is wrong with it shows in `hear`."""
        self.heard_ns = now_ns
        try:
            frame, has_more = decode_packet(packet)
            if has_more or self._parts:
                self._parts.append(frame.body)
                if len(self._parts) * PACKET_BYTES > 2 * MAX_BODY_BYTES:
                    raise UcxProtocolError(f"a frame of more than {MAX_BODY_BYTES} bytes")
            if not has_more:
                self._heard.append(replace(frame, body=b"".join(self._parts)) if self._parts else frame)
                self._parts = []
        except UcxProtocolError as error:
            self._violation = str(error)

    def hear(self) -> list[Frame]:
        """The frames that have arrived. What came before an end is heard before it."""
        if self._heard:
            heard, self._heard = self._heard, []
            return heard
        if self._violation is not None:
            raise LinkLostError(self._violation)
        if not self.endpoint.is_alive:
            raise LinkLostError("the connection has ended")
        return []

    def put_back(self, frames: list[Frame]) -> None:
        """What was heard together with the first frame, for whoever hears on."""
        self._heard = frames

    def close(self) -> None:
        """Breaks the connection. What UCX still works on ends later: see `has_settled`. Idempotent."""
        self.endpoint.close()

    def has_settled(self) -> bool:
        """After `close`: UCX has let go of every buffer."""
        self._let_go()
        return not self._saying

    def _let_go(self) -> bool:
        """True if there was something."""
        had = len(self._saying)
        while self._saying and self._saying[0].has_ended:
            self._saying.popleft()
        return len(self._saying) < had


class Mailroom:
    """Receives every connection's packets, and hands each to the link that it is addressed to."""

    def __init__(self, worker: Worker) -> None:
        """Raises: UcxEndpointError."""
        self._worker = worker
        self._links: dict[int, Link] = {}
        self._posted: deque[tuple[Transfer, Memory]] = deque()
        for _ in range(NUM_POSTED_PACKETS):
            self._post(np.empty(PACKET_BYTES, dtype=np.uint8))

    def enter(self, link: Link) -> None:
        self._links[link.link_id] = link

    def leave(self, link: Link) -> None:
        self._links.pop(link.link_id, None)

    def turn(self, now_ns: int) -> bool:
        """Hands out what has arrived. True if there was something. Raises: UcxEndpointError."""
        num_packets = 0
        while num_packets < MAX_PACKETS_PER_TURN and self._posted[0][0].has_ended:
            transfer, slot = self._posted.popleft()
            if not transfer.has_failed:  # else somebody sent what is no packet
                packet = slot.tobytes()
                link = self._links.get(decode_link_id(packet))
                if link is not None:  # else it was closed meanwhile
                    link.take(packet, now_ns)
            self._post(slot)
            num_packets += 1
        return num_packets > 0

    def close(self) -> None:
        """No packet is on its way any more: every connection is closed."""
        self._posted.clear()
        self._links.clear()

    def _post(self, slot: Memory) -> None:
        slot[:8] = 0  # so that an empty message is not taken for the packet before it
        self._posted.append((self._worker.receive_tagged(slot, PACKET_TAG), slot))
