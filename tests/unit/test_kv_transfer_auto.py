"""The choice of a backend for each peer, over two loopback networks that stand for two backends."""

from __future__ import annotations

import logging
import os
import random
import select
from collections.abc import Iterator
from typing import cast

import pytest

from kv_transfer.checksum import checksum
from kv_transfer.transport import backends as registry
from kv_transfer.transport.alarms import Alarms
from kv_transfer.transport.auto import AutoTransport
from kv_transfer.transport.auto_dial import CONNECT_TIMEOUT_S, NUM_PROBES, PROBE_BYTES, SELF_TEST_TIMEOUT_S
from kv_transfer.transport.auto_peer import LinkInfo
from kv_transfer.transport.auto_wire import (
    MAX_ENDPOINT_BYTES,
    AutoEndpoint,
    AutoProtocolError,
    compose_endpoint,
    decode_endpoint,
    encode_endpoint,
)
from kv_transfer.transport.backends import Backend, BackendUnavailableError, open_backend, open_backends
from kv_transfer.transport.base import (
    Connected,
    ConnectFailed,
    Copy,
    Fenced,
    Notified,
    PeerGone,
    PeerId,
    TransportError,
    TransportEvent,
    UnknownPeerError,
    WriteCompleted,
    WriteFailed,
)
from kv_transfer.transport.loopback import LoopbackFaults, LoopbackHub, LoopbackTransport
from kv_transfer.transport.shm_pool import PoolMemory

BLOCKS_BYTES = 4096
POOL_BYTES = BLOCKS_BYTES + PROBE_BYTES
NS_PER_S = 1_000_000_000
DECODE = PeerId("decode-0", 3)
PREFILL = PeerId("prefill-0", 5)
POOL = cast(PoolMemory, object())


class Net:
    """Two networks, `fast` preferred to `slow`, and a clock that both of them and the transports share."""

    def __init__(self) -> None:
        self.hubs = {name: LoopbackHub(random.Random(0)) for name in ("fast", "slow")}
        self.now_ns = 0
        self.ends: list[End] = []

    def start(self, me: PeerId, *names: str) -> End:
        end = End(self, me, names or tuple(self.hubs))
        self.ends.append(end)
        return end

    def run(self, *stuck: str) -> None:
        """Until nothing more happens. Networks that are `stuck` carry nothing."""
        while True:
            for end in self.ends:
                end.poll()
            hubs = [hub for name, hub in self.hubs.items() if name not in stuck]
            due = [due_ns for hub in hubs if (due_ns := hub.next_due_ns()) is not None]
            if not due:
                return
            self.now_ns = max(self.now_ns, min(due))
            for hub in hubs:
                hub.advance(self.now_ns)

    def wait(self, seconds: float) -> None:
        self.now_ns += int(seconds * NS_PER_S)
        for end in self.ends:
            end.poll()


class End:
    """A life: its transport, its memory, and what it was told."""

    def __init__(self, net: Net, me: PeerId, names: tuple[str, ...]) -> None:
        self.me = me
        self.memory = bytearray(POOL_BYTES)
        self.parts = {name: LoopbackTransport(net.hubs[name], me, memoryview(self.memory)) for name in names}
        pool = cast(PoolMemory, self)
        self.size_bytes = POOL_BYTES
        self.transport = AutoTransport(me, pool, backends=self.parts, clock_ns=lambda: net.now_ns)
        self.events: list[TransportEvent] = []

    def poll(self) -> None:
        self.events += self.transport.poll()
        self.transport.check_invariants()

    def take(self) -> list[TransportEvent]:
        events, self.events = self.events, []
        return events

    def dial(self, other: End) -> None:
        self.transport.connect(other.me, other.transport.endpoint())


@pytest.fixture
def net() -> Iterator[Net]:
    net = Net()
    yield net
    for end in net.ends:
        end.transport.close()


def connected_pair(net: Net) -> tuple[End, End]:
    target, writer = net.start(DECODE), net.start(PREFILL)
    writer.dial(target)
    net.run()
    assert writer.take() == [Connected(peer=DECODE)] and target.take() == [Connected(peer=PREFILL)]
    return writer, target


def backend_of_link(end: End) -> list[str]:
    return [link.backend for link in end.transport.links()]


# ---- the choice -----------------------------------------------------------------------------------------------


