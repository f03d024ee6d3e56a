"""UCX between hosts (and on one): a two-sided library given a receiver that posts the matching receives itself.

A writer announces which ranges it will write; the receiver checks them, posts receives straight into its pool and
grants them; what is granted is sent, merged into few large messages. WriteCompleted is the receiver's word that all
bytes are in place (`ucx_wire` has the conversation). One thread of each end does all of it (`ucx_engine`); this module
is what the owner's thread sees of it.

The fence is the receiver's: it closes the endpoint of that life and waits until every receive posted for it has ended.
What the sender still has in flight, also if it is stopped and wakes up later, has no connection and no receive left.
"""

from __future__ import annotations

import functools
import ipaddress
import os
from collections import deque
from collections.abc import Sequence

from kv_transfer.checksum import as_memory
from kv_transfer.protocol.limits import SECOND_NS
from kv_transfer.transport.base import (
    Connected,
    ConnectFailed,
    Copy,
    PeerId,
    TransportError,
    TransportEvent,
    UnknownPeerError,
    WriteCompleted,
    WriteFailed,
    check_num_sums,
)
from kv_transfer.transport.shm_pool import PoolMemory
from kv_transfer.transport.ucx_engine import Dropped, Engine, EngineEvent, Reachable
from kv_transfer.transport.ucx_pieces import MAX_PIECE_BYTES
from kv_transfer.transport.ucx_wire import MAX_NOTIFY_BYTES, MAX_PIECES_PER_WRITE, encode_endpoint
from kv_transfer.transport.ucx_writer import PostedWrite

PEER_TIMEOUT_NS = 5 * SECOND_NS
"""Within it a peer that is not heard is given up: stopped, or behind a cut link. A dead one is noticed at once."""
MAX_UNENDED_WRITES = 4096
"""Posted to one peer and not polled as ended; with one more the peer counts as gone."""


