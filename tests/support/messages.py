"""Hypothesis strategies for messages, made from their fields' types."""

from __future__ import annotations

import types
import typing
from enum import Enum
from typing import Any

from hypothesis import strategies as st

_SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 2**31 - 1),
    float: st.floats(0, 1e6, width=32),
    str: st.text(st.characters(codec="utf-8"), max_size=12),
    bytes: st.binary(max_size=20),
    bool: st.booleans(),
}


def _one(hint: Any) -> st.SearchStrategy[Any]:
    if hint in _SCALARS:
        return _SCALARS[hint]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (inner,) = (part for part in typing.get_args(hint) if part is not type(None))
        return st.none() | _one(inner)
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        return st.lists(_one(inner), max_size=3).map(tuple)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    hints = typing.get_type_hints(hint)
    return st.builds(hint, **{name: _one(part) for name, part in hints.items()})


def strategy_of(*types_: Any) -> st.SearchStrategy[Any]:
    """Draws instances of any of the classes, of which every field has its type."""
    return st.one_of(*(_one(cls) for cls in types_))