def test_preferred_backend_is_chosen_after_its_self_test(net: Net) -> None:
    target, writer = net.start(DECODE), net.start(PREFILL)
    landed: list[Copy] = []
    net.hubs["fast"]._on_landing = lambda handle, source, where, copy: landed.append(copy)
    writer.dial(target)
    writer.dial(target)
    net.run()
    assert landed == [Copy(BLOCKS_BYTES, BLOCKS_BYTES, PROBE_BYTES)] * NUM_PROBES, "outside of the probe areas"
    assert writer.take() == [Connected(peer=DECODE)]
    assert target.take() == [Connected(peer=PREFILL)]
    (link,) = writer.transport.links()
    # A copy, its notification, the answer and its notification take a microsecond each.
    expected = LinkInfo(peer=DECODE, backend="fast", bandwidth_bytes_per_s=PROBE_BYTES * NS_PER_S / 4_000)
    assert (link.peer, link.backend) == (expected.peer, expected.backend)
    assert link.bandwidth_bytes_per_s == pytest.approx(expected.bandwidth_bytes_per_s, rel=0.5)
    assert target.transport.links() == (), "who was dialled does not write"
    assert (writer.transport.backend_of(DECODE), target.transport.backend_of(PREFILL)) == ("fast", "fast")
    writer.dial(target)
    net.run()
    assert writer.take() == [] and target.take() == []


def test_writes_and_answers_go_through(net: Net) -> None:
    writer, target = connected_pair(net)
    writer.memory[:4] = b"KVKV"
    handle = writer.transport.write(DECODE, [Copy(0, 8, 4)], b"chunk", num_sums=1)
    answer = target.transport.write(PREFILL, [], b"")
    with pytest.raises(UnknownPeerError):
        target.transport.write(PREFILL, [Copy(0, 0, 4)], b"")
    net.run()
    sums = b"chunk" + sum_of(b"KVKV")
    assert target.take() == [WriteCompleted(handle=answer), Notified(peer=PREFILL, payload=sums)]
    assert writer.take() == [WriteCompleted(handle=handle), Notified(peer=DECODE, payload=b"")]
    assert target.memory[:16] == bytes(8) + b"KVKV" + bytes(4)


def sum_of(data: bytes) -> bytes:
    return checksum(data).to_bytes(8, "little")


