"""A double of NCCL over host memory, below `kv_transfer.transport.nccl_library`: between threads, without a GPU.

It is as unforgiving as the real one, and as late:

* A communicator is ready only when both ranks have joined, and after every call only some polls later. Whatever is
  called on it earlier, or after an abort, is an AssertionError.
* Operations run in order, need their counterpart, and take time: bytes are read from the source when they travel, wait
  in a buffer of the library's own (so a sender's end proves nothing), and land when the receiver's kernel runs.
* An abort stops this end's kernel some polls later, and bytes may land until then. It says nothing to the other end,
  which waits for ever.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kv_transfer.checksum import Memory
from kv_transfer.transport.nccl_library import PROBE_BYTES, RECEIVER_RANK, WRITER_RANK, NcclError, Range


@dataclass(slots=True, kw_only=True)
class FakeFabric:
    """What connects the communicators of a test, and how it behaves. All of it may be changed while it runs."""

    may_join: bool = True
    """Else communicators are made and never become ready."""
    is_moving: bool = True
    """Bytes travel a little whenever anything is polled. Else only `move` moves them."""
    step_bytes: int = 1 << 16
    """How much travels at a time, and how much fits into the library's own buffer."""
    num_settling_polls: int = 2
    """Of communicators that are made from now on."""
    num_abort_polls: int = 3
    communicators: list[FakeCommunicator] = field(default_factory=list)
    """In the order in which they were made."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    _pairs: dict[bytes, _Pair] = field(default_factory=dict)
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def new_id(self) -> bytes:
        with self.lock:
            return next(self._ids).to_bytes(128, "little")

    def join(self, unique_id: bytes, rank: int, memory: Memory) -> FakeCommunicator:
        with self.lock:
            pair = self._pairs.setdefault(unique_id, _Pair())
            assert rank not in pair.ends, f"rank {rank} has joined already"
            communicator = FakeCommunicator(self, pair, rank, memory)
            pair.ends[rank] = communicator
            self.communicators.append(communicator)
            return communicator

    def of_rank(self, rank: int) -> list[FakeCommunicator]:
        return [communicator for communicator in self.communicators if communicator.rank == rank]

    def move(self, size_bytes: int | None = None) -> None:
        """Lets up to `size_bytes` travel on each pair."""
        with self.lock:
            for pair in self._pairs.values():
                pair.move(self.step_bytes if size_bytes is None else size_bytes, self.step_bytes)


@dataclass(slots=True, eq=False)
class _Operation:
    offset: int | None
    """None for a probe, which touches no pool."""
    left: int


@dataclass(slots=True, eq=False)
class _Pair:
    ends: dict[int, FakeCommunicator] = field(default_factory=dict)
    buffered: bytearray = field(default_factory=bytearray)
    """The library's own memory at the receiver: sent, and not yet in the pool."""

    def move(self, size_bytes: int, room_bytes: int) -> None:
        if len(self.ends) < 2:
            return
        writer, receiver = self.ends[WRITER_RANK], self.ends[RECEIVER_RANK]
        for sent, received in zip(writer.sizes, receiver.sizes, strict=False):
            assert sent == received, f"a send of {sent} bytes meets a receive of {received}"
        while receiver.runs and self.buffered:
            del self.buffered[: receiver.write(self.buffered)]
        while writer.runs and size_bytes and len(self.buffered) < room_bytes:
            data = writer.read(min(size_bytes, room_bytes - len(self.buffered)))
            self.buffered += data
            size_bytes -= len(data)


