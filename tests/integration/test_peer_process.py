"""Holding a peer's process by descriptor, on kernels with and without SO_PEERPIDFD."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kv_transfer.transport import peer_process
from kv_transfer.transport.peer_process import PeerProcessError, identify

CHILD = """
import socket, sys, time
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect("\\0" + sys.argv[1])
time.sleep(60)
"""


@pytest.fixture
def listener() -> Iterator[tuple[socket.socket, str]]:
    name = f"baton-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind("\0" + name)
        listening.listen(1)
        listening.settimeout(30)
        yield listening, name


@pytest.mark.parametrize("option", [peer_process.SO_PEERPIDFD, 9999], ids=["by socket", "by number"])
def test_stopped_process_is_killed_and_its_end_is_seen(
    listener: tuple[socket.socket, str], option: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_process, "SO_PEERPIDFD", option)
    with subprocess.Popen([sys.executable, "-c", CHILD, listener[1]]) as child:
        connection, _ = listener[0].accept()
        connection.setblocking(False)
        process = identify(connection)
        assert process.pid == child.pid and not process.is_local
        assert select.select([process.pidfd], [], [], 0)[0] == []
        child.send_signal(signal.SIGSTOP)
        process.kill()
        assert select.select([process.pidfd], [], [], 30)[0] == [process.pidfd]
        assert child.wait(30) == -signal.SIGKILL
        process.kill()  # of what is gone already: nothing
        process.close()
        connection.close()


def test_process_that_has_left_is_not_taken_for_its_number(
    listener: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_process, "SO_PEERPIDFD", 9999)
    with subprocess.Popen([sys.executable, "-c", CHILD, listener[1]]) as child:
        connection, _ = listener[0].accept()
        connection.setblocking(False)
        os.kill(child.pid, signal.SIGKILL)
        child.wait(30)
        with pytest.raises(PeerProcessError):
            identify(connection)
        connection.close()


def test_our_own_process_is_never_held_or_killed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = identify(ours)
        assert process.is_local
        with pytest.raises(AssertionError):
            process.kill()


def test_other_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with ours, theirs, pytest.raises(PeerProcessError, match="user"):
        identify(ours)
