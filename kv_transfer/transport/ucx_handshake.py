"""How ucx connections begin: ours say HELLO and wait for an answer, accepted ones are heard, admitted or refused."""

from __future__ import annotations

import logging
import secrets
from typing import Protocol

from kv_transfer.transport.base import PeerId
from kv_transfer.transport.ucx_library import UcxEndpointError, Worker
from kv_transfer.transport.ucx_link import Link, LinkLostError
from kv_transfer.transport.ucx_wire import (
    Endpoint,
    Hello,
    Refused,
    UcxProtocolError,
    Welcome,
    decode_endpoint,
    decode_greeting,
    encode_greeting,
)

MAX_DIALS = 64
MAX_UNGREETED = 64
"""Accepted connections that have not said HELLO, or were refused and have not left; beyond it the oldest is closed."""

_log = logging.getLogger(__name__)


class Hall(Protocol):
    """Where connections go from here."""

    def refusal(self, hello: Hello) -> str | None:
        """Why a writer may not come in; None if it may."""

    def admit(self, peer: PeerId, link: Link) -> None:
        """A writer has come in and was told WELCOME."""

    def connected(self, peer: PeerId, link: Link, pool_size_bytes: int) -> None:
        """A peer has let us in."""

    def not_connected(self, peer: PeerId, reason: str) -> None: ...

    def let_go(self, link: Link) -> None:
        """Closes a connection that has come to nothing."""


class Handshakes:
    """Connections that are not through yet. All of it runs in the backend's thread."""

    def __init__(self, me: PeerId, worker: Worker, endpoint: Endpoint, pool_size_bytes: int, hall: Hall) -> None:
        self._me = me
        self._worker = worker
        self._endpoint = endpoint
        self._pool_size_bytes = pool_size_bytes
        self._hall = hall
        self._greeting: list[Link] = []
        self._dialling: dict[PeerId, Link] = {}

    @property
    def is_idle(self) -> bool:
        return not self._greeting and not self._dialling

    def dial(self, peer: PeerId, endpoint: bytes, now_ns: int) -> None:
        """`connected` or `not_connected` follows."""
        if peer in self._dialling:
            return
        if len(self._dialling) >= MAX_DIALS:
            self._hall.not_connected(peer, f"{MAX_DIALS} connections are being made already")
            return
        try:
            where = decode_endpoint(endpoint)
            link = Link(self._worker.connect(where.host, where.port), now_ns)
        except (UcxEndpointError, UcxProtocolError) as error:
            self._hall.not_connected(peer, str(error))
            return
        self._dialling[peer] = link
        hello = Hello(
            writer_name=self._me.name,
            writer_incarnation=self._me.incarnation,
            target_name=peer.name,
            target_incarnation=peer.incarnation,
            token=where.token,
        )
        try:
            link.say(encode_greeting(hello), now_ns)
        except LinkLostError as error:
            self.end_dial(peer, str(error))

    def end_dial(self, peer: PeerId, reason: str) -> None:
        """Nothing if that peer is not being dialled."""
        link = self._dialling.pop(peer, None)
        if link is not None:
            self._hall.let_go(link)
            self._hall.not_connected(peer, reason)

    def turn(self, now_ns: int) -> bool:
        """Hears whoever has said something. True if there was something."""
        has_moved = False
        for endpoint in self._worker.accept():
            self._wait_for(Link(endpoint, now_ns))
            has_moved = True
        for link in list(self._greeting):
            has_moved |= self._guard_greeting(link, now_ns)
        for peer, link in list(self._dialling.items()):
            has_moved |= self._hear_answer(peer, link, now_ns)
        return has_moved

    def expire(self, opened_before_ns: int, reason: str) -> None:
        for peer, link in list(self._dialling.items()):
            if link.opened_ns < opened_before_ns:
                self.end_dial(peer, reason)
        for link in [link for link in self._greeting if link.opened_ns < opened_before_ns]:
            self._dismiss(link)

    def close(self) -> None:
        for link in [*self._greeting, *self._dialling.values()]:
            self._hall.let_go(link)
        self._greeting.clear()
        self._dialling.clear()

    def check_invariants(self) -> None:
        assert len(self._dialling) <= MAX_DIALS and len(self._greeting) <= MAX_UNGREETED

    # ---- being dialled ---------------------------------------------------------------------------------------

    def _guard_greeting(self, link: Link, now_ns: int) -> bool:
        try:
            return self._hear_hello(link, now_ns)
        except LinkLostError:
            self._dismiss(link)
        except UcxProtocolError as error:
            _log.warning("refused a ucx connection: %s", error)
            self._refuse(link, str(error), now_ns)
        return True

    def _hear_hello(self, link: Link, now_ns: int) -> bool:
        frames = link.hear(now_ns, max_frames=1)
        if not frames:
            return False
        hello = decode_greeting(frames[0])
        if not isinstance(hello, Hello):
            raise UcxProtocolError("the connection did not begin with HELLO")
        if hello.target != self._me or not secrets.compare_digest(hello.token, self._endpoint.token):
            raise UcxProtocolError(f"this is {self._me.name} (incarnation {self._me.incarnation})")
        refusal = self._hall.refusal(hello)
        if refusal is not None:
            raise UcxProtocolError(refusal)
        link.say(encode_greeting(Welcome(size_bytes=self._pool_size_bytes)), now_ns)
        self._greeting.remove(link)
        self._hall.admit(hello.writer, link)
        return True

    def _refuse(self, link: Link, reason: str, now_ns: int) -> None:
        """The connection stays until the other end has left or its time is up: a close would overtake the word."""
        try:
            link.say(encode_greeting(Refused(reason=reason)), now_ns)
        except LinkLostError:
            self._dismiss(link)

    def _wait_for(self, link: Link) -> None:
        self._greeting.append(link)
        if len(self._greeting) > MAX_UNGREETED:
            self._dismiss(self._greeting[0])

    def _dismiss(self, link: Link) -> None:
        self._greeting.remove(link)
        self._hall.let_go(link)

    # ---- dialling --------------------------------------------------------------------------------------------

    def _hear_answer(self, peer: PeerId, link: Link, now_ns: int) -> bool:
        try:
            frames = link.hear(now_ns, max_frames=1)
            if not frames:
                return False
            answer = decode_greeting(frames[0])
        except (LinkLostError, UcxProtocolError) as error:
            self.end_dial(peer, str(error))
            return True
        if isinstance(answer, Welcome):
            del self._dialling[peer]
            self._hall.connected(peer, link, answer.size_bytes)
        elif isinstance(answer, Refused):
            self.end_dial(peer, f"refused: {answer.reason}")
        else:
            self.end_dial(peer, "the other end does not speak this protocol")
        return True
