"""The journal's files: bounded in size and number, each one replayable by itself, and never in the way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config import ClusterConfig, ModelConfig, PoolConfig
from cluster.core.events import Event, FromFront, FrontGone
from cluster.core.ids import FrontId, Role
from cluster.core.messages import FrontHello, Submit
from cluster.core.state import ClusterState
from cluster.live.journal import Journal, JournalSettings, journal_files, latest_epoch
from cluster.live.replay import find_files, replay_file
from cluster.wire.journal import LENGTH_BYTES, JournalError, decode_header, read_records, write_record

FRONT = FrontId("f", 1)


class Coordinator:
    """A state with its journal."""

    def __init__(self, folder: Path, *, epoch: int = 7, **settings: Any) -> None:
        pool = PoolConfig(name="d", role=Role.DECODE)
        config = ClusterConfig(name="c", model=ModelConfig(preset="p"), pools=(pool,))
        self.state = ClusterState(config, epoch=epoch)
        self.now_ns = 1000
        defaults: dict[str, Any] = {"file_size_bytes": 10_000, "max_files": 100}
        journal = JournalSettings(directory=folder, release="1", **{**defaults, **settings})
        self.journal = Journal(journal, self.state, epoch, lambda: self.now_ns)
        self.handle(FromFront(front=FRONT, message=FrontHello(front=FRONT, address="a:1")))

    def handle(self, event: Event) -> None:
        self.now_ns += 1000
        self.journal.write(self.now_ns, event, self.state.handle(self.now_ns, event))

    def submit(self, request_id: str) -> None:
        message = Submit(request_id=request_id, num_prompt_tokens=10, max_tokens=5)
        self.handle(FromFront(front=FRONT, message=message))


def records_of(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        return [record.content for record in read_records(file)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journals" / "c"


@pytest.fixture(autouse=True)
def no_descriptor_stays() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_are_ended_at_their_size_and_each_replays_alone(folder: Path) -> None:
    coordinator = Coordinator(folder, file_size_bytes=2_000)
    for number in range(60):
        coordinator.submit(f"r{number}")
    coordinator.journal.close()
    files = find_files(folder)
    reports = [replay_file(file) for file in files]
    assert len(files) > 3
    assert all(report.difference is None and not report.is_cut for report in reports)
    assert sum(report.num_events for report in reports) == 61
    assert [report.header.number for report in reports] == list(range(len(files)))
    sizes = [sum(LENGTH_BYTES + len(record) for record in records_of(file)[1:]) for file in files]
    assert all(2_000 <= size_bytes < 4_000 for size_bytes in sizes[:-1])


def test_a_life_that_is_killed_right_after_its_start_leaves_a_journal(folder: Path) -> None:
    coordinator = Coordinator(folder)
    (file,) = find_files(folder)
    report = replay_file(file)
    assert report.num_events == 0 and report.header.epoch == 7
    coordinator.journal.close()


def test_the_oldest_files_are_removed_those_of_an_earlier_life_first(folder: Path) -> None:
    first = Coordinator(folder, max_files=3)
    first.journal.close()
    second = Coordinator(folder, epoch=8, file_size_bytes=500, max_files=3)
    for number in range(20):
        second.submit(f"r{number}")
    second.journal.close()
    files = journal_files(folder)
    headers = [decode_header(records_of(file)[0]) for file in files]
    assert len(files) == 3
    assert [header.epoch for header in headers] == [8, 8, 8]
    assert [header.number for header in headers] == sorted(header.number for header in headers)
    assert all(replay_file(file).difference is None for file in files)


def test_only_its_user_can_read_it(folder: Path) -> None:
    Coordinator(folder).journal.close()
    assert folder.stat().st_mode & 0o077 == 0


def test_a_killed_process_leaves_a_record_that_is_cut(folder: Path) -> None:
    coordinator = Coordinator(folder)
    coordinator.submit("a")
    coordinator.submit("b")
    coordinator.journal.close()
    (file,) = find_files(folder)
    content = file.read_bytes()
    file.write_bytes(content[:-7])
    report = replay_file(file)
    assert report.is_cut and report.difference is None and report.num_events == 2
    file.write_bytes(content[:50])
    with pytest.raises(JournalError, match="not the first record"):
        replay_file(file)


def test_what_was_handed_over_is_on_disk(folder: Path) -> None:
    coordinator = Coordinator(folder)
    coordinator.submit("a")
    coordinator.journal.flush()
    assert replay_file(find_files(folder)[0]).num_events == 2
    coordinator.journal.close()
    coordinator.journal.close()


def test_a_record_that_is_none_is_named(folder: Path) -> None:
    coordinator = Coordinator(folder)
    coordinator.submit("a")
    coordinator.journal.close()
    (file,) = find_files(folder)
    records = records_of(file)
    with file.open("wb") as rewritten:
        for record in (*records[:2], b"rubbish", records[2]):
            write_record(rewritten, record)
    with pytest.raises(JournalError, match=r"journal:3: not an entry"):
        replay_file(file)


def test_a_directory_that_cannot_be_used_costs_the_journal_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    coordinator = Coordinator(blocker / "journal")
    assert not coordinator.journal.is_open
    coordinator.submit("a")
    coordinator.handle(FrontGone(front=FRONT))
    coordinator.journal.flush()
    coordinator.journal.close()
    assert [record.message for record in caplog.records if "has ended" in record.message] != []


def test_a_full_disk_ends_the_journal_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    coordinator = Coordinator(folder)
    file = coordinator.journal._file
    assert file is not None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file.fileno())
    os.close(full)
    for number in range(5):
        coordinator.submit(f"r{number}")
        coordinator.journal.flush()
    assert not coordinator.journal.is_open
    assert sum("has ended" in record.message for record in caplog.records) == 1
    coordinator.journal.close()


def test_there_is_no_journal_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="holds no journal"):
        find_files(tmp_path)
    with pytest.raises(JournalError, match="there is no file"):
        find_files(tmp_path / "x.journal")
    empty = tmp_path / "empty.journal"
    empty.write_bytes(b"")
    with pytest.raises(JournalError, match="is empty"):
        replay_file(empty)


def test_the_latest_epoch_is_told_from_the_files_alone(folder: Path) -> None:
    assert latest_epoch(folder) == 0
    for epoch in (7, 1_800_000_000, 8):
        Coordinator(folder, epoch=epoch).journal.close()
    (folder / "notes.journal").touch()
    assert latest_epoch(folder) == 1_800_000_000
