"""A worker's half of the pushes in a process of its own, to be killed and stopped, over any transport.

The child is a PushHost (the worker's own code, without engine and coordinator) on a small pool. It does what it is
told over a pipe, and reports there what becomes of its pushes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.kv_wires.push_host import PushHost
from kv_transfer.checksum import Memory, as_memory, checksums
from kv_transfer.protocol.layout import KVLayout, LayerGroup
from kv_transfer.protocol.limits import MILLISECOND_NS, PushLimits
from kv_transfer.protocol.messages import Grant, PeerId, PushKey
from kv_transfer.protocol.sampling import Checksums
from kv_transfer.transport import shm_copier
from kv_transfer.transport.backends import open_backend
from kv_transfer.transport.base import Copy, Transport
from kv_transfer.transport.shm_pool import PoolMemory, create_pool

LAYOUT = KVLayout(groups=(LayerGroup(num_layers=4, num_kv_heads=4, head_dim=64),), block_size=16, dtype="float32")
BLOCK_BYTES = LAYOUT.block_size_bytes
NUM_BLOCKS = 128
LIMITS = PushLimits(
    lease_ttl_ns=1000 * MILLISECOND_NS,
    stop_timeout_ns=300 * MILLISECOND_NS,
    stop_resend_interval_ns=50 * MILLISECOND_NS,
    end_resend_interval_ns=100 * MILLISECOND_NS,
    max_blocks_per_write=4,
    max_inflight_writes=2,
)
SLOW_BLOCK_S = 0.010
"""What a throttled push takes for a block."""
SLICE_BYTES = BLOCK_BYTES // 16
ANSWER_TIMEOUT_S = 30.0
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A transport under test. `copies_itself`: its copies run in our own code and can be slowed down themselves, so
    that a signal lands within one; elsewhere a slow sender's blocks become ready slowly."""

    name: str
    copies_itself: bool = False

    def open(self, me: PeerId, pool: PoolMemory) -> Transport:
        return open_backend(self.name, me, pool)


WIRES = (
    Wire(name="shm", copies_itself=True),
    Wire(name="nixl"),
    Wire(name="ucx"),
)


def pattern(seed: int, num_blocks: int) -> Memory:
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, BLOCK_BYTES), dtype=np.uint8)


# ---- the child -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wrote:
    """The push's first write has been posted."""

    key: PushKey


@dataclass(frozen=True, slots=True)
class CommittedHere:
    """At the receiver."""

    key: PushKey
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FailedHere:
    """At either side."""

    key: PushKey
    reason: str


class _WatchedTransport:
    """The transport, which tells of the first write to each peer since it was last asked to."""

    def __init__(self, transport: Transport, on_write: Any) -> None:
        self._transport = transport
        self._on_write = on_write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(
        self,
        peer: PeerId,
        copies: Sequence[Copy],
        notify: bytes,
        *,
        num_sums: int = 0,
    ) -> int:
        handle = self._transport.write(peer, copies, notify, num_sums=num_sums)
        if copies:
            self._on_write(peer)
        return handle


def _copy_slowly(target: Memory, source: Memory, copies: Any, *, checksum: bool) -> list[int]:
    for source_bytes, target_bytes, size_bytes in copies.tolist():
        for start in range(0, size_bytes, SLICE_BYTES):
            size = min(SLICE_BYTES, size_bytes - start)
            target[target_bytes + start : target_bytes + start + size] = source[source_bytes + start :][:size]
            time.sleep(SLOW_BLOCK_S * size / BLOCK_BYTES)
    return checksums(source, [(start, size) for start, _, size in copies.tolist()]) if checksum else []


