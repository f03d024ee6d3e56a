"""Whoever reaches a worker's port and is no worker must not keep its peers out, nor end it."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

import pytest

from kv_transfer.transport.backends import why_unavailable
from kv_transfer.transport.base import PeerId
from kv_transfer.transport.nixl_limits import MAX_CONNECTIONS
from kv_transfer.transport.nixl_wire import HELLO, decode_endpoint, encode_frame
from tests.support.transport_wires import TIMEOUT_S, ProcessWire, connect

DECODE = PeerId("decode-0", 3)
PREFILL = PeerId("prefill-0", 5)


@pytest.fixture
def wire() -> Iterator[ProcessWire]:
    reason = why_unavailable("nixl")
    if reason is not None:
        pytest.skip(reason)
    wire = ProcessWire("nixl")
    yield wire
    wire.end_test()
    wire.close()


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
