"""The nixl transport between hosts (network namespaces with a router between them), also while their link is cut."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

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
from kv_transfer.transport.nixl_agent import LIBRARIES
from kv_transfer.transport.nixl_limits import NixlLimits
from tests.support.network_namespaces import NoNamespacesError, TwoHosts, two_hosts
from tests.support.transport_lives import Child, Kind, children, pool_bytes

pytestmark = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in LIBRARIES), reason="the nixl library is not installed"
)

BLOCK = 360 * 1024
POOL = 16 * BLOCK
SILENCE_S = 1.5
SLACK_S = 3.0
"""Between the end of a wait and the moment at which a test on a busy machine hears of it."""
LIMITS = NixlLimits(heartbeat_interval_s=0.2, silence_timeout_s=SILENCE_S, connect_timeout_s=2.0)
KIND = Kind(path="kv_transfer.transport.nixl:NixlTransport", pool_size_bytes=POOL)
DECODE = PeerId("decode-0", 3)
PREFILL = PeerId("prefill-0", 5)


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    try:
        with two_hosts() as made:
            yield made
    except NoNamespacesError as error:
        pytest.skip(f"no network namespaces: {error}")


@pytest.fixture
def start(hosts: TwoHosts) -> Iterator[Callable[[PeerId, int], Child]]:
    with children(KIND) as start_child:

        def start_on_its_host(me: PeerId, seed: int) -> Child:
            host = hosts.left if me.name == PREFILL.name else hosts.right
            options = {"limits": LIMITS, "host": host.address}
            return start_child(me, seed, replace(KIND, options=options, network_namespace=host.namespace))

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


def test_cut_of_an_idle_link_is_noticed_in_time(hosts: TwoHosts, start: Callable[[PeerId, int], Child]) -> None:
    writer, reader = start(PREFILL, 1), start(DECODE, 2)
    connect(writer, reader, PREFILL)
    hosts.cut()
    cut_s = time.monotonic()
    for child in (writer, reader):
        gone = child.wait_for(PeerGone)
        assert isinstance(gone, PeerGone) and "silent" in gone.reason
        assert time.monotonic() - cut_s < SILENCE_S + SLACK_S
    writer.call("connect", DECODE, reader.endpoint)
    assert isinstance(writer.wait_for(ConnectFailed), ConnectFailed)
    hosts.mend()
    connect(writer, reader, PREFILL)


def test_cut_in_mid_push_is_noticed_and_nothing_lands_once_it_is_mended(
    hosts: TwoHosts, start: Callable[[PeerId, int], Child]
) -> None:
    writer, reader = start(PREFILL, 1), start(DECODE, 2)
    connect(writer, reader, PREFILL)
    writer.tell("hammer", DECODE, [Copy(0, 0, POOL)])
    for _ in range(5):
        reader.wait_for(Notified)
    hosts.cut()
    cut_s = time.monotonic()
    failed = writer.wait_for(WriteFailed)
    assert isinstance(failed, WriteFailed) and not failed.quiesced
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
