"""Progress for people, on stderr: a line a step, and on a terminal one line that moves while a step takes its time."""

from __future__ import annotations

import sys

_CLEAR_LINE = "\r\x1b[K"


def say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


class MovingLine:
    """A line with a percentage that is rewritten in place; without a terminal each new step gets a line of its own."""

    def __init__(self) -> None:
        self._moves = sys.stderr.isatty()
        self._last_step = ""

    def show(self, step: str, fraction: float) -> None:
        if self._moves:
            print(f"{_CLEAR_LINE}  {step} {fraction:4.0%}", end="", file=sys.stderr, flush=True)
        elif step != self._last_step:
            say(step)
        self._last_step = step

    def end(self) -> None:
        if self._moves and self._last_step:
            print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)
