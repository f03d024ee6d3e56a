"""The writer's end of a connection, from the dial to the last write's end."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kv_transfer.transport.base import Notified, PeerId, TransportError, TransportEvent
from kv_transfer.transport.nccl_control import ControlClosedError, ControlConnection
from kv_transfer.transport.nccl_library import WRITER_RANK, NcclCommunicator, NcclError, NcclLibrary
from kv_transfer.transport.nccl_limits import NcclLimits, NcclTimeoutError
from kv_transfer.transport.nccl_link import Opening, Phase, Session
from kv_transfer.transport.nccl_wire import (
    ARRIVED,
    ENDED,
    NOTIFY,
    OPENED,
    PING,
    QUIET,
    READY,
    WELCOME,
    Hello,
    NcclProtocolError,
    Refused,
    Welcome,
    decode_ended,
    decode_group,
    decode_handshake,
    encode_ended,
    encode_handshake,
)
from kv_transfer.transport.nccl_writing import WritingSide

_log = logging.getLogger(__name__)


class PeerEndedError(TransportError):
    """The other end gave the connection up, and says why."""


class Outbound:
    """One connection over which we write. Whatever a method raises, its owner answers with `end`.

    After `end`, writes of which something may be under way wait for the receiver to say QUIET; if it does not, their
    failure is reported as not quiesced.
    """

    def __init__(
        self,
        hello: Hello,
        control: ControlConnection,
        library: NcclLibrary,
        limits: NcclLimits,
        emit: Callable[[TransportEvent], None],
        now_ns: int,
    ) -> None:
        self.peer: PeerId = hello.target
        self.phase = Phase.DIALLING
        self.target_size_bytes = 0
        self.session = Session(control, limits, now_ns)
        self.writing: WritingSide | None = None
        self._hello = hello
        self._library = library
        self._limits = limits
        self._emit = emit
        self._deadline_ns = now_ns + limits.connect_timeout_ns
        self._communicator: NcclCommunicator | None = None
        self._opening: Opening | None = None
        self._is_opened_there = False
        self._is_quiet_there = False
        self._reason = ""

    @property
    def is_busy(self) -> bool:
        """Whether something may change without a frame or a deadline."""
        if self.phase is Phase.OPEN:
            return self.writing is not None and self.writing.is_busy
        return self.phase in (Phase.OPENING, Phase.ENDING)

    def next_deadline_ns(self) -> int:
        if self.phase is Phase.ENDING:
            return self._deadline_ns
        if self.phase is Phase.OPEN:
            return self.session.next_deadline_ns()
        return min(self._deadline_ns, self.session.next_deadline_ns())

    def on_dialled(self) -> None:
        """Raises: ControlClosedError."""
        if self.phase is Phase.DIALLING and not self.session.control.is_connecting:
            self.phase = Phase.GREETING
            self.session.send(encode_handshake(self._hello))

    def on_frame(self, frame: bytes) -> None:
        """Raises: PeerEndedError, NcclProtocolError, NcclError."""
        kind = frame[0]
        if self.phase is Phase.ENDING:
            self._on_late_frame(kind, frame)
        elif kind == ENDED:
            raise PeerEndedError(decode_ended(frame))
        elif self.phase is Phase.GREETING and kind != PING:
            self._on_answer(frame)
        elif kind == OPENED and self.phase is Phase.OPENING:
            self._is_opened_there = True
        elif kind == NOTIFY:
            self._emit(Notified(peer=self.peer, payload=frame[1:]))
        elif kind in (READY, ARRIVED) and self.writing is not None:
            (self.writing.on_ready if kind == READY else self.writing.on_arrived)(decode_group(frame))
        elif kind != PING:
            raise NcclProtocolError(f"a frame of kind {kind} while {self.phase.value}")

    def step(self, now_ns: int) -> bool:
        """Whether the connection has just opened. Raises: NcclError, NcclTimeoutError, ControlClosedError."""
        if self.phase is Phase.ENDING:
            self._finish(now_ns)
            return False
        if self.phase is Phase.OPEN:
            self.session.tick(now_ns)
            assert self.writing is not None
            self.writing.step(now_ns)
            return False
        if now_ns >= self._deadline_ns:
            seconds = self._limits.connect_timeout_ns / 1e9
            raise NcclTimeoutError(f"no connection within {seconds:.1f} s: waited for {self._waits_for()}")
        if self.phase is not Phase.OPENING:
            return False
        self.session.tick(now_ns)
        assert self._opening is not None and self._communicator is not None
        if not self._opening.step() or not self._is_opened_there:
            return False
        self.phase = Phase.OPEN
        self.writing = WritingSide(self._communicator, self.session.send, self._emit, self._limits)
        return True

    def end(self, reason: str, now_ns: int, *, is_lost: bool = False) -> None:
        """Gives the connection up: the communicator is aborted. `is_lost`: the peer can be told nothing any more."""
        self.phase = Phase.ENDING
        self._reason = reason
        self._deadline_ns = now_ns + self._limits.linger_timeout_ns
        if self._communicator is not None:
            self._communicator.abort()
        if self.writing is not None:
            self.writing.fail_unsent(reason)
        if is_lost:
            self.session.control.close()
            return
        try:
            self.session.send(encode_ended(reason))
        except ControlClosedError as error:
            _log.debug("%s was not told that the connection ends: %s", self.peer.name, error)
            self.session.control.close()

    def lose_control(self) -> None:
        """The connection broke while it was ending."""
        self.session.control.close()

    def _on_answer(self, frame: bytes) -> None:
        answer = decode_handshake(frame)
        if isinstance(answer, Refused):
            raise PeerEndedError(f"refused: {answer.reason}")
        if not isinstance(answer, Welcome):
            raise NcclProtocolError(f"it answered with a frame of kind {frame[0]}, not {WELCOME}")
        try:
            unique_id = bytes.fromhex(answer.unique_id)
        except ValueError as error:
            raise NcclProtocolError("damaged handshake: unique_id") from error
        self.target_size_bytes = answer.size_bytes
        self._communicator = self._library.communicator(unique_id, WRITER_RANK)
        self._opening = Opening(self._communicator)
        self.phase = Phase.OPENING

    def _on_late_frame(self, kind: int, frame: bytes) -> None:
        if kind == QUIET:
            self._is_quiet_there = True
        elif kind == ARRIVED and self.writing is not None:
            self.writing.on_arrived(decode_group(frame))

    def _finish(self, now_ns: int) -> None:
        # Before the connection was open nothing was sent that could land.
        has_answer = self._is_quiet_there or self.session.control.is_closed or self.writing is None
        is_quiet_here = self._communicator is None or self._is_quiet_here(self._communicator)
        if (has_answer and is_quiet_here) or now_ns >= self._deadline_ns:
            if self.writing is not None:
                self.writing.fail_rest(self._reason, quiesced=self._is_quiet_there)
            self.session.control.close()
            self.phase = Phase.ENDED

    def _is_quiet_here(self, communicator: NcclCommunicator) -> bool:
        try:
            return communicator.is_quiet()
        except NcclError as error:
            _log.warning("the communicator to %s cannot be asked whether it has ended: %s", self.peer.name, error)
            return False

    def _waits_for(self) -> str:
        if self._opening is not None:
            return "its word" if self._opening.is_done else self._opening.waits_for
        return "its address to answer" if self.phase is Phase.DIALLING else "its welcome"
