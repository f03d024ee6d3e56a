"""Worker lives for tests of a transport: one in the test's own process, others in processes of their own.

A transport is named by the path of its class, `package.module:Class`, so that a spawned process can make it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kv_transfer.checksum import as_memory
from kv_transfer.transport.base import (
    Connected,
    ConnectFailed,
    Copy,
    PeerId,
    Transport,
    TransportEvent,
    UnknownPeerError,
    WriteCompleted,
    WriteFailed,
)
from kv_transfer.transport.shm_pool import PoolMemory, create_pool
from tests.support import network_namespaces

TIMEOUT_S = 30.0
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Which transport, with what pool. `options` are its class's keyword arguments. A child enters the network
    namespace that is named."""

    path: str
    pool_size_bytes: int
    options: Mapping[str, Any] = field(default_factory=dict)
    network_namespace: str = ""

    def make(self, me: PeerId, pool: PoolMemory) -> Transport:
        module, _, name = self.path.partition(":")
        transport: Transport = getattr(importlib.import_module(module), name)(me, pool, **self.options)
        return transport


def pool_bytes(seed: int, size_bytes: int) -> bytes:
    """What `fill` writes."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8).tobytes()


def fill(pool: PoolMemory, seed: int) -> None:
    pool.mapping[:] = pool_bytes(seed, pool.size_bytes)


def child_main(kind: Kind, me: PeerId, seed: int, pipe: Connection) -> None:
    """A worker process: does what it is told over `pipe`, reports its transport's events there."""
    if kind.network_namespace:
        network_namespaces.enter(kind.network_namespace)
    pool = create_pool(kind.pool_size_bytes)
    fill(pool, seed)
    transport = kind.make(me, pool)
    pipe.send(transport.endpoint())
    poller = select.poll()
    poller.register(transport.fileno(), select.POLLIN)
    poller.register(pipe.fileno(), select.POLLIN)
    while True:
        poller.poll()
        for event in transport.poll():
            pipe.send(event)
        if pipe.poll():
            try:
                method, args, options = pipe.recv()
            except EOFError:
                break
            if method == "close":
                break
            if method == "hammer":
                hammer(transport, pipe, *args)
            elif method == "pool":
                pipe.send(("result", bytes(pool.mapping)))
            elif method == "fill":
                pipe.send(("result", fill(pool, *args)))
            else:
                pipe.send(("result", getattr(transport, method)(*args, **options)))
    transport.close()
    pool.close()
    pipe.close()


def hammer(transport: Transport, pipe: Connection, peer: PeerId, copies: list[Copy]) -> None:
    """Writes over and over, two at a time, until something fails; that and the events with it are reported."""
    pending = 0
    while True:
        with suppress(UnknownPeerError):  # it has ended, and an event will say so
            while pending < 2:
                transport.write(peer, copies, b"")
                pending += 1
        select.select([transport.fileno()], [], [])
        events = transport.poll()
        pending -= sum(isinstance(event, WriteCompleted) for event in events)
        if any(not isinstance(event, WriteCompleted) for event in events):
            for event in events:
                pipe.send(event)
            return


@dataclass
class Child:
    """The parent's handle on a worker process."""

    process: multiprocessing.process.BaseProcess
    pipe: Connection
    endpoint: bytes
    events: list[TransportEvent]

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        self.pipe.send((method, args, options))
        while True:
            said = self.receive()
            if isinstance(said, tuple) and said[0] == "result":
                return said[1]
            self.events.append(said)

    def tell(self, method: str, *args: Any) -> None:
        self.pipe.send((method, args, {}))

    def receive(self) -> Any:
        assert self.pipe.poll(TIMEOUT_S), f"the child says nothing, only {self.events}"
        return self.pipe.recv()

    def wait_for(self, wanted: type[TransportEvent]) -> TransportEvent:
        while True:
            for position, event in enumerate(self.events):
                if isinstance(event, wanted):
                    return self.events.pop(position)
            self.events.append(self.receive())

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def children(kind: Kind) -> Iterator[Callable[..., Child]]:
    """Gives a function that starts a Child; at the end all of them are ended, stopped ones too."""
    started: list[Child] = []

    def start(me: PeerId, seed: int = 1, another_kind: Kind | None = None) -> Child:
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=child_main, args=(another_kind or kind, me, seed, theirs), daemon=True)
        process.start()
        theirs.close()
        assert ours.poll(TIMEOUT_S)
        child = Child(process, ours, ours.recv(), [])
        started.append(child)
        return child

    yield start
    for child in started:
        if child.process.is_alive():
            child.process.kill()
        child.process.join(TIMEOUT_S)
        child.pipe.close()
        child.process.close()


class Life:
    """A life in the test's own process."""

    def __init__(self, kind: Kind, me: PeerId, seed: int = 0) -> None:
        self.me = me
        self.pool = create_pool(kind.pool_size_bytes)
        if seed:
            fill(self.pool, seed)
        self.transport: Any = kind.make(me, self.pool)
        self.events: list[TransportEvent] = []

    @property
    def memory(self) -> Any:
        return as_memory(self.pool.mapping)

    def bytes_at(self, offset: int, size: int) -> bytes:
        return bytes(self.pool.mapping[offset : offset + size])

    def poll(self, timeout_s: float) -> None:
        select.select([self.transport.fileno()], [], [], timeout_s)
        self.events += self.transport.poll()
        self.transport.check_invariants()

    def wait_for(self, wanted: type[TransportEvent]) -> TransportEvent:
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            for position, event in enumerate(self.events):
                if isinstance(event, wanted):
                    return self.events.pop(position)
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"no {wanted.__name__}, only {self.events}"
            self.poll(left_s)

    def wait_for_write(self, handle: int) -> WriteCompleted | WriteFailed:
        """How that write ended; other events are kept."""
        while True:
            for position, event in enumerate(self.events):
                if isinstance(event, WriteCompleted | WriteFailed) and event.handle == handle:
                    self.events.pop(position)
                    return event
            self.poll(TIMEOUT_S)

    def close(self) -> None:
        self.transport.close()
        self.pool.close()


def link(writer: Life, reader: Life) -> None:
    """Connects two lives of one process; both must poll for it."""
    writer.transport.connect(reader.me, reader.transport.endpoint())
    deadline_s = time.monotonic() + TIMEOUT_S
    wanted = {id(writer), id(reader)}
    while wanted:
        assert time.monotonic() < deadline_s, "not connected"
        for life, other in ((writer, reader), (reader, writer)):
            life.poll(0.005)
            assert not any(isinstance(event, ConnectFailed) for event in life.events), life.events
            connected = Connected(peer=other.me)
            if connected in life.events:
                life.events.remove(connected)
                wanted.discard(id(life))
