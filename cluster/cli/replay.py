"""`baton replay`: what the coordinator decided, and why, from its journal."""

from __future__ import annotations

import json
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from cluster.cli.errors import FAILED, INVALID, NOT_FOUND, fail
from cluster.core.limits import NS_PER_MS, NS_PER_S
from cluster.live.cluster_record import ClusterRecords
from cluster.live.environment import DISTRIBUTION, Environment
from cluster.live.replay import FileReport, Line, find_files, replay_file
from cluster.wire.journal import JournalError, show_effects

_MAX_SHOWN_CHARS: Final = 400


def run_replay(path: Path | None, request_id: str | None, environment: Environment, *, as_json: bool) -> None:
    """Raises CommandError."""
    lines: list[Line] = []

    def tell(line: Line) -> None:
        lines.append(line)
        if not as_json:
            since_ms = (line.wall_ns - lines[0].wall_ns) / NS_PER_MS
            print(f"{_clock(line.wall_ns)} {since_ms:+10.1f} ms  {line.what}")

    files = _find(path, environment)
    reports = []
    for file in files:
        try:
            reports.append(replay_file(file, request_id=request_id, tell=tell))
        except BrokenPipeError:
            raise  # the reader of this command's output has left; the file is all right
        except (JournalError, OSError) as error:
            fail(f"{file}: {error}", FAILED)
    if as_json:
        print(json.dumps({"files": [_as_json(report) for report in reports], "story": [_line(line) for line in lines]}))
    elif request_id is None:
        for report in reports:
            print(_summary(report))
    for report in reports:
        if report.difference is not None:
            fail(_explain_difference(report), FAILED)
    if request_id is not None and not lines:
        fail(f"no request {request_id} in {len(files)} journal file(s) of {files[0].parent}", NOT_FOUND)


def _find(path: Path | None, environment: Environment) -> list[Path]:
    if path is None:
        path = _only_journal(environment)
    try:
        return find_files(path)
    except JournalError as error:
        fail(str(error), NOT_FOUND)


def _only_journal(environment: Environment) -> Path:
    """That of the only cluster that was started here, or else the only one in the cache."""
    records = ClusterRecords(environment.clusters_dir).all()
    if len(records) == 1:
        if not records[0].journal_dir:
            fail(f"cluster {records[0].name} keeps no journal; name one: baton replay PATH", NOT_FOUND)
        return Path(records[0].journal_dir)
    found = [Path(record.journal_dir) for record in records if record.journal_dir]
    found = found or sorted(environment.journals_dir.glob("*"))
    if not found:
        fail(f"there is no journal in {environment.journals_dir}; name one: baton replay PATH", NOT_FOUND)
    if len(found) > 1:
        fail(f"there are several journals, name one: baton replay PATH, with {', '.join(map(str, found))}", INVALID)
    return found[0]


def _clock(wall_ns: int) -> str:
    moment = datetime.fromtimestamp(wall_ns // NS_PER_S).strftime("%Y-%m-%d %H:%M:%S")
    return f"{moment}.{wall_ns % NS_PER_S // NS_PER_MS:03d}"


def _summary(report: FileReport) -> str:
    if report.difference is not None:
        verdict = f"different from record {report.difference.record} on"
    else:
        verdict = "the same decisions" + (", up to a last record that is cut off" if report.is_cut else "")
    return (
        f"{report.path.name}: from {_clock(report.header.wall_ns)}, {report.num_events} events, "
        f"{report.num_effects} effects: {verdict}"
    )


def _explain_difference(report: FileReport) -> str:
    difference = report.difference
    assert difference is not None
    here = metadata.version(DISTRIBUTION)
    written_by = report.header.release
    why = f" (written by release {written_by}, replayed by {here})" if written_by != here else ""
    return (
        f"{difference.path}:{difference.record}: the replay decides differently{why}"
        f"\n  event:  {_shown(difference.event)}"
        f"\n  then:   {_shown(show_effects(difference.written))}"
        f"\n  now:    {_shown(show_effects(difference.replayed))}"
    )


def _shown(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + " ..."


def _as_json(report: FileReport) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "release": report.header.release,
        "epoch": report.header.epoch,
        "begun_ns": report.header.wall_ns,
        "events": report.num_events,
        "effects": report.num_effects,
        "is_cut": report.is_cut,
        "same": report.difference is None,
    }


def _line(line: Line) -> dict[str, Any]:
    return {"wall_ns": line.wall_ns, "what": line.what}
