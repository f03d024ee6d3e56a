"""A listener in a process that has no descriptor left."""

from __future__ import annotations

import errno
import os
import socket
from typing import cast

from kv_transfer.transport.doorway import Doorway

FULL = OSError(errno.EMFILE, "Too many open files")
NOBODY = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


class Listener:
    """Answers `accept` with what it was given, one after the other."""

    def __init__(self, *answers: socket.socket | OSError) -> None:
        self._answers = list(answers)

    def accept(self) -> tuple[socket.socket, None]:
        answer = self._answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer, None


def open_doorway(*answers: socket.socket | OSError) -> Doorway:
    return Doorway(cast(socket.socket, Listener(*answers)))


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_who_cannot_be_let_in_is_turned_away_and_the_next_one_heard() -> None:
    ours, theirs = socket.socketpair()
    others, other = socket.socketpair()
    with ours, theirs, others, other:
        before = num_descriptors()
        doorway = open_doorway(FULL, theirs, FULL, other, NOBODY)
        assert doorway.accept() is None
        assert ours.recv(1) == b"" and others.recv(1) == b"", "both were turned away"
        doorway.close()
        doorway.close()
        assert num_descriptors() == before - 2


def test_where_nobody_can_be_turned_away_the_listener_is_left_alone() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        doorway = open_doorway(FULL, FULL, theirs)
        assert doorway.accept() is None
        assert doorway.accept() is theirs
        doorway.close()
