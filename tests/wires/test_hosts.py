"""The transports between hosts (network namespaces with a router between them), also while their link is cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kv_transfer.protocol.limits import SECOND_NS
from kv_transfer.transport.backends import why_unavailable
from kv_transfer.transport.base import (
    Connected,
    ConnectFailed,
    Copy,
    Fenced,
    Notified,
    PeerGone,
    PeerId,
    WriteCompleted,
    WriteFailed,
)
from kv_transfer.transport.nixl_limits import NixlLimits
from tests.support.network_namespaces import TwoHosts
from tests.support.transport_lives import Child, Kind, children, pool_bytes

BLOCK = 360 * 1024
POOL = 16 * BLOCK
SILENCE_S = 3.0
"""How long a peer may be silent here; by default that is noticed within 5 s. On a busy machine a second can pass while
one end makes its side of a connection, and says nothing."""
SLACK_S = 10.0
"""Between the end of a wait and the moment at which a test on a busy machine hears of it. Without that wait it
would take more than a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A transport that crosses hosts.

    Attributes:
        says: how it calls a peer that has been silent for too long.
        asks_first: it sends nothing that the receiver has not granted, so a write may end before any of it is sent.
    """

    name: str
    path: str
    options: Mapping[str, Any]
    says: str
    asks_first: bool = False


WIRES = (
    Wire(
        name="nixl",
        path="kv_transfer.transport.nixl:NixlTransport",
        options={"limits": NixlLimits(heartbeat_interval_s=0.2, silence_timeout_s=SILENCE_S, connect_timeout_s=5.0)},
        says="silent",
    ),
    Wire(
        name="ucx",
        path="kv_transfer.transport.ucx:UcxTransport",
        options={"peer_timeout_ns": int(SILENCE_S * SECOND_NS)},
        says="not heard",
        asks_first=True,
    ),
)
DECODE = PeerId("decode-0", 3)
PREFILL = PeerId("prefill-0", 5)


@pytest.fixture(params=WIRES, ids=lambda wire: wire.name)
def wire(request: pytest.FixtureRequest) -> Wire:
    found: Wire = request.param
    reason = why_unavailable(found.name)
    if reason is not None:
        pytest.skip(reason)
    return found


@pytest.fixture
def start(wire: Wire, hosts: TwoHosts) -> Iterator[Callable[[PeerId, int], Child]]:
    """Each life in a process of its own: no two of these libraries live together in one."""
    kind = Kind(path=wire.path, pool_size_bytes=POOL)
    with children(kind) as start_child:

        def start_on_its_host(me: PeerId, seed: int) -> Child:
            host = hosts.left if me.name == PREFILL.name else hosts.right
            options = {**wire.options, "host": host.address}
            return start_child(me, seed, replace(kind, options=options, network_namespace=host.namespace))

        yield start_on_its_host


def connect(writer: Child, reader: Child, me: PeerId) -> None:
    writer.call("connect", DECODE, reader.endpoint)
    assert writer.wait_for(Connected) == Connected(peer=DECODE)
    assert reader.wait_for(Connected) == Connected(peer=me)


def test_blocks_travel_between_hosts(start: Callable[[PeerId, int], Child]) -> None:
    writer, reader = start(PREFILL, 1), start(DECODE, 2)
    connect(writer, reader, PREFILL)
    copies = [Copy(n * BLOCK, (15 - n) * BLOCK, BLOCK) for n in range(16)]
    handle = writer.call("write", DECODE, copies, b"chunk")
    assert reader.wait_for(Notified) == Notified(peer=PREFILL, payload=b"chunk")
    assert writer.wait_for(WriteCompleted) == WriteCompleted(handle=handle)
    source = pool_bytes(1, POOL)
    assert reader.call("pool") == b"".join(source[(15 - n) * BLOCK : (16 - n) * BLOCK] for n in range(16))
    reader.call("write", PREFILL, [], b"committed")
    assert writer.wait_for(Notified) == Notified(peer=DECODE, payload=b"committed")


def test_cut_of_an_idle_link_is_noticed_in_time(
    wire: Wire, hosts: TwoHosts, start: Callable[[PeerId, int], Child]
) -> None:
    writer, reader = start(PREFILL, 1), start(DECODE, 2)
    connect(writer, reader, PREFILL)
    hosts.cut()
    cut_s = time.monotonic()
    for child in (writer, reader):
        gone = child.wait_for(PeerGone)
        assert isinstance(gone, PeerGone) and wire.says in gone.reason
        assert time.monotonic() - cut_s < SILENCE_S + SLACK_S
    writer.call("connect", DECODE, reader.endpoint)
    assert isinstance(writer.wait_for(ConnectFailed), ConnectFailed)
    hosts.mend()
    connect(writer, reader, PREFILL)


def test_cut_in_mid_push_is_noticed_and_nothing_lands_once_it_is_mended(
    wire: Wire, hosts: TwoHosts, start: Callable[[PeerId, int], Child]
) -> None:
    writer, reader = start(PREFILL, 1), start(DECODE, 2)
    connect(writer, reader, PREFILL)
    writer.tell("hammer", DECODE, [Copy(0, 0, POOL)])
    for _ in range(5):
        reader.wait_for(Notified)
    hosts.cut()
    cut_s = time.monotonic()
    failed = writer.wait_for(WriteFailed)
    assert isinstance(failed, WriteFailed) and (wire.asks_first or not failed.quiesced)
    for child in (writer, reader):
        assert isinstance(child.wait_for(PeerGone), PeerGone)
        assert time.monotonic() - cut_s < SILENCE_S + SLACK_S
    reader.call("fence", PREFILL)
    assert reader.wait_for(Fenced) == Fenced(peer=PREFILL)
    reader.call("fill", 9)
    hosts.mend()  # and TCP sends again what it had not delivered
    again = PeerId(PREFILL.name, PREFILL.incarnation + 1)
    new = start(again, 4)
    connect(new, reader, again)
    assert reader.call("pool") == pool_bytes(9, POOL)
    handle = new.call("write", DECODE, [Copy(0, 0, POOL)], b"x")
    assert new.wait_for(WriteCompleted) == WriteCompleted(handle=handle)
    assert reader.call("pool") == pool_bytes(4, POOL)
