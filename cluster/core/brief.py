"""Events, effects and messages in one line, for people."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Final

from cluster.core.ids import AttemptId, FrontId, WorkerId

MAX_SHOWN: Final = 8


def brief(value: object) -> str:
    """A dataclass as `Name(field=value, ...)` without the fields that have their default; anything else as it is."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, WorkerId | FrontId | AttemptId):
        return str(value)
    if isinstance(value, tuple | list):
        more = [f"and {len(value) - MAX_SHOWN} more"] if len(value) > MAX_SHOWN else []
        return "[" + " ".join([brief(item) for item in value[:MAX_SHOWN]] + more) + "]"
    if isinstance(value, bytes):
        return value.hex()[:8]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return str(value)
    parts = [
        f"{field.name}={brief(getattr(value, field.name))}"
        for field in dataclasses.fields(value)
        if not _is_default(field, getattr(value, field.name))
    ]
    return f"{type(value).__name__}({', '.join(parts)})"


def _is_default(field: dataclasses.Field[object], value: object) -> bool:
    return field.default is not dataclasses.MISSING and field.default == value
