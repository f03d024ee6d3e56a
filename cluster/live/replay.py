"""Replays a journal: the same state machine, from the same state, through the same events.

What comes out must be what came out then, byte for byte; where it is not, this is another release, or a state machine
that looks at something besides its events. On the way it tells one request's story: what it waited for, where it was
placed and why, and everything that was said about it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cluster.core import events
from cluster.core.brief import brief
from cluster.core.effects import DropBody, Effect, ReportPoison, ToFront, ToWorker
from cluster.core.events import Event
from cluster.core.ids import AttemptId, FrontId, WorkerId
from cluster.core.messages import LegTimeline, WorkerRef
from cluster.core.state import ClusterState
from cluster.core.views import RequestView
from cluster.live.journal import journal_files
from cluster.wire.journal import (
    Header,
    JournalError,
    Record,
    decode_entry,
    decode_header,
    decode_snapshot,
    encode_effects,
    read_records,
)

INDENT: Final = "   "
"""Before what is not said by or to anybody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first entry whose effects were not what they are now."""

    path: Path
    record: int
    event: str
    written: bytes
    replayed: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """Attributes:
    num_events, num_effects: replayed.
    is_cut: whether the last record was not wholly written, as a killed process leaves it.
    difference: None where all was the same.
    """

    path: Path
    header: Header
    num_events: int
    num_effects: int
    is_cut: bool
    difference: Difference | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Of a request's story. `wall_ns` since 1970; `what` in words."""

    wall_ns: int
    what: str


Tell = Callable[[Line], None]


def find_files(path: Path) -> list[Path]:
    """The journal's files in a directory, or the one file. Raises JournalError if there is none."""
    files = journal_files(path) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise JournalError(f"{path} holds no journal" if path.is_dir() else f"there is no file {path}")
    return files


def replay_file(path: Path, *, request_id: str | None = None, tell: Tell | None = None) -> FileReport:
    """Replays a file, up to the first difference.

    Args:
        request_id: whose story is told to `tell`.

    Raises:
        JournalError: the file is not a journal, or has a record that is none of a journal's.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return _replay(path, read_records(file), request_id, tell)


def _replay(path: Path, records: Iterator[Record], request_id: str | None, tell: Tell | None) -> FileReport:
    first = next(records, None)
    if first is None:
        raise JournalError(f"{path} is empty")
    header = decode_header(first.content)
    state = decode_snapshot(header.snapshot)
    story = None if request_id is None or tell is None else _Story(request_id, header, tell)
    num_events = num_effects = 0
    is_cut, difference = not first.is_whole, None
    for record in records:
        if not record.is_whole:
            is_cut = True
            break
        try:
            entry = decode_entry(record.content)
        except JournalError as error:
            raise JournalError(f"{path}:{record.number}: {error}") from error
        effects = state.handle(entry.now_ns, entry.event)
        num_events += 1
        num_effects += len(effects)
        replayed = encode_effects(effects)
        if replayed != entry.effects:
            what = brief(entry.event)
            difference = Difference(
                path=path, record=record.number, event=what, written=entry.effects, replayed=replayed
            )
            break
        if story is not None:
            story.follow(entry.now_ns, entry.event, effects, state)
    return FileReport(
        path=path, header=header, num_events=num_events, num_effects=num_effects, is_cut=is_cut, difference=difference
    )


class _Story:
    """Tells what concerns one request: what is said about it, and what becomes of it."""

    def __init__(self, request_id: str, header: Header, tell: Tell) -> None:
        self._request_id = request_id
        self._to_wall_ns = header.wall_ns - header.now_ns
        self._tell = tell
        self._last: tuple[str, int, str] | None = None

    def follow(self, now_ns: int, event: Event, effects: list[Effect], state: ClusterState) -> None:
        heard = _describe_event(event, self._request_id)
        if heard is not None:
            self._say(now_ns, heard)
        view = state.request(self._request_id, now_ns)
        if view is not None:
            self._tell_change(now_ns, view)
        for effect in effects:
            done = _describe_effect(effect, self._request_id)
            if done is not None:
                self._say(now_ns, done)
        if view is None and self._last is not None:
            self._last = None
            self._say(now_ns, f"{INDENT}it has ended and is forgotten")

    def _tell_change(self, now_ns: int, view: RequestView) -> None:
        now = (view.phase, view.attempt, view.why)
        if now == self._last:
            return
        is_new_reason = self._last is None or now[1:] != self._last[1:]
        self._last = now
        where = " and ".join(str(worker) for worker in (view.prefill, view.decode) if worker is not None)
        parts = [
            f"{INDENT}{view.phase}",
            f"attempt {view.attempt}" if view.attempt and is_new_reason else "",
            f"on {where}" if where and is_new_reason else "",
            view.why if is_new_reason else "",
        ]
        self._say(now_ns, ", ".join(part for part in parts if part))

    def _say(self, now_ns: int, what: str) -> None:
        self._tell(Line(wall_ns=self._to_wall_ns + now_ns, what=what))


def _describe_event(event: Event, request_id: str) -> str | None:
    if isinstance(event, events.FromFront) and _concerns(event.message, request_id):
        return f"<- {event.front}: {_short(event.message)}"
    if isinstance(event, events.FromWorker) and _concerns(event.message, request_id):
        return f"<- {event.worker}: {_short(event.message)}"
    return None


def _describe_effect(effect: Effect, request_id: str) -> str | None:
    if isinstance(effect, ToWorker) and _concerns(effect.command.body, request_id):
        return f"-> {effect.worker}: {_short(effect.command.body)}"
    if isinstance(effect, ToFront) and _concerns(effect.message, request_id):
        return f"-> {effect.front}: {_short(effect.message)}"
    if isinstance(effect, ReportPoison) and effect.request_id == request_id:
        return f"-> operators are told of a poison request: {effect.reason}"
    if isinstance(effect, DropBody) and effect.request_id == request_id:
        return "-> its prompt is dropped"
    return None


def _concerns(message: object, request_id: str) -> bool:
    attempt = getattr(message, "attempt", None)
    return getattr(message, "request_id", None) == request_id or getattr(attempt, "request_id", None) == request_id


def _short(message: object) -> str:
    """A message as its name and what people want of it: peers by their name, lists by their length."""
    assert dataclasses.is_dataclass(message)
    parts = [_short_field(field, getattr(message, field.name)) for field in dataclasses.fields(message)]
    return " ".join([type(message).__name__, *(part for part in parts if part)])


def _short_field(field: dataclasses.Field[Any], value: object) -> str:
    if value is None or value == field.default or field.name in ("request_id", "epoch", "lease_id", "why"):
        return ""
    if isinstance(value, AttemptId):
        return f"attempt={value.attempt}"
    if isinstance(value, tuple | list) and not isinstance(value, WorkerId | FrontId):
        return f"{field.name}={len(value)}"
    if isinstance(value, bytes):
        return f"{field.name}={len(value)} bytes"
    if isinstance(value, WorkerRef):
        return f"{field.name}={value.worker}"
    if isinstance(value, float):
        return f"{field.name}={value:.1f}"
    if isinstance(value, LegTimeline):
        return " ".join(part for part in _short(value).split(" ")[1:])
    return f"{field.name}={brief(value)}"
