"""nixl: one-sided writes between hosts, over RDMA or TCP as UCX finds it, from and into host memory.

Two ways lead from a writer to the life that it writes to. Blocks go through nixl. Everything else goes over a small
TCP connection beside it: the handshake, notifications, heartbeats, and the word that somebody leaves. A notification
could go through nixl as well, but the library sends it only when the data have been flushed to the peer's memory,
which is when we send ours; over one stream those with and without data keep their order, arrive by themselves where
nixl would have to be polled, and a dead peer is noticed at once, a silent one within `NixlLimits.silence_timeout_s`
(the library notices neither in time). The metadata of an agent, which may outgrow an endpoint, travel there, too.

The fence. A write that is in flight cannot be taken back by its writer, and the owner of the memory can neither revoke
it nor deregister the memory under it. What does help is that, without cross-memory attach, the writes of a peer reach
us only through the agent that it was told of. So every connection has its own agent here, all over the same pool, and
destroying it ends what that peer can do while the others go on. It is destroyed with every end of its connection, not
just for a fence: Fenced follows when the last agent of that life is gone, and later connections of it are refused.

Threads. The library blocks: making an agent takes 20 ms, connecting to a host that does not answer may take minutes,
a transfer moves only while somebody polls. So every connection has a thread at either end that owns its agent
(`nixl_writer`, `nixl_reader`); it polls while a transfer is in flight and sleeps otherwise. The transport itself lives
in its caller's thread: a `Desk` carries orders to each of those threads, and all their reports come back over one
queue. The price of a connection is in `nixl_limits`.

UCX reads environment variables, and what they say overrides what it is told here: UCX_NET_DEVICES may choose the
devices of a host. UCX_TLS must leave cma out; if it does not, no connection is made (`nixl_agent.check_environment`).
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence

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
    TransportError,
    TransportEvent,
    UnknownPeerError,
    WriteCompleted,
    WriteFailed,
    check_num_sums,
)
from kv_transfer.transport.doorway import Doorway
from kv_transfer.transport.nixl_agent import LOOPBACK, check_environment, load_library
from kv_transfer.transport.nixl_desk import (
    Arrived,
    Desk,
    DialTimedOut,
    Ended,
    Established,
    HelloArrived,
    Job,
    Order,
    Report,
    WriteEnded,
)
from kv_transfer.transport.nixl_limits import MAX_CONNECTIONS, MAX_STRANGERS, NixlLimits
from kv_transfer.transport.nixl_reader import Reader
from kv_transfer.transport.nixl_wire import MAX_BODY_BYTES, Endpoint, Hello, encode_endpoint
from kv_transfer.transport.nixl_writer import Writer
from kv_transfer.transport.shm_pool import PoolMemory

LISTEN_BACKLOG = 128
MAX_FENCED_LIVES = 4096
MAX_NOTIFY_BYTES = MAX_BODY_BYTES
CLOSE_TIMEOUT_S = 5.0
"""How long `close` waits for threads that are in the library; they end by themselves later."""
JOIN_TIMEOUT_S = 1.0
"""For a thread that has said its last word."""

_log = logging.getLogger(__name__)


class NixlTransport:
    """One worker life's end; implements `transport.base.Transport` over its pool."""

    name = "nixl"

    def __init__(self, me: PeerId, pool: PoolMemory, *, host: str = LOOPBACK, limits: NixlLimits | None = None) -> None:
        """Listens at `host`, an address of this machine that peers can reach.

        Raises: TransportError if the library is missing or the environment forbids a fence, OSError for `host`."""
        load_library()
        check_environment()
        self.me = me
        self._pool = pool
        self._memory = as_memory(pool.mapping)
        self._host = host
        self._limits = limits or NixlLimits()
        self._events: deque[TransportEvent] = deque()
        self._reports: deque[Report] = deque()
        self._desks: dict[Desk, None] = {}
        """All whose thread has not said its last word."""
        self._dials: dict[PeerId, tuple[Desk, threading.Timer]] = {}
        self._outbound: dict[PeerId, Desk] = {}
        self._inbound: dict[PeerId, Desk] = {}
        self._admitted: dict[Desk, PeerId] = {}
        """Lives that may hold an agent of ours: until their thread has destroyed it."""
        self._fencing: dict[PeerId, None] = {}
        self._fenced: Recent[PeerId, None] = Recent(MAX_FENCED_LIVES)
        self._writes: dict[int, Job] = {}
        self._next_handle = 1
        self._is_closed = False
        self._is_polling = False
        self._token = secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=LISTEN_BACKLOG)
        self._listener.setblocking(False)
        self._doorway = Doorway(self._listener)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)

    # ---- Transport -------------------------------------------------------------------------------------------

    def endpoint(self) -> bytes:
        port = self._listener.getsockname()[1]
        return encode_endpoint(Endpoint(host=self._host, port=port, token=self._token))

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        if peer in self._outbound or peer in self._dials:
            return
        if len(self._desks) >= MAX_CONNECTIONS:
            self._emit(ConnectFailed(peer=peer, reason=f"there are {MAX_CONNECTIONS} connections already"))
            return
        try:
            writer = Writer(self.me, peer, endpoint, self._memory, self._limits, self._report)
        except OSError as error:  # no descriptor is left
            self._emit(ConnectFailed(peer=peer, reason=str(error)))
            return
        desk = writer.desk
        timer = threading.Timer(
            self._limits.connect_timeout_s, functools.partial(self._report, DialTimedOut(desk=desk))
        )
        timer.daemon = True
        timer.start()
        self._dials[peer] = (desk, timer)
        self._desks[desk] = None
        desk.start(writer.run, "kv-nixl-writer")

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
        desk = self._outbound.get(peer) if copies else self._outbound.get(peer) or self._inbound.get(peer)
        if desk is None:
            raise UnknownPeerError(f"not connected to {peer.name} (incarnation {peer.incarnation})")
        check_num_sums(copies, num_sums)
        if len(notify) + 8 * num_sums > MAX_NOTIFY_BYTES:
            raise ValueError(f"notify: {len(notify)} bytes with checksums exceed {MAX_NOTIFY_BYTES}")
        for copy in copies:
            if copy.size_bytes < 1:
                raise ValueError(f"copies: {copy} is empty")
            if copy.source_bytes < 0 or copy.source_bytes + copy.size_bytes > self._memory.size:
                raise ValueError(f"copies: {copy} is outside of the source pool of {self._memory.size} bytes")
            if copy.target_bytes < 0 or copy.target_bytes + copy.size_bytes > desk.target_size_bytes:
                raise ValueError(f"copies: {copy} is outside of the target pool of {desk.target_size_bytes} bytes")
        job = Job(handle=self._next_handle, copies=tuple(copies), notify=notify, num_sums=num_sums)
        if not desk.post(job):
            raise UnknownPeerError(f"the connection to {peer.name} (incarnation {peer.incarnation}) has ended")
        self._next_handle += 1
        if copies:
            self._writes[job.handle] = job
        else:
            self._emit(WriteCompleted(handle=job.handle))
        return job.handle

    def cancel(self, handle: int) -> None:
        job = self._writes.get(handle)
        if job is not None:
            job.is_cancelled = True

    def poll(self) -> list[TransportEvent]:
        """Raises: TransportError if a thread has died of a bug."""
        self._is_polling = True
        for fd, _ in self._epoll.poll(0):
            if fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            else:
                self._accept()
        while self._reports:
            self._take(self._reports.popleft())
        self._is_polling = False
        events = list(self._events)
        self._events.clear()
        return events

    def fence(self, peer: PeerId) -> None:
        if peer in self._fencing or peer in self._fenced:
            return
        self._fencing[peer] = None
        self._lose(peer, "fenced")
        for desk, writer in self._admitted.items():
            if writer == peer:
                desk.drop("fenced")
        self._maybe_complete_fence(peer)

    def disconnect(self, peer: PeerId) -> None:
        if peer in self._dials:
            self._dials[peer][0].drop("disconnected")
        for desk in self._take_links(peer):
            desk.leave("disconnected")

    def fileno(self) -> int:
        return self._epoll.fileno()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._epoll.unregister(self._listener.fileno())
        self._listener.close()
        self._doorway.close()
        for _, timer in self._dials.values():
            timer.cancel()
        for desk in self._desks:
            desk.drop("closed")
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for desk in self._desks:
            if not desk.join(max(0.0, deadline_s - time.monotonic())):
                _log.warning("a connection to %s is still in the nixl library", desk.peer)
        with self._wake_lock:
            self._epoll.close()
            os.close(self._wake_fd)
            self._wake_fd = -1
        self._reports.clear()
        self._desks.clear()
        del self._memory

    def check_invariants(self) -> None:
        """Raises AssertionError."""
        for links in (self._outbound, self._inbound):
            for peer, desk in links.items():
                assert desk.peer == peer and desk in self._desks
        for desk, peer in self._admitted.items():
            assert desk.peer == peer and desk in self._desks
        for peer, (desk, _) in self._dials.items():
            assert desk.peer == peer and desk in self._desks and peer not in self._outbound
        assert len(self._desks) <= MAX_CONNECTIONS and all(handle < self._next_handle for handle in self._writes)
        assert all(desk in self._admitted for desk in self._inbound.values())
        assert all(peer in self._admitted.values() for peer in self._fencing), "a fence waits for nothing"
        assert not any(peer in self._inbound or peer in self._fenced for peer in self._fencing)

    # ---- connecting ------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while (connection := self._doorway.accept()) is not None:
            if len(self._desks) >= MAX_CONNECTIONS:
                connection.close()
                continue
            try:
                reader = Reader(self.me, connection, self._memory, self._host, self._limits, self._report)
            except OSError as error:
                _log.warning("turned a nixl connection away: %s", error)
                connection.close()
                continue
            self._desks[reader.desk] = None
            reader.desk.start(reader.run, "kv-nixl-reader")
            strangers = [desk for desk in self._desks if desk.peer is None and desk.order is Order.SERVE]
            if len(strangers) > MAX_STRANGERS:
                strangers[0].drop(f"{MAX_STRANGERS} others wait to be let in")

    def _refusal(self, hello: Hello) -> str | None:
        writer = hello.writer
        if hello.target != self.me or hello.token != self._token:
            return f"this is {self.me.name} (incarnation {self.me.incarnation})"
        if writer in self._fencing or writer in self._fenced:
            return f"{writer.name} (incarnation {writer.incarnation}) is fenced"
        return None

    # ---- what the threads report -----------------------------------------------------------------------------

    def _report(self, report: Report) -> None:
        """Called in any thread."""
        self._reports.append(report)
        self._wake()

    def _take(self, report: Report) -> None:
        if isinstance(report, WriteEnded):
            self._on_write_ended(report)
        elif isinstance(report, Arrived):
            self._on_arrived(report.desk)
        elif isinstance(report, HelloArrived):
            self._on_hello(report.desk, report.hello)
        elif isinstance(report, Established):
            self._on_established(report.desk)
        elif isinstance(report, Ended):
            self._on_ended(report.desk, report.reason)
        elif isinstance(report, DialTimedOut):
            self._on_dial_timed_out(report.desk)
        else:
            raise TransportError("the thread of a nixl connection has died") from report.error

    def _on_hello(self, desk: Desk, hello: Hello) -> None:
        refusal = self._refusal(hello)
        if refusal is not None:
            _log.warning("refused a nixl connection: %s", refusal)
            desk.drop(refusal)
            return
        for old, writer in self._admitted.items():
            if writer == hello.writer:
                old.drop("it connects anew")  # who asks again has lost the connection that we may still see
        if hello.writer in self._inbound:
            self._lose(hello.writer, "it connects anew")
        self._admitted[desk] = hello.writer
        desk.admit(hello.writer)

    def _on_established(self, desk: Desk) -> None:
        peer = desk.peer
        if peer is None or desk.order is not Order.SERVE:
            return  # it was given up meanwhile, and ends by itself
        if desk in self._admitted:
            self._inbound[peer] = desk
        else:
            self._dials.pop(peer)[1].cancel()
            self._outbound[peer] = desk
        self._emit(Connected(peer=peer))

    def _on_arrived(self, desk: Desk) -> None:
        peer = desk.peer
        is_linked = peer is not None and desk in (self._outbound.get(peer), self._inbound.get(peer))
        while desk.arrived:
            payload = desk.arrived.popleft()
            if peer is not None and is_linked:
                self._emit(Notified(peer=peer, payload=payload))

    def _on_write_ended(self, report: WriteEnded) -> None:
        del self._writes[report.handle]
        if report.failure is None:
            self._emit(WriteCompleted(handle=report.handle))
        else:
            self._emit(WriteFailed(handle=report.handle, quiesced=report.quiesced, reason=report.failure))

    def _on_dial_timed_out(self, desk: Desk) -> None:
        peer = desk.peer
        if peer is not None and peer in self._dials and self._dials[peer][0] is desk:
            del self._dials[peer]
            desk.drop("not connected in time")  # once the library lets go of its thread
            self._emit(ConnectFailed(peer=peer, reason=f"not connected within {self._limits.connect_timeout_s:g} s"))

    def _on_ended(self, desk: Desk, reason: str) -> None:
        del self._desks[desk]
        desk.join(JOIN_TIMEOUT_S)
        peer = desk.peer
        if peer is None:
            return
        if peer in self._dials and self._dials[peer][0] is desk:
            self._dials.pop(peer)[1].cancel()
            self._emit(ConnectFailed(peer=peer, reason=reason))
        elif desk in (self._outbound.get(peer), self._inbound.get(peer)):
            self._lose(peer, reason)
        if self._admitted.pop(desk, None) is not None:
            self._maybe_complete_fence(peer)

    # ---- ending ----------------------------------------------------------------------------------------------

    def _take_links(self, peer: PeerId) -> list[Desk]:
        links = [self._outbound.pop(peer, None), self._inbound.pop(peer, None)]
        return [desk for desk in links if desk is not None]

    def _lose(self, peer: PeerId, reason: str) -> None:
        """The peer is gone, or as good as: both directions end, and the owner is told once."""
        links = self._take_links(peer)
        for desk in links:
            desk.leave(reason)
        if links:
            self._emit(PeerGone(peer=peer, reason=reason))

    def _maybe_complete_fence(self, peer: PeerId) -> None:
        if peer in self._fencing and peer not in self._admitted.values():
            del self._fencing[peer]
            self._fenced.add(peer, None)
            self._emit(Fenced(peer=peer))

    def _emit(self, event: TransportEvent) -> None:
        if not (self._events or self._is_polling):
            self._wake()  # what no thread reports must make `fileno` readable, too
        self._events.append(event)

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
