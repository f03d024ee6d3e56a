"""The ucx backend's thread: it alone touches UCX. It sleeps until UCX or a command wakes it, and takes turns then.

A connection past its handshake is a channel: `_outbound` (we write) or `_inbound` (the peer writes). When one ends, its
endpoint is closed at once, and it is kept in `_settling` until UCX has let go of all memory: only then is its writer
fenced.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.checksum import Memory
from kv_transfer.protocol.lease import Recent
from kv_transfer.protocol.limits import MILLISECOND_NS, SECOND_NS
from kv_transfer.transport.base import (
    Connected,
    ConnectFailed,
    Fenced,
    Notified,
    PeerGone,
    PeerId,
    TransportEvent,
    WriteFailed,
)
from kv_transfer.transport.ucx_channel import Channel
from kv_transfer.transport.ucx_handshake import Handshakes
from kv_transfer.transport.ucx_library import Worker
from kv_transfer.transport.ucx_link import Link, LinkLostError, Mailroom
from kv_transfer.transport.ucx_pieces import Staging
from kv_transfer.transport.ucx_reader import Reader
from kv_transfer.transport.ucx_wire import PING, Address, Frame, UcxProtocolError
from kv_transfer.transport.ucx_writer import PostedWrite, Writer

MAX_FENCED_LIVES = 4096
HEARTBEATS_PER_TIMEOUT = 5
"""An end that has nothing to say says PING so many times within a peer's timeout."""
CHECKS_PER_TIMEOUT = 10
SETTLE_INTERVAL_MS = 1
"""UCX lets go of a closed connection's memory within a turn or two, and does not always wake us for it."""
SETTLE_AT_CLOSE_NS = 2 * SECOND_NS

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachable:
    """Told beside the contract's events, ahead of Connected: the size of the peer's pool if we may write to it."""

    peer: PeerId
    pool_size_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Told beside the contract's events: both directions to the peer have ended."""

    peer: PeerId


EngineEvent = TransportEvent | Reachable | Dropped


