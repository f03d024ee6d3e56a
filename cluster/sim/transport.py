"""The push transport in the simulator: one-sided writes into a peer's KV memory, with every fault they can have.

What differs between backends is told in `cluster.sim.fabric`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from cluster.core.brief import brief
from cluster.sim.fabric import Fabric, Family, Landing
from cluster.sim.kernel import MILLISECOND_NS, SECOND_NS
from cluster.sim.kv_memory import KVMemory, checksum
from cluster.sim.process import Process
from kv_transfer.protocol.messages import PushChunk, PushMessage
from kv_transfer.transport.base import (
    Connected,
    ConnectFailed,
    Copy,
    Fenced,
    PeerGone,
    PeerId,
    UnknownPeerError,
    WriteCompleted,
    WriteFailed,
)

CONNECT_TIMEOUT_NS = 2 * SECOND_NS
MAX_FENCE_NS = 8 * MILLISECOND_NS
MAX_FAULT_DELAY_NS = 3 * SECOND_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """A notification, as the message that it carries; a chunk comes with the sums of its write."""

    peer: PeerId
    message: PushMessage


SimTransportEvent = Connected | ConnectFailed | WriteCompleted | WriteFailed | Delivered | PeerGone | Fenced


@dataclass(slots=True)
class _Link:
    """A data connection between two lives."""

    ends: tuple[SimTransport, SimTransport]
    is_open: bool = True

    def other(self, end: SimTransport) -> SimTransport:
        return self.ends[1] if self.ends[0] is end else self.ends[0]


@dataclass(slots=True)
class _Write:
    handle: int
    link: _Link
    copies: Sequence[Copy]
    notify: PushMessage
    sums: list[int] = field(default_factory=list)
    num_landed: int = 0
    is_cancelled: bool = False
    fails: bool = False


class SimTransport:
    """The contract of `kv_transfer.transport.base.Transport` for one worker life, with push messages not encoded.

    `wake` takes the place of `fileno`: it is called when there is something to poll, never from within another call.
    """

    def __init__(
        self, fabric: Fabric, process: Process, me: PeerId, memory: KVMemory, wake: Callable[[], None]
    ) -> None:
        self.name = f"sim-{fabric.family.value}"
        self.process = process
        self.me = me
        self._fabric = fabric
        self._memory = memory
        self._wake = wake
        self._links: dict[PeerId, _Link] = {}
        self._dialling: dict[PeerId, bool] = {}
        self._met: dict[PeerId, None] = {}
        """Lives that have been connected to us, ever: they may have writes in flight."""
        self._fenced: dict[PeerId, bool] = {}
        """Lives whose fence has begun; True once it is complete."""
        self._events: deque[SimTransportEvent] = deque()
        self._writes: dict[int, _Write] = {}
        self._num_writes = 0
        self._busy_until_ns: dict[PeerId, int] = {}
        self._last_notice_ns: dict[PeerId, int] = {}
        self._is_closed = False
        fabric.transports[me] = self
        process.on_exit(lambda _reason: self._die())

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Lives that are connected now."""
        return tuple(self._links)

    @property
    def num_writes_in_flight(self) -> int:
        """Writes with data that have not ended."""
        return sum(bool(write.copies) for write in self._writes.values())

    # ---- Transport --------------------------------------------------------------------------------------------

    def endpoint(self) -> bytes:
        return f"{self.me.name}#{self.me.incarnation}".encode()

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        if peer in self._links or peer in self._dialling:
            return
        self._dialling[peer] = True
        target = self._fabric.transports.get(peer)
        kernel = self._fabric.kernel
        if target is None or not target.process.alive or endpoint != target.endpoint():
            self._after(self._fabric.latency_ns(), lambda: self._connect_failed(peer, "no such endpoint"))
            return
        self._after(CONNECT_TIMEOUT_NS, lambda: self._connect_failed(peer, "timed out"))
        if not self._fabric.are_apart(self, target):
            kernel.after(self._fabric.latency_ns(), lambda: target.process.deliver(lambda: target._accept(self)))

    def write(self, peer: PeerId, copies: Sequence[Copy], notify: PushMessage) -> int:
        """Copies stand in the order of the chunk's blocks; those are summed that it says are."""
        link = self._links.get(peer)
        if link is None:
            raise UnknownPeerError(f"{self.me} is not connected to {peer}")
        self._num_writes += 1
        write = _Write(self._num_writes, link, copies, notify)
        self._writes[write.handle] = write
        write.fails = self._fabric.hits(self._fabric.faults.fail_write) and bool(copies)
        self._schedule_copies(write, peer)
        return write.handle

    def cancel(self, handle: int) -> None:
        write = self._writes.get(handle)
        if write is not None:
            write.is_cancelled = True

    def poll(self) -> list[SimTransportEvent]:
        events = list(self._events)
        self._events.clear()
        return events

    def fence(self, peer: PeerId) -> None:
        if peer in self._fenced:
            if self._fenced[peer]:
                self._after(0, lambda: self._report(Fenced(peer=peer)))
            return
        self._fenced[peer] = False
        delay_ns = int(self._fabric.random.random() * MAX_FENCE_NS) if peer in self._met else 0
        self._after(delay_ns, lambda: self._complete_fence(peer))

    def disconnect(self, peer: PeerId) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            self._break(link, "disconnected by peer")

    def close(self) -> None:
        self._is_closed = True
        for peer in list(self._links):
            self.disconnect(peer)

    # ---- connections ------------------------------------------------------------------------------------------

    def _accept(self, dialler: SimTransport) -> None:
        """The other side reached us; a fenced life is turned away."""
        if self._is_closed or dialler.me in self._fenced:
            dialler._after(self._fabric.latency_ns(), lambda: dialler._connect_failed(self.me, "refused: fenced"))
            return
        if not dialler.process.alive or self.me not in dialler._dialling:
            return
        link = _Link((dialler, self))
        self._links[dialler.me] = link
        self._met[dialler.me] = None
        self._report(Connected(peer=dialler.me))
        dialler._after(self._fabric.latency_ns(), lambda: dialler._connected(self.me, link))

    def _connected(self, peer: PeerId, link: _Link) -> None:
        if self._dialling.pop(peer, None) is None or not link.is_open:
            return
        self._links[peer] = link
        self._met[peer] = None
        self._report(Connected(peer=peer))

    def _connect_failed(self, peer: PeerId, reason: str) -> None:
        if self._dialling.pop(peer, None) is not None:
            self._report(ConnectFailed(peer=peer, reason=reason))

    def cut(self, peer: PeerId) -> None:
        """Fault: the connection breaks; both sides see it end in their own time."""
        link = self._links.get(peer)
        if link is not None:
            self._break(link, "connection lost")
            self._lose(link, "connection lost")

    def _break(self, link: _Link, reason: str) -> None:
        link.is_open = False
        other = link.other(self)
        other._after(self._fabric.latency_ns(), lambda: other._lose(link, reason))

    def _lose(self, link: _Link, reason: str) -> None:
        peer = link.other(self).me
        if self._links.get(peer) is link:
            del self._links[peer]
            self._abandon_writes(link, reason)
            self._report(PeerGone(peer=peer, reason=reason))

    def _abandon_writes(self, link: _Link, reason: str) -> None:
        """A remote backend reports what it had posted as failed, though its card may go on copying."""
        if self._fabric.family is Family.SHARED_MEMORY:
            return
        for write in [write for write in self._writes.values() if write.link is link]:
            self._writes.pop(write.handle, None)
            self._report(WriteFailed(handle=write.handle, quiesced=False, reason=reason))

    def _die(self) -> None:
        """Our process ended: the kernel closes our sockets, which a remote peer may never learn."""
        for link in self._links.values():
            link.is_open = False
            if self._fabric.family is Family.SHARED_MEMORY or self._fabric.random.random() < 0.5:
                self._break(link, "peer exited")

    # ---- writes -----------------------------------------------------------------------------------------------

    def _schedule_copies(self, write: _Write, peer: PeerId) -> None:
        """Copies run one after the other on the link; each lands as a whole at its time.

        A write that is going to fail does some of its copies late (a remote backend, which does not know what its card
        still does) or not at all (a local one, which stopped at an error).
        """
        fabric = self._fabric
        time_ns = max(fabric.kernel.now_ns, self._busy_until_ns.get(peer, 0))
        if fabric.hits(fabric.faults.slow_write):
            time_ns += int(fabric.random.random() * MAX_FAULT_DELAY_NS)
        for index, copy in enumerate(write.copies):
            time_ns += copy.size_bytes * fabric.ns_per_byte
            landing_ns = time_ns
            if write.fails and fabric.random.random() < 0.5:
                if fabric.family is Family.SHARED_MEMORY:
                    break
                landing_ns += int(fabric.random.random() * MAX_FAULT_DELAY_NS)
            fabric.kernel.at(landing_ns, self._copy_action(write, index))
        self._busy_until_ns[peer] = time_ns
        fabric.kernel.at(time_ns, lambda: self.process.deliver(lambda: self._finish(write)))

    def _copy_action(self, write: _Write, index: int) -> Callable[[], None]:
        if self._fabric.family is Family.REMOTE:
            return lambda: self._land(write, index)
        return lambda: self.process.deliver(lambda: self._land(write, index))

    def _land(self, write: _Write, index: int) -> None:
        """One copy reaches the receiver's memory, unless it was cancelled before or the receiver fenced us."""
        target, copy, faults = write.link.other(self), write.copies[index], self._fabric.faults
        is_local = self._fabric.family is Family.SHARED_MEMORY  # what a network card has been given cannot be cancelled
        if (write.is_cancelled and is_local) or target._fenced.get(self.me, False) or not target.process.alive:
            return
        write.num_landed += 1
        source = self._memory.data[copy.source_bytes : copy.source_bytes + copy.size_bytes]
        assert isinstance(write.notify, PushChunk), "only chunks carry data"
        if index in write.notify.summed:  # damage to others would pass, knowingly
            write.sums.append(checksum(source))
            if self._fabric.hits(faults.skip_data):
                return
            if self._fabric.hits(faults.corrupt):
                source[self._fabric.random.randrange(len(source))] ^= 0x40
        self._fabric.num_copies += 1
        grant, layers = write.notify.blocks[index], write.notify.layers
        landing = Landing(sender=self.me, receiver=target.me, grant=grant, layers=layers, copy=copy)
        self._fabric.observe_landing(landing)
        target._memory.data[copy.target_bytes : copy.target_bytes + copy.size_bytes] = source

    def _finish(self, write: _Write) -> None:
        """All copies are done, as far as the sender can tell."""
        if self._writes.pop(write.handle, None) is None:
            return
        target = write.link.other(self)
        if write.fails:
            is_quiet = self._fabric.family is Family.SHARED_MEMORY
            self._report(WriteFailed(handle=write.handle, quiesced=is_quiet, reason="injected failure"))
        elif write.num_landed < len(write.copies):
            self._report(WriteFailed(handle=write.handle, quiesced=True, reason="cancelled, fenced, or peer is dead"))
        elif not write.link.is_open or self._fabric.are_apart(self, target):
            self._report(WriteFailed(handle=write.handle, quiesced=True, reason="peer is gone"))
        else:
            self._report(WriteCompleted(handle=write.handle))
            self._notify(target, write)

    def _notify(self, target: SimTransport, write: _Write) -> None:
        fabric, faults = self._fabric, self._fabric.faults
        message = write.notify
        if isinstance(message, PushChunk):
            message = replace(message, checksums=tuple(write.sums))
        num_notices = 0 if fabric.hits(faults.lose_notice) else 2 if fabric.hits(faults.repeat_notice) else 1
        for _ in range(num_notices):
            delay_ns = self._notice_delay_ns(target.me)
            target._after(delay_ns, lambda: target._notified(write.link, message))
        if fabric.hits(faults.cut):
            self.cut(target.me)

    def _notice_delay_ns(self, peer: PeerId) -> int:
        """Notices keep their order, unless a fault delays one past those after it."""
        fabric, now_ns = self._fabric, self._fabric.kernel.now_ns
        if fabric.hits(fabric.faults.delay_notice):
            return int(fabric.random.random() * MAX_FAULT_DELAY_NS)
        arrival_ns = max(now_ns + fabric.latency_ns(), self._last_notice_ns.get(peer, 0))
        self._last_notice_ns[peer] = arrival_ns
        return arrival_ns - now_ns

    def _notified(self, link: _Link, message: PushMessage) -> None:
        sender = link.other(self).me
        if self._links.get(sender) is not link or sender in self._fenced:
            return
        kernel = self._fabric.kernel
        if kernel.trace.enabled:
            kernel.trace.note(kernel.now_ns, f"{link.other(self).process} => {self.process}: {brief(message)}")
        self._report(Delivered(peer=sender, message=message))

    # ---- fence ------------------------------------------------------------------------------------------------

    def _complete_fence(self, peer: PeerId) -> None:
        self._fabric.num_fences += 1
        sender = self._fabric.transports.get(peer)
        if self._fabric.family is Family.SHARED_MEMORY and sender is not None and peer in self._met:
            sender.process.exit(f"fenced by {self.me.name}")
        self._fenced[peer] = True
        link = self._links.pop(peer, None)
        if link is not None:
            self._break(link, "fenced by peer")
        self._report(Fenced(peer=peer))

    # ---- helpers ----------------------------------------------------------------------------------------------

    def _after(self, delay_ns: int, action: Callable[[], None]) -> None:
        self._fabric.kernel.after(delay_ns, lambda: self.process.deliver(action))

    def _report(self, event: SimTransportEvent) -> None:
        if self._is_closed:
            return
        self._events.append(event)
        self._wake()
