"""Tells the coordinator which blocks this worker can find by content: at intervals, in bounded messages, numbered."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.core.messages import BlockEvents, BlockRun
from engine.core.block_pool import BlockPool, NamedBlock


class BlockReporter:
    """Turns the prefix index's changes into BlockEvents.

    While nobody takes them, changes wait in the pool, which keeps them net and therefore bounded. The first events
    that a coordinator's stream carries are a snapshot: what an earlier stream carried may not have arrived.
    """

    def __init__(self, pool: BlockPool, *, interval_ns: int, max_hashes: int) -> None:
        """At most one message an `interval_ns`, with at most `max_hashes` hashes."""
        self._pool = pool
        self._interval_ns = interval_ns
        self._max_hashes = max_hashes
        self._sequence_number = 0
        self._is_snapshot_due = True
        self._earliest_ns = 0

    def start_over(self) -> None:
        """The coordinator knows nothing, or has missed something."""
        self._pool.tell_all_again()
        self._is_snapshot_due = True

    def next_deadline_ns(self) -> int | None:
        """When `take` should be called; None while there is nothing to tell."""
        return self._earliest_ns if self._is_snapshot_due or self._pool.num_pending_changes else None

    def take(self, now_ns: int) -> BlockEvents | None:
        """The next message, if there is something to tell and it is time."""
        deadline_ns = self.next_deadline_ns()
        if deadline_ns is None or now_ns < deadline_ns:
            return None
        changes = self._pool.take_changes(self._max_hashes)
        self._sequence_number += 1
        self._earliest_ns = now_ns + self._interval_ns
        is_snapshot, self._is_snapshot_due = self._is_snapshot_due, False
        return BlockEvents(
            sequence_number=self._sequence_number,
            is_snapshot=is_snapshot,
            stored=tuple(BlockRun(parent=parent, hashes=hashes) for parent, hashes in _runs(changes.stored)),
            # The last block of a sequence goes first, and a run is told in the sequence's order.
            evicted=tuple(hashes for _, hashes in _runs(reversed(changes.evicted)))[::-1],
        )


def _runs(blocks: Iterable[NamedBlock]) -> list[tuple[bytes, bytes]]:
    """Joins those that follow each other. Returns the parents of the first ones, and packed hashes."""
    runs: list[tuple[bytes, list[bytes]]] = []
    ending_with: dict[bytes, list[bytes]] = {}
    for block in blocks:
        hashes = ending_with.pop(block.parent_hash, None)
        if hashes is None:
            hashes = []
            runs.append((block.parent_hash, hashes))
        hashes.append(block.block_hash)
        ending_with[block.block_hash] = hashes
    return [(parent, b"".join(hashes)) for parent, hashes in runs]
