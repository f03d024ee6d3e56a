"""The writer's side of an open nccl connection: writes become groups of sends.

It keeps NCCL's rule that nothing is called on a communicator before the last call has settled. It knows neither sockets
nor clocks: frames go out through `send_frame`, time comes in with `step`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from kv_transfer.protocol.plan import Copy, merge_copies
from kv_transfer.transport.base import TransportEvent, WriteCompleted, WriteFailed
from kv_transfer.transport.nccl_library import NcclCommunicator
from kv_transfer.transport.nccl_limits import NcclLimits, NcclTimeoutError
from kv_transfer.transport.nccl_wire import (
    MAX_ANNOUNCED_GROUPS,
    MAX_COPIES_PER_GROUP,
    NOTIFY,
    NcclProtocolError,
    encode_announcement,
)


class _State(Enum):
    WAITING = "waiting"
    ANNOUNCED = "announced"
    READY = "ready"
    SENT = "sent"


@dataclass(slots=True, kw_only=True, eq=False)
class _Group:
    """Some copies of one write. `notify` is None except in its last group. `number` is given when it is announced."""

    handle: int
    copies: list[Copy]
    notify: bytes | None
    state: _State = _State.WAITING
    number: int = -1
    deadline_ns: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Write:
    num_left: int
    """Groups that may still arrive."""
    failure: str | None = None
    """Why some of its groups will never be sent."""


class WritingSide:
    """Posts writes in order: announces groups, sends each when the receiver is ready, and ends it on its word."""

    def __init__(
        self,
        communicator: NcclCommunicator,
        send_frame: Callable[[bytes], None],
        emit: Callable[[TransportEvent], None],
        limits: NcclLimits,
    ) -> None:
        self._communicator = communicator
        self._send_frame = send_frame
        self._emit = emit
        self._limits = limits
        self._waiting: deque[_Group | bytes] = deque()
        """In the order of posting; bytes are notifications of their own."""
        self._announced: dict[int, _Group] = {}
        self._writes: dict[int, _Write] = {}
        self._num_announced = 0
        self._num_ready = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._announced or self._waiting)

    def write(self, handle: int, copies: Sequence[Copy], notify: bytes) -> None:
        """Raises: NcclTimeoutError if too much waits already."""
        pieces = list(split_groups(copies, self._limits.max_group_bytes))
        self._writes[handle] = _Write(num_left=len(pieces))
        for index, piece in enumerate(pieces):
            is_last = index == len(pieces) - 1
            self._queue(_Group(handle=handle, copies=piece, notify=notify if is_last else None))

    def notify(self, payload: bytes) -> None:
        """After all writes that were posted before. Raises: NcclTimeoutError if too much waits already."""
        self._queue(payload)

    def cancel(self, handle: int) -> None:
        """Drops the groups that are not announced; the write ends when the others have."""
        write = self._writes.get(handle)
        dropped = [item for item in self._waiting if isinstance(item, _Group) and item.handle == handle]
        if write is None or not dropped:
            return
        for group in dropped:
            self._waiting.remove(group)
        write.failure = "cancelled"
        write.num_left -= len(dropped)
        self._end_write(handle, write)

    def step(self, now_ns: int) -> None:
        """Raises: NcclError, NcclTimeoutError, ControlClosedError."""
        self._announce(now_ns)
        for group in self._announced.values():
            if group.state is _State.SENT:
                continue
            if group.state is not _State.READY or not self._communicator.is_ready():
                break
            group.state = _State.SENT  # before the call: if it fails, a part of the group may be under way
            self._communicator.send([(copy.source_bytes, copy.size_bytes) for copy in group.copies])
        if self._announced:
            self._communicator.is_ready()  # raises what has gone wrong in the meantime
            deadline_ns = next(iter(self._announced.values())).deadline_ns
            if now_ns >= deadline_ns:
                raise NcclTimeoutError(f"a group did not arrive within {self._limits.group_timeout_ns / 1e9:.1f} s")

    def on_ready(self, number: int) -> None:
        """Raises: NcclProtocolError."""
        group = self._announced.get(number)
        if group is None or number != self._num_ready:
            raise NcclProtocolError(f"it is ready for group {number}, not for {self._num_ready}")
        self._num_ready += 1
        group.state = _State.READY

    def on_arrived(self, number: int) -> None:
        """Raises: NcclProtocolError."""
        group = next(iter(self._announced.values()), None)
        if group is None or group.number != number or group.state is not _State.SENT:
            raise NcclProtocolError(f"group {number} cannot have arrived")
        del self._announced[number]
        write = self._writes[group.handle]
        write.num_left -= 1
        self._end_write(group.handle, write)

    def fail_unsent(self, reason: str) -> None:
        """The connection ends and no send is posted from now on: ends all writes of which nothing can be under way."""
        exposed = {number: group for number, group in self._announced.items() if group.state is _State.SENT}
        self._waiting.clear()
        self._announced = exposed
        for handle, write in list(self._writes.items()):
            num_exposed = sum(group.handle == handle for group in exposed.values())
            if num_exposed < write.num_left:  # else it may have arrived, and the word of that is under way
                write.num_left = num_exposed
                write.failure = write.failure or reason
                self._end_write(handle, write)

    def fail_rest(self, reason: str, *, quiesced: bool) -> None:
        for handle in list(self._writes):
            self._emit(WriteFailed(handle=handle, quiesced=quiesced, reason=reason))
        self._writes.clear()
        self._announced.clear()

    def check_invariants(self) -> None:
        assert len(self._announced) <= MAX_ANNOUNCED_GROUPS
        assert len(self._waiting) <= self._limits.max_waiting
        assert all(group.number == number for number, group in self._announced.items())
        waiting = [item.handle for item in self._waiting if isinstance(item, _Group)]
        left = waiting + [group.handle for group in self._announced.values()]
        assert sorted(left) == sorted(h for h, write in self._writes.items() for _ in range(write.num_left))

    def _queue(self, item: _Group | bytes) -> None:
        self._waiting.append(item)
        if len(self._waiting) > self._limits.max_waiting:
            raise NcclTimeoutError(f"it leaves {self._limits.max_waiting} groups and notifications waiting")

    def _announce(self, now_ns: int) -> None:
        while self._waiting:
            item = self._waiting[0]
            if isinstance(item, bytes):
                self._send_frame(bytes([NOTIFY]) + item)
            elif len(self._announced) < MAX_ANNOUNCED_GROUPS:
                item.number = self._num_announced
                item.state = _State.ANNOUNCED
                item.deadline_ns = now_ns + self._limits.group_timeout_ns
                self._num_announced += 1
                self._announced[item.number] = item
                targets = [(copy.target_bytes, copy.size_bytes) for copy in item.copies]
                self._send_frame(encode_announcement(item.number, targets, item.notify))
            else:
                return
            self._waiting.popleft()

    def _end_write(self, handle: int, write: _Write) -> None:
        if write.num_left:
            return
        del self._writes[handle]
        if write.failure is not None:
            self._emit(WriteFailed(handle=handle, quiesced=True, reason=write.failure))
        else:
            self._emit(WriteCompleted(handle=handle))


def split_groups(copies: Sequence[Copy], max_group_bytes: int) -> Iterator[list[Copy]]:
    """Merges neighbours, then cuts the list into groups of bounded number and size. One group at least."""
    group: list[Copy] = []
    room_bytes = max_group_bytes
    for merged in merge_copies(copies):
        source_bytes, target_bytes, left_bytes = merged.source_bytes, merged.target_bytes, merged.size_bytes
        while left_bytes:
            if not room_bytes or len(group) == MAX_COPIES_PER_GROUP:
                yield group
                group, room_bytes = [], max_group_bytes
            size_bytes = min(left_bytes, room_bytes)
            group.append(Copy(source_bytes, target_bytes, size_bytes))
            source_bytes, target_bytes = source_bytes + size_bytes, target_bytes + size_bytes
            left_bytes, room_bytes = left_bytes - size_bytes, room_bytes - size_bytes
    yield group
