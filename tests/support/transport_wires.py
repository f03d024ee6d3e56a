"""Worker lives for transport tests: each an end of a transport over a pool of its own, driven by the test.

`ProcessWire` runs every life in a process of its own, which polls its transport whenever that says so and reports what
happens over a pipe. Processes are kept for the next life, since starting one takes longer than a test. `LoopbackWire`
has all lives in this process, on one hub whose clock it moves.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import select
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from kv_transfer.checksum import as_memory
from kv_transfer.transport.auto import AutoTransport
from kv_transfer.transport.auto_dial import PROBE_BYTES
from kv_transfer.transport.backends import PREFERENCE, open_backend
from kv_transfer.transport.base import (
    Connected,
    Copy,
    Notified,
    PeerId,
    Transport,
    TransportEvent,
    UnknownPeerError,
    WriteCompleted,
    WriteFailed,
)
from kv_transfer.transport.loopback import LoopbackHub, LoopbackTransport
from kv_transfer.transport.shm_pool import PoolMemory, create_pool

BLOCK_BYTES = 360 * 1024
POOL_BYTES = 16 * BLOCK_BYTES
AUTO = "auto"
TIMEOUT_S = 30.0
LATE_S = 0.05
"""How long a late write is waited for: a real one needs real time."""
MAX_FLOOD_WRITES = 4
"""In flight at once while a life floods a peer."""
SPAWN = multiprocessing.get_context("spawn")


def content(seed: int, size_bytes: int = POOL_BYTES) -> bytes:
    """What the pool of a life with that seed is filled with: zeros for seed 0."""
    if seed == 0:
        return bytes(size_bytes)
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8).tobytes()


def pool_size_bytes(backend: str) -> int:
    """Of a life's whole region; the test's bytes come first."""
    return POOL_BYTES + (PROBE_BYTES if backend.startswith(AUTO) else 0)


def open_transport(backend: str, me: PeerId, pool: PoolMemory) -> Transport:
    """`backend` is the name of one, or `auto`, or `auto:` with a list of names to choose from."""
    kind, _, names = backend.partition(":")
    if kind == AUTO:
        return AutoTransport(me, pool, preference=names.split(",") if names else PREFERENCE)
    return open_backend(backend, me, pool)


class Life(Protocol):
    """One worker life, as the test sees it. `events` are those that no `wait_for` has taken yet."""

    me: PeerId
    endpoint: bytes
    events: list[TransportEvent]

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Calls the transport; raises what it raises."""

    def wait_for(self, *kinds: type[TransportEvent]) -> TransportEvent:
        """Takes the first event of these kinds out of `events`."""

    def read(self, offset_bytes: int, size_bytes: int) -> bytes: ...

    def clear(self) -> None:
        """Fills the pool with zeros."""

    def hold(self) -> None:
        """From now on the transport is polled only by `call("poll")`."""

    def is_readable(self, timeout_s: float) -> bool:
        """Whether `fileno` is, or becomes so in time. Only while held."""

    def flood(self, peer: PeerId) -> None:
        """Writes the whole pool to the peer, over and over, from now on."""

    def stop(self) -> None:
        """As SIGSTOP."""

    def wake(self) -> None:
        """As SIGCONT; no harm if the life has ended."""

    def kill(self) -> None:
        """As SIGKILL."""

    def close(self) -> None: ...


class Wire(Protocol):
    """Where lives of one backend live. `pool_bytes`: size of the region that each has registered."""

    backend: str
    pool_bytes: int

    def start(self, me: PeerId, seed: int = 0) -> Life: ...

    def settle(self) -> None:
        """Gives whatever is still in flight the time to land."""

    def end_test(self) -> None:
        """Ends every life."""

    def close(self) -> None: ...


def make_wire(backend: str) -> Wire:
    return LoopbackWire() if backend == "loopback" else ProcessWire(backend)


def connect(writer: Life, target: Life) -> None:
    """Both sides have been told when this returns."""
    writer.call("connect", target.me, target.endpoint)
    assert writer.wait_for(Connected) == Connected(peer=target.me)
    assert target.wait_for(Connected) == Connected(peer=writer.me)


# ---- a life in a process of its own ---------------------------------------------------------------------------


