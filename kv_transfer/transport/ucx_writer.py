"""The writing end of a connection: announces writes, sends the pieces that are granted, completes them when told.

All of it runs in the backend's thread. The source of a write is left alone only when the receiver has said DONE or
ABANDONED, or when not a piece of it was sent: a send that UCX calls complete may not have arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kv_transfer.checksum import Memory, checksums
from kv_transfer.transport.base import Copy, TransportEvent, WriteCompleted, WriteFailed
from kv_transfer.transport.ucx_library import EMPTY, Transfer, UcxEndpointError
from kv_transfer.transport.ucx_link import Link, LinkLostError
from kv_transfer.transport.ucx_pieces import Staging, Table, cut_pieces, gather, group_pieces
from kv_transfer.transport.ucx_wire import (
    ABANDON,
    DONE,
    GRANT,
    NOTIFY,
    WRITE,
    Frame,
    UcxProtocolError,
    encode_pieces,
)

MAX_OPEN_WRITES = 16
"""Announced and not ended, a connection; later ones wait at the writer."""
MAX_SENT_PER_TURN = 32
"""Messages of a write, after which UCX is progressed."""
MAX_SUMMED_BYTES = 4 << 20
"""Summed in one turn, between which UCX is progressed."""


@dataclass(slots=True, kw_only=True, eq=False)
class PostedWrite:
    """A write, the first `num_sums` copies of which are summed, or (without `copies`) a notification alone. The rest is
    how far it has come."""

    handle: int
    copies: tuple[Copy, ...]
    notify: bytes
    num_sums: int = 0
    pieces: Table = field(default_factory=lambda: np.empty((0, 3), dtype=np.uint64))
    """See `cut_pieces`."""
    messages: list[tuple[int, int, int]] = field(default_factory=list)
    """See `group_pieces`; what is granted and sent is counted in them."""
    num_granted: int = 0
    num_sent: int = 0
    num_sending: int = 0
    """Of those sent, what UCX has not let go of."""
    first_tag: int = 0
    sums: list[int] = field(default_factory=list)
    is_told: bool = False
    """NOTIFY was said."""
    is_cancelled: bool = False
    is_done: bool = False
    is_abandoned: bool = False

    @property
    def is_sent(self) -> bool:
        return self.num_sent == len(self.messages)

    @property
    def is_summed(self) -> bool:
        return len(self.sums) == self.num_sums


class Writer:
    """What is written over one connection. The methods may raise LinkLostError and UcxProtocolError."""

    def __init__(self, link: Link, memory: Memory, staging: Staging, emit: Callable[[TransportEvent], None]) -> None:
        self._link = link
        self._memory = memory
        self._staging = staging
        self._emit = emit
        self._waiting: deque[PostedWrite] = deque()
        self._open: dict[int, PostedWrite] = {}
        self._sending: deque[tuple[Transfer, PostedWrite, Memory | None]] = deque()
        """With the buffer of a packed message."""
        self._may_reap = False
        """The peer has said something, or a write waits for its sends to end."""

    def post(self, write: PostedWrite) -> None:
        self._waiting.append(write)

    def cancel(self, handle: int, now_ns: int) -> None:
        """A write all of which was sent goes on; of another, nothing more is sent. Unknown ones: nothing."""
        write = self._open.get(handle)
        if write is not None:
            if not write.is_sent and not write.is_cancelled:
                write.is_cancelled = True
                self._link.say(Frame(kind=ABANDON, write_id=handle), now_ns)
            return
        for waiting in self._waiting:
            if waiting.handle == handle and waiting.copies:
                self._waiting.remove(waiting)
                self._emit(WriteFailed(handle=handle, quiesced=True, reason="cancelled"))
                return

    def take(self, frame: Frame) -> None:
        """GRANT, DONE or ABANDONED."""
        self._may_reap = True
        write = self._open.get(frame.write_id)
        if write is None:
            raise UcxProtocolError(f"frame {frame.kind} for write {frame.write_id}, which is not open")
        if frame.kind == GRANT:
            if not write.num_granted < frame.count <= len(write.messages):
                raise UcxProtocolError(f"{frame.count} of {len(write.messages)} messages granted")
            write.first_tag, write.num_granted = frame.tag, frame.count
        elif frame.kind == DONE:
            if not write.is_sent:
                raise UcxProtocolError("a write was called done before all of it was sent")
            write.is_done = True
        else:
            if not write.is_cancelled or write.is_abandoned:
                raise UcxProtocolError("a write was called abandoned that was not given up")
            write.is_abandoned = True

    def advance(self, now_ns: int) -> bool:
        """Does what can be done now. True if there was something."""
        has_moved = False
        if self._may_reap:  # a look in every turn would cost more than it frees
            self._may_reap = False
            self._reap()
        while self._waiting and len(self._open) < MAX_OPEN_WRITES and not self._link.is_full:
            self._begin(self._waiting.popleft(), now_ns)
            has_moved = True
        for write in list(self._open.values()):
            has_moved |= self._send_granted(write)
            has_moved |= self._sum_some(write)
            has_moved |= self._tell(write, now_ns)
            has_moved |= self._end(write)
        return has_moved

    def fail(self, reason: str) -> None:
        """The connection is lost: every write ends."""
        for write in [*self._open.values(), *self._waiting]:
            is_quiesced = write.num_sent == 0 or write.is_done or write.is_abandoned
            self._emit(WriteFailed(handle=write.handle, quiesced=is_quiesced, reason=reason))
        self._open.clear()
        self._waiting.clear()

    def has_settled(self) -> bool:
        """After the end: UCX reads our memory no more."""
        while self._sending and self._sending[0][0].has_ended:
            self._sending.popleft()
        return not self._sending

    def check_invariants(self) -> None:
        assert len(self._open) <= MAX_OPEN_WRITES
        for handle, write in self._open.items():
            assert handle == write.handle and write.copies and write.messages
            assert write.num_sent <= write.num_granted <= len(write.messages)
            assert not write.is_told or (write.is_sent and write.is_summed)
            assert write.num_sending == sum(sending is write for _, sending, _ in self._sending)

    # ---- steps -----------------------------------------------------------------------------------------------

    def _begin(self, write: PostedWrite, now_ns: int) -> None:
        if not write.copies:
            self._link.say(Frame(kind=NOTIFY, body=write.notify), now_ns)
            self._emit(WriteCompleted(handle=write.handle))
            return
        write.pieces = cut_pieces(write.copies)
        write.messages = group_pieces(write.pieces[:, 2])
        self._open[write.handle] = write
        body = encode_pieces(write.pieces[:, 1:])
        self._link.say(Frame(kind=WRITE, write_id=write.handle, body=body), now_ns)

    def _send_granted(self, write: PostedWrite) -> bool:
        """A cancelled write's messages go out empty: their receives are posted and must end."""
        first = write.num_sent
        try:
            while write.num_sent < min(write.num_granted, first + MAX_SENT_PER_TURN):
                memory, buffer = (EMPTY, None) if write.is_cancelled else self._message(write)
                transfer = self._link.endpoint.send_tagged(memory, write.first_tag + write.num_sent)
                self._sending.append((transfer, write, buffer))
                write.num_sent += 1
                write.num_sending += 1
        except UcxEndpointError as error:
            raise LinkLostError(str(error)) from error
        return write.num_sent > first

    def _message(self, write: PostedWrite) -> tuple[Memory, Memory | None]:
        """The next message's bytes, and the buffer that they are in if it is of several pieces."""
        first, end, size_bytes = write.messages[write.num_sent]
        if end == first + 1:
            source_bytes = int(write.pieces[first, 0])
            return self._memory[source_bytes : source_bytes + size_bytes], None
        buffer = self._staging.take()
        gather(buffer, self._memory, write.pieces[first:end, 0], write.pieces[first:end, 2])
        return buffer[:size_bytes], buffer

    def _sum_some(self, write: PostedWrite) -> bool:
        if write.is_summed or write.is_cancelled:
            return False
        ranges: list[tuple[int, int]] = []
        size_bytes = 0
        for copy in write.copies[len(write.sums) : write.num_sums]:
            ranges.append((copy.source_bytes, copy.size_bytes))
            size_bytes += copy.size_bytes
            if size_bytes >= MAX_SUMMED_BYTES:
                break
        write.sums += checksums(self._memory, ranges)
        return True

    def _tell(self, write: PostedWrite, now_ns: int) -> bool:
        if write.is_told or write.is_cancelled or not (write.is_sent and write.is_summed) or self._link.is_full:
            return False
        payload = write.notify + b"".join(value.to_bytes(8, "little") for value in write.sums)
        self._link.say(Frame(kind=NOTIFY, write_id=write.handle, body=payload), now_ns)
        write.is_told = True
        return True

    def _end(self, write: PostedWrite) -> bool:
        """Reports a write on which the receiver has had its last word, once UCX has let go of its source as well."""
        if not write.is_abandoned and not (write.is_done and write.is_told):
            return False
        if write.num_sending:
            self._may_reap = True
            return False
        del self._open[write.handle]
        if write.is_abandoned:
            self._emit(WriteFailed(handle=write.handle, quiesced=True, reason="cancelled"))
        else:
            self._emit(WriteCompleted(handle=write.handle))
        return True

    def _reap(self) -> None:
        while self._sending and self._sending[0][0].has_ended:
            transfer, write, buffer = self._sending.popleft()
            write.num_sending -= 1
            if buffer is not None:
                self._staging.give_back(buffer)
            if transfer.has_failed:
                raise LinkLostError("the connection has ended")
