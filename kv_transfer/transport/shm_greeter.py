"""The listening side of the shm handshake: accepts connections, hears their HELLO, admits or refuses them."""

from __future__ import annotations

import functools
import logging
import secrets
import socket
from collections.abc import Callable
from typing import Protocol

from kv_transfer.transport.doorway import Doorway
from kv_transfer.transport.peer_process import PeerProcess, PeerProcessError, check_same_user, identify
from kv_transfer.transport.shm_link import send_last_word
from kv_transfer.transport.shm_wire import (
    MAX_FRAME_BYTES,
    Endpoint,
    Hello,
    Refused,
    ShmProtocolError,
    decode_frame,
    encode_frame,
)

LISTEN_BACKLOG = 128
MAX_UNGREETED = 64
"""Accepted connections that have not said HELLO; beyond it the oldest is closed."""

_log = logging.getLogger(__name__)


class Watcher(Protocol):
    """Calls a handler when a descriptor is readable."""

    def watch(self, fd: int, handler: Callable[[], None]) -> None: ...

    def unwatch(self, fd: int) -> None: ...


class Greeter:
    """Listens at `endpoint`, a name in the abstract namespace that nobody can guess and that dies with the process.

    `refusal` says why a writer may not come in (None: it may). `admit` takes over the connection of one who may,
    with the process that is behind it.
    """

    def __init__(
        self,
        watcher: Watcher,
        refusal: Callable[[Hello], str | None],
        admit: Callable[[Hello, socket.socket, PeerProcess], None],
    ) -> None:
        self.endpoint = Endpoint(address=f"baton-kv-{secrets.token_hex(16)}", token=secrets.token_hex(16))
        self._watcher = watcher
        self._refusal = refusal
        self._admit = admit
        self._ungreeted: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.endpoint.address)
        self._listener.listen(LISTEN_BACKLOG)
        self._listener.setblocking(False)
        self._doorway = Doorway(self._listener)
        watcher.watch(self._listener.fileno(), self._on_accept)

    def close(self) -> None:
        for connection in list(self._ungreeted.values()):
            self._forget(connection)
            connection.close()
        self._watcher.unwatch(self._listener.fileno())
        self._listener.close()
        self._doorway.close()

    def _on_accept(self) -> None:
        while (connection := self._doorway.accept()) is not None:
            connection.setblocking(False)
            try:
                check_same_user(connection)  # now, so that nobody else's silence takes up a place
            except PeerProcessError as error:
                _log.debug("refused a shm connection: %s", error)  # which anybody on this host may try at any rate
                refuse(connection, str(error))
                continue
            self._ungreeted[connection.fileno()] = connection
            self._watcher.watch(connection.fileno(), functools.partial(self._on_hello, connection))
            if len(self._ungreeted) > MAX_UNGREETED:
                oldest = next(iter(self._ungreeted.values()))
                self._forget(oldest)
                oldest.close()

    def _on_hello(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(MAX_FRAME_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._forget(connection)
        if not data:
            connection.close()
            return
        try:
            hello = decode_frame(data)
            if not isinstance(hello, Hello):
                raise ShmProtocolError("the connection did not begin with HELLO")
            refusal = self._refusal(hello)
            if refusal is not None:
                raise ShmProtocolError(refusal)
            process = identify(connection)
        except (ShmProtocolError, PeerProcessError) as error:
            _log.warning("refused a shm connection: %s", error)
            refuse(connection, str(error))
            return
        self._admit(hello, connection, process)

    def _forget(self, connection: socket.socket) -> None:
        self._watcher.unwatch(connection.fileno())
        del self._ungreeted[connection.fileno()]


def refuse(connection: socket.socket, reason: str) -> None:
    send_last_word(connection, encode_frame(Refused(reason=reason)))
    connection.close()
