"""A transport within one process, for tests and simulations: real bytes, virtual time, faults by seed.

`LoopbackHub` is the network. Whoever drives it moves its clock (`advance`); nothing happens in between. Source bytes
are read when they land, as a network card does, so a source that was let go too early shows; and what a paused
sender had posted lands when it wakes, unless it was fenced meanwhile.
"""

from __future__ import annotations

import heapq
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kv_transfer.checksum import checksum
from kv_transfer.transport.base import (
    Connected,
    ConnectFailed,
    Copy,
    Fenced,
    Notified,
    PeerGone,
    PeerId,
    TransportEvent,
    UnknownPeerError,
    WriteCompleted,
    WriteFailed,
    check_num_sums,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopbackFaults:
    """How often what goes wrong: chances between 0 and 1, each tried once a notification or once a copy."""

    latency_ns: int = 1_000
    """Of every copy, notification and connection, at least."""
    jitter_ns: int = 0
    """Added to each latency, uniformly from 0, so that writes overtake each other."""
    drop: float = 0.0
    """A notification never arrives."""
    duplicate: float = 0.0
    """It arrives twice, the second time late."""
    delay: float = 0.0
    """It arrives late by up to `max_delay_ns`, and later ones overtake it."""
    max_delay_ns: int = 1_000_000
    corrupt: float = 0.0
    """A bit of a notification flips; of a copy, a bit flips or none of it arrives."""
    stray: float = 0.0
    """A write is reported as failed and unsettled, and lands late."""
    cut: float = 0.0
    """The connection breaks when the notification is sent; its writes in flight may land or not."""


@dataclass(slots=True, kw_only=True)
class _Write:
    handle: int
    source: PeerId
    target: PeerId
    copies: tuple[Copy, ...]
    notify: bytes
    sums: list[int]
    """Of the first copies; filled in as they land."""
    num_left: int
    has_landed: bool = False
    is_reported: bool = False
    """Its end was told to the sender; what still lands, lands late."""


@dataclass(slots=True, kw_only=True)
class _Life:
    transport: LoopbackTransport
    is_paused: bool = False
    withheld: list[Callable[[], None]] = field(default_factory=list)
    """What the life would have done while it was paused."""


class LoopbackHub:
    """Connects LoopbackTransports. `on_landing` is told of each copy just before its bytes land."""

    def __init__(
        self,
        rng: random.Random,
        faults: LoopbackFaults | None = None,
        on_landing: Callable[[int, PeerId, PeerId, Copy], None] | None = None,
    ) -> None:
        self.faults = faults or LoopbackFaults()
        self.num_injected: Counter[str] = Counter()
        """Faults that did happen: by their names in LoopbackFaults, and `reorder` (a notification came after a younger
        one) and `shut_out` (a copy that only a fence kept from landing)."""
        self.now_ns = 0
        self._rng = rng
        self._on_landing = on_landing
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self._num_handles = 0
        self._lives: dict[PeerId, _Life] = {}
        self._links: dict[tuple[PeerId, PeerId], int] = {}
        """(writer, target) of open connections -> when the last notification on it arrives."""
        self._num_notices = 0
        self._newest_notices: dict[tuple[PeerId, PeerId], int] = {}
        """(from, to) -> the number of the youngest notification that has arrived."""
        self._writes: dict[int, _Write] = {}
        self._fences: dict[tuple[PeerId, PeerId], bool] = {}
        """(life, from whose region it is shut out) -> whether the fence is complete."""

    # ---- driving ---------------------------------------------------------------------------------------------

    def next_due_ns(self) -> int | None:
        return self._due[0][0] if self._due else None

    def advance(self, now_ns: int) -> None:
        """Moves the clock and lets everything happen that is due by then, in order."""
        while self._due and self._due[0][0] <= now_ns:
            due_ns, _, action = heapq.heappop(self._due)
            self.now_ns = max(self.now_ns, due_ns)
            action()
        self.now_ns = max(self.now_ns, now_ns)

    def pause(self, peer: PeerId) -> None:
        """Stops a life as SIGSTOP does: nothing that it had posted lands until it is resumed."""
        self._lives[peer].is_paused = True

    def resume(self, peer: PeerId) -> None:
        life = self._lives.get(peer)
        if life is None:
            return
        life.is_paused = False
        withheld, life.withheld = life.withheld, []
        for action in withheld:
            self._schedule(self._latency_ns(), action)

    def crash(self, peer: PeerId, *, is_noticed: bool = True) -> None:
        """Ends a life as SIGKILL does: what has not landed never will. Peers notice; unless `is_noticed`, only those do
        that write to it, as on a network that says nothing of a silent peer."""
        del self._lives[peer]
        for handle, write in list(self._writes.items()):
            if write.source == peer:
                del self._writes[handle]
        for writer, target in list(self._links):
            if peer == target or (peer == writer and is_noticed):
                self.cut(writer, target, "the process died")

    def cut(self, writer: PeerId, target: PeerId, reason: str) -> None:
        """Breaks the connection over which `writer` writes to `target`; both are told."""
        if self._links.pop((writer, target), None) is None:
            return
        for write in list(self._writes.values()):
            if (write.source, write.target) == (writer, target) and not write.is_reported:
                self._fail_write(write, quiesced=self._rng.random() < 0.5, reason=reason)
        for end, other in ((writer, target), (target, writer)):
            self._emit_later(end, PeerGone(peer=other, reason=reason))

    # ---- what transports ask for -----------------------------------------------------------------------------

    def register(self, transport: LoopbackTransport) -> None:
        assert self._life(transport.me) is None, "a life is registered once"
        self._lives[transport.me] = _Life(transport=transport)

    def next_handle(self) -> int:
        self._num_handles += 1
        return self._num_handles

    def connect(self, writer: PeerId, target: PeerId, endpoint: bytes) -> None:
        def arrive() -> None:
            if endpoint != endpoint_of(target):
                self._emit(writer, ConnectFailed(peer=target, reason="this is not that life's endpoint"))
            elif self._fences.get((writer, target), False):
                self._emit(writer, ConnectFailed(peer=target, reason="fenced"))
            elif self._life(target) is None or self._life(writer) is None:
                self._emit(writer, ConnectFailed(peer=target, reason="no such life"))
            elif (writer, target) not in self._links:
                self._links[writer, target] = self.now_ns
                self._emit(writer, Connected(peer=target))
                self._emit(target, Connected(peer=writer))

        self._schedule(self._latency_ns(), lambda: self._act(writer, arrive))

    def is_connected(self, me: PeerId, peer: PeerId) -> bool:
        return (me, peer) in self._links or (peer, me) in self._links

    def can_write(self, me: PeerId, peer: PeerId) -> bool:
        return (me, peer) in self._links

    def region_size_bytes(self, peer: PeerId) -> int:
        life = self._life(peer)
        assert life is not None, "who writes to a life that ends has lost its connection by then"
        return len(life.transport.memory)

    def post(self, write: _Write) -> None:
        self._writes[write.handle] = write
        if not write.copies:
            self._schedule(self._latency_ns(), lambda: self._act(write.source, lambda: self._complete(write)))
        stray_ns = 0
        if write.copies and self._hits("stray"):
            self._fail_write(write, quiesced=False, reason="astray")
            stray_ns = self._rng.randrange(self.faults.max_delay_ns + 1)
        for position in range(len(write.copies)):
            self._schedule(stray_ns + self._latency_ns(), self._acting(write.source, self._landing(write, position)))

    def cancel(self, handle: int) -> None:
        write = self._writes.get(handle)
        if write is not None and write.copies and not write.has_landed:
            self._fail_write(write, quiesced=True, reason="cancelled")

    def fence(self, peer: PeerId, target: PeerId) -> None:
        """From when Fenced is reported, which is once, nothing of `peer` lands at `target`."""
        if (peer, target) in self._fences:
            return
        self._fences[peer, target] = False

        def complete() -> None:
            self._fences[peer, target] = True
            for write in list(self._writes.values()):
                if (write.source, write.target) == (peer, target):
                    self._fail_write(write, quiesced=True, reason="fenced")
                    self._writes.pop(write.handle, None)
            self.cut(peer, target, "fenced")
            self._emit(target, Fenced(peer=peer))

        self._schedule(self._latency_ns(), complete)

    def disconnect(self, me: PeerId, peer: PeerId) -> None:
        self.cut(me, peer, "disconnected")
        self.cut(peer, me, "disconnected")

    def leave(self, peer: PeerId) -> None:
        if peer in self._lives:
            self.crash(peer)

    # ---- how bytes and notifications travel ------------------------------------------------------------------

    def _landing(self, write: _Write, position: int) -> Callable[[], None]:
        def land() -> None:
            if write.handle not in self._writes:
                self.num_injected["shut_out"] += self._fences.get((write.source, write.target), False)
                return
            copy = write.copies[position]
            target, source = self._life(write.target), self._life(write.source)
            if target is not None and source is not None:
                self._copy(write, position, copy, source.transport.memory, target.transport.memory)
            write.has_landed = True
            write.num_left -= 1
            if write.num_left == 0:
                self._complete(write)

        return land

    def _copy(self, write: _Write, position: int, copy: Copy, source: memoryview, target: memoryview) -> None:
        if self._on_landing is not None:
            self._on_landing(write.handle, write.source, write.target, copy)
        data = bytearray(source[copy.source_bytes : copy.source_bytes + copy.size_bytes])
        if position < len(write.sums):
            write.sums[position] = checksum(data)
        if self._hits("corrupt"):
            if self._rng.random() < 0.5:
                return
            self._flip_bit(data)
        target[copy.target_bytes : copy.target_bytes + copy.size_bytes] = data

    def _complete(self, write: _Write) -> None:
        if self._writes.pop(write.handle, None) is None or write.is_reported:
            return
        link = (write.source, write.target)
        if self._hits("cut"):
            self.cut(*link, reason="cut")
            self.cut(write.target, write.source, reason="cut")
        payload = write.notify + b"".join(value.to_bytes(8, "little") for value in write.sums)
        self._emit(write.source, WriteCompleted(handle=write.handle))
        self._notify(write.source, write.target, payload)

    def _notify(self, source: PeerId, target: PeerId, payload: bytes) -> None:
        link = (source, target) if (source, target) in self._links else (target, source)
        if link not in self._links or self._hits("drop"):
            return
        if self._hits("corrupt"):
            data = bytearray(payload)
            self._flip_bit(data)
            payload = bytes(data)
        due_ns = self.now_ns + self._latency_ns()
        if self._hits("delay"):
            due_ns += self._rng.randrange(self.faults.max_delay_ns + 1)
        else:
            due_ns = self._links[link] = max(due_ns, self._links[link])
        arrivals = [due_ns]
        if self._hits("duplicate"):
            arrivals.append(due_ns + self._rng.randrange(self.faults.max_delay_ns + 1))
        self._num_notices += 1
        number = self._num_notices
        for arrival_ns in arrivals:
            self._schedule(arrival_ns - self.now_ns, lambda: self._deliver(link, source, target, payload, number))

    def _deliver(
        self, link: tuple[PeerId, PeerId], source: PeerId, target: PeerId, payload: bytes, number: int
    ) -> None:
        if link not in self._links:
            return
        newest = self._newest_notices.get((source, target), 0)
        self.num_injected["reorder"] += number < newest
        self._newest_notices[source, target] = max(number, newest)
        self._emit(target, Notified(peer=source, payload=payload))

    def _fail_write(self, write: _Write, *, quiesced: bool, reason: str) -> None:
        """Reports the write as failed; unless `quiesced`, what is left of it still lands."""
        if not write.is_reported:
            write.is_reported = True
            self._emit_later(write.source, WriteFailed(handle=write.handle, quiesced=quiesced, reason=reason))
        if quiesced:
            self._writes.pop(write.handle, None)

    # ---- helpers ---------------------------------------------------------------------------------------------

    def _life(self, peer: PeerId) -> _Life | None:
        """That life, if it runs; a later one at its address is somebody else."""
        return self._lives.get(peer)

    def _acting(self, peer: PeerId, action: Callable[[], None]) -> Callable[[], None]:
        return lambda: self._act(peer, action)

    def _act(self, peer: PeerId, action: Callable[[], None]) -> None:
        """Does what `peer` does, later if it is paused, never if it is dead."""
        life = self._life(peer)
        if life is None:
            return
        if life.is_paused:
            life.withheld.append(action)
        else:
            action()

    def _emit(self, peer: PeerId, event: TransportEvent) -> None:
        life = self._life(peer)
        if life is not None:
            life.transport.deliver(event)

    def _emit_later(self, peer: PeerId, event: TransportEvent) -> None:
        self._schedule(self._latency_ns(), lambda: self._emit(peer, event))

    def _schedule(self, after_ns: int, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._due, (self.now_ns + after_ns, self._sequence, action))

    def _latency_ns(self) -> int:
        jitter_ns = self.faults.jitter_ns
        return self.faults.latency_ns + (self._rng.randrange(jitter_ns + 1) if jitter_ns else 0)

    def _hits(self, fault: str) -> bool:
        """Whether a fault happens now, by its name in LoopbackFaults."""
        chance: float = getattr(self.faults, fault)
        happens = chance > 0.0 and self._rng.random() < chance
        self.num_injected[fault] += happens
        return happens

    def _flip_bit(self, data: bytearray) -> None:
        if data:
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)


