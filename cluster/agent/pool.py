"""The memory of a worker's KV pool, and the transport that is registered on it."""

from __future__ import annotations

import contextlib
import mmap

from cluster.agent.settings import WorkerSettings
from kv_transfer.checksum import Memory, as_memory
from kv_transfer.transport.auto import AutoTransport
from kv_transfer.transport.auto_dial import PROBE_BYTES
from kv_transfer.transport.backends import PREFERENCE
from kv_transfer.transport.base import PeerId
from kv_transfer.transport.shm_pool import PoolMemory, create_pool


class TransportPool:
    """Pool memory that peers can write, and how they are let to.

    Blocks are in its first `size_bytes`; behind them is what the transport's self-test needs.
    """

    def __init__(self, pool: PoolMemory, size_bytes: int, transport: AutoTransport) -> None:
        self._pool = pool
        self._size_bytes = size_bytes
        self.transport = transport

    @property
    def memory(self) -> Memory:
        """A new view of the blocks' bytes, which must be dropped before `close`."""
        return as_memory(self._pool.mapping)[: self._size_bytes]

    @property
    def buffer(self) -> memoryview:
        return self._pool.buffer[: self._size_bytes]

    def close(self) -> None:
        """Ends the transport and gives the memory back."""
        self.transport.close()
        # Whoever still holds a view (a tensor in a traceback) keeps the memory until the process ends.
        with contextlib.suppress(BufferError):
            self._pool.close()


def open_pool(settings: WorkerSettings, size_bytes: int) -> TransportPool:
    """A pool for `size_bytes` of blocks.

    Raises: ValueError for a transport that does not reach other processes, TransportError if the one asked for cannot
        be used here, PoolMemoryError if memory is short.
    """
    if settings.transport not in ("auto", *PREFERENCE):
        raise ValueError(f"transport: {settings.transport} does not reach other processes")
    blocks_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pool = create_pool(blocks_bytes + PROBE_BYTES)
    worker = settings.worker
    preference = PREFERENCE if settings.transport == "auto" else (settings.transport,)
    try:
        transport = AutoTransport(
            PeerId(worker.name, worker.incarnation), pool, preference=preference, host=settings.host
        )
    except BaseException:
        pool.close()
        raise
    return TransportPool(pool, size_bytes, transport)
