"""Maps a dataclass or named tuple onto the protobuf message whose fields have the same names, and back.

The plan of each class is compiled once from its type hints, so a message costs one pass over its fields. Supported:
scalars, bytes, enumerations, nested dataclasses and named tuples, tuples of these, and `X | None` for all of them.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

T = TypeVar("T")


class WireError(ValueError):
    """A message from another process that does not say what it must."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    name: str
    optional: bool
    repeated: bool
    to_wire: Callable[[Any], Any] | None  # None: the value goes as it is, or (nested) is filled in place
    from_wire: Callable[[Any], Any] | None
    nested: type | None


def to_message(value: Any, message: Message) -> None:
    """Fills `message` from `value`, an instance of such a class."""
    for spec in _plan(type(value)):
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
    values: dict[str, Any] = {}
    for spec in _plan(cls):
        if spec.repeated:
            values[spec.name] = tuple(_read_one(spec, item) for item in getattr(message, spec.name))
        elif (spec.optional or spec.nested is not None) and not message.HasField(spec.name):
            if not spec.optional:
                raise WireError(f"{message.DESCRIPTOR.full_name} lacks {spec.name}")
            values[spec.name] = None
        else:
            values[spec.name] = _read_one(spec, getattr(message, spec.name))
    return cls(**values)


def _fill_repeated(spec: _Field, items: tuple[Any, ...], target: Any) -> None:
    if spec.nested is not None:
        for item in items:
            to_message(item, target.add())
    else:
        target.extend(items if spec.to_wire is None else [spec.to_wire(item) for item in items])


def _read_one(spec: _Field, content: Any) -> Any:
    if spec.nested is not None:
        return from_message(spec.nested, content)
    return spec.from_wire(content) if spec.from_wire else content


# Compiled once a class: as many entries as there are message classes.
_plans: dict[Any, tuple[_Field, ...]] = {}


def _plan(cls: Any) -> tuple[_Field, ...]:
    plan = _plans.get(cls)
    if plan is None:
        plan = tuple(_field(name, hint) for name, hint in typing.get_type_hints(cls).items())
        _plans[cls] = plan
    return plan


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