class FakeCommunicator:
    """One rank; see the module docstring. `calls` lists what was posted, in order."""

    def __init__(self, fabric: FakeFabric, pair: _Pair, rank: int, memory: Memory) -> None:
        self.rank = rank
        self.calls: list[str] = []
        self.sizes: list[int] = []
        """Of all operations ever posted."""
        self.error: str | None = None
        self.gives_up_with: str | None = None
        """The error with which the next operation ends that an event is asked about."""
        self.is_dead = False
        self.is_aborted = False
        self.has_stopped = False
        self._fabric = fabric
        self._pair = pair
        self.memory = memory
        self._operations: deque[_Operation] = deque()
        self._num_ended = 0
        self.num_settling_polls = fabric.num_settling_polls
        self._settling_left = self.num_settling_polls
        self._abort_left = 0

    # ---- NcclCommunicator ------------------------------------------------------------------------------------

    def is_ready(self) -> bool:
        with self._fabric.lock:
            assert not self.is_aborted, "asked after its abort"
            self._poll()
            if self.error is not None:
                raise NcclError(self.error)
            if not self._fabric.may_join or len(self._pair.ends) < 2:
                return False
            if self._settling_left:
                self._settling_left -= 1
                return False
            return True

    def send(self, ranges: Sequence[Range]) -> None:
        assert self.rank == WRITER_RANK
        self._post("send", list(ranges))

    def receive(self, ranges: Sequence[Range]) -> None:
        assert self.rank == RECEIVER_RANK
        self._post("receive", list(ranges))

    def probe(self) -> None:
        self._post("probe", [(None, PROBE_BYTES)])

    def completion(self) -> FakeCompletion:
        with self._fabric.lock:
            self._check_usable()
            return FakeCompletion(self, self._num_ended + len(self._operations))

    def abort(self) -> None:
        with self._fabric.lock:
            if not self.is_aborted:
                self.is_aborted = True
                self._abort_left = self._fabric.num_abort_polls

    def is_quiet(self) -> bool:
        with self._fabric.lock:
            assert self.is_aborted
            self._poll()
            self._abort_left = max(0, self._abort_left - 1)
            self.has_stopped = self.has_stopped or self._abort_left == 0
            return self.has_stopped

    # ---- the fabric's side -----------------------------------------------------------------------------------

    @property
    def runs(self) -> bool:
        """Whether a kernel of this rank is on its GPU. After an error it waits for ever, until it is aborted."""
        return bool(self._operations) and not self.has_stopped and not self.is_dead and self.error is None

    def read(self, size_bytes: int) -> bytes:
        operation = self._operations[0]
        size_bytes = min(size_bytes, operation.left)
        start = operation.offset
        data = bytes(size_bytes) if start is None else self.memory[start : start + size_bytes].tobytes()
        self._advance(operation, size_bytes)
        return data

    def write(self, data: bytearray) -> int:
        operation = self._operations[0]
        size_bytes = min(len(data), operation.left)
        if operation.offset is not None:
            self.memory[operation.offset : operation.offset + size_bytes] = np.frombuffer(
                bytes(data[:size_bytes]), "u1"
            )
        self._advance(operation, size_bytes)
        return size_bytes

    def has_ended(self, count: int) -> bool:
        with self._fabric.lock:
            self._poll()
            if self.gives_up_with is not None:
                self.error = self.gives_up_with
                return True
            return self._num_ended >= count or self.has_stopped

    def _advance(self, operation: _Operation, size_bytes: int) -> None:
        if operation.offset is not None:
            operation.offset += size_bytes
        operation.left -= size_bytes
        if not operation.left:
            self._operations.popleft()
            self._num_ended += 1

    def _post(self, kind: str, ranges: Sequence[tuple[int | None, int]]) -> None:
        with self._fabric.lock:
            self._check_usable()
            self.calls.append(kind)
            for offset, size in ranges:
                assert size > 0 and (offset is None or 0 <= offset <= self.memory.size - size), "outside of the pool"
                self._operations.append(_Operation(offset, size))
                self.sizes.append(size)
            self._settling_left = self.num_settling_polls

    def _check_usable(self) -> None:
        assert not self.is_aborted, "used after its abort"
        assert len(self._pair.ends) == 2 and self._fabric.may_join, "used before both ranks have joined"
        assert not self._settling_left, "used while the last call is in progress"

    def _poll(self) -> None:
        if self._fabric.is_moving:
            self._fabric.move()


class FakeCompletion:
    """An event. Like a real one it is done also when its operations were given up."""

    def __init__(self, communicator: FakeCommunicator, count: int) -> None:
        self._communicator = communicator
        self._count = count

    def is_done(self) -> bool:
        return self._communicator.has_ended(self._count)


class FakeNccl:
    """NcclLibrary over host memory."""

    def __init__(self, fabric: FakeFabric, memory: Memory, version: str = "2.99.0") -> None:
        self.version = version
        self.size_bytes = memory.size
        self.host_memory: Memory | None = memory
        self._memory = memory
        self._fabric = fabric

    def unique_id(self) -> bytes:
        return self._fabric.new_id()

    def communicator(self, unique_id: bytes, rank: int) -> FakeCommunicator:
        return self._fabric.join(unique_id, rank, self._memory)
