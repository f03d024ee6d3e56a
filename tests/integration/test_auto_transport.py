"""`auto` between real processes: what it chooses, what its self-test leaves alone, and peers that do not answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.agent.pool import open_pool
from cluster.agent.settings import WorkerSettings
from cluster.core.ids import Role, WorkerId
from kv_transfer.transport.auto_dial import CONNECT_TIMEOUT_S, PROBE_BYTES
from kv_transfer.transport.auto_wire import decode_endpoint
from kv_transfer.transport.backends import why_unavailable
from kv_transfer.transport.base import Connected, ConnectFailed, Copy, Notified, PeerId, TransportError
from tests.support.transport_wires import BLOCK_BYTES, POOL_BYTES, ProcessLife, ProcessWire, connect, content

DECODE = PeerId("decode-0", 3)
PREFILL = PeerId("prefill-0", 5)


@pytest.fixture
def wires() -> Iterator[dict[str, ProcessWire]]:
    """By list of backends, made when asked for."""
    made: dict[str, ProcessWire] = {}
    yield made
    for wire in made.values():
        wire.close()


def start(wires: dict[str, ProcessWire], backends: str, me: PeerId, seed: int = 0) -> ProcessLife:
    for backend in backends.split(","):
        reason = why_unavailable(backend)
        if reason is not None:
            pytest.skip(reason)
    return wires.setdefault(backends, ProcessWire(f"auto:{backends}")).start(me, seed)


def test_workers_of_one_host_take_shm_and_know_its_bandwidth(wires: dict[str, ProcessWire]) -> None:
    target, writer = start(wires, "shm", DECODE), start(wires, "shm", PREFILL, seed=1)
    connect(writer, target)
    (link,) = writer.call("links")
    assert (link.peer, link.backend) == (DECODE, "shm") and link.bandwidth_bytes_per_s > 0
    assert target.call("links") == ()
    assert (writer.call("backend_of", DECODE), target.call("backend_of", PREFILL)) == ("shm", "shm")
    assert target.read(0, POOL_BYTES) == bytes(POOL_BYTES), "the self-test wrote into a block"
    assert writer.read(0, POOL_BYTES) == content(1)
    for life in (writer, target):
        life.call("check_invariants")
    writer.call("disconnect", DECODE)
    assert writer.call("links") == ()


@pytest.mark.parametrize("backend", ["nixl", "ucx"])
def test_workers_that_share_no_memory_take_what_both_have(wires: dict[str, ProcessWire], backend: str) -> None:
    target, writer = start(wires, backend, DECODE), start(wires, f"shm,{backend}", PREFILL, seed=1)
    connect(writer, target)
    (link,) = writer.call("links")
    assert link.backend == backend and link.bandwidth_bytes_per_s > 0
    writer.call("write", DECODE, [Copy(0, BLOCK_BYTES, BLOCK_BYTES)], b"chunk")
    assert target.wait_for(Notified) == Notified(peer=PREFILL, payload=b"chunk")
    assert target.read(BLOCK_BYTES, BLOCK_BYTES) == content(1)[:BLOCK_BYTES]


def test_a_stopped_peer_is_given_up_in_time(wires: dict[str, ProcessWire]) -> None:
    target, writer = start(wires, "shm", DECODE), start(wires, "shm", PREFILL)
    target.stop()
    writer.call("connect", DECODE, target.endpoint)
    expected = f"shm: no connection within {CONNECT_TIMEOUT_S:g} s"
    assert writer.wait_for(ConnectFailed) == ConnectFailed(peer=DECODE, reason=expected)
    other = start(wires, "shm", PeerId("decode-1", 1))
    connect(writer, other)
    target.wake()  # its part of the handshake comes late, and is of no account
    other.call("write", PREFILL, [], b"still here")
    assert writer.wait_for(Notified) == Notified(peer=other.me, payload=b"still here")
    assert not any(isinstance(event, Connected) for event in writer.events)


def test_a_backend_that_is_not_there_is_refused_by_name() -> None:
    wire = ProcessWire("auto:pigeon")
    try:
        with pytest.raises(TransportError, match="there is no transport 'pigeon'"):
            wire.start(DECODE)
    finally:
        wire.close()


def settings(transport: str) -> WorkerSettings:
    return WorkerSettings(
        worker=WorkerId("d0", 1),
        pool="decode",
        role=Role.DECODE,
        coordinator_address="127.0.0.1:1",
        model_dir=Path("absent"),
        dtype="float32",
        num_blocks=1,
        transport=transport,
    )


def test_a_workers_pool_has_its_blocks_in_front_and_the_probe_area_behind() -> None:
    pool = open_pool(settings("shm"), 10_000)
    try:
        assert (len(pool.buffer), pool.memory.size) == (10_000, 10_000)
        where = decode_endpoint(pool.transport.endpoint())
        assert [name for name, _ in where.endpoints] == ["shm"]
        assert where.probe_offset_bytes >= 10_000 and where.probe_size_bytes == PROBE_BYTES
    finally:
        pool.close()


@pytest.mark.parametrize("transport", ["loopback", "nccl", "pigeon"])
def test_a_transport_that_reaches_no_other_process_is_refused(transport: str) -> None:
    with pytest.raises(ValueError, match=f"transport: {transport} does not reach"):
        open_pool(settings(transport), 10_000)
