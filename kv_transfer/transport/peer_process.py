"""The process behind a local socket: who it is, when it dies, and how to end it for certain (the fence of shm)."""

from __future__ import annotations

import os
import signal
import socket
import struct

from kv_transfer.transport.base import TransportError

SO_PEERPIDFD = 77
"""Linux 6.5. A descriptor of the very process that connected, whatever became of its number since."""
_UCRED = struct.Struct("iII")


class PeerProcessError(TransportError):
    """The process cannot be named, or is not ours to end."""


class PeerProcess:
    """Holds a process by descriptor, so that its number may be reused without harm.

    A peer in our own process (`is_local`, as in tests) has no descriptor and is never killed.
    """

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd

    @property
    def is_local(self) -> bool:
        return self.pidfd < 0

    def kill(self) -> None:
        """Ends it, also if it is stopped; `pidfd` becomes readable when it is gone with all its mappings.

        Raises: PeerProcessError if the kernel does not let us."""
        assert not self.is_local, "a peer in our own process is not killed"
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return
        except OSError as error:
            raise PeerProcessError(f"cannot kill process {self.pid}: {error}") from error

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def check_same_user(connection: socket.socket) -> int:
    """The pid of the process at the other end of a unix socket. Raises: PeerProcessError if it is another user's."""
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid != os.geteuid():
        raise PeerProcessError(f"the other end belongs to user {uid}, this worker to {os.geteuid()}")
    return int(pid)


def identify(connection: socket.socket) -> PeerProcess:
    """The process that connected. Raises: PeerProcessError if it is another user's, or cannot be held."""
    pid = check_same_user(connection)
    if pid == os.getpid():
        return PeerProcess(pid, -1)
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        pidfd = _open_by_number(connection, pid)
    os.set_inheritable(pidfd, False)
    return PeerProcess(pid, pidfd)


def _open_by_number(connection: socket.socket, pid: int) -> int:
    """For kernels without SO_PEERPIDFD. The number is of that process as long as its end of the socket is open."""
    if pid <= 1:
        raise PeerProcessError("the other end runs where its processes cannot be seen, so it could not be fenced")
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise PeerProcessError(f"cannot hold process {pid}: {error}") from error
    try:
        is_closed = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        is_closed = False
    except OSError:
        is_closed = True
    if is_closed:
        os.close(pidfd)
        raise PeerProcessError(f"process {pid} has left")
    return pidfd
