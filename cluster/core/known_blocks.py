"""What the coordinator knows of the blocks that one worker can find by content."""

from __future__ import annotations

from cluster.core.messages import BlockEvents


class KnownBlocks:
    """Follows one life's BlockEvents.

    A gap in their numbers makes the count stale until a snapshot begins it anew; it is asked for once.
    """

    __slots__ = ("_is_stale", "_sequence_number", "num_blocks")

    def __init__(self) -> None:
        self.num_blocks = 0
        self._sequence_number: int | None = None
        self._is_stale = False

    def hear(self, events: BlockEvents) -> bool:
        """Takes the events in. True if a snapshot is to be asked for."""
        expected = None if self._sequence_number is None else self._sequence_number + 1
        self._sequence_number = events.sequence_number
        if events.is_snapshot:
            self.num_blocks = 0
            self._is_stale = False
        elif self._is_stale:
            return False
        elif events.sequence_number != expected:
            self._is_stale = True
            return True
        self.num_blocks += sum(len(run.hashes) for run in events.stored) - len(events.evicted)
        return False

    def check_invariants(self) -> None:
        assert self.num_blocks >= 0, "more blocks were evicted than stored"
