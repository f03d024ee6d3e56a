"""Reads single fields of config.json. Every complaint names the field."""

from __future__ import annotations

import math
from typing import Any


class UnsupportedModelError(ValueError):
    """The configuration is sound, but asks for something that Baton's own model code does not compute."""


def positive_int(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    """`default` stands for a field that is absent or null; without one the field is required."""
    value = _present(raw, name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer in config.json, got {value!r}")
    return value


def non_negative_int(raw: dict[str, Any], name: str) -> int:
    return 0 if raw.get(name) == 0 else positive_int(raw, name)


def positive_float(raw: dict[str, Any], name: str, default: float | None = None) -> float:
    value = _present(raw, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a positive number in config.json, got {value!r}")
    return float(value)


def flag(raw: dict[str, Any], name: str) -> bool:
    """Absent and null mean false."""
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false in config.json, got {value!r}")
    return bool(value)


def optional_token_id(raw: dict[str, Any], name: str, vocab_size: int) -> int | None:
    value = raw.get(name)
    return None if value is None else _token_id(value, name, vocab_size)


def token_ids(raw: dict[str, Any], name: str, vocab_size: int, file: str = "config.json") -> tuple[int, ...]:
    """One id or a list of them; sorted and without repeats."""
    value = raw.get(name)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    return tuple(sorted({_token_id(token_id, name, vocab_size, file) for token_id in ids}))


def _token_id(value: object, name: str, vocab_size: int, file: str = "config.json") -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
        raise ValueError(
            f"{name} must be a token id between 0 and {vocab_size - 1} (vocab_size - 1) in {file}, got {value!r}"
        )
    return value


def _present(raw: dict[str, Any], name: str, default: float | None) -> Any:
    value = raw.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{name} is missing from config.json")
    return value
