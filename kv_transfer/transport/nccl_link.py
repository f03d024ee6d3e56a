"""What both ends of an nccl connection share: signs of life, and the way a communicator comes up."""

from __future__ import annotations

from enum import Enum

from kv_transfer.transport.nccl_control import ControlClosedError, ControlConnection
from kv_transfer.transport.nccl_library import Completion, NcclCommunicator
from kv_transfer.transport.nccl_limits import NcclLimits
from kv_transfer.transport.nccl_wire import PING


class Phase(Enum):
    """Of a connection. It only moves forward, and any phase may be followed by ENDING."""

    DIALLING = "dialling"
    GREETING = "greeting"
    OPENING = "opening"
    OPEN = "open"
    ENDING = "ending"
    ENDED = "ended"


class Session:
    """A control connection whose silence is noticed, at both ends."""

    def __init__(self, control: ControlConnection, limits: NcclLimits, now_ns: int) -> None:
        self.control = control
        self._limits = limits
        self._last_heard_ns = now_ns
        self._last_sent_ns = now_ns
        self._has_heard = False
        self._has_sent = False

    def send(self, frame: bytes) -> None:
        """Raises: ControlClosedError."""
        self._has_sent = True
        self.control.send(frame)

    def receive(self) -> tuple[list[bytes], str | None]:
        """See ControlConnection.receive."""
        frames, ended = self.control.receive()
        self._has_heard |= bool(frames)
        return frames, ended

    def tick(self, now_ns: int) -> None:
        """Raises: ControlClosedError if the peer has said nothing for too long, or can't be told anything."""
        if self._has_heard:
            self._last_heard_ns, self._has_heard = now_ns, False
        if now_ns - self._last_heard_ns >= self._limits.silence_timeout_ns:
            raise ControlClosedError(f"it has said nothing for {self._limits.silence_timeout_ns / 1e9:.1f} s")
        if self._has_sent:
            self._last_sent_ns, self._has_sent = now_ns, False
        elif now_ns - self._last_sent_ns >= self._limits.heartbeat_interval_ns:
            self._last_sent_ns = now_ns
            self.control.send(bytes([PING]))

    def next_deadline_ns(self) -> int:
        return min(
            self._last_heard_ns + self._limits.silence_timeout_ns,
            self._last_sent_ns + self._limits.heartbeat_interval_ns,
        )


class Opening:
    """Brings a communicator up: both ranks join, then the first bytes travel, for only these connect the ranks.

    What NCCL allocates, it allocates now. Later calls settle without the peer.
    """

    def __init__(self, communicator: NcclCommunicator) -> None:
        self._communicator = communicator
        self._is_probing = False
        self._mark: Completion | None = None
        self.is_done = False

    def step(self) -> bool:
        """Whether the first bytes have arrived (at the writer: have left). Raises: NcclError."""
        if self.is_done or not self._communicator.is_ready():
            return self.is_done
        if not self._is_probing:
            self._is_probing = True
            self._communicator.probe()
        elif self._mark is None:
            self._mark = self._communicator.completion()
        else:
            self.is_done = self._mark.is_done()
        return self.is_done

    @property
    def waits_for(self) -> str:
        return "the first bytes" if self._is_probing else "both ends to join the communicator"
