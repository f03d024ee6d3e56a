"""The coordinator's journal: what each file and line of it holds, as bytes.

A file is lines of JSON. The first is a header with a snapshot of ClusterState; each other one is an *entry*,
`[now_ns, event, effects]`, where an event is `[kind, message kind, fields]` and an effect likewise. Replaying the
events from the snapshot gives the same effects, byte for byte, with the release of Baton that wrote them. What users
wrote is not in it: messages carry lengths and hashes, and bodies travel beside them (`cluster.core.messages`).

A snapshot is a pickle, because the state's parts share objects. It is read back by an unpickler that makes nothing but
classes of `cluster.core` and `cluster.policy` and plain containers, so a journal from elsewhere cannot run code.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickle
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, get_args

import msgspec

from cluster.core import events
from cluster.core.effects import Effect, ToFront, ToWorker
from cluster.core.events import Event
from cluster.core.ids import FrontId, WorkerId
from cluster.core.messages import FrontMessage, WorkerMessage
from cluster.core.state import ClusterState

FORMAT: Final = 2
_STATE_PACKAGES: Final = ("cluster.core.", "cluster.policy.")
_STATE_BUILTINS: Final = (("builtins", "set"), ("builtins", "frozenset"), ("collections", "deque"))

_encoder = msgspec.json.Encoder()
_message_kinds: Final = {kind.__name__: kind for kind in (*get_args(FrontMessage), *get_args(WorkerMessage))}


class JournalError(Exception):
    """A line is not what a journal of this release holds; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line of a file.

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
    snapshot: str
    format: int = FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One event, and the effects that came of it as they stand in the line."""

    now_ns: int
    event: Event
    effects: bytes


def encode_header(header: Header) -> bytes:
    return _encoder.encode(header)


def decode_header(line: bytes) -> Header:
    """Raises: JournalError."""
    try:
        header = msgspec.json.decode(line, type=Header)
    except msgspec.MsgspecError as error:
        raise JournalError(f"not the first line of a journal: {error}") from error
    if header.format != FORMAT:
        raise JournalError(f"a journal of format {header.format}, expected {FORMAT}")
    return header


def encode_snapshot(state: ClusterState) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(state), level=1)).decode()


def decode_snapshot(snapshot: str) -> ClusterState:
    """Raises: JournalError."""
    try:
        state = _StateUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(snapshot)))).load()
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
        raise JournalError(f"the snapshot cannot be read: {error}") from error
    if not isinstance(state, ClusterState):
        raise JournalError(f"the snapshot is of {type(state).__name__}, expected ClusterState")
    return state


def encode_entry(now_ns: int, event: Event, effects: Iterable[Effect]) -> bytes:
    return _encoder.encode((now_ns, (type(event).__name__, _kind_of_message(event), event), _tagged(effects)))


def encode_effects(effects: Iterable[Effect]) -> bytes:
    return _encoder.encode(_tagged(effects))


def decode_entry(line: bytes) -> Entry:
    """Raises: JournalError."""
    try:
        now_ns, event, effects = msgspec.json.decode(line, type=tuple[int, _TaggedEvent, msgspec.Raw])
        return Entry(now_ns=now_ns, event=_decode_event(*event), effects=bytes(effects))
    except (msgspec.MsgspecError, KeyError) as error:
        raise JournalError(f"not an entry of a journal: {error}") from error


_TaggedEvent = tuple[str, str, msgspec.Raw]


def _decode_event(kind: str, message_kind: str, fields: msgspec.Raw) -> Event:
    match kind:
        case "FromFront" | "FromWorker":
            parts = msgspec.json.decode(fields, type=dict[str, msgspec.Raw])
            message: Any = msgspec.json.decode(parts["message"], type=_message_kinds[message_kind])
            if kind == "FromFront":
                return events.FromFront(front=msgspec.json.decode(parts["front"], type=FrontId), message=message)
            return events.FromWorker(worker=msgspec.json.decode(parts["worker"], type=WorkerId), message=message)
        case "FrontGone":
            return msgspec.json.decode(fields, type=events.FrontGone)
        case "WorkerGone":
            return msgspec.json.decode(fields, type=events.WorkerGone)
        case "Tick":
            return msgspec.json.decode(fields, type=events.Tick)
    raise JournalError(f"not an event: {kind!r}")


def _tagged(effects: Iterable[Effect]) -> list[tuple[str, str, Effect]]:
    return [(type(effect).__name__, _kind_of_message(effect), effect) for effect in effects]


def _kind_of_message(carrier: Event | Effect) -> str:
    """The class of what it carries, empty where it carries nothing."""
    content_of = _CONTENTS.get(type(carrier))
    return "" if content_of is None else type(content_of(carrier)).__name__


_CONTENTS: Final[dict[type, Callable[[Any], object]]] = {
    events.FromFront: attrgetter("message"),
    events.FromWorker: attrgetter("message"),
    ToFront: attrgetter("message"),
    ToWorker: attrgetter("command.body"),
}


class _StateUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module.startswith(_STATE_PACKAGES) and "." not in name) or (module, name) in _STATE_BUILTINS:
            found = super().find_class(module, name)
            if isinstance(found, type):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a coordinator's state")
