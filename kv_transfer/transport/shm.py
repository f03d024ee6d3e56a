"""Shared memory between processes of one host: the writer maps its peer's pool and copies straight into place.

A life listens on a socket in the abstract namespace, which vanishes with the process. A writer connects and is given
the pool's memory file (`shm_wire`); a thread of the writer copies (`shm_copier`), and when the bytes are in place the
notification follows over the socket. Sockets, timers-by-event and everything else run in `poll`, in the caller's
thread; `fileno` is an epoll descriptor over all of it.

A mapping cannot be taken back from a process, so the fence is the sender's death: SIGKILL through a descriptor of
that very process (pidfd), and Fenced when the kernel reports it gone. A peer within our own process (tests) is fenced
by revoking the mapping under its copy thread's lock.
"""

from __future__ import annotations

import functools
import logging
import os
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from kv_transfer.checksum import as_memory
from kv_transfer.protocol.lease import Recent
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
from kv_transfer.transport.peer_process import PeerProcess, PeerProcessError
from kv_transfer.transport.shm_copier import Copier, CopyJob
from kv_transfer.transport.shm_dial import DialError, Dialled, dial
from kv_transfer.transport.shm_greeter import Greeter, refuse
from kv_transfer.transport.shm_link import MAX_QUEUED_FRAMES, Link, LinkClosedError, Outgoing, send_last_word
from kv_transfer.transport.shm_pool import PoolMemory
from kv_transfer.transport.shm_wire import BYE, MAX_FRAME_BYTES, NOTIFY, Hello, Welcome, encode_endpoint, encode_frame

MAX_DIALS = 64
DIAL_JOIN_INTERVAL_S = 0.02
MAX_FENCED_LIVES = 4096
MAX_NOTIFY_BYTES = MAX_FRAME_BYTES - 1

