"""What is moved: blocks of a layout, scattered over both pools, in writes as the push protocol posts them."""

from __future__ import annotations

import functools
import random
import time
from dataclasses import dataclass

import numpy as np

from kv_transfer.checksum import Memory, as_memory, checksums
from kv_transfer.protocol.layout import KVLayout, LayerGroup
from kv_transfer.protocol.limits import PushLimits
from kv_transfer.protocol.messages import BlockGrant, PushChunk, PushKey
from kv_transfer.protocol.plan import Copy
from kv_transfer.protocol.sampling import Checksums, summed_positions
from kv_transfer.transport.shm_pool import PoolMemory, create_pool

POOL_BYTES = 256 << 20
LIMITS = PushLimits()
DEMO_LAYOUT = KVLayout(
    groups=(LayerGroup(num_layers=30, num_kv_heads=3, head_dim=64),), block_size=16, dtype="bfloat16"
)
"""SmolLM2-135M: 360 KiB a block."""
LARGE_LAYOUT = KVLayout(
    groups=(LayerGroup(num_layers=80, num_kv_heads=8, head_dim=128),), block_size=16, dtype="bfloat16"
)
"""A model of the 70B class with grouped queries: 5 MiB a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """As many pieces of `size_bytes` as fit into `total_bytes`, the first `total_bytes` of either pool being theirs."""

    size_bytes: int
    total_bytes: int = POOL_BYTES

    @property
    def num_pieces(self) -> int:
        return self.total_bytes // self.size_bytes

    @property
    def moved_bytes(self) -> int:
        return self.num_pieces * self.size_bytes


@functools.lru_cache(maxsize=2)
def scattered_writes(load: Load, seed: int) -> list[list[Copy]]:
    """The load's pieces in random order, from random places to random places, cut into writes."""
    source = random.Random(seed)
    origins, targets = list(range(load.num_pieces)), list(range(load.num_pieces))
    source.shuffle(origins)
    source.shuffle(targets)
    size = load.size_bytes
    copies = [Copy(origin * size, target * size, size) for origin, target in zip(origins, targets, strict=True)]
    step = LIMITS.blocks_per_write(size)
    return [copies[start : start + step] for start in range(0, len(copies), step)]


def count_sums(checksums: Checksums, load: Load, number: int, num_copies: int) -> int:
    """How many of a write's pieces a push would have summed, were it the `number`-th chunk of one."""
    first = number * LIMITS.blocks_per_write(load.size_bytes)
    blocks = tuple(BlockGrant(first + place, place, 1) for place in range(num_copies))
    chunk = PushChunk(
        key=PushKey("load", 1), lease_id=1, rank=0, chunk=number, blocks=blocks, first_layer=0, num_layers=1
    )
    return len(summed_positions(checksums, chunk))


def piece_sums(memory: Memory, load: Load, seed: int, *, at_target: bool) -> list[int]:
    """A checksum a piece, in the order of the writes, where the pieces come from or where they go to."""
    copies = [copy for write in scattered_writes(load, seed) for copy in write]
    return checksums(memory, [(c.target_bytes if at_target else c.source_bytes, c.size_bytes) for c in copies])


def make_pool(content_seed: int) -> tuple[PoolMemory, Memory]:
    """A pool of random bytes, and a view of it that must be dropped before the pool is closed."""
    pool = create_pool(POOL_BYTES)
    memory = as_memory(pool.mapping)
    words = np.random.default_rng(content_seed).integers(0, 2**64, POOL_BYTES // 8, dtype=np.uint64)
    memory[:] = words.view(np.uint8)
    return pool, memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Of one move, at its sender: until the receiver had it all, and the processor time of the sender's process."""

    seconds: float
    cpu_seconds: float


class Stopwatch:
    """Starts when it is made."""

    def __init__(self) -> None:
        self._cpu_ns = time.process_time_ns()
        self._start_ns = time.perf_counter_ns()

    def stop(self) -> Timing:
        end_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        return Timing(seconds=(end_ns - self._start_ns) / 1e9, cpu_seconds=(cpu_ns - self._cpu_ns) / 1e9)