class _Host:
    """The child's side: lives one after the other, at most one at a time."""

    def __init__(self, backend: str, pipe: Connection) -> None:
        self._backend = backend
        self._pipe = pipe
        self._poller = select.poll()
        self._poller.register(pipe.fileno(), select.POLLIN)
        self._pool: PoolMemory | None = None
        self._transport: Transport | None = None
        self._is_held = False

    def run(self) -> None:
        while True:
            self._poller.poll()
            if self._transport is not None and not self._is_held:
                for event in self._transport.poll():
                    self._pipe.send(event)
            if self._pipe.poll():
                try:
                    method, args, options = self._pipe.recv()
                except EOFError:
                    return
                try:
                    own = getattr(self, f"do_{method}", None)
                    answer = ("result", (own or getattr(self._transport, method))(*args, **options))
                except Exception as error:  # noqa: BLE001 - raised again where the test called
                    answer = ("error", error)
                self._pipe.send(answer)

    def do_open(self, me: PeerId, seed: int) -> bytes:
        self._pool = create_pool(pool_size_bytes(self._backend))
        self._pool.mapping[:POOL_BYTES] = content(seed)
        self._transport = open_transport(self._backend, me, self._pool)
        self._poller.register(self._transport.fileno(), select.POLLIN)
        return self._transport.endpoint()

    def do_close(self) -> None:
        if self._transport is not None:
            if not self._is_held:
                self._poller.unregister(self._transport.fileno())
            self._is_held = False
            self._transport.close()
            self._transport.close()
            self._transport = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def do_read(self, offset_bytes: int, size_bytes: int) -> bytes:
        assert self._pool is not None
        return bytes(self._pool.mapping[offset_bytes : offset_bytes + size_bytes])

    def do_clear(self) -> None:
        assert self._pool is not None
        as_memory(self._pool.mapping)[:] = 0

    def do_hold(self) -> None:
        assert self._transport is not None
        self._is_held = True
        self._poller.unregister(self._transport.fileno())

    def do_is_readable(self, timeout_s: float) -> bool:
        assert self._transport is not None
        return bool(select.select([self._transport.fileno()], [], [], timeout_s)[0])

    def do_flood(self, peer: PeerId) -> None:
        """Never returns."""
        assert self._transport is not None and self._pool is not None
        self._pipe.send(("result", None))
        copies = [Copy(0, 0, POOL_BYTES)]
        num_pending = 0
        while True:
            while num_pending < MAX_FLOOD_WRITES:
                self._transport.write(peer, copies, b"flood")
                num_pending += 1
            num_pending -= sum(isinstance(event, WriteCompleted | WriteFailed) for event in self._transport.poll())

    def do_resources(self) -> tuple[int, int]:
        """Open descriptors and threads of the process."""
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _host_main(backend: str, pipe: Connection) -> None:
    _Host(backend, pipe).run()


