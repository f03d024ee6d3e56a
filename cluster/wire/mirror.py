"""Maps a dataclass or named tuple onto the protobuf message whose fields have the same names, and back.

The plan of each class is compiled once from its type hints, so a message costs one pass over its fields. Supported:
scalars, bytes, enumerations, nested dataclasses and named tuples, tuples of these, and `X | None` for all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

T = TypeVar("T")


class WireError(ValueError):
    """A message from another process that does not say what it must."""


Read = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """`to_wire`, `from_wire`: None where the value goes as it is, or (nested) is filled in place."""

    name: str
    optional: bool
    repeated: bool
    to_wire: Callable[[Any], Any] | None
    from_wire: Callable[[Any], Any] | None
    nested: type | None

    @property
    def is_plain(self) -> bool:
        return not (self.optional or self.repeated or self.from_wire or self.nested)


def to_message(value: Any, message: Message) -> None:
    """Fills `message` from `value`, an instance of such a class."""
    for spec in _plan(type(value)):  # type: ignore[arg-type]  # to mypy, classes of unknown metaclass are unhashable
        content = getattr(value, spec.name)
        if content is None:
            continue
        if spec.repeated:
            _fill_repeated(spec, content, getattr(message, spec.name))
        elif spec.nested is not None:
            target = getattr(message, spec.name)
            target.SetInParent()
            to_message(content, target)
        else:
            setattr(message, spec.name, spec.to_wire(content) if spec.to_wire else content)


def from_message(cls: type[T], message: Message) -> T:
    """Builds a `cls` from `message`.

    Raises: WireError where a required part is missing or an enumeration's value is unknown.
    """
    return cast(T, _reader(cls)(message))  # type: ignore[arg-type]


def _fill_repeated(spec: _Field, items: tuple[Any, ...], target: Any) -> None:
    if spec.nested is not None:
        for item in items:
            to_message(item, target.add())
    else:
        target.extend(items if spec.to_wire is None else [spec.to_wire(item) for item in items])


@functools.cache  # as many entries as there are message classes
def _reader(cls: Any) -> Read:
    plan = _plan(cls)
    plain = [spec.name for spec in plan if spec.is_plain]
    others = [(spec.name, _field_reader(spec)) for spec in plan if not spec.is_plain]
    get_plain = _getter(plain)

    def read(message: Any) -> Any:
        values = dict(zip(plain, get_plain(message), strict=True))
        for name, read_field in others:
            values[name] = read_field(message)
        return cls(**values)

    def read_plain(message: Any) -> Any:
        return cls(*get_plain(message))

    return read_plain if issubclass(cls, tuple) and not others else read


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Reads all of them at once."""
    if not names:
        return lambda message: ()
    if len(names) == 1:
        (name,) = names
        return lambda message: (getattr(message, name),)
    return operator.attrgetter(*names)


def _field_reader(spec: _Field) -> Read:
    get = operator.attrgetter(spec.name)
    convert = _reader(spec.nested) if spec.nested is not None else spec.from_wire
    if spec.repeated:
        return lambda message: tuple(get(message) if convert is None else map(convert, get(message)))

    def read_optional(message: Any) -> Any:
        if not message.HasField(spec.name):
            return None
        return get(message) if convert is None else convert(get(message))

    def read_required(message: Any) -> Any:
        assert convert is not None, "else it is a plain field"
        if spec.nested is not None and not message.HasField(spec.name):
            raise WireError(f"{message.DESCRIPTOR.full_name} lacks {spec.name}")
        return convert(get(message))

    return read_optional if spec.optional else read_required


@functools.cache
def _plan(cls: Any) -> tuple[_Field, ...]:
    return tuple(_field(name, hint) for name, hint in typing.get_type_hints(cls).items())


def _field(name: str, hint: Any) -> _Field:
    optional = False
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
        optional = True
    repeated = typing.get_origin(hint) is tuple
    if repeated:
        hint = typing.get_args(hint)[0]
    if isinstance(hint, type) and issubclass(hint, Enum):
        to_wire, from_wire = _enum_converters(hint)
        return _Field(name, optional, repeated, to_wire, from_wire, None)
    is_nested = dataclasses.is_dataclass(hint) or issubclass(hint, tuple)
    nested = cast(type, hint) if is_nested else None
    return _Field(name, optional, repeated, None, None, nested)


def _enum_converters(cls: type[Enum]) -> tuple[Callable[[Any], int], Callable[[int], Enum]]:
    """Members are numbered from 1 in the order of their definition, as in the .proto files (0 is UNSPECIFIED)."""
    numbers = {member: number for number, member in enumerate(cls, start=1)}
    members = {number: member for member, number in numbers.items()}

    def from_wire(number: int) -> Enum:
        member = members.get(number)
        if member is None:
            raise WireError(f"unknown {cls.__name__} {number}")
        return member

    return numbers.__getitem__, from_wire
