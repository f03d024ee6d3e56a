"""The writing end of one nixl connection, in a thread of its own: dials, then carries out writes one after the other.

One transfer at a time: its end leaves the other side a moment without arriving data, in which it hears what is said.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence

from kv_transfer.checksum import Memory
from kv_transfer.transport.base import Copy, PeerId, TransportError
from kv_transfer.transport.nixl_agent import NixlAgent, NixlError, Transfer
from kv_transfer.transport.nixl_desk import Arrived, Desk, Ended, Established, Job, Order, Pace, Report, WriteEnded
from kv_transfer.transport.nixl_limits import HANDSHAKE_POLL_S, MAX_QUEUED, PROBE, NixlLimits
from kv_transfer.transport.nixl_link import ControlLink, LinkEndedError, open_connection
from kv_transfer.transport.nixl_wire import (
    ACTIVE,
    BYE,
    LEAVE,
    NOTIFY,
    PING,
    QUIET,
    READY,
    Endpoint,
    Hello,
    NixlProtocolError,
    Refused,
    Welcome,
    decode_endpoint,
    decode_handshake,
    encode_handshake,
)
from kv_transfer.transport.nixl_write import RunningWrite

_log = logging.getLogger(__name__)


class Writer:
    """Of the connection from `me` to `peer`. The transport's owner finds at `desk` what becomes of it."""

    def __init__(
        self,
        me: PeerId,
        peer: PeerId,
        endpoint: bytes,
        memory: Memory,
        limits: NixlLimits,
        report: Callable[[Report], None],
    ) -> None:
        self.desk = Desk(report)
        self.desk.peer = peer
        self._me = me
        self._peer = peer
        self._endpoint = endpoint
        self._memory = memory
        self._limits = limits
        self._agent: NixlAgent | None = None
        self._peer_agent = ""
        self._peer_base_address = 0
        self._write: RunningWrite | None = None
        self._is_peer_polling = False
        self._has_peer_let_go = False

    def run(self) -> None:
        """The thread."""
        link: ControlLink | None = None
        try:
            where = decode_endpoint(self._endpoint)
            deadline_s = time.monotonic() + self._limits.connect_timeout_s
            connection = open_connection(where.host, where.port, self.desk.wake_fd, self._limits.connect_timeout_s)
            link = ControlLink(connection, self.desk.wake_fd, self._limits)
            self._shake_hands(link, where, deadline_s)
            self.desk.report(Established(desk=self.desk))
            reason = self._serve(link)
        except (OSError, TransportError) as error:
            reason = str(error)
        self._destroy_agent()
        jobs = self.desk.finish()
        if link is not None:
            _say_notifications(link, jobs)
            link.close(LEAVE)
        if self._write is not None:
            quiesced = self._has_peer_let_go or not self._write.is_in_flight
            self.desk.report(WriteEnded(handle=self._write.job.handle, failure=reason, quiesced=quiesced))
            self._write = None  # it knows us, too, and the pool could not be closed before a cycle is collected
        self._fail_jobs(reason, jobs)
        self.desk.report(Ended(desk=self.desk, reason=reason))

    # ---- connecting ------------------------------------------------------------------------------------------

    def _shake_hands(self, link: ControlLink, where: Endpoint, deadline_s: float) -> None:
        """Raises: TransportError."""
        hello = Hello(
            writer_name=self._me.name,
            writer_incarnation=self._me.incarnation,
            target_name=self._peer.name,
            target_incarnation=self._peer.incarnation,
            token=where.token,
        )
        link.say_frame(encode_handshake(hello))
        link.flush()
        # Made while the other end makes its own. Names must differ between all agents that ever meet.
        name = f"{self._me.name}.{self._me.incarnation}.{secrets.token_hex(8)}"
        self._agent = agent = NixlAgent(name, self._memory, where.host, self._limits.silence_timeout_s)
        welcome = decode_handshake(*self._await_frame(link, deadline_s))
        if isinstance(welcome, Refused):
            raise LinkEndedError(f"refused: {welcome.reason}")
        if not isinstance(welcome, Welcome):
            raise NixlProtocolError("the other end does not speak this protocol")
        self._peer_base_address = welcome.base_address
        self.desk.target_size_bytes = welcome.size_bytes
        self._peer_agent = agent.add_peer(welcome.agent_metadata())
        if self.desk.order is not Order.SERVE:  # given up while the library blocked
            raise LinkEndedError(self.desk.reason)
        agent.probe(self._peer_agent, PROBE)
        kind, _ = self._await_frame(link, deadline_s)
        if kind != READY:
            raise NixlProtocolError("the other end does not speak this protocol")

    def _await_frame(self, link: ControlLink, deadline_s: float) -> tuple[int, bytes]:
        """Raises: LinkEndedError."""
        assert self._agent is not None
        while True:
            if self.desk.order is not Order.SERVE:
                raise LinkEndedError(self.desk.reason)
            if time.monotonic() >= deadline_s:
                raise LinkEndedError(f"not connected within {self._limits.connect_timeout_s:g} s")
            link.receive()
            while link.frames:
                kind, body = link.frames.popleft()
                if kind == BYE:
                    raise LinkEndedError(body.decode(errors="replace"))
                if kind != PING:
                    return kind, body
            link.flush()
            self._agent.progress()
            link.wait(HANDSHAKE_POLL_S)

    # ---- writing ---------------------------------------------------------------------------------------------

    def _serve(self, link: ControlLink) -> str:
        """Until the connection ends; returns why, or raises TransportError."""
        pace = Pace()
        while self.desk.order is Order.SERVE:
            link.receive()
            self._take_frames(link)
            started_ns = time.monotonic_ns()
            try:
                self._advance(link)
            except NixlError as error:
                self._leave(link)
                return str(error)
            link.flush()
            if self._write is None:
                link.wait(self._limits.heartbeat_interval_s)
                pace.start()
            else:
                pace.rest(started_ns)
        if self.desk.order is Order.LEAVE:
            self._leave(link)
        return self.desk.reason

    def _take_frames(self, link: ControlLink) -> None:
        """Raises: LinkEndedError if the other end has let go."""
        has_arrived = False
        farewell: str | None = None
        while link.frames and farewell is None:
            kind, body = link.frames.popleft()
            if kind == NOTIFY:
                self.desk.arrived.append(body)
                has_arrived = True
            elif kind == BYE:
                farewell = body.decode(errors="replace")
        if has_arrived:
            self.desk.report(Arrived(desk=self.desk))
        if farewell is not None:
            self._has_peer_let_go = True
            raise LinkEndedError(farewell)
        if len(self.desk.arrived) > MAX_QUEUED:
            raise LinkEndedError(f"{MAX_QUEUED} notifications were left unread")

    def _advance(self, link: ControlLink) -> None:
        """Moves the write under way on, and begins what can begin. Raises: NixlError, LinkEndedError."""
        if self._write is not None:
            if not self._write.advance():
                return
            self._end_write(link, self._write)
        while self._write is None and not link.is_full:
            job = self.desk.next_job()
            if job is None:
                if self._is_peer_polling:
                    self._is_peer_polling = False
                    link.say(QUIET)
                return
            if job.is_cancelled:
                self._fail_jobs("cancelled", [job])
            elif job.copies:
                self._begin_write(link, job)
            else:
                link.say(NOTIFY, job.notify)
                link.flush()

    def _begin_write(self, link: ControlLink, job: Job) -> None:
        if not self._is_peer_polling:
            self._is_peer_polling = True
            link.say(ACTIVE)
        link.flush()  # also what the last write ended with: posting takes its time
        self._write = RunningWrite(job, self._memory, self._post, self._limits.transfer_timeout_s)
        self._write.start()

    def _post(self, copies: Sequence[Copy]) -> Transfer:
        assert self._agent is not None
        return self._agent.post(self._peer_agent, copies, self._peer_base_address)

    def _end_write(self, link: ControlLink, write: RunningWrite) -> None:
        self._write = None
        if write.is_cut_short:
            self._fail_jobs("cancelled", [write.job])
            return
        link.say(NOTIFY, write.notification())
        self.desk.report(WriteEnded(handle=write.job.handle, failure=None))

    def _fail_jobs(self, reason: str, jobs: Sequence[Job]) -> None:
        """Of jobs of which nothing is in flight. A notification alone has been reported when it was posted."""
        for job in jobs:
            if job.copies:
                self.desk.report(WriteEnded(handle=job.handle, failure=reason))

    # ---- the end ---------------------------------------------------------------------------------------------

    def _leave(self, link: ControlLink) -> None:
        """Asks the other end to let go: from its BYE on nothing of a write under way can land there."""
        deadline_s = time.monotonic() + self._limits.leave_timeout_s
        jobs = self.desk.take_jobs()
        _say_notifications(link, jobs)
        self._fail_jobs(self.desk.reason or "the connection has ended", jobs)
        link.say(LEAVE)
        try:
            while self.desk.order is not Order.DROP and time.monotonic() < deadline_s:
                link.flush()
                link.receive()
                self._take_frames(link)
                link.wait(HANDSHAKE_POLL_S)
        except TransportError as error:
            _log.debug("left %s: %s", self._peer, error)

    def _destroy_agent(self) -> None:
        """From here on nothing reads our memory; what has left it may still land in the peer's."""
        agent, self._agent = self._agent, None
        if self._write is not None:
            try:
                self._write.abandon()
            except NixlError as error:
                _log.debug("a transfer to %s did not end in order: %s", self._peer, error)
        if agent is not None:
            agent.close()


def _say_notifications(link: ControlLink, jobs: Sequence[Job]) -> None:
    """Those alone, of jobs that will not be carried out: they were reported as completed when they were posted."""
    for job in jobs:
        if not job.copies:
            link.say(NOTIFY, job.notify)
