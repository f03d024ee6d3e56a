"""The receiver's end of a connection, from the welcome to the moment when nothing of it can land any more."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kv_transfer.transport.base import Notified, PeerId, TransportEvent
from kv_transfer.transport.nccl_control import ControlClosedError
from kv_transfer.transport.nccl_library import RECEIVER_RANK, NcclCommunicator, NcclError, NcclLibrary
from kv_transfer.transport.nccl_limits import SECOND_NS, NcclLimits, NcclTimeoutError
from kv_transfer.transport.nccl_link import Opening, Phase, Session
from kv_transfer.transport.nccl_outbound import PeerEndedError
from kv_transfer.transport.nccl_receiving import ReceivePermits, ReceivingSide
from kv_transfer.transport.nccl_wire import (
    ANNOUNCE,
    ENDED,
    NOTIFY,
    OPENED,
    PING,
    QUIET,
    NcclProtocolError,
    Welcome,
    decode_announcement,
    decode_ended,
    encode_ended,
    encode_handshake,
)

HUNG_ABORT_POLL_NS = SECOND_NS // 10
"""How often an abort is asked about that has taken longer than a connection's end should."""

_log = logging.getLogger(__name__)


class Inbound:
    """One connection over which a peer writes to us. Whatever a method raises, its owner answers with `end`."""

    def __init__(
        self,
        peer: PeerId,
        session: Session,
        library: NcclLibrary,
        limits: NcclLimits,
        permits: ReceivePermits,
        emit: Callable[[TransportEvent], None],
        now_ns: int,
    ) -> None:
        self.peer = peer
        self.phase = Phase.OPENING
        self.session = session
        self.is_quiet = False
        """From now on nothing of this connection touches the pool."""
        self._library = library
        self._limits = limits
        self._emit = emit
        self._permits = permits
        self._deadline_ns = now_ns + limits.connect_timeout_ns
        self._is_hung = False
        self._communicator: NcclCommunicator | None = None
        self._opening: Opening | None = None
        self.receiving: ReceivingSide | None = None

    @property
    def is_busy(self) -> bool:
        if self.phase is Phase.OPEN:
            return self.receiving is not None and self.receiving.is_busy
        return self.phase is Phase.OPENING or (self.phase is Phase.ENDING and not self.is_quiet and not self._is_hung)

    def next_deadline_ns(self) -> int:
        if self.phase is Phase.OPENING:
            return min(self._deadline_ns, self.session.next_deadline_ns())
        return self._deadline_ns if self.phase is Phase.ENDING else self.session.next_deadline_ns()

    def welcome(self) -> None:
        """Raises: NcclError, ControlClosedError."""
        unique_id = self._library.unique_id()
        self._communicator = self._library.communicator(unique_id, RECEIVER_RANK)
        self._opening = Opening(self._communicator)
        answer = Welcome(size_bytes=self._library.size_bytes, unique_id=unique_id.hex())
        self.session.send(encode_handshake(answer))

    def notify(self, payload: bytes) -> None:
        """Raises: ControlClosedError."""
        self.session.send(bytes([NOTIFY]) + payload)

    def on_frame(self, frame: bytes) -> None:
        """Raises: PeerEndedError, NcclProtocolError."""
        kind = frame[0]
        if self.phase is Phase.ENDING:
            return
        if kind == ENDED:
            raise PeerEndedError(decode_ended(frame))
        if self.receiving is not None and kind == ANNOUNCE:
            self.receiving.on_announcement(decode_announcement(frame))
        elif self.receiving is not None and kind == NOTIFY:
            self.receiving.on_notify(frame[1:])
        elif kind != PING:
            raise NcclProtocolError(f"a frame of kind {kind} while {self.phase.value}")

    def step(self, now_ns: int) -> bool:
        """Whether the connection has just opened. Raises: NcclError, NcclTimeoutError, ControlClosedError."""
        if self.phase is Phase.ENDING:
            self._finish(now_ns)
            return False
        self.session.tick(now_ns)
        if self.phase is Phase.OPEN:
            assert self.receiving is not None
            self.receiving.step(now_ns)
            return False
        assert self._opening is not None and self._communicator is not None
        if now_ns >= self._deadline_ns:
            seconds = self._limits.connect_timeout_ns / 1e9
            raise NcclTimeoutError(f"no connection within {seconds:.1f} s: waited for {self._opening.waits_for}")
        if not self._opening.step():
            return False
        self.session.send(bytes([OPENED]))  # first, for if it fails the connection was never open
        self.phase = Phase.OPEN
        self.receiving = ReceivingSide(
            self._communicator,
            self._library.size_bytes,
            self.session.send,
            self._deliver,
            self._permits,
            self._limits,
        )
        return True

    def end(self, reason: str, now_ns: int, *, is_lost: bool = False) -> None:
        """Gives the connection up: the communicator is aborted. `is_lost`: the peer can be told nothing any more."""
        self.phase = Phase.ENDING
        self._deadline_ns = now_ns + self._limits.linger_timeout_ns
        if self._communicator is None:
            self.is_quiet = True
        else:
            self._communicator.abort()
        if is_lost:
            self.session.control.close()
        else:
            self._tell(encode_ended(reason))

    def lose_control(self) -> None:
        """The connection broke, or the writer has closed it, while it was ending."""
        self.session.control.close()

    def _deliver(self, payload: bytes) -> None:
        self._emit(Notified(peer=self.peer, payload=payload))

    def _finish(self, now_ns: int) -> None:
        """Quiet first, whatever it takes; then the writer is told, and has its time to hear it."""
        if not self.is_quiet:
            assert self._communicator is not None
            try:
                self.is_quiet = self._communicator.is_quiet()
            except NcclError as error:
                _log.warning("the communicator from %s cannot be asked whether it has ended: %s", self.peer.name, error)
            if not self.is_quiet:
                self._keep_waiting(now_ns)
                return
            if self.receiving is not None:
                self.receiving.release()
            self._deadline_ns = now_ns + self._limits.linger_timeout_ns
            self._tell(bytes([QUIET]))
        if self.session.control.is_closed or now_ns >= self._deadline_ns:
            self.session.control.close()
            self.phase = Phase.ENDED

    def _keep_waiting(self, now_ns: int) -> None:
        if now_ns < self._deadline_ns:
            return
        if not self._is_hung:
            self._is_hung = True
            peer = self.peer
            _log.warning("the communicator from %s (incarnation %d) does not end", peer.name, peer.incarnation)
        self._deadline_ns = now_ns + HUNG_ABORT_POLL_NS

    def _tell(self, frame: bytes) -> None:
        if self.session.control.is_closed:
            return
        try:
            self.session.send(frame)
        except ControlClosedError as error:
            _log.debug("%s was not told that the connection ends: %s", self.peer.name, error)
            self.session.control.close()
