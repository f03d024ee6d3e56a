"""How ucx connections begin: ours say HELLO and wait for an answer, accepted ones are heard, admitted or refused."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kv_transfer.checksum import Memory
from kv_transfer.transport.base import PeerId
from kv_transfer.transport.ucx_library import Endpoint, Transfer, UcxEndpointError, Worker
from kv_transfer.transport.ucx_link import Link, LinkLostError, Mailroom
from kv_transfer.transport.ucx_wire import (
    HELLO_BYTES,
    Address,
    Hello,
    Refused,
    UcxProtocolError,
    Welcome,
    decode_answer,
    decode_endpoint,
    decode_hello,
    decode_hello_link_id,
    encode_answer,
    encode_hello,
)

MAX_DIALS = 64
MAX_ARRIVALS = 64
"""Accepted connections that have not said HELLO, or were refused and have not left; beyond it the oldest is closed."""

_log = logging.getLogger(__name__)


class Hall(Protocol):
    """Where connections go from here. Those that are told of here are addressed already; `let_go` ends that."""

    def refusal(self, writer: PeerId) -> str | None:
        """Why that life may not come in; None if it may."""

    def admit(self, peer: PeerId, link: Link) -> None:
        """A writer has come in and was told WELCOME."""

    def connected(self, peer: PeerId, link: Link, pool_size_bytes: int) -> None:
        """A peer has let us in."""

    def not_connected(self, peer: PeerId, reason: str) -> None: ...

    def let_go(self, link: Link) -> None:
        """Closes a connection that has come to nothing."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Arrival:
    """An accepted connection: first its HELLO is awaited, then, if it was refused, its leaving."""

    endpoint: Endpoint
    opened_ns: int
    hello: Memory
    hearing: Transfer
    refused: Link | None = None


class Handshakes:
    """Connections that are not through yet. All of it runs in the backend's thread."""

    def __init__(
        self, me: PeerId, worker: Worker, mailroom: Mailroom, address: Address, pool_size_bytes: int, hall: Hall
    ) -> None:
        self._me = me
        self._worker = worker
        self._mailroom = mailroom
        self._address = address
        self._pool_size_bytes = pool_size_bytes
        self._hall = hall
        self._arrivals: list[_Arrival] = []
        self._dialling: dict[PeerId, Link] = {}

    @property
    def is_idle(self) -> bool:
        return not self._arrivals and not self._dialling

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
        self._mailroom.enter(link)
        self._dialling[peer] = link
        hello = Hello(
            writer_name=self._me.name,
            writer_incarnation=self._me.incarnation,
            target_name=peer.name,
            target_incarnation=peer.incarnation,
            token=where.token,
        )
        try:
            link.introduce(encode_hello(hello, link.link_id))
        except (LinkLostError, UcxProtocolError) as error:
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
            self._await_hello(endpoint, now_ns)
            has_moved = True
        for arrival in list(self._arrivals):
            has_moved |= self._serve(arrival, now_ns)
        for peer, link in list(self._dialling.items()):
            has_moved |= self._hear_answer(peer, link)
        return has_moved

    def expire(self, opened_before_ns: int, reason: str) -> None:
        for peer, link in list(self._dialling.items()):
            if link.opened_ns < opened_before_ns:
                self.end_dial(peer, reason)
        for arrival in [arrival for arrival in self._arrivals if arrival.opened_ns < opened_before_ns]:
            self._dismiss(arrival)

    def close(self) -> None:
        for arrival in list(self._arrivals):
            self._dismiss(arrival)
        for link in self._dialling.values():
            self._hall.let_go(link)
        self._dialling.clear()

    def check_invariants(self) -> None:
        assert len(self._dialling) <= MAX_DIALS and len(self._arrivals) <= MAX_ARRIVALS

    # ---- being dialled ---------------------------------------------------------------------------------------

    def _await_hello(self, endpoint: Endpoint, now_ns: int) -> None:
        hello: Memory = np.empty(HELLO_BYTES, dtype=np.uint8)
        try:
            hearing = endpoint.receive_stream(hello)
        except UcxEndpointError as error:
            _log.debug("a ucx connection left at once: %s", error)
            endpoint.close()
            return
        self._arrivals.append(_Arrival(endpoint=endpoint, opened_ns=now_ns, hello=hello, hearing=hearing))
        if len(self._arrivals) > MAX_ARRIVALS:
            self._dismiss(self._arrivals[0])

    def _serve(self, arrival: _Arrival, now_ns: int) -> bool:
        """True if that arrival has come further."""
        if not arrival.endpoint.is_alive:
            self._dismiss(arrival)
            return True
        if arrival.refused is not None or not arrival.hearing.has_ended:
            return False
        data = arrival.hello.tobytes()
        link = Link(arrival.endpoint, now_ns)
        try:
            link.peer_link_id = decode_hello_link_id(data)
        except UcxProtocolError as error:
            _log.warning("refused a ucx connection: %s", error)
            self._dismiss(arrival)
            return True
        self._answer(arrival, link, data, now_ns)
        return True

    def _answer(self, arrival: _Arrival, link: Link, data: bytes, now_ns: int) -> None:
        try:
            try:
                hello = decode_hello(data)
                self._check(hello)
            except UcxProtocolError as error:
                _log.warning("refused a ucx connection: %s", error)
                arrival.refused = link  # and kept until it has left: a close would overtake the word
                link.say(encode_answer(Refused(reason=str(error))), now_ns)
                return
            link.say(encode_answer(Welcome(size_bytes=self._pool_size_bytes, link_id=link.link_id)), now_ns)
        except LinkLostError as error:
            _log.debug("a ucx connection left before it was answered: %s", error)
            arrival.refused = link
            self._dismiss(arrival)
            return
        self._arrivals.remove(arrival)
        self._mailroom.enter(link)
        self._hall.admit(hello.writer, link)

    def _check(self, hello: Hello) -> None:
        """Raises UcxProtocolError, saying why, if that writer may not come in."""
        if hello.target != self._me or not _is_same(hello.token, self._address.token):
            raise UcxProtocolError(f"this is {self._me.name} (incarnation {self._me.incarnation})")
        refusal = self._hall.refusal(hello.writer)
        if refusal is not None:
            raise UcxProtocolError(refusal)

    def _dismiss(self, arrival: _Arrival) -> None:
        self._arrivals.remove(arrival)
        if arrival.refused is not None:
            self._hall.let_go(arrival.refused)
        else:
            arrival.endpoint.close()

    # ---- dialling --------------------------------------------------------------------------------------------

    def _hear_answer(self, peer: PeerId, link: Link) -> bool:
        try:
            frames = link.hear()
            if not frames:
                return False
            answer = decode_answer(frames[0])
        except (LinkLostError, UcxProtocolError) as error:
            self.end_dial(peer, str(error))
            return True
        if isinstance(answer, Refused):
            self.end_dial(peer, f"refused: {answer.reason}")
            return True
        del self._dialling[peer]
        link.peer_link_id = answer.link_id
        link.put_back(frames[1:])
        self._hall.connected(peer, link, answer.size_bytes)
        return True


def _is_same(told: str, token: str) -> bool:
    return secrets.compare_digest(told.encode(), token.encode())
