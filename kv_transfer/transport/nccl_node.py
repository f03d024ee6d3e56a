"""All nccl connections of one worker life: who may come in, who is gone, who is fenced. Run by one thread, in steps.

One connection carries KV in one direction, and has a communicator, a CUDA stream and a TCP connection of its own. Two
workers that write to each other have two. NCCL runs the operations of a communicator in the order in which they were
posted; in one communicator for both directions, the two ends would have to agree on the order of their sends and
receives, one direction would wait for the other, and to fence a peer would end what we write to it.
"""

from __future__ import annotations

import functools
import hmac
import logging
import secrets
import selectors
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kv_transfer.checksum import checksums
from kv_transfer.protocol.lease import Recent
from kv_transfer.transport.base import (
    ConnectFailed,
    Copy,
    Fenced,
    PeerGone,
    PeerId,
    TransportError,
    TransportEvent,
    WriteFailed,
)
from kv_transfer.transport.doorway import Doorway
from kv_transfer.transport.nccl_control import ControlClosedError, ControlConnection
from kv_transfer.transport.nccl_inbound import Inbound
from kv_transfer.transport.nccl_library import NcclLibrary
from kv_transfer.transport.nccl_limits import NcclLimits
from kv_transfer.transport.nccl_link import Phase, Session
from kv_transfer.transport.nccl_outbound import Outbound
from kv_transfer.transport.nccl_receiving import ReceivePermits
from kv_transfer.transport.nccl_wire import (
    MAX_REASON_BYTES,
    Endpoint,
    Hello,
    NcclProtocolError,
    Refused,
    decode_endpoint,
    decode_handshake,
    encode_handshake,
)

LISTEN_BACKLOG = 128

_log = logging.getLogger(__name__)

Link = Outbound | Inbound


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUp:
    """A connection has opened; where we are the writer, with the size of the peer's pool."""

    peer: PeerId
    target_size_bytes: int | None


@dataclass(slots=True, eq=False)
class _Stranger:
    """An accepted connection that has not said HELLO."""

    session: Session
    deadline_ns: int