class _Child:
    def __init__(self, me: PeerId, wire: Wire, is_slow: bool, pipe: Connection) -> None:
        self._pipe = pipe
        self._is_paced = is_slow and not wire.copies_itself
        if is_slow and wire.copies_itself:
            shm_copier.copy_ranges = _copy_slowly
        self._pool = create_pool(LAYOUT.pool_size_bytes(NUM_BLOCKS))
        self._memory = as_memory(self._pool.mapping)
        self._transport = wire.open(me, self._pool)
        self._unwritten: dict[PeerId, PushKey] = {}
        self._committed: dict[PushKey, list[int]] = {}
        self._pushing: set[asyncio.Task[None]] = set()
        self._sources: dict[PushKey, list[int]] = {}
        self._host = PushHost(
            me,
            _WatchedTransport(self._transport, self._on_write),  # type: ignore[arg-type]
            self._memory,
            LAYOUT,
            limits=LIMITS,
            checksums=Checksums.FULL,
            on_arrived=self._on_arrived,
            on_failed=lambda key, reason: pipe.send(FailedHere(key, reason)),
        )

    def endpoint(self) -> bytes:
        return self._transport.endpoint()

    def reserve(self, key: PushKey, lease_id: int, sender: PeerId, num_blocks: int, ttl_ns: int) -> Grant:
        return self._host.reserve(key, lease_id, sender, num_blocks, ttl_ns=ttl_ns)

    def push(self, grant: Grant, endpoint: bytes, seed: int, is_paced: bool) -> None:
        """Starts a push of `pattern(seed)`, whose blocks become ready one by one if `is_paced`."""
        blocks = self._host.pool.allocate(len(grant.blocks))
        for block_id, content in zip(blocks, pattern(seed, len(blocks)), strict=True):
            self._memory[block_id * BLOCK_BYTES :][:BLOCK_BYTES] = content
        self._sources[grant.key] = blocks
        self._unwritten[grant.receiver] = grant.key
        self._host.open(grant, endpoint)
        task = asyncio.get_running_loop().create_task(self._give(grant.key, blocks, is_paced or self._is_paced))
        self._pushing.add(task)
        task.add_done_callback(self._pushing.discard)

    async def _give(self, key: PushKey, blocks: list[int], is_paced: bool) -> None:
        for pair in enumerate(blocks):
            self._host.give(key, [pair])
            if is_paced:
                await asyncio.sleep(SLOW_BLOCK_S)
        self._host.finish(key, len(blocks) * LAYOUT.block_size)
        await self._host.wait_until(lambda: not self._host.pushes.holds(key))
        self._host.pool.release(self._sources.pop(key))

    def differing_blocks(self, key: PushKey, seed: int) -> list[int]:
        """Those of a committed push that are not bit-equal to `pattern(seed)`."""
        block_ids = self._committed[key]
        contents = zip(block_ids, pattern(seed, len(block_ids)), strict=True)
        return [
            block_id
            for block_id, content in contents
            if not np.array_equal(self._memory[block_id * BLOCK_BYTES :][:BLOCK_BYTES], content)
        ]

    def release(self, key: PushKey) -> None:
        self._host.pool.release(self._committed.pop(key))

    def num_held(self) -> int:
        """Leases, reserved, quarantined and source blocks; checks the invariants."""
        self._host.pushes.check_invariants()
        self._host.pool.check_invariants()
        counts = self._host.pool.counts()
        num_sources = sum(map(len, self._sources.values()))
        return len(self._host.pushes.leases(time.monotonic_ns())) + counts.reserved + counts.quarantined + num_sources

    def close(self) -> None:
        self._host.close()
        self._transport.close()

    def _on_write(self, peer: PeerId) -> None:
        key = self._unwritten.pop(peer, None)
        if key is not None:
            self._pipe.send(Wrote(key))

    def _on_arrived(self, key: PushKey, block_ids: list[int]) -> None:
        self._committed[key] = block_ids
        self._pipe.send(CommittedHere(key, tuple(block_ids)))


async def _run(me: PeerId, wire: Wire, is_slow: bool, pipe: Connection) -> None:
    child = _Child(me, wire, is_slow, pipe)
    ended = asyncio.get_running_loop().create_future()

    def end(error: Exception | None) -> None:
        asyncio.get_running_loop().remove_reader(pipe.fileno())
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    def answer() -> None:
        try:
            method, arguments = pipe.recv()
            pipe.send(("answer", getattr(child, method)(*arguments)))
        except (EOFError, BrokenPipeError):
            end(None)
        except Exception as error:  # noqa: BLE001 - the child dies of it, which the test hears as the end of the pipe
            end(error)

    asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
    pipe.send(("answer", child.endpoint()))
    await ended
    child.close()


def child_main(me: PeerId, wire: Wire, is_slow: bool, pipe: Connection) -> None:
    asyncio.run(_run(me, wire, is_slow, pipe))


# ---- the test's handle on it ---------------------------------------------------------------------------------


class PushWorker:
    """A child, and what it has reported. `endpoint` waits until it has started."""

    def __init__(self, me: PeerId, wire: Wire, *, is_slow: bool = False) -> None:
        self.me = me
        self._reports: list[Any] = []
        self._endpoint: bytes | None = None
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=child_main, args=(me, wire, is_slow, theirs), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def endpoint(self) -> bytes:
        if self._endpoint is None:
            self._endpoint = self._answer()
        return self._endpoint

    def call(self, method: str, *arguments: Any) -> Any:
        assert self.endpoint
        self._pipe.send((method, arguments))
        return self._answer()

    def wait_for(self, *wanted: type[Any], key: PushKey) -> Any:
        """The first report of one of these types about the push."""
        while True:
            found = self._find(wanted, key)
            if found is not None:
                return found
            self._reports.append(self._receive())

    def has_said(self, wanted: type[Any], key: PushKey) -> bool:
        """Whether it has said so by now; also of one that has died since."""
        with suppress(EOFError, ConnectionResetError):  # the pipe of a dead process ends after its last word
            while self._pipe.poll():
                self._reports.append(self._pipe.recv())
        return self._find((wanted,), key) is not None

    def wait_until_nothing_is_held(self) -> None:
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while num_held := self.call("num_held"):
            assert time.monotonic() < deadline_s, f"{self.me}: {num_held} leases and blocks are still held"
            time.sleep(0.005)

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def close(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join(ANSWER_TIMEOUT_S)
        self._pipe.close()
        self._process.close()

    def _find(self, wanted: tuple[type[Any], ...], key: PushKey) -> Any:
        return next((said for said in self._reports if isinstance(said, wanted) and said.key == key), None)

    def _answer(self) -> Any:
        while True:
            said = self._receive()
            if isinstance(said, tuple):
                return said[1]
            self._reports.append(said)

    def _receive(self) -> Any:
        assert self._pipe.poll(ANSWER_TIMEOUT_S), f"{self.me} says nothing"
        return self._pipe.recv()
