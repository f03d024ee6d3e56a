"""Simulated coordinators write journals, of which every one replays to the very same effects, from any snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.core.effects import Effect
from cluster.core.events import Event, FromFront
from cluster.core.messages import Submit
from cluster.core.state import ClusterState
from cluster.live.replay import Line, replay_file
from cluster.sim.history import run_seed
from cluster.wire.journal import Header, encode_entry, encode_header, encode_snapshot, write_record

SEEDS = range(40)
FILE_EVENTS = 40


class Recorder:
    """Writes what passes through ClusterState.handle into files, a new one every so many events."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        self._handle = ClusterState.handle
        self.submitted: list[str] = []
        """Ids of requests that reached a coordinator."""
        self._files: dict[int, list[list[bytes]]] = {}
        self._states: list[ClusterState] = []
        """Kept, so that no other takes over the identity of one that is gone."""
        monkeypatch.setattr(ClusterState, "handle", lambda state, now_ns, event: self._record(state, now_ns, event))

    def _record(self, state: ClusterState, now_ns: int, event: Event) -> list[Effect]:
        if isinstance(event, FromFront) and isinstance(event.message, Submit):
            self.submitted.append(event.message.request_id)
        files = self._files.setdefault(id(state), [])
        if not files:
            self._states.append(state)
        if not files or len(files[-1]) > FILE_EVENTS:
            snapshot = encode_snapshot(state)
            header = Header(release="r", epoch=1, number=len(files), wall_ns=now_ns, now_ns=now_ns, snapshot=snapshot)
            files.append([encode_header(header)])
        effects = self._handle(state, now_ns, event)
        files[-1].append(encode_entry(now_ns, event, effects))
        return effects

    def write(self) -> list[Path]:
        """Ends the recording."""
        self._monkeypatch.undo()
        paths = []
        for files in self._files.values():
            for records in files:
                path = self._folder / f"{len(paths)}.journal"
                with path.open("wb") as file:
                    for record in records:
                        write_record(file, record)
                paths.append(path)
        return paths


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Recorder(tmp_path, monkeypatch)


def test_every_history_replays_to_the_same_effects(recorder: Recorder) -> None:
    for seed in SEEDS:
        run_seed(seed)
    paths = recorder.write()
    num_events = num_effects = 0
    for path in paths:
        report = replay_file(path)
        assert report.difference is None, report.difference
        num_events += report.num_events
        num_effects += report.num_effects
    assert len(paths) > 2 * len(SEEDS), "files that begin in the middle of a history are what matters"
    assert num_events > 2_000 and num_effects > 1_000


def test_every_request_has_its_story(recorder: Recorder) -> None:
    for seed in (3, 4):
        run_seed(seed)
    paths = recorder.write()
    endings: Counter[str] = Counter()
    for request_id in dict.fromkeys(recorder.submitted):
        story: list[Line] = []
        for path in paths:
            replay_file(path, request_id=request_id, tell=story.append)
        assert ": Submit " in story[0].what
        endings[story[-1].what.strip()] += 1
    assert endings["it has ended and is forgotten"] >= 3, endings


def test_a_machine_that_decides_otherwise_is_found(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    run_seed(0)
    paths = recorder.write()
    assert all(replay_file(path).difference is None for path in paths)
    handle = ClusterState.handle
    monkeypatch.setattr(ClusterState, "handle", lambda state, now_ns, event: handle(state, now_ns, event)[:-1])
    reports = [replay_file(path) for path in paths]
    found = [report.difference for report in reports if report.difference is not None]
    assert found and all(len(difference.replayed) < len(difference.written) for difference in found)
