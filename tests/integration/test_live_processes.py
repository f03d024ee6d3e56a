"""Processes of a run are found and ended, whatever they do; children do not outlive their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.core.ids import WorkerId
from cluster.live.run_processes import (
    RUN_ID_VARIABLE,
    end_run_processes,
    find_run_processes,
    is_alive,
    own_start_time_s,
)
from cluster.live.worker_reaper import WorkerReaper

TIMEOUT_S = 20.0
SLEEP = "import time; print('up', flush=True); time.sleep(60)"


@pytest.fixture
def run_id() -> Iterator[str]:
    run_id = uuid.uuid4().hex
    yield run_id
    end_run_processes(run_id)


def start(run_id: str, code: str = SLEEP) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, RUN_ID_VARIABLE: run_id, "PYTHONPATH": ":".join(sys.path)},
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def test_the_processes_of_a_run_are_ended_and_no_others(run_id: str) -> None:
    with start("another") as other, start(run_id) as ours:
        assert [process.pid for process in find_run_processes(run_id)] == [ours.pid]
        assert end_run_processes(run_id) == 1
        assert ours.wait(TIMEOUT_S) == -signal.SIGKILL
        assert find_run_processes(run_id) == [] and other.poll() is None
        other.kill()


def test_children_and_those_that_ignore_signals_are_ended_too(run_id: str) -> None:
    code = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True); {SLEEP}"
    )
    with start(run_id, code) as parent:
        os.kill(parent.pid, signal.SIGSTOP)
        assert end_run_processes(run_id) == 2
        assert parent.wait(TIMEOUT_S) == -signal.SIGKILL


def test_a_process_that_hides_its_environment_is_known_by_its_open_files(run_id: str, tmp_path: Path) -> None:
    code = (
        "import sys, os; file = open(sys.argv[1], 'w'); "
        "os.environ.pop('X', None); print('up', flush=True); import time; time.sleep(60)"
    )
    log = tmp_path / "agent.log"
    command = ["ray::Agent", "-c", code, str(log)]
    with subprocess.Popen(command, executable=sys.executable, stdout=subprocess.PIPE, text=True) as hidden:
        assert hidden.stdout is not None and hidden.stdout.readline() == "up\n"
        with subprocess.Popen(["tail", "-f", str(log)]) as reader:
            assert [process.pid for process in find_run_processes(run_id, str(tmp_path))] == [hidden.pid]
            assert find_run_processes(run_id) == []
            end_run_processes(run_id, str(tmp_path))
            assert hidden.wait(TIMEOUT_S) == -signal.SIGKILL
            assert reader.poll() is None, "someone who reads the log is none of ours"
            reader.kill()


def test_a_pid_alone_is_not_a_process() -> None:
    assert is_alive(os.getpid(), own_start_time_s())
    assert not is_alive(os.getpid(), own_start_time_s() - 100)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        started_s = psutil.Process(ended.pid).create_time()
        ended.wait(TIMEOUT_S)
    assert not is_alive(ended.pid, started_s)


def test_a_child_does_not_outlive_its_parent(run_id: str) -> None:
    code = (
        "import os, subprocess, sys, time; child = subprocess.Popen([sys.executable, '-m', 'cluster.live.with_parent', "
        "str(os.getpid()), 'http.server', '--bind', '127.0.0.1', '0'], stdout=subprocess.PIPE, text=True, "
        "env={**os.environ, 'PYTHONUNBUFFERED': '1'}); "
        "child.stdout.readline(); print('up', flush=True); time.sleep(60)"
    )
    with start(run_id, code) as parent:
        [child] = [process for process in find_run_processes(run_id) if process.pid != parent.pid]
        parent.kill()
        parent.wait(TIMEOUT_S)
        psutil.wait_procs([child], timeout=TIMEOUT_S)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_child_of_a_parent_that_is_gone_already_ends_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cluster.live.with_parent", "1", "http.server", "0"],
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0


def test_the_reaper_ends_the_life_it_knows_and_only_that(run_id: str) -> None:
    asked: list[WorkerId] = []
    reaper = WorkerReaper(lambda worker, reason: asked.append(worker), host="here")
    with start(run_id) as local, start(run_id) as kept:
        reaper.adopt(WorkerId("w", 1), "here", local.pid)
        reaper.adopt(WorkerId("kept", 1), "here", kept.pid)
        reaper.adopt(WorkerId("far", 1), "there", kept.pid)
        reaper.release(WorkerId("kept", 1))
        reaper.end(WorkerId("w", 1), "silent")
        assert local.wait(TIMEOUT_S) == -signal.SIGKILL
        reaper.end(WorkerId("w", 1), "again")
        reaper.end(WorkerId("far", 1), "silent")
        assert asked == [WorkerId("w", 1), WorkerId("far", 1)]
        assert kept.poll() is None
        reaper.close()
        kept.kill()
