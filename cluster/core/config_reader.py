"""Reads nested plain data key by key and refuses what it does not expect, naming where it stands in the file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

from cluster.core.errors import ConfigError

KeyPath = tuple[str | int, ...]
Locate = Callable[[KeyPath], int | None]
"""Line (1-based) on which the value or key of that path stands, None where unknown."""

_SIZE_UNITS: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE_PATTERN: Final = re.compile(r"(\d{1,15})(?:\.(\d{1,3}))?\s*(B|KiB|MiB|GiB|KB|MB|GB)")
_MAX_SHOWN_CHARS: Final = 60


def format_path(path: KeyPath) -> str:
    """`("pools", 1, "name")` as `pools[1].name`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text


def describe(value: object) -> str:
    """A value as found in a file, with its type, short enough for a message."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return f"a mapping of {len(value)} keys"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    shown = repr(value)
    if len(shown) > _MAX_SHOWN_CHARS:
        shown = shown[: _MAX_SHOWN_CHARS - 3] + "..."
    kinds = {bool: "true/false", int: "integer", float: "number", str: "text"}
    return f"{shown} ({kinds.get(type(value), type(value).__name__)})"


class Section:
    """One mapping of the file. Ask it for every key it may have, then call `finish`.

    Every method raises ConfigError for what it does not accept. A key that is absent, or present without a value,
    takes the default.
    """

    def __init__(self, data: object, *, source: str, locate: Locate, path: KeyPath = ()) -> None:
        self._source = source
        self._locate = locate
        self._path = path
        self._known: list[str] = []
        if not isinstance(data, dict):
            self._refuse(path, describe(data), "a mapping of keys to values")
        self._data: dict[object, object] = data

    def has(self, key: str) -> bool:
        """Whether the key is there with a value."""
        return self._data.get(key) is not None

    def section(self, key: str) -> Section:
        """A nested mapping; an empty one if absent."""
        value = self._take(key)
        return Section(
            {} if value is None else value, source=self._source, locate=self._locate, path=(*self._path, key)
        )

    def sections(self, key: str) -> list[Section]:
        """A list of mappings, with at least one."""
        value = self._take(key)
        if not isinstance(value, list) or not value:
            self.refuse(key, describe(value), "a list with at least one entry")
        return [
            Section(item, source=self._source, locate=self._locate, path=(*self._path, key, i))
            for i, item in enumerate(value)
        ]

    def optional_sections(self, key: str) -> list[Section]:
        """A list of mappings with at least one, or nothing at all."""
        return self.sections(key) if self._note_and_has(key) else []

    def text(self, key: str, *, default: str | None = None, pattern: str = r".+", expected: str = "text") -> str:
        value = self._take(key)
        if value is None:
            if default is None:
                self.refuse(key, "nothing", expected, hint="the key is required")
            return default
        if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
            self.refuse(key, describe(value), expected)
        return value

    def choice(
        self, key: str, choices: tuple[str, ...], *, default: str | None = None, hints: Mapping[str, str] | None = None
    ) -> str:
        """`hints`: what to say of a value that somebody may well try, and that is none of the choices."""
        value = self.text(key, default=default, pattern=r"(?s).*", expected=_one_of(choices))
        if value not in choices:
            hint = (hints or {}).get(value) or _nearest_hint(value, choices)
            self.refuse(key, describe(value), _one_of(choices), hint=hint)
        return value

    def integer(self, key: str, *, default: int | None = None, minimum: int, maximum: int) -> int:
        expected = f"an integer from {minimum} to {maximum}"
        value = self._take(key)
        if value is None:
            if default is None:
                self.refuse(key, "nothing", expected, hint="the key is required")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            self.refuse(key, describe(value), expected)
        return value

    def optional_integer(self, key: str, *, minimum: int, maximum: int) -> int | None:
        return self.integer(key, minimum=minimum, maximum=maximum) if self._note_and_has(key) else None

    def integer_or_choice(
        self, key: str, choices: tuple[str, ...], *, default: str, minimum: int, maximum: int
    ) -> int | str:
        """A number, or one of a few words."""
        value = self._take(key)
        if value is None:
            return default
        is_number = isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum
        if not is_number and value not in choices:
            hint = _nearest_hint(value, choices) if isinstance(value, str) else ""
            expected = f"{_one_of(choices)}, or an integer from {minimum} to {maximum}"
            self.refuse(key, describe(value), expected, hint=hint)
        assert isinstance(value, int | str)
        return value

    def optional_number(self, key: str, *, minimum: float, maximum: float) -> float | None:
        return self.number(key, default=minimum, minimum=minimum, maximum=maximum) if self._note_and_has(key) else None

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self._take(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(key, describe(value), "true or false")
        return value

    def number(self, key: str, *, default: float, minimum: float, maximum: float) -> float:
        value = self._take(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
            self.refuse(key, describe(value), f"a number from {minimum:g} to {maximum:g}")
        return float(value)

    def optional_size_bytes(self, key: str, *, minimum: int, maximum: int) -> int | None:
        """A size such as `512MiB`, or a number of bytes."""
        value = self._take(key)
        if value is None:
            return None
        size_bytes = value if isinstance(value, int) and not isinstance(value, bool) else _parse_size_bytes(value)
        if size_bytes is None or not minimum <= size_bytes <= maximum:
            expected = f"a size such as 512MiB, from {_format_size(minimum)} to {_format_size(maximum)}"
            self.refuse(key, describe(value), expected)
        return size_bytes

    def optional_integer_lists(self, key: str, *, maximum: int) -> tuple[tuple[int, ...], ...] | None:
        """A list of non-empty lists of integers from 0 to `maximum`."""
        value = self._take(key)
        if value is None:
            return None
        expected = f"a list of lists of integers from 0 to {maximum}, such as [[0, 1], [2, 3]]"
        if not isinstance(value, list) or not value:
            self.refuse(key, describe(value), expected)
        for i, inner in enumerate(value):
            if not isinstance(inner, list) or not inner:
                self._refuse((*self._path, key, i), describe(inner), "a list of integers with at least one entry")
            for j, number in enumerate(inner):
                if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= maximum:
                    self._refuse((*self._path, key, i, j), describe(number), f"an integer from 0 to {maximum}")
        return tuple(tuple(inner) for inner in value)

    def finish(self) -> None:
        """Refuses the first key that nobody asked for."""
        for key in self._data:
            if key not in self._known:
                found = f"the unknown key {key!r}"
                hint = _nearest_hint(key, self._known) if isinstance(key, str) else ""
                path = (*self._path, key) if isinstance(key, str) else self._path
                self._refuse(path, found, _one_of(tuple(self._known)), hint=hint)

    def refuse(self, key: str | None, found: str, expected: str, *, hint: str = "") -> NoReturn:
        """Raises ConfigError for the key, or for the section as a whole."""
        self._refuse(self._path if key is None else (*self._path, key), found, expected, hint=hint)

    def _take(self, key: str) -> object:
        self._known.append(key)
        return self._data.get(key)

    def _note_and_has(self, key: str) -> bool:
        self._known.append(key)
        return self.has(key)

    def _refuse(self, path: KeyPath, found: str, expected: str, *, hint: str = "") -> NoReturn:
        raise ConfigError(
            source=self._source,
            line=self._line_of(path),
            path=format_path(path),
            found=found,
            expected=expected,
            hint=hint,
        )

    def _line_of(self, path: KeyPath) -> int | None:
        """The line of the path, or of the nearest part around it that has one (a missing key has none)."""
        for length in range(len(path), -1, -1):
            line = self._locate(path[:length])
            if line is not None:
                return line
        return None


def _one_of(choices: tuple[str, ...]) -> str:
    return f"one of {', '.join(choices)}"


def _nearest_hint(word: str, known: tuple[str, ...] | list[str]) -> str:
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {nearest[0]!r}?" if nearest else ""


def _parse_size_bytes(value: object) -> int | None:
    match = _SIZE_PATTERN.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return None
    unit = _SIZE_UNITS[match[3]]
    fraction = match[2] or "0"
    thousandths = int(fraction.ljust(3, "0"))
    return int(match[1]) * unit + thousandths * unit // 1000


def _format_size(size_bytes: int) -> str:
    for name in ("GiB", "MiB", "KiB"):
        if size_bytes >= _SIZE_UNITS[name]:
            return f"{size_bytes / _SIZE_UNITS[name]:g}{name}"
    return f"{size_bytes}B"
