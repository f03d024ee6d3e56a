"""What connects this worker to its peers, and how fast it is where this side writes."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.ids import WorkerId
from cluster.core.reports import LinkReport
from kv_transfer.transport.base import PeerId


@dataclass(slots=True, kw_only=True)
class _PeerLink:
    """`bandwidth_bytes_per_s` is None as long as only the peer writes."""

    transport: str
    bandwidth_bytes_per_s: int | None


class PeerLinks:
    """One entry for each life of a peer that is connected."""

    def __init__(self) -> None:
        self._links: dict[PeerId, _PeerLink] = {}

    def connected(self, peer: PeerId, transport: str, bandwidth_bytes_per_s: int | None) -> None:
        known = self._links.get(peer)
        if known is not None and bandwidth_bytes_per_s is None and known.bandwidth_bytes_per_s is not None:
            return  # the peer connects as well: what we write over is still the connection that we made
        self._links[peer] = _PeerLink(transport=transport, bandwidth_bytes_per_s=bandwidth_bytes_per_s)

    def gone(self, peer: PeerId) -> None:
        self._links.pop(peer, None)

    def transport_of(self, peer: PeerId | None) -> str:
        """Empty if nothing connects us, or nobody has said what does."""
        link = None if peer is None else self._links.get(peer)
        return "" if link is None else link.transport

    def reports(self) -> tuple[LinkReport, ...]:
        """Of connections that this side writes over, by peer."""
        return tuple(
            LinkReport(
                peer=WorkerId(peer.name, peer.incarnation),
                transport=link.transport,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
            )
            for peer, link in sorted(self._links.items())
            if link.bandwidth_bytes_per_s is not None
        )
