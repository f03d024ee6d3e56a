"""The coordinator's journal: what each file and record of it holds, as bytes.

A file is records of MessagePack, each after its length. The first is a header with a snapshot of ClusterState; each
other one is an *entry*, `[now_ns, event, effects]`, where an event is `[kind, message kind, fields]` and an effect
likewise. (JSON would take five times as long to write: most of an entry is hashes.) Replaying the
events from the snapshot gives the same effects, byte for byte, with the release of Baton that wrote them. What users
wrote is not in it: messages carry lengths and hashes, and bodies travel beside them (`cluster.core.messages`).

A snapshot is a pickle, because the state's parts share objects. It is read back by an unpickler that makes nothing but
classes of `cluster.core` and `cluster.policy` and plain containers, so a journal from elsewhere cannot run code.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, get_args

import msgspec

from cluster.core import events
from cluster.core.effects import Effect, ToFront, ToWorker
from cluster.core.events import Event
from cluster.core.ids import FrontId, WorkerId
from cluster.core.messages import FrontMessage, WorkerMessage
from cluster.core.state import ClusterState

FORMAT: Final = 2
LENGTH_BYTES: Final = 4
MAX_RECORD_BYTES: Final = 2**31
_STATE_PACKAGES: Final = ("cluster.core.", "cluster.policy.")
_STATE_BUILTINS: Final = (("builtins", "set"), ("builtins", "frozenset"), ("collections", "deque"))

_encoder = msgspec.msgpack.Encoder()
_message_kinds: Final = {kind.__name__: kind for kind in (*get_args(FrontMessage), *get_args(WorkerMessage))}


class JournalError(Exception):
    """A record is not what a journal of this release holds; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first record of a file.

    Attributes:
        release: of Baton that wrote it. epoch: of the coordinator's life. number: of the file in that life, from 0.
        wall_ns: nanoseconds since 1970 as the file was begun, and now_ns: the same moment on the entries' clock.
        snapshot: of the state before the first entry.
    """

    release: str
    epoch: int
    number: int
    wall_ns: int
    now_ns: int
    snapshot: bytes
    format: int = FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One event, and the effects that came of it as they stand in the record."""

    now_ns: int
    event: Event
    effects: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """`number` counts from 1. Not `is_whole` where the file ends within it, as a killed process leaves it."""

    number: int
    content: bytes
    is_whole: bool


def write_record(file: BinaryIO, content: bytes) -> int:
    """Returns the number of bytes written. Raises: OSError."""
    return file.write(len(content).to_bytes(LENGTH_BYTES, "little") + content)


def read_records(file: BinaryIO) -> Iterator[Record]:
    """Up to the file's end. Raises: OSError."""
    number = 0
    while length := file.read(LENGTH_BYTES):
        number += 1
        size = int.from_bytes(length, "little")
        content = file.read(min(size, MAX_RECORD_BYTES))
        yield Record(number=number, content=content, is_whole=len(content) == size and len(length) == LENGTH_BYTES)


def encode_header(header: Header) -> bytes:
    return _encoder.encode(header)


def decode_header(record: bytes) -> Header:
    """Raises: JournalError."""
    try:
        header = msgspec.msgpack.decode(record, type=Header)
    except msgspec.MsgspecError as error:
        raise JournalError(f"not the first record of a journal: {error}") from error
    if header.format != FORMAT:
        raise JournalError(f"a journal of format {header.format}, expected {FORMAT}")
    return header


def encode_snapshot(state: ClusterState) -> bytes:
    return zlib.compress(pickle.dumps(state), level=1)


def decode_snapshot(snapshot: bytes) -> ClusterState:
    """Raises: JournalError."""
    try:
        state = _StateUnpickler(io.BytesIO(zlib.decompress(snapshot))).load()
    except (zlib.error, pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
        raise JournalError(f"the snapshot cannot be read: {error}") from error
    if not isinstance(state, ClusterState):
        raise JournalError(f"the snapshot is of {type(state).__name__}, expected ClusterState")
    return state


def encode_entry(now_ns: int, event: Event, effects: Iterable[Effect]) -> bytes:
    return _encoder.encode((now_ns, (type(event).__name__, _CONTENT_KIND[type(event)](event), event), _tagged(effects)))


def encode_effects(effects: Iterable[Effect]) -> bytes:
    return _encoder.encode(_tagged(effects))


def show_effects(effects: bytes) -> str:
    """What `encode_effects` gives, for people: as JSON."""
    return msgspec.json.encode(msgspec.msgpack.decode(effects)).decode()


def decode_entry(record: bytes) -> Entry:
    """Raises: JournalError."""
    try:
        now_ns, event, effects = msgspec.msgpack.decode(record, type=tuple[int, _TaggedEvent, msgspec.Raw])
        return Entry(now_ns=now_ns, event=_decode_event(*event), effects=bytes(effects))
    except (msgspec.MsgspecError, KeyError) as error:
        raise JournalError(f"not an entry of a journal: {error}") from error


_TaggedEvent = tuple[str, str, msgspec.Raw]


def _decode_event(kind: str, message_kind: str, fields: msgspec.Raw) -> Event:
    match kind:
        case "FromFront" | "FromWorker":
            parts = msgspec.msgpack.decode(fields, type=dict[str, msgspec.Raw])
            message: Any = msgspec.msgpack.decode(parts["message"], type=_message_kinds[message_kind])
            if kind == "FromFront":
                return events.FromFront(front=msgspec.msgpack.decode(parts["front"], type=FrontId), message=message)
            return events.FromWorker(worker=msgspec.msgpack.decode(parts["worker"], type=WorkerId), message=message)
        case "FrontGone":
            return msgspec.msgpack.decode(fields, type=events.FrontGone)
        case "WorkerGone":
            return msgspec.msgpack.decode(fields, type=events.WorkerGone)
        case "DrainAsked":
            return msgspec.msgpack.decode(fields, type=events.DrainAsked)
        case "Tick":
            return msgspec.msgpack.decode(fields, type=events.Tick)
    raise JournalError(f"not an event: {kind!r}")


def _tagged(effects: Iterable[Effect]) -> list[tuple[str, str, Effect]]:
    return [(type(effect).__name__, _CONTENT_KIND[type(effect)](effect), effect) for effect in effects]


def _no_content(carrier: object) -> str:
    return ""


def _message_kind(carrier: Any) -> str:
    return type(carrier.message).__name__


def _command_kind(carrier: Any) -> str:
    return type(carrier.command.body).__name__


_CONTENT_KIND: Final[dict[type, Callable[[Any], str]]] = {
    **dict.fromkeys((*get_args(Event), *get_args(Effect)), _no_content),
    events.FromFront: _message_kind,
    events.FromWorker: _message_kind,
    ToFront: _message_kind,
    ToWorker: _command_kind,
}
"""Names the class of what an event or effect carries."""


class _StateUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module.startswith(_STATE_PACKAGES) and "." not in name) or (module, name) in _STATE_BUILTINS:
            found = super().find_class(module, name)
            if isinstance(found, type):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a coordinator's state")
