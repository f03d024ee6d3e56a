"""The writer's side of the handshake: blocking, run in a thread of its own by ShmTransport.connect."""

from __future__ import annotations

import array
import os
import socket
from dataclasses import dataclass

from kv_transfer.transport.base import PeerId, TransportError
from kv_transfer.transport.peer_process import check_same_user
from kv_transfer.transport.shm_copier import Region
from kv_transfer.transport.shm_pool import map_pool
from kv_transfer.transport.shm_wire import (
    MAX_FRAME_BYTES,
    Hello,
    Refused,
    Welcome,
    decode_endpoint,
    decode_frame,
    encode_frame,
)

HANDSHAKE_TIMEOUT_S = 10.0


class DialError(TransportError):
    """The peer could not be reached, refused, or sent what cannot be mapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialled:
    connection: socket.socket
    region: Region


def dial(connection: socket.socket, me: PeerId, writer_token: str, peer: PeerId, endpoint: bytes) -> Dialled:
    """Connects, shakes hands and maps the peer's pool. Raises: DialError; the connection is closed then."""
    try:
        return _dial(connection, me, writer_token, peer, endpoint)
    except (OSError, TransportError) as error:
        connection.close()
        raise DialError(str(error)) from error


def _dial(connection: socket.socket, me: PeerId, writer_token: str, peer: PeerId, endpoint: bytes) -> Dialled:
    where = decode_endpoint(endpoint)
    hello = Hello(
        writer_name=me.name,
        writer_incarnation=me.incarnation,
        target_name=peer.name,
        target_incarnation=peer.incarnation,
        token=where.token,
        writer_token=writer_token,
    )
    connection.settimeout(HANDSHAKE_TIMEOUT_S)
    connection.connect("\0" + where.address)
    check_same_user(connection)
    connection.send(encode_frame(hello))
    answer, fds = _receive_with_fds(connection)
    try:
        if isinstance(answer, Refused):
            raise DialError(f"refused: {answer.reason}")
        if not isinstance(answer, Welcome) or len(fds) != 1:
            raise DialError("the other end does not speak this protocol")
        region = Region(map_pool(fds[0], answer.size_bytes))
    finally:
        for fd in fds:
            os.close(fd)
    connection.setblocking(False)
    return Dialled(connection=connection, region=region)


def _receive_with_fds(connection: socket.socket) -> tuple[Hello | Welcome | Refused, list[int]]:
    fds = array.array("i")
    data, ancillary, _, _ = connection.recvmsg(
        MAX_FRAME_BYTES, socket.CMSG_SPACE(4 * fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    try:
        if not data:
            raise DialError("the other end closed the connection")
        return decode_frame(data), fds.tolist()
    except TransportError:
        for fd in fds:
            os.close(fd)
        raise
