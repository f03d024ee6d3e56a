"""What holds for every test run: no process of a cluster and no shared memory of Baton's outlives it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.live.run_processes import RUN_ID_VARIABLE

SHARED_MEMORY = Path("/dev/shm")
OWN_SEGMENTS = ("baton", "plasma")


def _processes_since(start_s: float) -> list[str]:
    """Live processes that began after `start_s` and descend from this one or carry the id of a cluster's run."""
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE or process.create_time() < start_s:
                continue
            if process.pid in children or RUN_ID_VARIABLE in process.environ():
                found.append(f"{process.pid} {' '.join(process.cmdline()[:4])}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _segments() -> set[str]:
    names = {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()
    return {name for name in names if any(own in name for own in OWN_SEGMENTS)}


@pytest.fixture(scope="session", autouse=True)
def nothing_outlives_the_run() -> Iterator[None]:
    start_s, segments = time.time(), _segments()
    yield
    assert _processes_since(start_s) == []
    assert _segments() <= segments
