"""What holds for every test: no process and no shared memory of Baton's outlives the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

SHARED_MEMORY = Path("/dev/shm")


def _descendants() -> list[psutil.Process]:
    """Live processes that were started from here, at whatever remove."""
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def _shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


@pytest.fixture(scope="session", autouse=True)
def nothing_outlives_the_run() -> Iterator[None]:
    before = _shared_memory()
    yield
    left = [f"{process.pid} {' '.join(process.cmdline()[:4])}" for process in _descendants()]
    assert not left, f"processes are left: {left}"
    assert _shared_memory() <= before, "segments are left in /dev/shm"
