"""One end of a wire that is one of Baton's transports, and memcpy beside shm, between the same memory."""

from __future__ import annotations

import ctypes
import select
import socket
import time
from collections.abc import Callable

from benchmarks.kv_wires.plans import (
    LIMITS,
    Load,
    Stopwatch,
    Timing,
    count_sums,
    make_pool,
    piece_sums,
    scattered_writes,
)
from benchmarks.kv_wires.remote import IsCalled
from kv_transfer.checksum import Memory
from kv_transfer.protocol.messages import PeerId
from kv_transfer.protocol.sampling import Checksums
from kv_transfer.transport.backends import open_backend
from kv_transfer.transport.base import (
    Connected,
    ConnectFailed,
    Notified,
    PeerGone,
    Transport,
    TransportEvent,
    WriteCompleted,
    WriteFailed,
)
from kv_transfer.transport.shm_dial import Dialled, dial

SENDER, RECEIVER, PROBE = PeerId("prefill", 1), PeerId("decode", 1), PeerId("memcpy", 1)
DONE = b"done"
EVENT_TIMEOUT_S = 60.0
IDLE_POLL_S = 0.001


class WireBrokenError(Exception):
    """The transport reports a failure where none is expected, or nothing at all."""


class TransportEnd:
    """Sends or receives the loads; `name` is a backend's."""

    def __init__(self, name: str, me: PeerId, is_called: IsCalled) -> None:
        """Raises BackendUnavailableError where the backend, or its library, is missing."""
        self._is_called = is_called
        self._pool, memory = make_pool(1 if me == SENDER else 2)
        self._memory: Memory | None = memory
        self._transport: Transport = open_backend(name, me, self._pool)
        self._peer = RECEIVER if me == SENDER else SENDER
        self._probe: Dialled | None = None

    def endpoint(self) -> bytes:
        return self._transport.endpoint()

    def connect(self, endpoint: bytes) -> None:
        self._transport.connect(self._peer, endpoint)
        self._wait(lambda event: isinstance(event, Connected))

    def serve(self) -> None:
        """Takes part until the next call comes."""
        while not self._is_called():
            select.select([self._transport.fileno()], [], [], IDLE_POLL_S)
            _check(self._transport.poll())

    def prepare(self, load: Load, seed: int) -> int:
        """Plans the move, so that planning is not timed. Returns the number of writes."""
        return len(scattered_writes(load, seed))

    def receive(self, num_writes: int) -> None:
        """Says so to the sender when so many writes have arrived, and takes part until the next call comes."""
        num_arrived = 0
        while num_arrived < num_writes:
            num_arrived += sum(isinstance(event, Notified) for event in self._next_events())
        self._transport.write(self._peer, [], DONE)
        self.serve()

    def send(self, load: Load, seed: int, checksums: Checksums) -> Timing:
        """Posts as a push does: so many writes in flight, the next one when one has ended."""
        writes = scattered_writes(load, seed)
        num_sums = [count_sums(checksums, load, number, len(write)) for number, write in enumerate(writes)]
        num_posted = num_completed = 0
        watch = Stopwatch()
        is_done = False
        while not is_done:
            while num_posted < len(writes) and num_posted - num_completed < LIMITS.max_inflight_writes:
                copies, num_summed = writes[num_posted], num_sums[num_posted]
                self._transport.write(self._peer, copies, b"chunk", num_sums=num_summed)
                num_posted += 1
            for event in self._next_events():
                num_completed += isinstance(event, WriteCompleted)
                is_done = is_done or isinstance(event, Notified)
        timing = watch.stop()
        while num_completed < len(writes):
            num_completed += sum(isinstance(event, WriteCompleted) for event in self._next_events())
        return timing

    def sums(self, load: Load, seed: int, at_target: bool) -> list[int]:
        """Of the pieces as they lie here."""
        assert self._memory is not None
        return piece_sums(self._memory, load, seed, at_target=at_target)

    def close(self) -> None:
        if self._probe is not None:
            self._probe.region.revoke()
            self._probe.connection.close()
        self._transport.close()
        self._memory = None
        self._pool.close()

    # ---- what shm is compared with ---------------------------------------------------------------------------

    def map_peer(self, endpoint: bytes) -> None:
        """Maps the receiver's pool once more, as shm does it, for memcpy."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._probe = dial(connection, PROBE, "memcpy", RECEIVER, endpoint)

    def memcpy(self, load: Load) -> Timing:
        """As many bytes in one call of the C library."""
        assert self._probe is not None and self._probe.region.memory is not None and self._memory is not None
        target, source = self._probe.region.memory.ctypes.data, self._memory.ctypes.data
        copy = ctypes.CDLL(None).memcpy
        copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        watch = Stopwatch()
        copy(target, source, load.moved_bytes)
        return watch.stop()

    # ---- inside ----------------------------------------------------------------------------------------------

    def _next_events(self) -> list[TransportEvent]:
        if not select.select([self._transport.fileno()], [], [], EVENT_TIMEOUT_S)[0]:
            raise WireBrokenError(f"nothing happens for {EVENT_TIMEOUT_S:.0f} s")
        events = self._transport.poll()
        _check(events)
        return events

    def _wait(self, is_wanted: Callable[[TransportEvent], bool]) -> None:
        deadline_s = time.monotonic() + EVENT_TIMEOUT_S
        while not any(is_wanted(event) for event in self._next_events()):
            if time.monotonic() > deadline_s:
                raise WireBrokenError(f"not what was waited for in {EVENT_TIMEOUT_S:.0f} s")


def _check(events: list[TransportEvent]) -> None:
    for event in events:
        if isinstance(event, ConnectFailed | PeerGone | WriteFailed):
            raise WireBrokenError(f"{type(event).__name__}: {event.reason}")
