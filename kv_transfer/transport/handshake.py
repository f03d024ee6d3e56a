"""What the handshakes of all transports have in common: messages as JSON, from a stranger until they are proved good.

Each transport has its own messages, frozen dataclasses whose fields are `int` or `str`, and its own error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from kv_transfer.transport.base import PeerId, TransportError

MAX_PORT = 65_535
MAX_NUMBER = (1 << 64) - 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenLives:
    """A first message, which names the life that writes and the one that it means to reach."""

    writer_name: str
    writer_incarnation: int
    target_name: str
    target_incarnation: int

    @property
    def writer(self) -> PeerId:
        return PeerId(self.writer_name, self.writer_incarnation)

    @property
    def target(self) -> PeerId:
        return PeerId(self.target_name, self.target_incarnation)


def decode_fields(data: bytes, error_type: type[TransportError]) -> dict[str, Any]:
    """The JSON object in `data`. Raises: `error_type`."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise error_type("damaged handshake") from error
    if not isinstance(found, dict):
        raise error_type("damaged handshake")
    return found


def check_version(transport: str, said: object, version: int, error_type: type[TransportError]) -> None:
    """Raises: `error_type`, with both versions."""
    if said != version:
        # A stranger's word goes into a message, and may be anything: long, or with halves of characters in it.
        shown = said if _is_number(said, MAX_NUMBER) else "unknown"
        raise error_type(f"{transport} protocol version {shown}, where this worker speaks {version}")


def build_message(message_type: type[T], found: dict[str, Any], error_type: type[TransportError]) -> T:
    """The message with these fields. Raises: `error_type` if one is missing, unknown, or not of its type or range."""
    try:
        message = message_type(**found)
    except TypeError as error:
        raise error_type("damaged handshake") from error
    for field in fields(message_type):  # type: ignore[arg-type]
        value = getattr(message, field.name)
        largest = MAX_PORT if field.name == "port" else MAX_NUMBER
        if not (_is_number(value, largest) if field.type in (int, "int") else _is_text(value)):
            raise error_type(f"damaged handshake: {field.name}")
    return message


def _is_number(value: object, largest: int) -> bool:
    return type(value) is int and 0 <= value <= largest


def _is_text(value: object) -> bool:
    """JSON can name halves of characters, which no encoding has."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)
