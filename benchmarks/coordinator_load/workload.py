"""What the coordinator is measured with: prompts of which many begin alike, and workers whose pools are full.

Prompts have 2,048 tokens, half of them begin like others, and a worker that stores a prompt's blocks has evicted as
many, those of its oldest prompt.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from typing import Final

from cluster.agent.translation import pack_grants
from cluster.core.config import ClusterConfig, CoordinatorConfig, ModelConfig, PoolConfig
from cluster.core.disaggregation import DisaggregationConfig
from cluster.core.ids import FrontId, Role, WorkerId
from cluster.core.messages import (
    BLOCK_HASH_BYTES,
    BlockCounts,
    BlockEvents,
    BlockRun,
    LegTimeline,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
)
from kv_transfer.protocol.messages import BlockGrant

PROMPT_TOKENS: Final = 2048
BLOCK_SIZE: Final = 16
NUM_BLOCKS: Final = PROMPT_TOKENS // BLOCK_SIZE
NUM_SHARED_BLOCKS: Final = 64
NUM_BEGINNINGS: Final = 50
NEW_TOKENS: Final = 128
POOL_BLOCKS: Final = 4000
FRONT: Final = FrontId("front-0", 1)
TIMELINE: Final = LegTimeline(prefill_ms=600.0, push_ms=3.0, kv_bytes=47_185_920, kv_transport="shm")
CHUNK_TOKEN_MS: Final = 2.0
"""What a prompt token adds to a decode worker's step: so much that every prompt is pushed, after both were weighed."""
MAX_TPOT_MS: Final = 60.0
"""Decode may read that slowly beside its answers."""
GRANTED: Final = pack_grants(BlockGrant(index, index, 7) for index in range(NUM_BLOCKS + 1))


def make_config(num_workers: int) -> ClusterConfig:
    half = num_workers // 2
    return ClusterConfig(
        name="bench",
        model=ModelConfig(path="m"),
        pools=tuple(
            PoolConfig(name=role.value, role=role, replicas=half, kv_blocks=POOL_BLOCKS, kv_bytes=None) for role in Role
        ),
        disaggregation=DisaggregationConfig(max_tpot_ms=MAX_TPOT_MS),
        coordinator=CoordinatorConfig(queue_limit=10_000, heartbeat_timeout_s=3600.0, queue_timeout_s=3600.0),
    )


def make_hello(worker: WorkerId, pool: PoolConfig, token_address: str) -> WorkerHello:
    return WorkerHello(
        ref=WorkerRef(worker=worker, token_address=token_address),
        pool=pool.name,
        role=pool.role,
        host="host",
        pid=1,
        model="m",
        compatibility="c",
        compatibility_details="",
        block_size=BLOCK_SIZE,
        block_size_bytes=368_640,
        max_model_tokens=8192,
        load=make_load(),
    )


def make_load() -> WorkerLoad:
    counts = BlockCounts(total=POOL_BLOCKS, free=0, active=0, cached=POOL_BLOCKS, reserved=0, quarantined=0)
    return WorkerLoad(
        blocks=counts, step_ms_per_token=0.3, decode_base_ms=20.0, chunk_token_ms=CHUNK_TOKEN_MS, num_steps=100
    )


class Prompts:
    """Chains of block hashes, of which every second begins as others do."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._beginnings = [self._hashes(NUM_SHARED_BLOCKS) for _ in range(NUM_BEGINNINGS)]

    def next(self) -> bytes:
        if self._random.random() < 0.5:
            return self._hashes(NUM_BLOCKS)
        return self._random.choice(self._beginnings) + self._hashes(NUM_BLOCKS - NUM_SHARED_BLOCKS)

    def _hashes(self, count: int) -> bytes:
        return self._random.randbytes(count * BLOCK_HASH_BYTES)


class BlockCache:
    """The prompts that one worker holds the blocks of, as it tells of them."""

    def __init__(self) -> None:
        self._kept: deque[bytes] = deque()
        self._num_told = 0
        self._stored: list[BlockRun] = []
        self._evicted: list[bytes] = []

    def store(self, hashes: bytes) -> None:
        """The worker has the prompt's blocks now, and in their place it has evicted those of its oldest prompt."""
        num_known = _num_shared(hashes, self._kept)
        self._kept.append(hashes)
        if len(self._kept) * NUM_BLOCKS > POOL_BLOCKS:
            oldest = self._kept.popleft()
            self._evicted.append(oldest[_num_shared(oldest, self._kept) * BLOCK_HASH_BYTES :])
        parent = hashes[: num_known * BLOCK_HASH_BYTES][-BLOCK_HASH_BYTES:] or bytes(BLOCK_HASH_BYTES)
        self._stored.append(BlockRun(parent=parent, hashes=hashes[num_known * BLOCK_HASH_BYTES :]))

    def tell(self) -> BlockEvents:
        """What was not told before."""
        self._num_told += 1
        told = BlockEvents(
            sequence_number=self._num_told,
            is_snapshot=self._num_told == 1,
            stored=tuple(self._stored),
            evicted=tuple(self._evicted),
        )
        self._stored, self._evicted = [], []
        return told


def _num_shared(hashes: bytes, others: Iterable[bytes]) -> int:
    """Blocks at its beginning that one of the others has as well: none, or all that prompts ever share."""
    beginning = hashes[: NUM_SHARED_BLOCKS * BLOCK_HASH_BYTES]
    return NUM_SHARED_BLOCKS if any(other.startswith(beginning) for other in others) else 0
