"""Nodes of the nccl transport, stepped by hand on a virtual clock over a double of NCCL; their TCP is real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from kv_transfer.checksum import Memory
from kv_transfer.transport.base import Connected, Copy, Notified, PeerId, TransportEvent
from kv_transfer.transport.nccl_limits import NcclLimits
from kv_transfer.transport.nccl_node import LinkUp, NcclNode
from kv_transfer.transport.nccl_wire import encode_endpoint
from tests.support.fake_nccl import FakeFabric, FakeNccl

POOL = 1 << 20
STEP_NS = 1_000_000
MAX_STEPS = 60_000

E = TypeVar("E", bound=TransportEvent)


def pool_bytes(seed: int) -> Memory:
    return np.random.default_rng(seed).integers(0, 256, POOL, dtype=np.uint8) if seed else np.zeros(POOL, np.uint8)


class Life:
    """One worker life, driven by hand."""

    def __init__(
        self,
        world: World,
        me: PeerId,
        seed: int,
        *,
        limits: NcclLimits | None = None,
        version: str = "2.99.0",
    ) -> None:
        self.me = me
        self.memory = pool_bytes(seed)
        self.events: list[TransportEvent] = []
        self.is_stopped = False
        self.sizes: dict[PeerId, int | None] = {}
        library = FakeNccl(world.fabric, self.memory, version)
        self.node = NcclNode(me, library, limits or NcclLimits(), "127.0.0.1", self._emit)
        self._world = world
        self._handles = 0

    def endpoint(self) -> bytes:
        return encode_endpoint(self.node.endpoint)

    def connect(self, other: Life) -> None:
        self.node.connect(other.me, other.endpoint(), self._world.now_ns)

    def write(self, peer: PeerId, copies: list[Copy], notify: bytes, num_sums: int = 0) -> int:
        self._handles += 1
        self.node.write(peer, self._handles, copies, notify, num_sums, self._world.now_ns)
        return self._handles

    def notify(self, peer: PeerId, payload: bytes) -> None:
        self.node.notify(peer, payload, self._world.now_ns)

    def fence(self, peer: PeerId) -> None:
        self.node.fence(peer, self._world.now_ns)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def payloads(self) -> list[bytes]:
        return [event.payload for event in self.of(Notified)]

    def _emit(self, event: TransportEvent | LinkUp) -> None:
        self.events.append(Connected(peer=event.peer) if isinstance(event, LinkUp) else event)


@dataclass
class World:
    """Steps every life in turn; a stopped one does nothing, but its GPU goes on."""

    fabric: FakeFabric = field(default_factory=FakeFabric)
    lives: list[Life] = field(default_factory=list)
    now_ns: int = 0

    def life(self, me: PeerId, seed: int = 0, *, limits: NcclLimits | None = None, version: str = "2.99.0") -> Life:
        life = Life(self, me, seed, limits=limits, version=version)
        self.lives.append(life)
        return life

    def step(self, step_ns: int = STEP_NS) -> None:
        self.now_ns += step_ns
        for life in self.lives:
            if not life.is_stopped:
                life.node.step(self.now_ns)
                life.node.check_invariants()

    def until(self, condition: Callable[[], object]) -> None:
        for _ in range(MAX_STEPS):
            if condition():
                return
            self.step()
        raise AssertionError(f"never happened; events {[life.events for life in self.lives]}")

    def run(self, num_steps: int = 50) -> None:
        for _ in range(num_steps):
            self.step()

    def end(self, life: Life) -> None:
        """Ends it as a killed process does: its sockets close, its kernels vanish."""
        self.lives.remove(life)
        for communicator in self.fabric.communicators:
            communicator.is_dead |= communicator.memory is life.memory
        life.node.give_up()

    def close(self) -> None:
        for life in self.lives:
            life.node.close(self.now_ns)
        self.fabric.may_join = self.fabric.is_moving = True
        self.until(lambda: all(life.node.is_closed or life.is_stopped for life in self.lives))
        for life in self.lives:
            life.node.give_up()
