"""One end of pushes over shm in a process of its own, for what a push costs beside its bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np

from benchmarks.kv_wires.plans import DEMO_LAYOUT, LIMITS
from benchmarks.kv_wires.push_host import PushHost
from benchmarks.kv_wires.remote import IsCalled
from benchmarks.kv_wires.transport_end import RECEIVER, SENDER
from kv_transfer.checksum import as_memory
from kv_transfer.protocol.messages import Grant, PeerId, PushKey
from kv_transfer.protocol.sampling import Checksums
from kv_transfer.transport.shm import ShmTransport
from kv_transfer.transport.shm_copier import copy_ranges
from kv_transfer.transport.shm_pool import create_pool

NUM_BLOCKS = 256
PUSH_TIMEOUT_S = 10.0
LOOK_INTERVAL_S = 0.005

T = TypeVar("T")


class PushEnd:
    """The calls of one end run on its event loop, one at a time; between them it stands still."""

    def __init__(self, me: PeerId, checksums: Checksums, is_called: IsCalled) -> None:
        self._is_called = is_called
        self._loop = asyncio.new_event_loop()
        self._pool = create_pool(DEMO_LAYOUT.pool_size_bytes(NUM_BLOCKS))
        self._memory = as_memory(self._pool.mapping)
        self._memory[:] = np.random.default_rng(1).integers(0, 256, self._memory.size, dtype=np.uint8)
        self._transport = ShmTransport(me, self._pool)
        self._source_blocks: list[int] = []
        self._host = self._run(self._make_host(me, checksums))

    def endpoint(self) -> bytes:
        return self._transport.endpoint()

    def reserve(self, number: int, num_blocks: int) -> tuple[Grant, float]:
        """A grant, and the seconds that it took."""
        return self._run(self._reserve(number, num_blocks))

    def serve(self) -> None:
        """Takes part until the next call comes."""
        self._run(self._serve())

    def push(self, grant: Grant, endpoint: bytes) -> float:
        """Seconds from opening the push until the receiver's commit is known."""
        return self._run(asyncio.wait_for(self._push(grant, endpoint), PUSH_TIMEOUT_S))

    def copy_times(self, num_blocks: int, count: int, checksum: bool) -> list[float]:
        """Seconds of copying so many scattered blocks within this pool, by the transport's own copy."""
        size_bytes = DEMO_LAYOUT.block_size_bytes
        places = np.random.default_rng(2)
        times_s = []
        for _ in range(count):
            blocks = places.permutation(NUM_BLOCKS)[: 2 * num_blocks].astype(np.uint64) * np.uint64(size_bytes)
            sizes = np.full(num_blocks, size_bytes, dtype=np.uint64)
            table = np.stack([blocks[:num_blocks], blocks[num_blocks:], sizes], axis=1)
            start_s = time.perf_counter()
            copy_ranges(self._memory, self._memory, table, checksum=checksum)
            times_s.append(time.perf_counter() - start_s)
        return times_s

    def close(self) -> None:
        self._host.close()
        self._transport.close()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    async def _make_host(self, me: PeerId, checksums: Checksums) -> PushHost:
        host = PushHost(
            me,
            self._transport,
            self._memory,
            DEMO_LAYOUT,
            limits=LIMITS,
            checksums=checksums,
            on_arrived=lambda key, block_ids: host.pool.release(block_ids),
            on_failed=_fail,
        )
        if me == SENDER:
            self._source_blocks = host.pool.allocate(NUM_BLOCKS)
        return host

    async def _reserve(self, number: int, num_blocks: int) -> tuple[Grant, float]:
        start_s = time.perf_counter()
        key = PushKey(f"r{number}", 1)
        grant = self._host.reserve(key, number + 1, SENDER, num_blocks, ttl_ns=LIMITS.lease_ttl_ns)
        return grant, time.perf_counter() - start_s

    async def _serve(self) -> None:
        while not self._is_called():
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _push(self, grant: Grant, endpoint: bytes) -> float:
        assert grant.receiver == RECEIVER
        num_blocks = len(grant.blocks)
        start = (7 * grant.lease_id) % (NUM_BLOCKS - num_blocks)
        blocks = list(enumerate(self._source_blocks[start : start + num_blocks]))
        start_s = time.perf_counter()
        self._host.open(grant, endpoint)
        self._host.give(grant.key, blocks)
        self._host.finish(grant.key, num_blocks * DEMO_LAYOUT.block_size)
        await self._host.wait_until(lambda: not self._host.pushes.holds(grant.key))
        return time.perf_counter() - start_s


def _fail(key: PushKey, reason: str) -> None:
    raise AssertionError(f"{key} failed: {reason}")
