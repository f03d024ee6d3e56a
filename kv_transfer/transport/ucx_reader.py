"""The receiving end of a connection: posts receives straight into the pool, grants them, reports what has landed.

All of it runs in the backend's thread. Nothing lands but in a posted receive, and UCX writes to one until it has
ended: a connection is settled, and its writer fenced, when the endpoint is closed and every receive has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kv_transfer.checksum import Memory
from kv_transfer.transport.ucx_library import Transfer, UcxEndpointError, Worker
from kv_transfer.transport.ucx_link import Link, LinkLostError
from kv_transfer.transport.ucx_pieces import MAX_PIECE_BYTES, Staging, Table, group_pieces, scatter
from kv_transfer.transport.ucx_wire import (
    ABANDONED,
    DONE,
    GRANT,
    MAX_NOTIFY_BYTES,
    NOTIFY,
    WRITE,
    Frame,
    UcxProtocolError,
    decode_pieces,
)
from kv_transfer.transport.ucx_writer import MAX_OPEN_WRITES

MAX_POSTED_BYTES = 64 << 20
"""Granted and not landed, a connection: what may come in before commands and other peers are served again."""
MAX_POSTED_MESSAGES = 512
MAX_HELD_NOTIFICATIONS = 4096
"""Notifications that wait for the bytes of an earlier write; one more breaks the protocol."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Incoming:
    """A write that is not delivered; a notification alone has no pieces."""

    write_id: int = 0
    pieces: Table = field(default_factory=lambda: np.empty((0, 2), dtype=np.uint64))
    """[num_pieces, 2]: target offset, size in bytes."""
    messages: list[tuple[int, int, int]] = field(default_factory=list)
    """See `group_pieces`; what is posted and landed is counted in them."""
    first_tag: int = 0
    num_posted: int = 0
    num_landed: int = 0
    landing: deque[tuple[Transfer, Memory | None]] = field(default_factory=deque)
    """With the buffer of a packed message."""
    payload: bytes | None = None
    has_landed: bool = False
    """And the writer was told so."""
    is_abandoned: bool = False


