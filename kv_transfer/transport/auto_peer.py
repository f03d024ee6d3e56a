"""What an `auto` transport knows of a peer it is connected to."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from kv_transfer.transport.base import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkInfo:
    """A connection that this side writes over. `bandwidth_bytes_per_s` is what its self-test measured."""

    peer: PeerId
    backend: str
    bandwidth_bytes_per_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class Peer:
    """A life there is any connection to.

    Attributes:
        linked: backends that are connected, in either direction.
        outbound: the connection that we chose. inbound: the backend that the peer chose.
    """

    linked: dict[str, None] = field(default_factory=dict)
    outbound: LinkInfo | None = None
    inbound: str | None = None

    def backend_for(self, *, is_answer: bool) -> str | None:
        """What carries our writes; an answer, which has no copies, may also go back over the peer's connection."""
        if self.outbound is not None:
            return self.outbound.backend
        return self.inbound if is_answer else None

    @property
    def is_known(self) -> bool:
        """Whether the owner has been told of the peer."""
        return self.outbound is not None or self.inbound is not None


class Peers:
    """All lives that are connected, or being dialled."""

    def __init__(self) -> None:
        self._peers: dict[PeerId, Peer] = {}

    def get(self, peer: PeerId) -> Peer | None:
        return self._peers.get(peer)

    def of(self, peer: PeerId) -> Peer:
        """Makes an entry if there is none."""
        return self._peers.setdefault(peer, Peer())

    def forget(self, peer: PeerId) -> Peer | None:
        return self._peers.pop(peer, None)

    def links(self) -> tuple[LinkInfo, ...]:
        """By peer."""
        links = [known.outbound for known in self._peers.values() if known.outbound is not None]
        return tuple(sorted(links, key=lambda link: link.peer))

    def check_invariants(self, dialled: Container[PeerId]) -> None:
        for peer, known in self._peers.items():
            assert known.linked or peer in dialled, f"{peer} is neither connected nor being dialled"
            assert known.outbound is None or peer not in dialled, f"{peer} is connected and being dialled"
            for backend in (known.inbound, known.outbound.backend if known.outbound is not None else None):
                assert backend is None or backend in known.linked, f"{peer} is known over {backend}, not connected"
