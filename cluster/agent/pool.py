"""The memory of a worker's KV pool, and the transport that is registered on it."""

from __future__ import annotations

import contextlib

from cluster.agent.settings import WorkerSettings
from kv_transfer.checksum import Memory, as_memory
from kv_transfer.transport.base import PeerId, Transport
from kv_transfer.transport.shm import ShmTransport
from kv_transfer.transport.shm_pool import PoolMemory, create_pool


class TransportPool:
    """Pool memory that peers can write, and how they are let to."""

    def __init__(self, pool: PoolMemory, transport: Transport) -> None:
        self._pool = pool
        self.transport = transport

    @property
    def memory(self) -> Memory:
        """A new view of the pool's bytes, which must be dropped before `close`."""
        return as_memory(self._pool.mapping)

    @property
    def buffer(self) -> memoryview:
        return self._pool.buffer

    def close(self) -> None:
        """Ends the transport and gives the memory back."""
        self.transport.close()
        # Whoever still holds a view (a tensor in a traceback) keeps the memory until the process ends.
        with contextlib.suppress(BufferError):
            self._pool.close()


def open_pool(settings: WorkerSettings, size_bytes: int) -> TransportPool:
    """Raises: ValueError for a transport that does not reach other processes, PoolMemoryError if memory is short."""
    if settings.transport not in ("auto", "shm"):
        raise ValueError(f"transport: {settings.transport} does not reach other processes")
    pool = create_pool(size_bytes)
    worker = settings.worker
    return TransportPool(pool, ShmTransport(PeerId(worker.name, worker.incarnation), pool))