class Reader:
    """What is written to us over one connection. The methods may raise LinkLostError and UcxProtocolError.

    Without `memory` (at the end that connected) only notifications are taken. `deliver` is given each notification's
    payload, in the order in which the writes were announced, when all of its write has landed.
    """

    def __init__(
        self, link: Link, memory: Memory | None, staging: Staging, worker: Worker, deliver: Callable[[bytes], None]
    ) -> None:
        self._link = link
        self._memory = memory
        self._staging = staging
        self._worker = worker
        self._deliver = deliver
        self._order: deque[_Incoming] = deque()
        self._known: dict[int, _Incoming] = {}
        """Writes that are neither delivered nor abandoned, by id."""
        self._landing: dict[int, _Incoming] = {}
        """Those of them that have not landed."""
        self._num_posted_bytes = 0
        self._num_posted_messages = 0

    def take(self, frame: Frame, now_ns: int) -> None:
        """WRITE, NOTIFY or ABANDON."""
        if frame.kind == WRITE:
            self._on_write(frame)
        elif frame.kind == NOTIFY:
            self._on_notify(frame)
        else:
            self._on_abandon(frame.write_id, now_ns)

    def advance(self, now_ns: int) -> bool:
        """Does what can be done now. True if there was something."""
        has_moved = False
        is_first = True  # what was posted first lands first, so that looking at one write is enough
        for write in list(self._landing.values()):
            has_moved |= is_first and self._reap(write, now_ns)
            is_first = is_first and not write.landing
            has_moved |= self._post_more(write, now_ns)
            if not write.landing and (write.is_abandoned or write.num_landed == len(write.messages)):
                self._end(write, now_ns)
                has_moved = True
        while self._order and self._is_ready(self._order[0]):
            write = self._order.popleft()
            self._known.pop(write.write_id, None)
            if write.payload is not None:  # else it was abandoned
                self._deliver(write.payload)
            has_moved = True
        return has_moved

    def has_settled(self) -> bool:
        """After the end: UCX writes to our memory no more."""
        for write in self._landing.values():
            while write.landing and write.landing[0][0].has_ended:
                write.landing.popleft()
        return not any(write.landing for write in self._landing.values())

    def check_invariants(self) -> None:
        assert len(self._landing) <= MAX_OPEN_WRITES and len(self._order) <= MAX_HELD_NOTIFICATIONS
        for write in self._landing.values():
            assert write.num_posted - write.num_landed == len(write.landing)
        posted = [transfer for write in self._landing.values() for transfer, _ in write.landing]
        assert self._num_posted_messages == len(posted) <= MAX_POSTED_MESSAGES
        assert self._num_posted_bytes == sum(transfer.size_bytes for transfer in posted)

    # ---- frames ----------------------------------------------------------------------------------------------

    def _on_write(self, frame: Frame) -> None:
        if self._memory is None:
            raise UcxProtocolError("a write from the end that was connected to")
        if frame.write_id in self._known or frame.write_id == 0:
            raise UcxProtocolError(f"write {frame.write_id} was announced twice")
        if len(self._landing) >= MAX_OPEN_WRITES:
            raise UcxProtocolError(f"more than {MAX_OPEN_WRITES} writes at once")
        pieces = decode_pieces(frame.body, self._memory.size)
        if int(pieces[:, 1].max()) > MAX_PIECE_BYTES:
            raise UcxProtocolError(f"a piece of more than {MAX_PIECE_BYTES} bytes")
        messages = group_pieces(pieces[:, 1])
        first_tag = self._worker.take_tags(len(messages))
        write = _Incoming(write_id=frame.write_id, pieces=pieces, messages=messages, first_tag=first_tag)
        self._known[write.write_id] = self._landing[write.write_id] = write
        self._hold(write)

    def _on_notify(self, frame: Frame) -> None:
        if len(frame.body) > MAX_NOTIFY_BYTES:
            raise UcxProtocolError(f"a notification of {len(frame.body)} bytes")
        if frame.write_id == 0:
            self._hold(_Incoming(payload=frame.body, has_landed=True))
            return
        write = self._known.get(frame.write_id)
        if write is None or write.is_abandoned or write.payload is not None:
            raise UcxProtocolError(f"a notification of write {frame.write_id}, which is not expected")
        write.payload = frame.body

    def _on_abandon(self, write_id: int, now_ns: int) -> None:
        write = self._known.get(write_id)
        if write is None or write.is_abandoned or write.payload is not None:
            raise UcxProtocolError(f"write {write_id} was given up, which is not expected")
        write.is_abandoned = True
        if write.has_landed:  # all its pieces were granted, and the last ones came empty before this frame
            self._link.say(Frame(kind=ABANDONED, write_id=write_id), now_ns)

    def _hold(self, write: _Incoming) -> None:
        self._order.append(write)
        if len(self._order) > MAX_HELD_NOTIFICATIONS:
            raise UcxProtocolError(f"more than {MAX_HELD_NOTIFICATIONS} notifications wait for a write")

    # ---- steps -----------------------------------------------------------------------------------------------

    def _reap(self, write: _Incoming, now_ns: int) -> bool:
        """Receives end about in the order in which they were posted, so that looking at the first is enough."""
        has_moved = False
        while write.landing and write.landing[0][0].has_ended:
            transfer, buffer = write.landing.popleft()
            self._num_posted_bytes -= transfer.size_bytes
            self._num_posted_messages -= 1
            if transfer.has_failed:
                raise LinkLostError("the connection has ended")
            if buffer is not None:
                self._unpack(write, buffer)
            write.num_landed += 1
            self._link.heard_ns = now_ns
            has_moved = True
        return has_moved

    def _unpack(self, write: _Incoming, buffer: Memory) -> None:
        """An abandoned write's messages may have come empty."""
        if not write.is_abandoned:
            assert self._memory is not None
            first, end, _ = write.messages[write.num_landed]
            scatter(self._memory, buffer, write.pieces[first:end, 0], write.pieces[first:end, 1])
        self._staging.give_back(buffer)

    def _post_more(self, write: _Incoming, now_ns: int) -> bool:
        first = write.num_posted
        if write.is_abandoned or first == len(write.messages) or not self._has_room(0.5):
            return False
        try:
            while write.num_posted < len(write.messages) and self._has_room(1.0):
                memory, buffer = self._place(write)
                transfer = self._link.endpoint.receive_tagged(memory, write.first_tag + write.num_posted)
                write.landing.append((transfer, buffer))
                write.num_posted += 1
                self._num_posted_bytes += transfer.size_bytes
                self._num_posted_messages += 1
        except UcxEndpointError as error:
            raise LinkLostError(str(error)) from error
        if write.num_posted == first:
            return False
        grant = Frame(kind=GRANT, write_id=write.write_id, count=write.num_posted, tag=write.first_tag)
        self._link.say(grant, now_ns)
        return True

    def _place(self, write: _Incoming) -> tuple[Memory, Memory | None]:
        """Where the next message lands: in the pool, or in a buffer if it is of several pieces."""
        assert self._memory is not None
        first, end, size_bytes = write.messages[write.num_posted]
        if end == first + 1:
            offset_bytes = int(write.pieces[first, 0])
            return self._memory[offset_bytes : offset_bytes + size_bytes], None
        buffer = self._staging.take()
        return buffer[:size_bytes], buffer

    def _has_room(self, share: float) -> bool:
        """Whether less than that share of the limits is posted. Half of it is enough for the wire: grants are few."""
        return (
            self._num_posted_bytes < share * MAX_POSTED_BYTES
            and self._num_posted_messages < share * MAX_POSTED_MESSAGES
        )

    def _end(self, write: _Incoming, now_ns: int) -> None:
        del self._landing[write.write_id]
        write.has_landed = True
        self._link.say(Frame(kind=ABANDONED if write.is_abandoned else DONE, write_id=write.write_id), now_ns)

    @staticmethod
    def _is_ready(write: _Incoming) -> bool:
        return write.has_landed and (write.payload is not None or write.is_abandoned)
