"""NCCL between the GPUs of two workers: a communicator a pair and direction, behind the one-sided contract of `base`.

NCCL is two-sided: each send needs its receive. The receiver's end of every connection posts the receives that the
writer announces over a TCP connection beside the communicator (`nccl_wire`), so that its owner sees writes and
notifications alone. All of it runs in one thread (`nccl_node`), and what touches NCCL and CUDA is behind two protocols
(`nccl_library`). `docs/gpu-transports.md` says what of it has been run.

* A write is done when the receiver's CUDA event says that its bytes are in the pool, and the receiver has said so: that
  a send has ended proves nothing. Then its notification is handed out there, never earlier.
* The fence of a life aborts the communicators over which it writes to us, and is complete when their threads have ended
  and their streams are empty. The pool is never registered with NCCL, so only our own GPU's kernels write into it.
* A connection that fails is given up by both ends. The next `connect` makes a new communicator, with a new name.
* Checksums are for pools that the processor can read. A pool in a GPU's memory has no kernel yet that sums it, so
  `write` with `num_sums` raises ChecksumUnavailableError rather than copy every block to the host twice. Damage on the
  way is left to what NVLink and InfiniBand check themselves.
"""

from __future__ import annotations

import functools
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kv_transfer.transport.base import (
    Connected,
    Copy,
    PeerGone,
    PeerId,
    TransportError,
    TransportEvent,
    UnknownPeerError,
    WriteCompleted,
    check_num_sums,
)
from kv_transfer.transport.nccl_library import NcclLibrary
from kv_transfer.transport.nccl_limits import SECOND_NS, NcclLimits
from kv_transfer.transport.nccl_node import LinkUp, NcclNode
from kv_transfer.transport.nccl_wire import MAX_NOTIFY_BYTES, encode_endpoint

BUSY_POLL_S = 0.0002
"""How often the thread looks at CUDA events and communicators while something is under way: they have no descriptor."""
CLOSE_TIMEOUT_NS = 5 * SECOND_NS

_log = logging.getLogger(__name__)


class ChecksumUnavailableError(TransportError):
    """The pool is where the processor cannot sum it."""