def test_a_backend_that_does_not_connect_gives_way(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    target, writer = net.start(DECODE), net.start(PREFILL)
    where = decode_endpoint(target.transport.endpoint())
    broken = compose_endpoint(
        where.probe_offset_bytes, where.probe_size_bytes, dict(where.endpoints) | {"fast": b"elsewhere"}
    )
    with caplog.at_level(logging.WARNING):
        writer.transport.connect(DECODE, broken)
        net.run()
    assert writer.take() == [Connected(peer=DECODE)] and target.take() == [Connected(peer=PREFILL)]
    assert backend_of_link(writer) == ["slow"]
    assert "decode-0 is reached over slow, since fast: this is not that life's endpoint" in caplog.text


def test_a_backend_that_says_nothing_gives_way(net: Net) -> None:
    target, writer = net.start(DECODE), net.start(PREFILL)
    writer.dial(target)
    net.run("fast")
    net.wait(CONNECT_TIMEOUT_S - 0.1)
    assert backend_of_link(writer) == []
    net.wait(0.1)
    net.run("fast")
    assert writer.take() == [Connected(peer=DECODE)] and target.take() == [Connected(peer=PREFILL)]
    assert backend_of_link(writer) == ["slow"]
    net.run()  # what was late is of no account
    assert writer.take() == [] and target.take() == []
    assert backend_of_link(writer) == ["slow"]


@pytest.mark.parametrize("faults", [LoopbackFaults(drop=1.0), LoopbackFaults(stray=1.0), LoopbackFaults(cut=1.0)])
def test_a_backend_that_fails_its_self_test_gives_way(net: Net, faults: LoopbackFaults) -> None:
    net.hubs["fast"].faults = faults
    target, writer = net.start(DECODE), net.start(PREFILL)
    writer.dial(target)
    net.run()
    if faults.drop:
        assert writer.take() == []
        net.wait(SELF_TEST_TIMEOUT_S)
        net.run()
    assert writer.take() == [Connected(peer=DECODE)] and target.take() == [Connected(peer=PREFILL)]
    assert backend_of_link(writer) == ["slow"]
    assert not net.hubs["fast"].is_connected(PREFILL, DECODE), "what was given up is left"
    for end, peer in ((writer, DECODE), (target, PREFILL)):
        known = end.transport._peers.get(peer)
        assert known is not None and list(known.linked) == ["slow"]
    writer.transport.write(DECODE, [], b"hello")
    net.run()
    assert target.take() == [Notified(peer=PREFILL, payload=b"hello")]


def test_when_all_fail_every_reason_is_told(net: Net) -> None:
    target, writer = net.start(DECODE), net.start(PREFILL)
    net.hubs["slow"].crash(DECODE)
    writer.dial(target)
    net.run("fast")
    net.wait(CONNECT_TIMEOUT_S)
    net.run("fast")
    expected = "fast: no connection within 5 s; slow: no such life"
    assert writer.take() == [ConnectFailed(peer=DECODE, reason=expected)]
    assert writer.transport.links() == ()
    with pytest.raises(UnknownPeerError):
        writer.transport.write(DECODE, [], b"")
    assert target.take() == []


def test_both_sides_need_a_backend_in_common(net: Net) -> None:
    target, writer, narrow = net.start(DECODE, "slow"), net.start(PREFILL), net.start(PeerId("p", 1), "fast")
    writer.dial(target)
    narrow.dial(target)
    net.run()
    assert writer.take() == [Connected(peer=DECODE)] and backend_of_link(writer) == ["slow"]
    assert narrow.take() == [ConnectFailed(peer=DECODE, reason="it offers slow, this worker speaks fast")]


def test_two_lives_may_dial_each_other(net: Net) -> None:
    one, other = net.start(DECODE), net.start(PREFILL)
    one.dial(other)
    other.dial(one)
    net.run()
    assert set(one.take()) == {Connected(peer=PREFILL)} and set(other.take()) == {Connected(peer=DECODE)}
    for writer, target in ((one, other), (other, one)):
        writer.transport.write(target.me, [Copy(0, 0, 8)], b"hello")
        net.run()
        assert Notified(peer=writer.me, payload=b"hello") in target.take()
        assert backend_of_link(writer) == ["fast"]


def test_a_lost_choice_is_made_up_for_by_the_first_payload(net: Net) -> None:
    target, writer = net.start(DECODE), net.start(PREFILL)
    writer.dial(target)
    hub = net.hubs["fast"]
    while not writer.events:
        due_ns = hub.next_due_ns()
        assert due_ns is not None
        hub.advance(due_ns)
        writer.poll()
        target.poll()
    hub.faults = LoopbackFaults(drop=1.0)
    net.run()
    assert target.take() == []
    hub.faults = LoopbackFaults()
    writer.transport.write(DECODE, [], b"first")
    net.run()
    assert target.take() == [Connected(peer=PREFILL), Notified(peer=PREFILL, payload=b"first")]


# ---- routing --------------------------------------------------------------------------------------------------


def test_handles_are_unique_over_backends_and_cancel_finds_them(net: Net) -> None:
    writer = net.start(PREFILL)
    targets = [net.start(PeerId("d", 1), "fast"), net.start(PeerId("d", 2), "slow")]
    for target in targets:
        writer.dial(target)
    net.run()
    writer.take()
    handles = [writer.transport.write(t.me, [Copy(0, 0, 8)], b"") for t in targets for _ in range(3)]
    assert len(set(handles)) == 6
    for handle in (handles[1], handles[4]):
        writer.transport.cancel(handle)
    net.run()
    failed = [event for event in writer.events if isinstance(event, WriteFailed)]
    assert {event.handle for event in failed} == {handles[1], handles[4]}
    completed = {event.handle for event in writer.events if isinstance(event, WriteCompleted)}
    assert completed == set(handles) - {handles[1], handles[4]}


def test_a_lost_connection_is_told_once_and_can_be_made_again(net: Net) -> None:
    writer, target = connected_pair(net)
    net.hubs["fast"].cut(PREFILL, DECODE, "unplugged")
    net.run()
    assert writer.take() == [PeerGone(peer=DECODE, reason="unplugged")]
    assert target.take() == [PeerGone(peer=PREFILL, reason="unplugged")]
    assert writer.transport.links() == ()
    assert writer.transport._peers.get(DECODE) is None and target.transport._peers.get(PREFILL) is None
    writer.dial(target)
    net.run()
    assert writer.take() == [Connected(peer=DECODE)] and target.take() == [Connected(peer=PREFILL)]


def test_disconnecting_ends_an_attempt_without_a_word(net: Net) -> None:
    target, writer = net.start(DECODE), net.start(PREFILL)
    writer.dial(target)
    writer.transport.disconnect(DECODE)
    net.run()
    net.wait(CONNECT_TIMEOUT_S)
    assert writer.take() == [] and target.take() == []


# ---- the fence ------------------------------------------------------------------------------------------------


def test_fence_is_complete_when_every_backends_is(net: Net) -> None:
    writer, target = connected_pair(net)
    target.transport.fence(PREFILL)
    target.transport.fence(PREFILL)
    net.run("slow")
    assert [type(event) for event in target.take()] == [PeerGone]
    net.run()
    assert target.take() == [Fenced(peer=PREFILL)]
    target.transport.fence(PREFILL)
    net.run()
    assert target.take() == []
    writer.take()
    writer.dial(target)
    net.run()
    assert writer.take() == [ConnectFailed(peer=DECODE, reason="fast: fenced; slow: fenced")]
    assert target.take() == []


def test_a_life_is_fenced_where_only_a_self_test_went(net: Net) -> None:
    net.hubs["fast"].faults = LoopbackFaults(drop=1.0)
    target, writer = net.start(DECODE), net.start(PREFILL)
    writer.dial(target)
    net.run()
    target.transport.fence(PREFILL)
    net.run()
    assert target.take() == [Fenced(peer=PREFILL)], "the owner never knew the peer"
    assert [type(event) for event in writer.take()] == [ConnectFailed]


# ---- endpoints ------------------------------------------------------------------------------------------------


def test_endpoints_travel_and_damaged_ones_are_refused(net: Net) -> None:
    endpoint = AutoEndpoint(probe_offset_bytes=7, probe_size_bytes=9, endpoints=(("shm", b"abc"), ("nixl", b"")))
    data = encode_endpoint(endpoint)
    assert decode_endpoint(data) == endpoint
    assert (endpoint.of("shm"), endpoint.of("ucx")) == (b"abc", None)
    versioned = data[:4] + bytes([99]) + data[5:]
    empty = encode_endpoint(AutoEndpoint(probe_offset_bytes=0, probe_size_bytes=0, endpoints=()))
    outside = [
        encode_endpoint(AutoEndpoint(probe_offset_bytes=offset, probe_size_bytes=size, endpoints=()))
        for offset, size in (((1 << 63) - 1, 1), (1 << 63, 1), (0, (1 << 64) - 1))
    ]
    for damaged in (b"", b"nonsense" * 9, data[:-1], data + b"x", data[:25], versioned, empty, *outside):
        with pytest.raises(AutoProtocolError):
            decode_endpoint(damaged)
    writer = net.start(PREFILL)
    writer.transport.connect(DECODE, b"nonsense")
    net.run()
    assert writer.take() == [ConnectFailed(peer=DECODE, reason="this endpoint is not of an auto transport")]


def test_an_endpoint_that_would_be_too_long_leaves_the_later_backends_out() -> None:
    data = compose_endpoint(0, 1, {"shm": bytes(100), "nixl": bytes(3990), "ucx": bytes(200)})
    assert len(data) <= MAX_ENDPOINT_BYTES
    assert [name for name, _ in decode_endpoint(data).endpoints] == ["shm", "ucx"]


def test_a_pool_without_room_for_the_probe_area_is_refused() -> None:
    class Small:
        size_bytes = PROBE_BYTES - 1

    with pytest.raises(ValueError, match="probe area"):
        AutoTransport(PREFILL, cast(PoolMemory, Small()))


# ---- the registry ---------------------------------------------------------------------------------------------


def test_what_is_not_there_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailableError, match="no transport 'pigeon'; there are shm, nixl, ucx"):
        open_backend("pigeon", PREFILL, POOL)
    here = "kv_transfer.transport.shm"
    missing = Backend(name="x", module=here, class_name="ShmTransport", extra="birds", libraries=("pigeon_post",))
    monkeypatch.setitem(registry._BACKENDS, "x", missing)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'baton-cluster\[birds\]'"):
        open_backend("x", PREFILL, POOL)
    absent = Backend(name="x", module="kv_transfer.transport.pigeon", class_name="PigeonTransport")
    monkeypatch.setitem(registry._BACKENDS, "x", absent)
    with pytest.raises(BackendUnavailableError, match="not part of this installation"):
        open_backend("x", PREFILL, POOL)


def test_unusable_backends_are_passed_over_with_their_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = object()
    reasons = {"bad": TransportError("no such device"), "worse": ValueError("host: no address")}

    def open_it(name: str, me: PeerId, pool: PoolMemory, *, host: str) -> object:
        if name in reasons:
            raise reasons[name]
        return made

    monkeypatch.setattr(registry, "open_backend", open_it)
    with caplog.at_level(logging.INFO):
        assert open_backends(PREFILL, POOL, ("bad", "good")) == {"good": made}
    assert "transport bad is not used: no such device" in caplog.text
    with pytest.raises(TransportError, match="no such device; host: no address"):
        open_backends(PREFILL, POOL, ("bad", "worse"))


def test_an_alarm_makes_its_descriptor_readable() -> None:
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        alarms: Alarms[str] = Alarms(fd)
        alarms.set("late", 3600.0)
        alarms.set("soon", 3600.0)
        assert select.select([fd], [], [], 0)[0] == []
        alarms.set("soon", 0.0)
        assert select.select([fd], [], [], 30.0)[0] == [fd]
        assert list(alarms) == ["late", "soon"]
        alarms.close()
        assert list(alarms) == []
    finally:
        os.close(fd)
