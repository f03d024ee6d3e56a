"""What happened in a history, line by line, for people; and a digest of it, for the determinism test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum


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


def brief(value: object) -> str:
    """A dataclass as `Name(field=value, ...)` without the fields that have their default; anything else as it is."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple | list):
        return "[" + " ".join(brief(item) for item in value) + "]"
    if isinstance(value, bytes):
        return value.hex()[:8]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return str(value)
    if type(value).__str__ is not object.__str__ and type(value).__name__ in ("WorkerId", "FrontId", "AttemptId"):
        return str(value)
    parts = [
        f"{field.name}={brief(getattr(value, field.name))}"
        for field in dataclasses.fields(value)
        if not _is_default(field, getattr(value, field.name))
    ]
    return f"{type(value).__name__}({', '.join(parts)})"


def _is_default(field: dataclasses.Field[object], value: object) -> bool:
    return field.default is not dataclasses.MISSING and field.default == value