class NcclNode:
    """Nothing in here blocks. `step` does what can be done now; `is_busy` says that another step may do more at once,
    and `next_deadline_ns` when one is due in any case."""

    def __init__(
        self,
        me: PeerId,
        library: NcclLibrary,
        limits: NcclLimits,
        host: str,
        emit: Callable[[TransportEvent | LinkUp], None],
    ) -> None:
        """`host`: the address to listen at, which peers must reach. Raises: TransportError if that is impossible."""
        self.me = me
        self._listener = _listen(host)
        self._doorway = Doorway(self._listener)
        self.selector = selectors.DefaultSelector()
        self._library = library
        self._limits = limits
        self._emit = emit
        self._outbound: dict[PeerId, Outbound] = {}
        self._inbound: dict[PeerId, Inbound] = {}
        self._ending: list[Link] = []
        self._strangers: list[_Stranger] = []
        self._fencing: dict[PeerId, None] = {}
        self._fenced: Recent[PeerId, None] = Recent(limits.max_fenced_lives)
        self._permits = ReceivePermits(limits.max_receiving_groups)
        address, port = self._listener.getsockname()[:2]
        self.endpoint = Endpoint(host=address, port=port, token=secrets.token_hex(16))
        self.selector.register(self._listener, selectors.EVENT_READ, self._on_accept)

    # ---- what the transport asks for -------------------------------------------------------------------------

    def connect(self, peer: PeerId, endpoint: bytes, now_ns: int) -> None:
        if peer in self._outbound:
            return
        try:
            if sum(link.phase is not Phase.OPEN for link in self._outbound.values()) >= self._limits.max_dials:
                raise ControlClosedError(f"{self._limits.max_dials} connections are being made already")
            where = decode_endpoint(endpoint)
            control = ControlConnection.connect_to(where.host, where.port)
        except TransportError as error:
            self._emit(ConnectFailed(peer=peer, reason=str(error)))
            return
        hello = Hello(
            writer_name=self.me.name,
            writer_incarnation=self.me.incarnation,
            target_name=peer.name,
            target_incarnation=peer.incarnation,
            token=where.token,
            library_version=self._library.version,
        )
        link = Outbound(hello, control, self._library, self._limits, self._emit, now_ns)
        self._outbound[peer] = link
        control.watch(self.selector, functools.partial(self._on_link, link))

    def write(
        self, peer: PeerId, handle: int, copies: Sequence[Copy], notify: bytes, num_sums: int, now_ns: int
    ) -> None:
        link = self._outbound.get(peer)
        if link is None or link.writing is None:
            self._emit(WriteFailed(handle=handle, quiesced=True, reason="the connection has ended"))
            return
        if num_sums:
            assert self._library.host_memory is not None, "refused by the transport"
            ranges = [(copy.source_bytes, copy.size_bytes) for copy in copies[:num_sums]]
            sums = checksums(self._library.host_memory, ranges)
            notify += b"".join(value.to_bytes(8, "little") for value in sums)
        self._guard(link, now_ns, functools.partial(link.writing.write, handle, copies, notify))

    def notify(self, peer: PeerId, payload: bytes, now_ns: int) -> None:
        """Over the connection on which we write; else as an answer over the peer's own."""
        outbound, inbound = self._outbound.get(peer), self._inbound.get(peer)
        if outbound is not None and outbound.writing is not None:
            self._guard(outbound, now_ns, functools.partial(outbound.writing.notify, payload))
        elif inbound is not None and inbound.phase is Phase.OPEN:
            self._guard(inbound, now_ns, functools.partial(inbound.notify, payload))

    def cancel(self, handle: int) -> None:
        for link in self._outbound.values():
            if link.writing is not None:
                link.writing.cancel(handle)

    def fence(self, peer: PeerId, now_ns: int) -> None:
        if peer in self._fencing or peer in self._fenced:
            return
        self._fencing[peer] = None
        self._lose(peer, "fenced", now_ns)

    def disconnect(self, peer: PeerId, now_ns: int) -> None:
        reason = "disconnected"
        for link in self._links_of(peer):
            was_dialling = isinstance(link, Outbound) and link.phase is not Phase.OPEN
            self._end(link, reason, now_ns)
            if was_dialling:
                self._emit(ConnectFailed(peer=peer, reason=reason))

    def close(self, now_ns: int) -> None:
        """Ends everything; `step` goes on until `is_closed`, or until nobody wants to wait for it any more."""
        for peer in self._peers():
            for link in self._links_of(peer):
                self._end(link, "it closes", now_ns)
        for stranger in list(self._strangers):
            self._forget(stranger)
        self.selector.unregister(self._listener)
        self._listener.close()

    @property
    def is_closed(self) -> bool:
        return not self._ending

    def give_up(self) -> None:
        """Closes every descriptor, whatever has not ended."""
        for link in self._all_links():
            peer = link.peer
            _log.warning("the connection to %s (incarnation %d) has not ended in order", peer.name, peer.incarnation)
            link.session.control.close()
        for stranger in self._strangers:
            stranger.session.control.close()
        self._listener.close()
        self._doorway.close()
        self.selector.close()

    # ---- time --------------------------------------------------------------------------------------------------

    def step(self, now_ns: int) -> None:
        for key, _ in self.selector.select(0):
            if key.data is not None:
                key.data(now_ns)
        for link in [*self._outbound.values(), *self._inbound.values(), *self._ending]:
            self._guard(link, now_ns, functools.partial(self._step_link, link, now_ns))
        self._ending = [link for link in self._ending if link.phase is not Phase.ENDED]
        for stranger in [stranger for stranger in self._strangers if now_ns >= stranger.deadline_ns]:
            self._forget(stranger)
        self._complete_fences()

    @property
    def is_busy(self) -> bool:
        return any(link.is_busy for link in self._all_links())

    def next_deadline_ns(self) -> int | None:
        deadlines = [link.next_deadline_ns() for link in self._all_links()]
        deadlines += [stranger.deadline_ns for stranger in self._strangers]
        return min(deadlines, default=None)

    def check_invariants(self) -> None:
        self._permits.check_invariants()
        for peer, link in self._outbound.items():
            assert link.peer == peer and link.phase not in (Phase.ENDING, Phase.ENDED)
            assert (link.writing is not None) == (link.phase is Phase.OPEN)
            if link.writing is not None:
                link.writing.check_invariants()
        for peer, inbound in self._inbound.items():
            assert inbound.peer == peer and inbound.phase in (Phase.OPENING, Phase.OPEN)
            assert peer not in self._fencing and peer not in self._fenced, "a fenced life is let in no more"
            if inbound.receiving is not None:
                inbound.receiving.check_invariants()
        assert all(link.phase in (Phase.ENDING, Phase.ENDED) for link in self._ending)
        assert len(self._strangers) <= self._limits.max_strangers

    # ---- coming in -------------------------------------------------------------------------------------------

    def _on_accept(self, now_ns: int) -> None:
        while (connection := self._doorway.accept()) is not None:
            session = Session(ControlConnection(connection), self._limits, now_ns)
            stranger = _Stranger(session, now_ns + self._limits.connect_timeout_ns)
            session.control.watch(self.selector, functools.partial(self._on_stranger, stranger))
            self._strangers.append(stranger)
            if len(self._strangers) > self._limits.max_strangers:
                self._forget(self._strangers[0])

    def _on_stranger(self, stranger: _Stranger, now_ns: int) -> None:
        try:
            frames, ended = stranger.session.receive()
            if not frames:
                if ended is not None:
                    self._forget(stranger)
                return
            hello = decode_handshake(frames[0])
            if not isinstance(hello, Hello) or len(frames) > 1:
                raise NcclProtocolError("the connection did not begin with HELLO")
            refusal = self._refusal(hello)
            if refusal is not None:
                raise NcclProtocolError(refusal)
        except TransportError as error:
            _log.warning("refused an nccl connection: %s", error)
            try:
                stranger.session.send(encode_handshake(Refused(reason=str(error)[:MAX_REASON_BYTES])))
            except ControlClosedError as closed:
                _log.debug("it was not told: %s", closed)
            self._forget(stranger)
            return
        self._strangers.remove(stranger)
        self._admit(hello.writer, stranger.session, now_ns)

    def _refusal(self, hello: Hello) -> str | None:
        writer = hello.writer
        if hello.target != self.me or not hmac.compare_digest(hello.token.encode(), self.endpoint.token.encode()):
            return f"this is {self.me.name} (incarnation {self.me.incarnation})"
        if writer in self._fencing or writer in self._fenced:
            return f"{writer.name} (incarnation {writer.incarnation}) is fenced"
        if hello.library_version != self._library.version:
            return f"libnccl {hello.library_version} at the writer, {self._library.version} at the receiver"
        return None

    def _admit(self, peer: PeerId, session: Session, now_ns: int) -> None:
        for older in [other for other in self._peers() if other.name == peer.name]:
            if older.incarnation < peer.incarnation:
                self._lose(older, f"incarnation {peer.incarnation} has come", now_ns)
        if peer in self._inbound:
            # A writer connects once, so it has given the old connection up, and we have not heard of that yet.
            self._lose(peer, "it has connected anew", now_ns)
        link = Inbound(peer, session, self._library, self._limits, self._permits, self._emit, now_ns)
        self._inbound[peer] = link
        session.control.watch(self.selector, functools.partial(self._on_link, link))
        self._guard(link, now_ns, link.welcome)

    def _forget(self, stranger: _Stranger) -> None:
        self._strangers.remove(stranger)
        stranger.session.control.close()

    # ---- connections -----------------------------------------------------------------------------------------

    def _step_link(self, link: Link, now_ns: int) -> None:
        if link.phase is Phase.ENDED or not link.step(now_ns):
            return
        size_bytes = link.target_size_bytes if isinstance(link, Outbound) else None
        self._emit(LinkUp(peer=link.peer, target_size_bytes=size_bytes))

    def _on_link(self, link: Link, now_ns: int) -> None:
        def exchange() -> None:
            control = link.session.control
            control.flush()
            if isinstance(link, Outbound):
                link.on_dialled()
            if control.is_connecting:
                return
            frames, ended = link.session.receive()
            for frame in frames:
                link.on_frame(frame)
            if ended is not None:
                raise ControlClosedError(ended)

        self._guard(link, now_ns, exchange)

    def _guard(self, link: Link, now_ns: int, action: Callable[[], None]) -> None:
        """Does it; what it raises ends the connection."""
        try:
            action()
        except TransportError as error:
            is_lost = isinstance(error, ControlClosedError)
            if link.phase is not Phase.ENDING:
                self._fail(link, str(error), now_ns, is_lost=is_lost)
            else:
                _log.debug("%s, whose connection is ending: %s", link.peer.name, error)
                link.lose_control()

    def _fail(self, link: Link, reason: str, now_ns: int, *, is_lost: bool) -> None:
        if link.phase is Phase.OPEN:
            self._lose(link.peer, reason, now_ns, lost=link if is_lost else None)
            return
        self._end(link, reason, now_ns, is_lost=is_lost)
        if isinstance(link, Outbound):
            self._emit(ConnectFailed(peer=link.peer, reason=reason))
        else:
            _log.warning("%s (incarnation %d) did not connect: %s", link.peer.name, link.peer.incarnation, reason)

    def _lose(self, peer: PeerId, reason: str, now_ns: int, *, lost: Link | None = None) -> None:
        """The peer is gone, or as good as: both directions end, and the owner is told once."""
        links = self._links_of(peer)
        was_open = any(link.phase is Phase.OPEN for link in links)
        for link in links:
            was_dialling = isinstance(link, Outbound) and link.phase is not Phase.OPEN
            self._end(link, reason, now_ns, is_lost=link is lost)
            if was_dialling:
                self._emit(ConnectFailed(peer=peer, reason=reason))
        if was_open:
            self._emit(PeerGone(peer=peer, reason=reason))

    def _end(self, link: Link, reason: str, now_ns: int, *, is_lost: bool = False) -> None:
        links: dict[PeerId, Outbound] | dict[PeerId, Inbound] = (
            self._outbound if isinstance(link, Outbound) else self._inbound
        )
        del links[link.peer]
        link.end(reason, now_ns, is_lost=is_lost)
        self._ending.append(link)

    def _complete_fences(self) -> None:
        """A fence is complete when none of that life's connections to us can touch the pool any more."""
        for peer in list(self._fencing):
            links = [link for link in self._ending if isinstance(link, Inbound) and link.peer == peer]
            if all(link.is_quiet for link in links):
                del self._fencing[peer]
                self._fenced.add(peer, None)
                self._emit(Fenced(peer=peer))

    def _links_of(self, peer: PeerId) -> list[Link]:
        found = (self._outbound.get(peer), self._inbound.get(peer))
        return [link for link in found if link is not None]

    def _peers(self) -> list[PeerId]:
        return list(dict.fromkeys([*self._outbound, *self._inbound]))

    def _all_links(self) -> Iterator[Link]:
        yield from self._outbound.values()
        yield from self._inbound.values()
        yield from self._ending


def _listen(host: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.bind(address)
            listener.listen(LISTEN_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise TransportError(f"cannot listen at {host}: {error}") from error
    return listener