_log = logging.getLogger(__name__)
_transports_here: weakref.WeakValueDictionary[str, ShmTransport] = weakref.WeakValueDictionary()
"""This process's transports by token, for the fence between two of them."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Posted:
    """A write that has not ended."""

    link: Link
    outgoing: Outgoing
    job: CopyJob


@dataclass(slots=True, kw_only=True, eq=False)
class _Life:
    """A peer that has been given our pool: it may hold a mapping until it says BYE or dies."""

    process: PeerProcess
    token: str


class ShmTransport:
    """One worker life's end; implements `transport.base.Transport` over its pool."""

    name = "shm"

    def __init__(self, me: PeerId, pool: PoolMemory) -> None:
        self.me = me
        self._pool = pool
        self._memory = as_memory(pool.mapping)
        self._events: deque[TransportEvent] = deque()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._dials: dict[PeerId, tuple[threading.Thread, socket.socket]] = {}
        self._dialled: deque[tuple[PeerId, Dialled | DialError]] = deque()
        self._outbound: dict[PeerId, Link] = {}
        self._inbound: dict[PeerId, Link] = {}
        self._leaving: list[Link] = []
        """Links that have ended here and wait for their copies to end."""
        self._lives: dict[PeerId, _Life] = {}
        self._fencing: dict[PeerId, None] = {}
        self._fenced: Recent[PeerId, None] = Recent(MAX_FENCED_LIVES)
        self._posted: dict[int, _Posted] = {}
        self._next_handle = 1
        self._is_closed = False
        self._is_polling = False
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._copier = Copier(self._memory, self._wake_fd)
        self.watch(self._wake_fd, self._on_wake)
        self._greeter = Greeter(self, self._refusal, self._welcome)
        _transports_here[self._greeter.endpoint.token] = self

    # ---- Transport -------------------------------------------------------------------------------------------

    def endpoint(self) -> bytes:
        return encode_endpoint(self._greeter.endpoint)

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        if peer in self._outbound or peer in self._dials:
            return
        if len(self._dials) >= MAX_DIALS:
            self._emit(ConnectFailed(peer=peer, reason=f"{MAX_DIALS} connections are being made already"))
            return
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:  # no descriptor is left
            self._emit(ConnectFailed(peer=peer, reason=str(error)))
            return
        thread = threading.Thread(target=self._run_dial, args=(connection, peer, endpoint), name="kv-dial", daemon=True)
        self._dials[peer] = (thread, connection)
        thread.start()

    def write(
        self,
        peer: PeerId,
        copies: Sequence[Copy],
        notify: bytes,
        *,
        num_sums: int = 0,
    ) -> int:
        """See Transport. Raises: UnknownPeerError, and ValueError for a range outside of either pool or a
        notification of more than MAX_NOTIFY_BYTES."""
        link = self._outbound.get(peer) if copies else self._outbound.get(peer) or self._inbound.get(peer)
        if link is None:
            raise UnknownPeerError(f"not connected to {peer.name} (incarnation {peer.incarnation})")
        check_num_sums(copies, num_sums)
        if len(notify) + 8 * num_sums > MAX_NOTIFY_BYTES:
            raise ValueError(f"notify: {len(notify)} bytes with checksums exceed {MAX_NOTIFY_BYTES}")
        handle = self._next_handle
        self._next_handle += 1
        outgoing = Outgoing(frame=bytes([NOTIFY]) + notify, is_ready=not copies)
        if copies:
            self._submit(handle, link, outgoing, copies, num_sums)
            link.queue.append(outgoing)  # sent once it is ready
            return handle
        self._emit(WriteCompleted(handle=handle))
        link.queue.append(outgoing)
        self._flush(link)
        return handle

    def cancel(self, handle: int) -> None:
        posted = self._posted.get(handle)
        if posted is not None:
            posted.job.is_cancelled = True

    def poll(self) -> list[TransportEvent]:
        self._is_polling = True
        for fd, _ in self._epoll.poll(0):
            handler = self._handlers.get(fd)
            if handler is not None:  # else an earlier handler of this round has closed it
                handler()
        self._is_polling = False
        events = list(self._events)
        self._events.clear()
        return events

    def fence(self, peer: PeerId) -> None:
        if peer in self._fencing or peer in self._fenced:
            return
        life = self._lives.get(peer)
        if life is None:
            self._complete_fence(peer)
            return
        self._fencing[peer] = None
        if life.process.is_local:
            other = _transports_here.get(life.token)
            if other is not None:
                other.stop_writing(self.me)
            self._end_life(peer, "fenced")
            return
        _log.warning("fencing %s (incarnation %d): killing process %d", peer.name, peer.incarnation, life.process.pid)
        try:
            life.process.kill()
        except PeerProcessError:
            _log.exception("%s (incarnation %d) cannot be fenced", peer.name, peer.incarnation)

    def disconnect(self, peer: PeerId) -> None:
        if peer in self._dials:
            _shut_down(self._dials[peer][1])
        self._drop_links(peer)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for thread, connection in list(self._dials.values()):
            while thread.is_alive():  # again, because it may not have connected yet
                _shut_down(connection)
                thread.join(DIAL_JOIN_INTERVAL_S)
        for _, dialled in self._dialled:
            if isinstance(dialled, Dialled):
                dialled.region.revoke()
                dialled.connection.close()
        for peer in [*self._outbound, *self._inbound]:
            self._drop_links(peer)
        self._copier.stop()
        for link in list(self._leaving):
            self._leave(link)
        self._greeter.close()
        for life in self._lives.values():
            life.process.close()
        self._epoll.close()
        os.close(self._wake_fd)
        self._handlers.clear()
        del self._memory, self._copier

    # ---- beyond the contract ---------------------------------------------------------------------------------

    def stop_writing(self, peer: PeerId) -> None:
        """From the return on, nothing of ours lands in that peer's pool. For the fence within one process."""
        link = self._outbound.get(peer)
        for candidate in [*([link] if link else []), *(gone for gone in self._leaving if gone.peer == peer)]:
            assert candidate.region is not None
            candidate.region.revoke()

    # ---- connecting, as the writer ---------------------------------------------------------------------------

    def _run_dial(self, connection: socket.socket, peer: PeerId, endpoint: bytes) -> None:
        try:
            result: Dialled | DialError = dial(connection, self.me, self._greeter.endpoint.token, peer, endpoint)
        except DialError as error:
            result = error
        self._dialled.append((peer, result))
        os.eventfd_write(self._wake_fd, 1)

    def _take_dialled(self) -> None:
        while self._dialled:
            peer, result = self._dialled.popleft()
            self._dials.pop(peer)[0].join()
            if isinstance(result, DialError):
                self._emit(ConnectFailed(peer=peer, reason=str(result)))
                continue
            link = Link(peer=peer, connection=result.connection, region=result.region)
            self._outbound[peer] = link
            self._watch_link(link)
            self._emit(Connected(peer=peer))

    # ---- being written to, and the fence ----------------------------------------------------------------------

    def _refusal(self, hello: Hello) -> str | None:
        writer = hello.writer
        if hello.target != self.me or hello.token != self._greeter.endpoint.token:
            return f"this is {self.me.name} (incarnation {self.me.incarnation})"
        if writer in self._fencing or writer in self._fenced:
            return f"{writer.name} (incarnation {writer.incarnation}) is fenced"
        if writer in self._inbound:
            return f"{writer.name} (incarnation {writer.incarnation}) is connected already"
        return None

    def _welcome(self, hello: Hello, connection: socket.socket, process: PeerProcess) -> None:
        """From here on the writer may map the pool, so its life is held until it has left or died."""
        peer = hello.writer
        life = self._lives.get(peer)
        if life is not None and life.process.pid != process.pid:
            process.close()
            refuse(connection, f"{peer.name} (incarnation {peer.incarnation}) lives in another process")
            return
        if life is None:
            self._lives[peer] = _Life(process=process, token=hello.writer_token)
            if not process.is_local:
                self.watch(process.pidfd, functools.partial(self._on_death, peer))
        else:
            process.close()
        frame = encode_frame(Welcome(size_bytes=self._pool.size_bytes))
        link = Link(peer=peer, connection=connection)
        self._inbound[peer] = link
        self._watch_link(link)
        self._emit(Connected(peer=peer))
        try:
            socket.send_fds(connection, [frame], [self._pool.fd])
        except OSError as error:
            self._lose(peer, str(error))

    def _on_death(self, peer: PeerId) -> None:
        for link in self._links_of(peer):
            self._receive(link)  # what it said before it died
        self._lose(peer, "its process has died")
        self._end_life(peer, "its process has died")

    def _end_life(self, peer: PeerId, reason: str) -> None:
        """Nothing of that life can land here any more."""
        life = self._lives.pop(peer, None)
        if life is not None:
            if not life.process.is_local:
                self.unwatch(life.process.pidfd)
            life.process.close()
        if peer in self._fencing:
            del self._fencing[peer]
            self._lose(peer, reason)
            self._complete_fence(peer)

    def _complete_fence(self, peer: PeerId) -> None:
        self._fenced.add(peer, None)
        self._emit(Fenced(peer=peer))

    # ---- writing ---------------------------------------------------------------------------------------------

    def _submit(self, handle: int, link: Link, outgoing: Outgoing, copies: Sequence[Copy], num_sums: int) -> None:
        assert link.region is not None
        try:
            table = np.fromiter(chain.from_iterable(copies), dtype=np.int64, count=3 * len(copies)).reshape(-1, 3)
        except OverflowError as error:
            raise ValueError("copies: an offset or a size is outside of any pool") from error
        # A look at the outermost is quick, and enough where copies have one size; else each is looked at.
        limits = (self._memory.size, link.region.size_bytes)
        source, target, size = table.max(axis=0).tolist()
        if table.min() < 0 or source + size > limits[0] or target + size > limits[1]:
            _refuse_outside(copies, limits)
        job = CopyJob(handle=handle, region=link.region, copies=table.view(np.uint64), num_sums=num_sums)
        self._posted[handle] = _Posted(link=link, outgoing=outgoing, job=job)
        link.num_jobs += 1
        self._copier.submit(job)

    def _take_ended(self) -> None:
        for job in self._copier.take_ended():
            posted = self._posted.pop(job.handle)
            link = posted.link
            link.num_jobs -= 1
            if job.failure is None:
                if job.sums:
                    posted.outgoing.frame += b"".join(value.to_bytes(8, "little") for value in job.sums)
                posted.outgoing.is_ready = True
                self._emit(WriteCompleted(handle=job.handle))
            else:
                if posted.outgoing in link.queue:
                    link.queue.remove(posted.outgoing)
                self._emit(WriteFailed(handle=job.handle, quiesced=True, reason=job.failure))
            if link in self._leaving:
                if link.num_jobs == 0:
                    self._leave(link)
            else:
                self._flush(link)

    def _flush(self, link: Link) -> None:
        was_full = link.is_full
        try:
            link.flush()
        except LinkClosedError as error:
            self._lose(link.peer, str(error))
            return
        if len(link.queue) > MAX_QUEUED_FRAMES:
            self._lose(link.peer, f"it leaves {MAX_QUEUED_FRAMES} notifications unread")
        elif link.is_full != was_full:
            mask = select.EPOLLIN | (select.EPOLLOUT if link.is_full else 0)
            self._epoll.modify(link.connection.fileno(), mask)

    # ---- links -----------------------------------------------------------------------------------------------

    def _watch_link(self, link: Link) -> None:
        self.watch(link.connection.fileno(), functools.partial(self._on_link, link))

    def _on_link(self, link: Link) -> None:
        if link.is_full:
            self._flush(link)
        if link.connection.fileno() in self._handlers:
            ended = self._receive(link)
            if ended is not None:
                self._lose(link.peer, ended)

    def _receive(self, link: Link) -> str | None:
        """Reports what has arrived; returns why the connection has ended if it has."""
        frames, ended = link.receive()
        for frame in frames:
            if frame[0] == NOTIFY:
                self._emit(Notified(peer=link.peer, payload=frame[1:]))
            elif frame[0] == BYE and self._inbound.get(link.peer) is link and link.peer not in self._fencing:
                self._end_life(link.peer, "left")
        return ended

    def _links_of(self, peer: PeerId) -> list[Link]:
        return [links[peer] for links in (self._outbound, self._inbound) if peer in links]

    def _lose(self, peer: PeerId, reason: str) -> None:
        """The peer is gone, or as good as: both directions end, and the owner is told once."""
        if self._links_of(peer):
            self._drop_links(peer)
            self._emit(PeerGone(peer=peer, reason=reason))

    def _drop_links(self, peer: PeerId) -> None:
        """Ends both directions. Where we are the writer, copies under way are waited for before we unmap."""
        inbound = self._inbound.pop(peer, None)
        if inbound is not None:
            self.unwatch(inbound.connection.fileno())
            inbound.connection.close()
        outbound = self._outbound.pop(peer, None)
        if outbound is not None:
            self.unwatch(outbound.connection.fileno())
            for posted in self._posted.values():
                if posted.link is outbound:
                    posted.job.is_cancelled = True
            self._leaving.append(outbound)
            if outbound.num_jobs == 0:
                self._leave(outbound)

    def _leave(self, link: Link) -> None:
        """Unmaps, then says so: a peer that hears BYE need not fear this life any more."""
        assert link.region is not None
        self._leaving.remove(link)
        link.region.revoke()
        send_last_word(link.connection, bytes([BYE]))
        link.connection.close()

    # ---- descriptors -----------------------------------------------------------------------------------------

    def _on_wake(self) -> None:
        os.eventfd_read(self._wake_fd)
        self._take_ended()
        self._take_dialled()

    def _emit(self, event: TransportEvent) -> None:
        if not (self._events or self._is_polling or self._is_closed):
            os.eventfd_write(self._wake_fd, 1)  # what no descriptor reports must make `fileno` readable, too
        self._events.append(event)

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        _log.debug("a connection attempt had ended already: %s", error)


def _refuse_outside(copies: Sequence[Copy], limits: tuple[int, int]) -> None:
    """Raises: ValueError that names the first copy that is outside of the source's or the target's pool."""
    for copy in copies:
        starts = (copy.source_bytes, copy.target_bytes)
        for side, start, limit in zip(("source", "target"), starts, limits, strict=True):
            if min(start, copy.size_bytes) < 0 or start > limit - copy.size_bytes:
                raise ValueError(f"copies: {copy} is outside of the {side} pool of {limit} bytes")
