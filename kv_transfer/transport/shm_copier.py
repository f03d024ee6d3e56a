"""The thread that copies: takes writes in order, one native call each, and reports how they ended."""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from kv_transfer.checksum import Memory, as_memory, fallback_checksum
from kv_transfer.native_library import load

_log = logging.getLogger(__name__)


class Region:
    """A peer's pool as this process maps it. `lock` is held while bytes are copied into it."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self.memory: Memory | None = as_memory(mapping)
        self.size_bytes = len(mapping)
        self.lock = threading.Lock()

    def revoke(self) -> None:
        """From the return on, nothing is copied into it any more; a copy under way is waited for. Idempotent."""
        with self.lock:
            self.memory = None
            self._mapping.close()


@dataclass(slots=True, kw_only=True, eq=False)
class CopyJob:
    """`copies` is [num_copies, 3]: source offset, target offset, size in bytes. The first `num_sums` are summed."""

    handle: int
    region: Region
    copies: npt.NDArray[np.uint64]
    num_sums: int
    is_cancelled: bool = False
    failure: str | None = None
    sums: list[int] = field(default_factory=list)


class Copier:
    """One daemon thread. `wake_fd` (an eventfd) is written when a job has ended; `take_ended` hands them out."""

    def __init__(self, source: Memory, wake_fd: int) -> None:
        self._source = source
        self._wake_fd = wake_fd
        self._jobs: SimpleQueue[CopyJob | None] = SimpleQueue()
        """None wakes the thread up to stop."""
        self._ended: deque[CopyJob] = deque()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-copier", daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        self._jobs.put(job)

    def take_ended(self) -> list[CopyJob]:
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def stop(self) -> None:
        """Waits for the job under way; the others never start."""
        self._is_stopping = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._is_stopping:
            try:
                self._do(job)
            except Exception as error:  # noqa: BLE001 - as where memory is short; the thread must go on for other writes
                job.failure = f"{type(error).__name__}: {error}"
                _log.error("a write could not be copied: %s", job.failure)
            self._ended.append(job)
            os.eventfd_write(self._wake_fd, 1)

    def _do(self, job: CopyJob) -> None:
        with job.region.lock:
            if job.is_cancelled:
                job.failure = "cancelled"
            elif job.region.memory is None:
                job.failure = "the connection has ended"
            else:
                target, summed, others = job.region.memory, job.copies[: job.num_sums], job.copies[job.num_sums :]
                job.sums = copy_ranges(target, self._source, summed, checksum=True)
                copy_ranges(target, self._source, others, checksum=False)


def copy_ranges(target: Memory, source: Memory, copies: npt.NDArray[np.uint64], *, checksum: bool) -> list[int]:
    """Copies ranges, natively if possible; returns one checksum a copy if asked."""
    if not len(copies):
        return []
    native = load()
    if native is not None:
        return native.copy(target, source, copies, checksum=checksum)
    sums = []
    for source_bytes, target_bytes, size_bytes in copies.tolist():
        piece = source[source_bytes : source_bytes + size_bytes]
        target[target_bytes : target_bytes + size_bytes] = piece
        if checksum:
            sums.append(fallback_checksum(piece))
    return sums
