"""Whoever reaches a worker's port and is no worker must not keep its peers out, nor end it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_transfer.transport.backends import why_unavailable
from kv_transfer.transport.base import PeerId
from kv_transfer.transport.nixl_limits import MAX_CONNECTIONS
from kv_transfer.transport.nixl_wire import HELLO, decode_endpoint, encode_frame
from tests.support.transport_wires import TIMEOUT_S, ProcessLife, ProcessWire, connect

DECODE = PeerId("decode-0", 3)
PREFILL = PeerId("prefill-0", 5)
LISTENING = "0A"
"""A socket's state in /proc/net/tcp."""


@pytest.fixture
def wire(request: pytest.FixtureRequest) -> Iterator[ProcessWire]:
    backend = str(request.param)
    reason = why_unavailable(backend)
    if reason is not None:
        pytest.skip(reason)
    wire = ProcessWire(backend)
    yield wire
    wire.end_test()
    wire.close()


@pytest.mark.parametrize("wire", ["nixl"], indirect=True)
def test_strangers_on_the_network_neither_keep_peers_out_nor_end_the_worker(wire: ProcessWire) -> None:
    target, writer = wire.start(DECODE), wire.start(PREFILL, seed=1)
    where = decode_endpoint(target.endpoint)
    with contextlib.ExitStack() as strangers:
        for _ in range(MAX_CONNECTIONS + 1):
            stranger = strangers.enter_context(socket.create_connection((where.host, where.port), TIMEOUT_S))
        # Half a character: what quotes it cannot be sent.
        stranger.sendall(encode_frame(HELLO, json.dumps({"version": "\ud800"}).encode()))
        while stranger.recv(1000):
            continue
        connect(writer, target)


@pytest.mark.parametrize("wire", ["nixl"], indirect=True)
def test_what_the_library_opens_is_open_to_this_host_alone(wire: ProcessWire) -> None:
    """It ends the process when it is sent what it does not understand. (That of ucx has ports on every device.)"""
    target, writer = wire.start(DECODE), wire.start(PREFILL, seed=1)
    connect(writer, target)
    own_ports = {json.loads(life.endpoint)["port"] for life in (target, writer)}
    for life in (target, writer):
        assert isinstance(life, ProcessLife)
        opened = listening(life)
        assert opened, "the library listens somewhere"
        outside = {address for address, port in opened if port not in own_ports and not address.startswith("127.")}
        assert outside == set()


def listening(life: ProcessLife) -> list[tuple[str, int]]:
    """Addresses (IPv4) and ports at which the life's process accepts connections."""
    folder = Path(f"/proc/{life.process.pid}")
    sockets = set()
    for descriptor in (folder / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            sockets.add(os.readlink(descriptor))
    found = []
    for line in (folder / "net" / "tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == LISTENING and f"socket:[{fields[9]}]" in sockets:
            address, port = fields[1].split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found