class Engine:
    """`report` is called, in the engine's thread, with what has happened since; `fail` when the thread has died."""

    def __init__(
        self,
        me: PeerId,
        memory: Memory,
        host: str,
        peer_timeout_ns: int,
        report: Callable[[list[EngineEvent]], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Raises: UcxLibraryError."""
        self._memory = memory
        self._peer_timeout_ns = peer_timeout_ns
        self._check_interval_ns = peer_timeout_ns // CHECKS_PER_TIMEOUT
        self._report = report
        self._fail = fail
        self._events: list[EngineEvent] = []
        self._commands: deque[Callable[[], None]] = deque()
        self._is_stopping = False
        self._now_ns = time.monotonic_ns()
        self._next_check_ns = 0
        self._outbound: dict[PeerId, Channel] = {}
        self._inbound: dict[PeerId, Channel] = {}
        self._settling: list[tuple[PeerId | None, Channel | Link]] = []
        self._fencing: dict[PeerId, None] = {}
        self._fenced: Recent[PeerId, None] = Recent(MAX_FENCED_LIVES)
        self._staging = Staging()
        self._worker = Worker()
        self._mailroom = Mailroom(self._worker)
        self.address = Address(host=host, port=self._worker.port, token=secrets.token_hex(16))
        self._handshakes = Handshakes(me, self._worker, self._mailroom, self.address, memory.size, self)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv-ucx", daemon=True)
        self._thread.start()

    # ---- from the owner's thread -----------------------------------------------------------------------------

    def submit(self, command: Callable[[], None]) -> None:
        """Has the engine's thread call `command`, in order."""
        self._commands.append(command)
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Ends every connection and the thread. Once."""
        self.submit(self._stop)
        self._thread.join()
        os.close(self._wake_fd)

    # ---- commands, in the engine's thread --------------------------------------------------------------------

    def dial(self, peer: PeerId, endpoint: bytes) -> None:
        if peer not in self._outbound:
            self._handshakes.dial(peer, endpoint, self._now_ns)

    def post(self, peer: PeerId, write: PostedWrite) -> None:
        channel = self._outbound.get(peer) or (None if write.copies else self._inbound.get(peer))
        if channel is None:
            self._emit(WriteFailed(handle=write.handle, quiesced=True, reason="the connection has ended"))
            return
        channel.writer.post(write)

    def cancel(self, handle: int) -> None:
        for peer, channel in list(self._outbound.items()):
            try:
                channel.writer.cancel(handle, self._now_ns)
            except LinkLostError as error:
                self.lose(peer, str(error))

    def fence(self, peer: PeerId) -> None:
        if peer not in self._fencing and peer not in self._fenced:
            self._fencing[peer] = None
            self.lose(peer, "fenced")

    def disconnect(self, peer: PeerId) -> None:
        self._handshakes.end_dial(peer, "disconnected")
        self._drop(peer, "disconnected")

    def lose(self, peer: PeerId, reason: str) -> None:
        """The peer is gone, or as good as: both directions end, and the owner is told once."""
        if peer in self._outbound or peer in self._inbound:
            self._drop(peer, reason)
            self._emit(PeerGone(peer=peer, reason=reason))

    def _stop(self) -> None:
        self._is_stopping = True

    # ---- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._take_turns()
        except BaseException as error:  # noqa: BLE001 - told to the owner, whose next poll raises it
            _log.exception("the transfer thread has died")
            self._fail(error)
        finally:
            self._shut_down()

    def _take_turns(self) -> None:
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        poller.register(self._worker.fileno(), select.POLLIN)
        while not self._is_stopping:
            has_moved = self._turn()
            if self._events:
                events, self._events = self._events, []
                self._report(events)
            if not has_moved and not self._commands and self._worker.arm():
                ready = poller.poll(self._sleep_ms())
                if any(fd == self._wake_fd for fd, _ in ready):
                    os.eventfd_read(self._wake_fd)
            self._now_ns = time.monotonic_ns()

    def _turn(self) -> bool:
        """True if something happened, so that more may be possible at once."""
        has_moved = bool(self._commands)
        while self._commands:
            self._commands.popleft()()
        self._worker.progress()
        has_moved |= self._mailroom.turn(self._now_ns)
        has_moved |= self._handshakes.turn(self._now_ns)
        for channels in (self._outbound, self._inbound):
            for peer, channel in list(channels.items()):
                if channels.get(peer) is channel:  # else it was lost together with the other direction
                    has_moved |= self._serve(channel)
        self._settle()
        if self._now_ns >= self._next_check_ns:
            self._next_check_ns = self._now_ns + self._check_interval_ns
            self._check_times()
        return has_moved

    def _serve(self, channel: Channel) -> bool:
        try:
            return channel.turn(self._now_ns)
        except (LinkLostError, UcxProtocolError) as error:
            self.lose(channel.peer, str(error))
            return True

    def _sleep_ms(self) -> int | None:
        if self._settling:
            return SETTLE_INTERVAL_MS
        if self._outbound or self._inbound or not self._handshakes.is_idle:
            return max(1, (self._next_check_ns - self._now_ns) // MILLISECOND_NS)
        return None

    def _check_times(self) -> None:
        """Who was not heard for too long is given up; who was not told anything for a while hears a PING.

        What had arrived was heard in this very turn, so that our own pause is not taken for the peer's.
        """
        silence_ns = self._peer_timeout_ns - self._check_interval_ns  # so that it is noticed within the timeout
        limit_ns = self._now_ns - silence_ns
        seconds = f"{silence_ns / SECOND_NS:g} s"
        self._handshakes.expire(limit_ns, f"no answer within {seconds}")
        for channel in [*self._outbound.values(), *self._inbound.values()]:
            if channel.link.heard_ns < limit_ns:
                self.lose(channel.peer, f"it was not heard for {seconds}")
            elif channel.link.said_ns <= self._now_ns - self._peer_timeout_ns // HEARTBEATS_PER_TIMEOUT:
                try:
                    channel.link.say(Frame(kind=PING), self._now_ns)
                except LinkLostError as error:
                    self.lose(channel.peer, str(error))

    def _shut_down(self) -> None:
        self._handshakes.close()
        for peer in [*self._outbound, *self._inbound]:
            self._drop(peer, "closed")
        deadline_ns = time.monotonic_ns() + SETTLE_AT_CLOSE_NS
        self._settle()
        while self._settling and time.monotonic_ns() < deadline_ns:
            self._worker.progress()
            self._settle()
        if self._settling:
            _log.error("%d ucx connections did not settle in time", len(self._settling))
        self._settling.clear()
        self._commands.clear()
        self._mailroom.close()
        self._worker.close()
        del self._memory

    # ---- connections: from the handshakes --------------------------------------------------------------------

    def refusal(self, writer: PeerId) -> str | None:
        if writer in self._fencing or writer in self._fenced:
            return f"{writer.name} (incarnation {writer.incarnation}) is fenced"
        return None

    def admit(self, peer: PeerId, link: Link) -> None:
        if peer in self._inbound:  # the old connection is broken, and the peer was the first to notice
            self.lose(peer, "it has connected anew")
        self._inbound[peer] = self._make_channel(peer, link, self._memory)
        self._emit(Reachable(peer=peer, pool_size_bytes=None))
        self._emit(Connected(peer=peer))

    def connected(self, peer: PeerId, link: Link, pool_size_bytes: int) -> None:
        self._outbound[peer] = self._make_channel(peer, link, None)
        self._emit(Reachable(peer=peer, pool_size_bytes=pool_size_bytes))
        self._emit(Connected(peer=peer))

    def not_connected(self, peer: PeerId, reason: str) -> None:
        self._emit(ConnectFailed(peer=peer, reason=reason))

    def let_go(self, link: Link) -> None:
        self._close(None, link)

    # ---- connections -----------------------------------------------------------------------------------------

    def _make_channel(self, peer: PeerId, link: Link, target: Memory | None) -> Channel:
        def deliver(payload: bytes) -> None:
            self._emit(Notified(peer=peer, payload=payload))

        writer = Writer(link, self._memory, self._staging, self._emit)
        reader = Reader(link, target, self._staging, self._worker, deliver)
        return Channel(peer=peer, link=link, writer=writer, reader=reader)

    def _drop(self, peer: PeerId, reason: str) -> None:
        """Ends both directions."""
        for channels in (self._outbound, self._inbound):
            channel = channels.pop(peer, None)
            if channel is not None:
                channel.writer.fail(reason)
                self._close(peer, channel)
        self._emit(Dropped(peer=peer))

    def _close(self, peer: PeerId | None, ended: Channel | Link) -> None:
        self._mailroom.leave(ended if isinstance(ended, Link) else ended.link)
        ended.close()
        self._settling.append((peer, ended))

    def _settle(self) -> None:
        """Forgets what UCX has let go of, and completes the fences that waited for it."""
        if self._settling:
            self._settling = [(peer, ended) for peer, ended in self._settling if not ended.has_settled()]
        for peer in list(self._fencing):
            if all(peer != unsettled for unsettled, _ in self._settling):
                del self._fencing[peer]
                self._fenced.add(peer, None)
                self._emit(Fenced(peer=peer))

    def _emit(self, event: EngineEvent) -> None:
        self._events.append(event)

    def check_invariants(self) -> None:
        """To be called in the engine's thread."""
        self._handshakes.check_invariants()
        for peer in self._inbound:
            assert peer not in self._fencing and peer not in self._fenced, "a fenced life is connected"
        for channels in (self._outbound, self._inbound):
            for peer, channel in channels.items():
                assert peer == channel.peer
                channel.check_invariants()