class ProcessLife:
    """The parent's side; see Life."""

    def __init__(self, backend: str) -> None:
        self.me = PeerId("", 0)
        self.endpoint = b""
        self.events: list[TransportEvent] = []
        self.is_reusable = True
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_host_main, args=(backend, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def open(self, me: PeerId, seed: int) -> None:
        self.me = me
        self.endpoint = self.call("open", me, seed)

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        self.pipe.send((method, args, options))
        while True:
            said = self._receive()
            if not isinstance(said, tuple):
                self.events.append(said)
                continue
            kind, value = said
            if kind == "error":
                raise value
            return value

    def wait_for(self, *kinds: type[TransportEvent]) -> TransportEvent:
        num_seen = 0
        while True:
            for position in range(num_seen, len(self.events)):
                if isinstance(self.events[position], kinds):
                    return self.events.pop(position)
            num_seen = len(self.events)
            names = ", ".join(kind.__name__ for kind in kinds)
            self.events.append(self._receive(f"{self.me.name} reports no {names}, only {self.events}"))

    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        return self.call("read", offset_bytes, size_bytes)  # type: ignore[no-any-return]

    def clear(self) -> None:
        self.call("clear")

    def hold(self) -> None:
        self.call("hold")

    def is_readable(self, timeout_s: float) -> bool:
        return self.call("is_readable", timeout_s)  # type: ignore[no-any-return]

    def flood(self, peer: PeerId) -> None:
        self.is_reusable = False
        self.call("flood", peer)

    def stop(self) -> None:
        self.is_reusable = False
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self.is_reusable = False
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        self.call("close")

    def rest(self) -> bool:
        """Ends the life, which may have ended before. Whether the process can take another one."""
        if self.is_reusable and self.process.is_alive():
            try:
                self.close()
            except (EOFError, OSError):  # a fence has ended it meanwhile
                return False
            self.events.clear()
            return True
        return False

    def end_process(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(TIMEOUT_S)
        self.pipe.close()
        self.process.close()

    def _signal(self, number: signal.Signals) -> None:
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def _receive(self, complaint: str = "the life says nothing") -> Any:
        assert self.pipe.poll(TIMEOUT_S), complaint
        return self.pipe.recv()


class ProcessWire:
    """See Wire."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.pool_bytes = pool_size_bytes(backend)
        self._lives: list[ProcessLife] = []
        self._resting: list[ProcessLife] = []

    def start(self, me: PeerId, seed: int = 0) -> ProcessLife:
        life = self._resting.pop() if self._resting else ProcessLife(self.backend)
        self._lives.append(life)
        life.open(me, seed)
        return life

    def settle(self) -> None:
        time.sleep(LATE_S)

    def end_test(self) -> None:
        lives, self._lives = self._lives, []
        for life in lives:
            if life.rest():
                self._resting.append(life)
            else:
                life.end_process()

    def close(self) -> None:
        self.end_test()
        for life in self._resting:
            life.end_process()
        self._resting.clear()


# ---- a life on the loopback hub -------------------------------------------------------------------------------


class LoopbackLife:
    """See Life."""

    def __init__(self, wire: LoopbackWire, me: PeerId, seed: int) -> None:
        self.me = me
        self.events: list[TransportEvent] = []
        self._wire = wire
        self._pool = bytearray(content(seed))
        self._transport = LoopbackTransport(wire.hub, me, memoryview(self._pool))
        self._is_held = False
        self._flooded: PeerId | None = None
        self.endpoint = self._transport.endpoint()

    def look(self) -> None:
        """Polls, unless that is left to the test."""
        if self._is_held:
            return
        events = self._transport.poll()
        self.events += events
        for event in events:
            if isinstance(event, WriteCompleted | WriteFailed) and self._flooded is not None:
                self._write_all(self._flooded)

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        return getattr(self._transport, method)(*args, **options)

    def wait_for(self, *kinds: type[TransportEvent]) -> TransportEvent:
        while True:
            self.look()
            for position, event in enumerate(self.events):
                if isinstance(event, kinds):
                    return self.events.pop(position)
            assert self._wire.step(), f"nothing more happens, and {self.me.name} has only {self.events}"

    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        return bytes(self._pool[offset_bytes : offset_bytes + size_bytes])

    def clear(self) -> None:
        self._pool[:] = bytes(len(self._pool))

    def hold(self) -> None:
        self._is_held = True

    def is_readable(self, timeout_s: float) -> bool:
        del timeout_s
        self._wire.settle()
        return bool(select.select([self._transport.fileno()], [], [], 0)[0])

    def flood(self, peer: PeerId) -> None:
        self._flooded = peer
        for _ in range(MAX_FLOOD_WRITES):
            self._write_all(peer)

    def stop(self) -> None:
        self._wire.hub.pause(self.me)

    def wake(self) -> None:
        self._wire.hub.resume(self.me)

    def kill(self) -> None:
        self._wire.hub.crash(self.me)

    def close(self) -> None:
        self._flooded = None
        self._transport.close()
        self._transport.close()

    def _write_all(self, peer: PeerId) -> None:
        try:
            self._transport.write(peer, [Copy(0, 0, len(self._pool))], b"flood")
        except UnknownPeerError:
            self._flooded = None


class LoopbackWire:
    """See Wire."""

    backend = "loopback"
    pool_bytes = POOL_BYTES

    def __init__(self) -> None:
        self.hub = LoopbackHub(random.Random(0))
        self._lives: list[LoopbackLife] = []

    def start(self, me: PeerId, seed: int = 0) -> LoopbackLife:
        life = LoopbackLife(self, me, seed)
        self._lives.append(life)
        return life

    def step(self) -> bool:
        """Lets the next thing happen, and everybody look; False if nothing is under way."""
        due_ns = self.hub.next_due_ns()
        if due_ns is None:
            return False
        self.hub.advance(due_ns)
        for life in self._lives:
            life.look()
        return True

    def settle(self) -> None:
        while self.step():
            continue

    def end_test(self) -> None:
        for life in self._lives:
            life.close()
        self._lives.clear()
        self.hub = LoopbackHub(random.Random(0))

    def close(self) -> None:
        self.end_test()


def payloads(life: Life, count: int) -> list[bytes]:
    """Of the next `count` notifications, whoever sent them."""
    found: Sequence[TransportEvent] = [life.wait_for(Notified) for _ in range(count)]
    return [event.payload for event in found if isinstance(event, Notified)]
