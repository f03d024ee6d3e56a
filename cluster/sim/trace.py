"""What happened in a history, line by line, for people; and a digest of it, for the determinism test."""

from __future__ import annotations

from collections.abc import Callable


class Trace:
    """Collects lines while enabled. `lines` costs nothing when it is not: callers ask `enabled` first."""

    def __init__(self, enabled: bool = False, sink: Callable[[str], None] | None = None) -> None:
        self.enabled = enabled
        self.lines: list[str] = []
        self._sink = sink

    def note(self, now_ns: int, text: str) -> None:
        if not self.enabled:
            return
        line = f"{now_ns / 1e6:12.4f} ms  {text}"
        self.lines.append(line)
        if self._sink is not None:
            self._sink(line)
