"""Stop strings: ends the output where one appears, and never shows a part of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Searches text that comes in pieces, wherever it is cut.

    The match that is complete first counts; of several that end together, the longest. So the result does not depend
    on how the text is cut into pieces. Text that might be the beginning of a stop string is held back until that is
    decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError("stop strings must not be empty")
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can be shown now, and whether a stop string has ended the output (it is not shown)."""
        if not text or not self._stops:
            return text, False
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            _, start = min(matches)
            self._held = ""
            return text[:start], True
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """What is held back: nothing follows, so it is no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
