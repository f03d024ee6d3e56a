"""`baton replay`: whole journals, one request's story, and journals that are not there or not right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.core.config import ClusterConfig, ModelConfig, PoolConfig
from cluster.core.events import FromFront, Tick
from cluster.core.ids import FrontId, Role
from cluster.core.messages import FrontHello, Submit
from cluster.core.state import ClusterState
from cluster.live.cluster_record import ClusterRecord, ClusterRecords
from cluster.live.journal import Journal, JournalSettings
from tests.support.cli_scripted import baton

FRONT = FrontId("front-0", 5)


def write_journal(folder: Path) -> None:
    """Two requests that wait for workers which never come; the second one is refused in the end."""
    pool = PoolConfig(name="d", role=Role.DECODE)
    state = ClusterState(ClusterConfig(name="c", model=ModelConfig(preset="p"), pools=(pool,)), epoch=7)
    settings = JournalSettings(directory=folder, file_size_bytes=10**6, max_files=4, release="0.0")
    journal = Journal(settings, state, 7, lambda: 0)
    hello = FrontHello(front=FRONT, address="a:1")
    submits = [Submit(request_id=name, num_prompt_tokens=10, max_tokens=5) for name in ("one", "two")]
    events = [FromFront(front=FRONT, message=message) for message in (hello, *submits)]
    for now_ns, event in ((1, events[0]), (2_000_000, events[1]), (3_000_000, events[2]), (90 * 10**9, Tick())):
        journal.write(now_ns, event, state.handle(now_ns, event))
    journal.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_journal(tmp_path / "baton" / "journals" / "c")
    return tmp_path


def test_a_whole_journal_is_replayed(home: Path) -> None:
    said = baton("replay", home=home)
    assert said.exit_code == 0 and said.stderr == ""
    (line,) = said.stdout.splitlines()
    assert line.startswith("000000000007-000000.journal: from 20") and "4 events" in line
    assert line.endswith("the same decisions")
    report = json.loads(baton("replay", "--json", home=home).stdout)
    assert report["story"] == []
    (file,) = report["files"]
    assert (file["events"], file["same"], file["is_cut"], file["epoch"]) == (4, True, False, 7)


def test_one_request_has_its_story(home: Path) -> None:
    said = baton("replay", "--request", "two", home=home)
    assert said.exit_code == 0
    told = [line.split(" ms  ", 1)[1] for line in said.stdout.splitlines()]
    assert told[0] == "<- front-0#5: Submit num_prompt_tokens=10 max_tokens=5"
    assert told[1].strip().startswith("queued")
    assert told[2].startswith("-> front-0#5: Refused outcome=rejected_overload")
    assert "one" not in said.stdout
    story = json.loads(baton("replay", "--request", "two", "--json", home=home).stdout)["story"]
    assert [line["what"] for line in story] == told


def test_what_waits_says_for_what(home: Path) -> None:
    told = baton("replay", "--request", "one", home=home).stdout
    assert "queued, no decode worker" in told


def test_a_request_that_is_not_in_it(home: Path) -> None:
    said = baton("replay", "--request", "three", home=home)
    assert said.exit_code == 3 and "no request three in 1 journal file(s)" in said.stderr


def test_a_replay_that_comes_out_differently_says_where(home: Path) -> None:
    (file,) = (home / "baton" / "journals" / "c").iterdir()
    content = file.read_bytes()
    assert content.count(b"rejected_overload") == 2
    file.write_bytes(content.replace(b"rejected_overload", b"rejected_overlord"))
    said = baton("replay", str(file), home=home)
    assert said.exit_code == 1
    assert "different from record 5 on" in said.stdout
    assert ":5: the replay decides differently (written by release 0.0, replayed by " in said.stderr
    assert '"outcome":"rejected_overlord"' in said.stderr and '"outcome":"rejected_overload"' in said.stderr


def test_without_a_journal_it_says_where_it_looked(tmp_path: Path) -> None:
    said = baton("replay", home=tmp_path)
    assert said.exit_code == 3 and f"no journal in {tmp_path}/baton/journals" in said.stderr
    said = baton("replay", str(tmp_path), home=tmp_path)
    assert said.exit_code == 3 and "holds no journal" in said.stderr


def test_the_only_cluster_says_where_its_journal_is(home: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    write_journal(elsewhere)
    write_journal(home / "baton" / "journals" / "of-another")
    records = ClusterRecords(home / "baton" / "clusters")
    record = ClusterRecord(
        name="c",
        run_id="r",
        phase="serving",
        launcher_pid=1,
        launcher_started_s=0.0,
        ray_owned=True,
        journal_dir=str(elsewhere),
    )
    records.create(record)
    assert baton("replay", "--request", "two", home=home).exit_code == 0
    records.update(replace(record, journal_dir=""))
    said = baton("replay", home=home)
    assert said.exit_code == 3 and "cluster c keeps no journal" in said.stderr


def test_a_reader_that_leaves_is_no_fault_of_the_journal(home: Path) -> None:
    command = f"{sys.executable} -m cluster.cli replay --request two | head -n 1; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "XDG_CACHE_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert "Broken pipe" not in done.stderr and done.stdout.count("\n") == 1
    assert done.returncode in (0, 141), done.stderr


def test_with_several_journals_it_asks_which(home: Path) -> None:
    write_journal(home / "baton" / "journals" / "other")
    said = baton("replay", home=home)
    assert (
        said.exit_code == 2 and "name one: baton replay PATH, with " in said.stderr and "journals/other" in said.stderr
    )
    assert baton("replay", str(home / "baton" / "journals" / "other"), home=home).exit_code == 0
