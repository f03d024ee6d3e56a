"""What all simulated push transports of a cluster share: the kind of backend, its faults, and who lives where.

Two families of backend are modelled. With `SHARED_MEMORY` the sender's own process copies into the receiver's memory:
a stopped sender's copies land when it continues, a dead one's never, and the fence is its death. With `REMOTE` the
network card copies: what was posted may land although the sender is stopped or dead, the receiver may not hear of its
death, and the fence closes the receiver's side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from cluster.sim.kernel import Kernel
from cluster.sim.network import Network
from kv_transfer.protocol.messages import BlockGrant
from kv_transfer.transport.base import Copy, PeerId

if TYPE_CHECKING:
    from cluster.sim.transport import SimTransport

MIN_LATENCY_NS = 20_000
MAX_LATENCY_NS = 320_000


class Family(Enum):
    SHARED_MEMORY = "shared_memory"
    REMOTE = "remote"


@dataclass(slots=True, kw_only=True)
class DataFaults:
    """Probabilities, a write or notification, of what goes wrong on the data links at the moment; all 0 = healthy."""

    lose_notice: float = 0.0
    delay_notice: float = 0.0
    repeat_notice: float = 0.0
    corrupt: float = 0.0
    skip_data: float = 0.0
    fail_write: float = 0.0
    slow_write: float = 0.0
    cut: float = 0.0

    def clear(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """A copy that is about to land: layers of a block that was granted so."""

    sender: PeerId
    receiver: PeerId
    grant: BlockGrant
    layers: range
    copy: Copy


class Fabric:
    """What all transports of a cluster share: who lives where, and the state of the links."""

    def __init__(self, kernel: Kernel, network: Network, family: Family, *, ns_per_byte: int = 400) -> None:
        self.kernel = kernel
        self.network = network
        self.family = family
        self.ns_per_byte = ns_per_byte
        self.faults = DataFaults()
        self.random = kernel.stream("fabric")
        self.transports: dict[PeerId, SimTransport] = {}
        self.num_copies = 0
        self.num_fences = 0
        self.observe_landing: Callable[[Landing], None] = lambda landing: None
        """Called before each copy lands: the checks look at the block."""

    def latency_ns(self) -> int:
        return MIN_LATENCY_NS + int(self.random.random() * (MAX_LATENCY_NS - MIN_LATENCY_NS))

    def hits(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def cut(self, name: str, other: str = "") -> None:
        """Fault: breaks the data connections of a worker, all of them or those to one other."""
        for transport in list(self.transports.values()):
            if transport.me.name == name and transport.process.alive:
                for peer in transport.peers:
                    if other in ("", peer.name):
                        transport.cut(peer)

    def are_apart(self, end: SimTransport, other: SimTransport) -> bool:
        """Whether a partition separates the two; workers that share memory share a host."""
        if self.family is Family.SHARED_MEMORY:
            return False
        return self.network.is_partitioned(end.process.name, other.process.name)