class UcxTransport:
    """One worker life's end; implements `transport.base.Transport` over its pool.

    It listens on every address of its host (ucxx knows no other way); who comes must know the endpoint's token.
    """

    name = "ucx"

    def __init__(
        self, me: PeerId, pool: PoolMemory, *, host: str = "127.0.0.1", peer_timeout_ns: int = PEER_TIMEOUT_NS
    ) -> None:
        """`host` is the IPv4 address at which peers reach this worker; `peer_timeout_ns` is the same for all of them.

        Raises: UcxLibraryError if ucxx is missing or does not start, ValueError for another kind of address.
        """
        if ipaddress.ip_address(host).version != 4:
            raise ValueError(f"host: must be an IPv4 address, is {host}")
        self.me = me
        self._pool_size_bytes = pool.size_bytes
        self._reported: deque[EngineEvent] = deque()
        self._failure: BaseException | None = None
        self._connecting: dict[PeerId, None] = {}
        self._writable: dict[PeerId, int] = {}
        """Peers that we may write to, with the size of their pool in bytes."""
        self._writers: dict[PeerId, None] = {}
        """Peers that may write to us."""
        self._unended: dict[int, PeerId] = {}
        self._num_unended: dict[PeerId, int] = {}
        self._next_handle = 1
        self._is_closed = False
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            memory = as_memory(pool.mapping)
            self._engine = Engine(me, memory, host, peer_timeout_ns, self._report, self._report_failure)
        except TransportError:
            os.close(self._event_fd)
            raise

    # ---- Transport -------------------------------------------------------------------------------------------

    def endpoint(self) -> bytes:
        return encode_endpoint(self._engine.address)

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        if peer in self._writable or peer in self._connecting:
            return
        self._connecting[peer] = None
        self._engine.submit(functools.partial(self._engine.dial, peer, endpoint))

    def write(
        self,
        peer: PeerId,
        copies: Sequence[Copy],
        notify: bytes,
        *,
        num_sums: int = 0,
    ) -> int:
        """See Transport. Raises: UnknownPeerError (also where MAX_UNENDED_WRITES are reached), and ValueError for a
        range outside of either pool, too many or empty copies, or a notification of more than MAX_NOTIFY_BYTES."""
        pool_size_bytes = self._writable.get(peer)
        if pool_size_bytes is None and (copies or peer not in self._writers):
            raise UnknownPeerError(f"not connected to {peer.name} (incarnation {peer.incarnation})")
        check_num_sums(copies, num_sums)
        if len(notify) + 8 * num_sums > MAX_NOTIFY_BYTES:
            raise ValueError(f"notify: {len(notify)} bytes with checksums exceed {MAX_NOTIFY_BYTES}")
        if pool_size_bytes is not None:
            self._check_copies(copies, pool_size_bytes)
        num_unended = self._num_unended.get(peer, 0)
        if num_unended >= MAX_UNENDED_WRITES:
            self._forget(peer)
            self._engine.submit(functools.partial(self._engine.lose, peer, f"it leaves {num_unended} writes unread"))
            raise UnknownPeerError(f"{peer.name} (incarnation {peer.incarnation}) leaves {num_unended} writes unread")
        handle = self._next_handle
        self._next_handle += 1
        self._unended[handle] = peer
        self._num_unended[peer] = num_unended + 1
        write = PostedWrite(handle=handle, copies=tuple(copies), notify=bytes(notify), num_sums=num_sums)
        self._engine.submit(functools.partial(self._engine.post, peer, write))
        return handle

    def cancel(self, handle: int) -> None:
        if handle in self._unended:
            self._engine.submit(functools.partial(self._engine.cancel, handle))

    def poll(self) -> list[TransportEvent]:
        """Raises: TransportError if the transfer thread has died."""
        if self._failure is not None:
            raise TransportError("the ucx transfer thread has died") from self._failure
        events: list[TransportEvent] = []
        if not self._is_closed:
            self._clear_event_fd()
        while self._reported:
            event = self._reported.popleft()
            self._note(event)
            if not isinstance(event, Reachable | Dropped):
                events.append(event)
        return events

    def fence(self, peer: PeerId) -> None:
        self._engine.submit(functools.partial(self._engine.fence, peer))

    def disconnect(self, peer: PeerId) -> None:
        self._forget(peer)
        self._engine.submit(functools.partial(self._engine.disconnect, peer))

    def fileno(self) -> int:
        return self._event_fd

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._engine.close()
        os.close(self._event_fd)

    def check_invariants(self) -> None:
        assert len(self._unended) == sum(self._num_unended.values())
        assert all(0 < number <= MAX_UNENDED_WRITES for number in self._num_unended.values())

    # ---- from the engine's thread ----------------------------------------------------------------------------

    def _report(self, events: list[EngineEvent]) -> None:
        self._reported.extend(events)
        os.eventfd_write(self._event_fd, 1)

    def _report_failure(self, error: BaseException) -> None:
        self._failure = error
        os.eventfd_write(self._event_fd, 1)

    # ---- helpers ---------------------------------------------------------------------------------------------

    def _note(self, event: EngineEvent) -> None:
        """Keeps this side's view in step with what the owner is told."""
        match event:
            case Reachable(peer=peer, pool_size_bytes=None):
                self._writers[peer] = None
            case Reachable(peer=peer, pool_size_bytes=int(size_bytes)):
                self._writable[peer] = size_bytes
            case Connected(peer=peer) | ConnectFailed(peer=peer):
                self._connecting.pop(peer, None)
            case Dropped(peer=peer):
                self._forget(peer)
            case WriteCompleted(handle=handle) | WriteFailed(handle=handle):
                peer = self._unended.pop(handle)
                self._num_unended[peer] -= 1
                if self._num_unended[peer] == 0:
                    del self._num_unended[peer]

    def _forget(self, peer: PeerId) -> None:
        self._writable.pop(peer, None)
        self._writers.pop(peer, None)

    def _check_copies(self, copies: Sequence[Copy], pool_size_bytes: int) -> None:
        num_pieces = 0
        for copy in copies:
            if copy.size_bytes < 1:
                raise ValueError(f"copies: {copy} is empty")
            if copy.source_bytes < 0 or copy.source_bytes + copy.size_bytes > self._pool_size_bytes:
                raise ValueError(f"copies: {copy} is outside of the source pool of {self._pool_size_bytes} bytes")
            if copy.target_bytes < 0 or copy.target_bytes + copy.size_bytes > pool_size_bytes:
                raise ValueError(f"copies: {copy} is outside of the target pool of {pool_size_bytes} bytes")
            num_pieces += -(-copy.size_bytes // MAX_PIECE_BYTES)
        if num_pieces > MAX_PIECES_PER_WRITE:
            raise ValueError(f"copies: {num_pieces} pieces exceed {MAX_PIECES_PER_WRITE}")

    def _clear_event_fd(self) -> None:
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            return  # nothing was reported since
