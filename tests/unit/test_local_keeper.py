"""Plain processes of a local cluster: those that were drained to be started again are, and no others."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from cluster.agent.exit_status import AGAIN, EXIT_AGAIN, EXIT_ENDED, EXIT_LEFT
from cluster.live.local_processes import ClusterHandle, LocalProcess


def ended(name: str, status: int, last_line: str, folder: Path) -> LocalProcess:
    """A worker's process that has served and said so."""
    stdout = folder / f"{name}.out"
    with stdout.open("wb") as file:
        code = f"print('ready 127.0.0.1:1\\n{last_line}'); raise SystemExit({status})"
        popen = subprocess.Popen([sys.executable, "-c", code], stdout=file)
    popen.wait()
    return LocalProcess(name, popen, stdout, folder / f"{name}.err")


def test_a_worker_that_was_drained_to_be_started_again_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = ClusterHandle(Any, tmp_path, {})  # type: ignore[arg-type]
    handle.workers = {
        "flipped": ended("flipped", EXIT_AGAIN, f"{AGAIN}decode", tmp_path),
        "drained": ended("drained", EXIT_LEFT, "", tmp_path),
        "crashed": ended("crashed", EXIT_ENDED, "", tmp_path),
    }
    stopped = threading.Event()
    started: list[tuple[str, str | None]] = []

    def start_worker(_: ClusterHandle, name: str, pool_name: str | None = None) -> None:
        started.append((name, pool_name))
        stopped.set()

    monkeypatch.setattr(ClusterHandle, "start_worker", start_worker)
    handle.keep_drained(stopped)
    assert started == [("flipped", "decode")]
