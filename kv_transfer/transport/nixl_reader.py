"""The end of one nixl connection that is written to, in a thread of its own: admits the writer, then lets arrive.

Its agent is the writer's only way into the pool. However the connection ends, the agent is destroyed before anybody
is told, so the end of this thread is the fence of that connection.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable

from kv_transfer.checksum import Memory
from kv_transfer.transport.base import PeerId, TransportError
from kv_transfer.transport.nixl_agent import NixlAgent
from kv_transfer.transport.nixl_desk import Arrived, Desk, Ended, Established, HelloArrived, Order, Pace, Report
from kv_transfer.transport.nixl_limits import HANDSHAKE_POLL_S, MAX_QUEUED, PROBE, NixlLimits
from kv_transfer.transport.nixl_link import ControlLink, LinkEndedError
from kv_transfer.transport.nixl_wire import (
    ACTIVE,
    BYE,
    LEAVE,
    NOTIFY,
    PING,
    QUIET,
    READY,
    Hello,
    NixlProtocolError,
    Refused,
    Welcome,
    decode_handshake,
    encode_handshake,
)


class Reader:
    """Of an accepted connection. The transport's owner answers its HelloArrived at `desk`."""

    def __init__(
        self,
        me: PeerId,
        connection: socket.socket,
        memory: Memory,
        host: str,
        limits: NixlLimits,
        report: Callable[[Report], None],
    ) -> None:
        self.desk = Desk(report)
        self._me = me
        self._connection = connection
        self._memory = memory
        self._host = host
        self._limits = limits
        self._agent: NixlAgent | None = None
        self._is_active = False

    def run(self) -> None:
        """The thread."""
        link: ControlLink | None = None
        try:
            link = ControlLink(self._connection, self.desk.wake_fd, self._limits)
            self._shake_hands(link)
            reason = self._serve(link)
        except (OSError, TransportError) as error:
            reason = str(error)
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()
        jobs = self.desk.finish()
        if link is not None:
            for job in jobs:
                link.say(NOTIFY, job.notify)
            link.close(BYE, reason.encode())
        self.desk.report(Ended(desk=self.desk, reason=reason))

    # ---- admission -------------------------------------------------------------------------------------------

    def _shake_hands(self, link: ControlLink) -> None:
        """Raises: TransportError."""
        deadline_s = time.monotonic() + self._limits.connect_timeout_s
        self._wait_until(link, deadline_s, lambda: bool(link.frames))
        hello = decode_handshake(*link.frames.popleft())
        if not isinstance(hello, Hello):
            raise NixlProtocolError("the connection did not begin with HELLO")
        self.desk.report(HelloArrived(desk=self.desk, hello=hello))
        try:
            self._wait_until(link, deadline_s, lambda: self.desk.is_admitted)
        except LinkEndedError as error:
            link.say_frame(encode_handshake(Refused(reason=str(error))))
            raise
        name = f"{self._me.name}.{self._me.incarnation}.{secrets.token_hex(8)}"
        self._agent = agent = NixlAgent(name, self._memory, self._host, self._limits.silence_timeout_s)
        welcome = Welcome(
            base_address=agent.base_address, size_bytes=self._memory.size, metadata=agent.metadata().hex()
        )
        link.say_frame(encode_handshake(welcome))
        self._wait_until(link, deadline_s, lambda: PROBE in agent.progress())
        link.say(READY)
        self.desk.report(Established(desk=self.desk))

    def _wait_until(self, link: ControlLink, deadline_s: float, is_reached: Callable[[], bool]) -> None:
        """Raises: LinkEndedError."""
        while True:
            link.flush()
            link.receive()
            if self.desk.order is not Order.SERVE:
                raise LinkEndedError(self.desk.reason)
            if is_reached():
                return
            if time.monotonic() >= deadline_s:
                raise LinkEndedError(f"not connected within {self._limits.connect_timeout_s:g} s")
            link.wait(HANDSHAKE_POLL_S)

    # ---- being written to ------------------------------------------------------------------------------------

    def _serve(self, link: ControlLink) -> str:
        """Until the connection ends; returns why, or raises TransportError."""
        assert self._agent is not None
        pace = Pace()
        while self.desk.order is Order.SERVE:
            link.receive()
            if self._take_frames(link):
                return "left"
            self._say_what_waits(link)
            if self._is_active:
                started_ns = time.monotonic_ns()
                self._agent.progress()
                pace.rest(started_ns)
            else:
                link.wait(self._limits.heartbeat_interval_s)
                pace.start()
        return self.desk.reason

    def _take_frames(self, link: ControlLink) -> bool:
        """Whether the writer leaves. Raises: LinkEndedError."""
        is_leaving = has_arrived = False
        while link.frames:
            kind, body = link.frames.popleft()
            if kind == NOTIFY:
                self.desk.arrived.append(body)
                has_arrived = True
            elif kind in (ACTIVE, QUIET):
                self._is_active = kind == ACTIVE
            elif kind == LEAVE:
                is_leaving = True
            elif kind != PING:
                raise NixlProtocolError(f"a frame of kind {kind}")
        if has_arrived:
            self.desk.report(Arrived(desk=self.desk))
        if len(self.desk.arrived) > MAX_QUEUED:
            raise LinkEndedError(f"{MAX_QUEUED} notifications were left unread")
        return is_leaving

    def _say_what_waits(self, link: ControlLink) -> None:
        while not link.is_full:
            job = self.desk.next_job()
            if job is None:
                break
            link.say(NOTIFY, job.notify)
            link.flush()
        link.flush()