class NcclTransport:
    """One worker life's end; implements `transport.base.Transport` over the pool of `library`."""

    name = "nccl"

    def __init__(
        self, me: PeerId, library: NcclLibrary, *, host: str = "127.0.0.1", limits: NcclLimits | None = None
    ) -> None:
        """`host`: where to listen for peers, as they reach it. Raises: TransportError if that is impossible."""
        self.me = me
        self._library = library
        self._events: deque[TransportEvent | LinkUp] = deque()
        self._commands: deque[Callable[[int], None]] = deque()
        self._writable: dict[PeerId, int] = {}
        """Peers that we write to, with the size of their pools, as far as their events have been polled."""
        self._readable: dict[PeerId, None] = {}
        """Peers that write to us, likewise."""
        self._next_handle = 1
        self._is_closed = False
        self._node = NcclNode(me, library, limits or NcclLimits(), host, self._emit)
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._node.selector.register(self._wake_fd, selectors.EVENT_READ)
        self._is_stopping = False
        self._failure: BaseException | None = None
        """A bug that has ended the thread: `poll` raises it, for nothing would ever be reported again."""
        self._thread = threading.Thread(target=self._run, name="kv-nccl", daemon=True)
        self._thread.start()

    # ---- Transport -------------------------------------------------------------------------------------------

    def endpoint(self) -> bytes:
        return encode_endpoint(self._node.endpoint)

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        self._post(functools.partial(self._node.connect, peer, endpoint))

    def write(
        self,
        peer: PeerId,
        copies: Sequence[Copy],
        notify: bytes,
        *,
        num_sums: int = 0,
    ) -> int:
        """See Transport. Raises: UnknownPeerError; ChecksumUnavailableError; ValueError for a range outside of either
        pool or a notification of more than MAX_NOTIFY_BYTES."""
        if peer not in self._writable and (copies or peer not in self._readable):
            raise UnknownPeerError(f"not connected to {peer.name} (incarnation {peer.incarnation})")
        check_num_sums(copies, num_sums)
        if num_sums and self._library.host_memory is None:
            raise ChecksumUnavailableError("checksums: the nccl transport cannot sum a pool in a GPU's memory")
        if len(notify) + 8 * num_sums > MAX_NOTIFY_BYTES:
            raise ValueError(f"notify: {len(notify)} bytes with checksums exceed {MAX_NOTIFY_BYTES}")
        handle = self._next_handle
        if copies:
            self._check_ranges(copies, self._writable[peer])
        if any(copy.size_bytes for copy in copies):
            self._post(functools.partial(self._node.write, peer, handle, list(copies), notify, num_sums))
        else:
            sums = bytes(8 * num_sums)  # the checksum of nothing is 0
            self._post(functools.partial(self._node.notify, peer, notify + sums))
            self._emit(WriteCompleted(handle=handle))
        self._next_handle += 1
        return handle

    def cancel(self, handle: int) -> None:
        self._post(lambda _: self._node.cancel(handle))

    def poll(self) -> list[TransportEvent]:
        if self._is_closed:
            return []
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            return []
        if self._failure is not None:
            raise RuntimeError("the nccl transport's thread has failed") from self._failure
        events: list[TransportEvent] = []
        while self._events:
            event = self._events.popleft()
            if isinstance(event, LinkUp):
                if event.target_size_bytes is None:
                    self._readable[event.peer] = None
                else:
                    self._writable[event.peer] = event.target_size_bytes
                events.append(Connected(peer=event.peer))
                continue
            if isinstance(event, PeerGone):
                self._forget(event.peer)
            events.append(event)
        return events

    def fence(self, peer: PeerId) -> None:
        self._post(functools.partial(self._node.fence, peer))

    def disconnect(self, peer: PeerId) -> None:
        self._forget(peer)
        self._post(functools.partial(self._node.disconnect, peer))

    def fileno(self) -> int:
        return self._event_fd

    def close(self) -> None:
        """Waits until NCCL has let the pool go, at most CLOSE_TIMEOUT_NS."""
        if self._is_closed:
            return
        self._is_closed = True
        self._is_stopping = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        os.close(self._wake_fd)
        os.close(self._event_fd)

    # ---- the caller's thread ---------------------------------------------------------------------------------

    def _check_ranges(self, copies: Sequence[Copy], target_size_bytes: int) -> None:
        source_size_bytes = self._library.size_bytes
        for copy in copies:
            if copy.source_bytes < 0 or copy.size_bytes < 0 or copy.source_bytes + copy.size_bytes > source_size_bytes:
                raise ValueError(f"copies: {copy} is outside of the source pool of {source_size_bytes} bytes")
            if copy.target_bytes < 0 or copy.target_bytes + copy.size_bytes > target_size_bytes:
                raise ValueError(f"copies: {copy} is outside of the target pool of {target_size_bytes} bytes")

    def _forget(self, peer: PeerId) -> None:
        self._writable.pop(peer, None)
        self._readable.pop(peer, None)

    def _post(self, command: Callable[[int], None]) -> None:
        assert not self._is_closed, "the transport is closed"
        self._commands.append(command)
        os.eventfd_write(self._wake_fd, 1)

    # ---- the backend's thread --------------------------------------------------------------------------------

    def _emit(self, event: TransportEvent | LinkUp) -> None:
        self._events.append(event)
        os.eventfd_write(self._event_fd, 1)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._step()
                self._wait(None)
            self._node.close(time.monotonic_ns())
            deadline_ns = time.monotonic_ns() + CLOSE_TIMEOUT_NS
            while not self._node.is_closed and time.monotonic_ns() < deadline_ns:
                self._wait(deadline_ns)
                self._step()
        except Exception as error:
            self._failure = error
            _log.exception("the nccl transport's thread has failed")
            os.eventfd_write(self._event_fd, 1)
            raise
        finally:
            self._node.give_up()

    def _step(self) -> None:
        now_ns = time.monotonic_ns()
        while self._commands:
            self._commands.popleft()(now_ns)
        self._node.step(now_ns)

    def _wait(self, until_ns: int | None) -> None:
        """For a command, a frame or a deadline; only a moment while NCCL must be asked again."""
        if self._node.is_busy:
            time.sleep(BUSY_POLL_S)
            return
        deadlines = [at_ns for at_ns in (until_ns, self._node.next_deadline_ns()) if at_ns is not None]
        wait_s = max(0.0, (min(deadlines) - time.monotonic_ns()) / SECOND_NS) if deadlines else None
        for key, _ in self._node.selector.select(wait_s):  # frames are left to the next step
            if key.fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
