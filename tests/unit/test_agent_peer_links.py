"""What a worker knows and tells of the connections to its peers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.agent import events as ev
from cluster.agent.peer_links import PeerLinks
from cluster.agent.transport_port import TransportPort
from cluster.core.ids import WorkerId
from cluster.core.reports import LinkReport
from kv_transfer.protocol.layout import KVLayout, LayerGroup
from kv_transfer.protocol.messages import BlockGrant, PushChunk, PushKey, WriteBlocks
from kv_transfer.transport.auto import AutoTransport
from kv_transfer.transport.auto_peer import LinkInfo
from kv_transfer.transport.base import Connected, Copy, PeerId, TransportEvent

ONE, OTHER = PeerId("d-0", 1), PeerId("d-1", 4)
LAYOUT = KVLayout(groups=(LayerGroup(num_layers=1, num_kv_heads=1, head_dim=4),), block_size=1, dtype="bfloat16")


def test_connections_that_this_side_writes_over_are_reported() -> None:
    links = PeerLinks()
    links.connected(OTHER, "nixl", 2_000)
    links.connected(ONE, "shm", None)
    assert links.reports() == (LinkReport(peer=WorkerId("d-1", 4), transport="nixl", bandwidth_bytes_per_s=2_000),)
    assert [links.transport_of(peer) for peer in (ONE, OTHER, PeerId("d-0", 2), None)] == ["shm", "nixl", "", ""]
    links.connected(ONE, "shm", 9_000)
    links.connected(ONE, "ucx", None)  # it has connected, too, over something else
    assert [report.bandwidth_bytes_per_s for report in links.reports()] == [9_000, 2_000]
    assert links.transport_of(ONE) == "shm"
    links.gone(ONE)
    links.gone(ONE)
    links.gone(OTHER)
    assert links.reports() == () and links.transport_of(ONE) == ""


class FakeTransport(AutoTransport):
    """An AutoTransport that is connected to ONE for writing, and to OTHER by its doing."""

    def __init__(self) -> None:
        self.events: list[TransportEvent] = [Connected(peer=ONE), Connected(peer=OTHER)]

    def poll(self) -> list[TransportEvent]:
        return self.events

    def links(self) -> tuple[LinkInfo, ...]:
        return (LinkInfo(peer=ONE, backend="shm", bandwidth_bytes_per_s=7_000.6),)

    def backend_of(self, peer: PeerId) -> str:
        return {ONE: "shm", OTHER: "nixl"}[peer]


@pytest.mark.bad_day(14)
def test_the_port_tells_what_connects_and_how_fast() -> None:
    posted: list[ev.Event] = []
    TransportPort(FakeTransport(), LAYOUT, post=posted.append).poll()
    assert posted == [
        ev.PeerConnected(peer=ONE, transport="shm", bandwidth_bytes_per_s=7_001),
        ev.PeerConnected(peer=OTHER, transport="nixl"),
    ]


class SmallPool(FakeTransport):
    """Of a peer that has no such blocks."""

    def write(
        self,
        peer: PeerId,
        copies: Sequence[Copy],
        notify: bytes,
        *,
        num_sums: int = 0,
    ) -> int:
        raise ValueError(f"copies: {copies[0]} is outside of the target pool")


def test_blocks_that_the_peer_does_not_have_fail_their_push_alone() -> None:
    posted: list[ev.Event] = []
    chunk = PushChunk(
        key=PushKey("r", 1),
        lease_id=1,
        rank=0,
        chunk=0,
        blocks=(BlockGrant(0, 4_000_000_000, 1),),
        first_layer=0,
        num_layers=1,
    )
    effect = WriteBlocks(peer=ONE, write_id=7, source_blocks=(0,), message=chunk)
    TransportPort(SmallPool(), LAYOUT, post=posted.append).write(effect)
    (broken,) = posted
    assert isinstance(broken, ev.WriteBroken) and (broken.write_id, broken.quiesced) == (7, True)
    assert "outside of the target pool" in broken.reason