def endpoint_of(peer: PeerId) -> bytes:
    return f"loopback:{peer.name}:{peer.incarnation}".encode()


class LoopbackTransport:
    """One life's end of a hub; implements `transport.base.Transport` over `memory`."""

    name = "loopback"

    def __init__(self, hub: LoopbackHub, me: PeerId, memory: memoryview) -> None:
        self.me = me
        self.memory = memory
        self._hub = hub
        self._events: deque[TransportEvent] = deque()
        self._connecting: dict[PeerId, None] = {}
        self._eventfd: int | None = None
        hub.register(self)

    def endpoint(self) -> bytes:
        return endpoint_of(self.me)

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        if peer in self._connecting or self._hub.can_write(self.me, peer):
            return
        self._connecting[peer] = None
        self._hub.connect(self.me, peer, endpoint)

    def write(
        self,
        peer: PeerId,
        copies: Sequence[Copy],
        notify: bytes,
        *,
        num_sums: int = 0,
    ) -> int:
        """See Transport. Raises: UnknownPeerError, and ValueError for a range outside of either region."""
        reachable = self._hub.can_write(self.me, peer) if copies else self._hub.is_connected(self.me, peer)
        if not reachable:
            raise UnknownPeerError(f"not connected to {peer.name} (incarnation {peer.incarnation})")
        for copy in copies:
            self._check_range("source", copy, copy.source_bytes, len(self.memory))
            self._check_range("target", copy, copy.target_bytes, self._hub.region_size_bytes(peer))
        check_num_sums(copies, num_sums)
        handle = self._hub.next_handle()
        sums = [0] * num_sums
        write = _Write(
            handle=handle,
            source=self.me,
            target=peer,
            copies=tuple(copies),
            notify=notify,
            sums=sums,
            num_left=len(copies),
        )
        self._hub.post(write)
        return handle

    def cancel(self, handle: int) -> None:
        self._hub.cancel(handle)

    def poll(self) -> list[TransportEvent]:
        events = list(self._events)
        self._events.clear()
        if self._eventfd is not None and events:
            os.eventfd_read(self._eventfd)
        return events

    def fence(self, peer: PeerId) -> None:
        self._hub.fence(peer, self.me)

    def disconnect(self, peer: PeerId) -> None:
        self._hub.disconnect(self.me, peer)

    def fileno(self) -> int:
        if self._eventfd is None:
            self._eventfd = os.eventfd(len(self._events), os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self._eventfd

    def close(self) -> None:
        self._hub.leave(self.me)
        if self._eventfd is not None:
            os.close(self._eventfd)
            self._eventfd = None

    @staticmethod
    def _check_range(side: str, copy: Copy, start_bytes: int, region_bytes: int) -> None:
        if start_bytes < 0 or start_bytes + copy.size_bytes > region_bytes:
            raise ValueError(f"copies: {copy} is outside of the {side} region of {region_bytes} bytes")

    def deliver(self, event: TransportEvent) -> None:
        """The hub's side: queues an event for poll."""
        if isinstance(event, Connected | ConnectFailed):
            self._connecting.pop(event.peer, None)
        self._events.append(event)
        if self._eventfd is not None:
            os.eventfd_write(self._eventfd, 1)
