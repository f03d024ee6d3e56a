"""One write under way: cut into transfers that follow each other, its checksums taken while they are in flight."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kv_transfer.checksum import Memory, checksums
from kv_transfer.protocol.plan import merge_copies
from kv_transfer.transport.base import Copy
from kv_transfer.transport.nixl_agent import NixlError, Transfer
from kv_transfer.transport.nixl_desk import Job
from kv_transfer.transport.nixl_limits import MAX_TRANSFER_BYTES, SUM_SLICE_BYTES


class RunningWrite:
    """`start` posts its first transfer, `advance` does the rest. `post` is how to start a transfer."""

    def __init__(self, job: Job, memory: Memory, post: Callable[[Sequence[Copy]], Transfer], timeout_s: float) -> None:
        self.job = job
        self._memory = memory
        self._post = post
        self._timeout_s = timeout_s
        self._pieces = deque(cut(merge_copies(job.copies), MAX_TRANSFER_BYTES))
        self._unsummed = deque(job.copies[: job.num_sums])
        self._sums: list[int] = []
        self._transfer: Transfer | None = None
        self._deadline_s = 0.0
        self.is_in_flight = False

    def start(self) -> None:
        """Raises: NixlError."""
        self._post_next()

    def advance(self) -> bool:
        """Moves it on; True when nothing of it is in flight and nothing more will be posted.

        Raises: NixlError if a transfer fails, or does not land in time."""
        self._sum_slice()
        if self._transfer is not None and self._transfer.is_done():
            self._transfer.release()
            self._transfer = None
            self.is_in_flight = False
            self._post_next()
        if self._transfer is not None:
            if time.monotonic() >= self._deadline_s:
                raise NixlError(f"a transfer has not landed within {self._timeout_s:g} s")
            return False
        return self.is_cut_short or not self._unsummed

    @property
    def is_cut_short(self) -> bool:
        """It was cancelled, and pieces of it were never posted."""
        return self.job.is_cancelled and bool(self._pieces)

    def notification(self) -> bytes:
        return self.job.notify + b"".join(value.to_bytes(8, "little") for value in self._sums)

    def abandon(self) -> None:
        """Before the agent is destroyed. What is in flight may still land. Raises: NixlError."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.release()

    def _post_next(self) -> None:
        if self._pieces and not self.job.is_cancelled:
            self.is_in_flight = True  # also while it is being posted, which may fail half-way
            self._transfer = self._post(self._pieces.popleft())
            self._deadline_s = time.monotonic() + self._timeout_s

    def _sum_slice(self) -> None:
        ranges: list[tuple[int, int]] = []
        size_bytes = 0
        while self._unsummed and size_bytes < SUM_SLICE_BYTES:
            copy = self._unsummed.popleft()
            ranges.append((copy.source_bytes, copy.size_bytes))
            size_bytes += copy.size_bytes
        if ranges:
            self._sums += checksums(self._memory, ranges)


def cut(copies: Sequence[Copy], max_bytes: int) -> Iterator[list[Copy]]:
    """The same bytes in lists of at most `max_bytes`, in order; a copy that does not fit is split."""
    piece: list[Copy] = []
    room = max_bytes
    for copy in copies:
        while copy.size_bytes > room:
            if room:
                piece.append(Copy(copy.source_bytes, copy.target_bytes, room))
            copy = Copy(copy.source_bytes + room, copy.target_bytes + room, copy.size_bytes - room)
            yield piece
            piece, room = [], max_bytes
        piece.append(copy)
        room -= copy.size_bytes
    if piece:
        yield piece
