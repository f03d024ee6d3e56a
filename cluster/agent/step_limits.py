"""How long steps may take while prompts are read beside running answers."""

from __future__ import annotations

from collections.abc import KeysView

from engine.core.step import SequenceKey


class StepLimits:
    """By the sequence that is being read; the tightest holds for all of a step. At most one for each leg."""

    def __init__(self) -> None:
        self._by_key: dict[SequenceKey, float] = {}

    @property
    def tightest_ms(self) -> float | None:
        return min(self._by_key.values(), default=None)

    def add(self, key: SequenceKey, limit_ms: float) -> None:
        assert key not in self._by_key
        self._by_key[key] = limit_ms

    def remove(self, key: SequenceKey) -> None:
        """Its prompt has been read, or is not wanted any more. Does nothing if it has no limit."""
        self._by_key.pop(key, None)

    def limited(self) -> KeysView[SequenceKey]:
        return self._by_key.keys()
