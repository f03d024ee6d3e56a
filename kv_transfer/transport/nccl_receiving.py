"""The receiver's side of an open nccl connection: announcements become groups of receives.

It keeps NCCL's rules: nothing is called on a communicator before the last call has settled, and what is recorded on its
stream before then would mark nothing. It knows neither sockets nor clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.transport.nccl_library import Completion, NcclCommunicator, Range
from kv_transfer.transport.nccl_limits import NcclLimits, NcclTimeoutError
from kv_transfer.transport.nccl_wire import (
    ARRIVED,
    MAX_ANNOUNCED_GROUPS,
    MAX_COPIES_PER_GROUP,
    READY,
    Announcement,
    NcclProtocolError,
    encode_group,
)


class ReceivePermits:
    """How many groups may be received into one GPU at once, over all peers; first come, first served."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._waiting: deque[object] = deque()
        self.num_taken = 0

    def take(self, who: object) -> bool:
        """Whether `who` has one now; else it keeps its place and asks again."""
        if who not in self._waiting:
            self._waiting.append(who)
        if self.num_taken == self._capacity or self._waiting[0] is not who:
            return False
        self._waiting.popleft()
        self.num_taken += 1
        return True

    def give_back(self, number: int = 1) -> None:
        self.num_taken -= number

    def leave(self, who: object) -> None:
        """`who` asks no more."""
        if who in self._waiting:
            self._waiting.remove(who)

    def check_invariants(self) -> None:
        assert 0 <= self.num_taken <= self._capacity


@dataclass(slots=True, kw_only=True, eq=False)
class _Arrival:
    """An announced group. It is posted, then (when that has settled) marked on the stream, then done."""

    number: int
    ranges: tuple[Range, ...]
    notify: bytes | None
    is_posted: bool = False
    mark: Completion | None = None
    deadline_ns: int = 0


class ReceivingSide:
    """Posts the receives that the writer announces, and hands out its notifications when their bytes are in place."""

    def __init__(
        self,
        communicator: NcclCommunicator,
        size_bytes: int,
        send_frame: Callable[[bytes], None],
        deliver: Callable[[bytes], None],
        permits: ReceivePermits,
        limits: NcclLimits,
    ) -> None:
        self._communicator = communicator
        self._size_bytes = size_bytes
        self._send_frame = send_frame
        self._deliver = deliver
        self._permits = permits
        self._limits = limits
        self._arrivals: deque[_Arrival | bytes] = deque()
        """In the order in which the writer posted; bytes are notifications of their own."""
        self._num_announced = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._arrivals)

    def on_announcement(self, announcement: Announcement) -> None:
        """Raises: NcclProtocolError for a range outside of the pool, or more than the writer may announce."""
        if announcement.group != self._num_announced:
            raise NcclProtocolError(f"it announced group {announcement.group}, not {self._num_announced}")
        if len(self._groups()) == MAX_ANNOUNCED_GROUPS or len(announcement.ranges) > MAX_COPIES_PER_GROUP:
            raise NcclProtocolError("it announced more than a writer may")
        for offset, size in announcement.ranges:
            if size < 1 or offset + size > self._size_bytes:
                raise NcclProtocolError(
                    f"it announced {size} bytes at {offset}, outside of the pool of {self._size_bytes} bytes"
                )
        self._num_announced += 1
        self._arrivals.append(
            _Arrival(number=announcement.group, ranges=announcement.ranges, notify=announcement.notify)
        )

    def on_notify(self, payload: bytes) -> None:
        """Raises: NcclProtocolError."""
        self._arrivals.append(payload)
        if len(self._arrivals) > self._limits.max_waiting:
            raise NcclProtocolError(f"it sent {self._limits.max_waiting} notifications behind one group")
        self._hand_out()

    def step(self, now_ns: int) -> None:
        """Raises: NcclError, NcclTimeoutError, ControlClosedError."""
        groups = self._groups()
        if not groups:
            return
        if self._communicator.is_ready():  # raises what has gone wrong in the meantime
            self._post(groups, now_ns)
        self._hand_out()
        oldest = next(iter(self._groups()), None)
        if oldest is not None and oldest.is_posted and now_ns >= oldest.deadline_ns:
            raise NcclTimeoutError(f"a group did not arrive within {self._limits.group_timeout_ns / 1e9:.1f} s")

    def release(self) -> None:
        """The communicator is quiet: nothing of it is on the GPU any more."""
        self._permits.leave(self)
        self._permits.give_back(sum(group.is_posted for group in self._groups()))
        self._arrivals.clear()

    def check_invariants(self) -> None:
        groups = self._groups()
        assert len(groups) <= MAX_ANNOUNCED_GROUPS
        posted = [group.is_posted for group in groups]
        marked = [group.mark is not None for group in groups]
        assert posted == sorted(posted, reverse=True) and marked == sorted(marked, reverse=True), "in order"
        assert 0 <= sum(posted) - sum(marked) <= 1, "one group settles at a time"

    def _groups(self) -> list[_Arrival]:
        return [item for item in self._arrivals if isinstance(item, _Arrival)]

    def _post(self, groups: list[_Arrival], now_ns: int) -> None:
        """Takes the first group that is not marked one step further."""
        group = next((group for group in groups if group.mark is None), None)
        if group is None:
            return
        if group.is_posted:
            group.mark = self._communicator.completion()
        elif self._permits.take(self):
            group.is_posted = True
            group.deadline_ns = now_ns + self._limits.group_timeout_ns
            self._communicator.receive(group.ranges)
            self._send_frame(encode_group(READY, group.number))

    def _hand_out(self) -> None:
        while self._arrivals:
            item = self._arrivals[0]
            if isinstance(item, bytes):
                self._arrivals.popleft()
                self._deliver(item)
                continue
            if item.mark is None or not item.mark.is_done():
                return
            # An event is done also when its receives were given up: only a communicator without an error has received.
            self._communicator.is_ready()
            self._arrivals.popleft()
            self._permits.give_back()
            self._send_frame(encode_group(ARRIVED, item.number))
            if item.notify is not None:
                self._deliver(item.notify)
