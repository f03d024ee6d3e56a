"""Reads a client's message so that what is wrong with it can be answered.

gRPC hands a message that does not parse to nobody and answers INTERNAL. It is the client's mistake, so the readers made
here return the error instead, and the handlers answer it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from baton.v1 import inference_pb2
from cluster.core.errors import InvalidRequestError
from cluster.front.validate import PROMPT_FIELDS

MessageT = TypeVar("MessageT", bound=Message)

MAX_NESTING = 8
"""Depth to which a malformed text is looked for."""

_LENGTH_DELIMITED = 2
_PROMPT_NUMBERS = {
    field.number: field.name for field in inference_pb2.GenerateRequest.DESCRIPTOR.oneofs_by_name["input"].fields
}


def reader(cls: type[MessageT]) -> Callable[[bytes], MessageT | InvalidRequestError]:
    """A deserializer for gRPC."""

    def read(data: bytes) -> MessageT | InvalidRequestError:
        try:
            return cls.FromString(data)
        except DecodeError:
            return _explain(cls, data)

    return read


def read_generate(data: bytes) -> inference_pb2.GenerateRequest | InvalidRequestError:
    """As `reader`, and refuses what parsing alone would drop: all prompts but the last, and fields of a later version,
    which may ask for something (a grammar, say) without which the answer is not the one that was asked for."""
    request = _READ_GENERATE(data)
    if isinstance(request, InvalidRequestError):
        return request
    unknown = _unknown_field(request)
    if unknown is not None:
        return InvalidRequestError(unknown, "this version of Baton does not know this field and cannot do what it asks")
    numbers = {number for number, _ in _fields(data)}
    present = [name for number, name in _PROMPT_NUMBERS.items() if number in numbers]
    if len(present) > 1:
        message = f"exactly one of {', '.join(PROMPT_FIELDS)} must be set, got {' and '.join(present)}"
        return InvalidRequestError(present[0], message)
    return request


_READ_GENERATE = reader(inference_pb2.GenerateRequest)


def _unknown_field(message: Message) -> str | None:
    """The path of the first field that its message's type does not have, by its number; None if all are known."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        return f"field {unknown[0].field_number}"
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for one in value if isinstance(value, Sequence) else [value]:
            inner = _unknown_field(one)
            if inner is not None:
                return f"{field.name}.{inner}"
    return None


def _explain(cls: type[Message], data: bytes) -> InvalidRequestError:
    field = _malformed_text(cls.DESCRIPTOR, data, MAX_NESTING)
    if field is not None:
        return InvalidRequestError(field, "is not valid UTF-8")
    return InvalidRequestError("request", f"is not a {cls.DESCRIPTOR.full_name} message")


def _malformed_text(descriptor: Any, data: bytes, depth: int) -> str | None:
    """The path of the first text in the encoded message that is not UTF-8; None if there is none."""
    for number, value in _fields(data):
        field = descriptor.fields_by_number.get(number)
        if field is None:
            continue
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(value):
            return str(field.name)
        if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None and depth > 0:
            inner = _malformed_text(field.message_type, value, depth - 1)
            if inner is not None:
                return f"{field.name}.{inner}"
    return None


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of the length-delimited fields of an encoded message, in order; none if it is broken."""
    try:
        unknown = UnknownFieldSet(Empty.FromString(data))
    except DecodeError:
        return
    for index in range(len(unknown)):
        field = unknown[index]
        if field.wire_type == _LENGTH_DELIMITED:
            yield field.field_number, field.data


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
