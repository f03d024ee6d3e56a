"""What holds for every test run: nothing that it started outlives it."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings

MARK = "BATON_TEST_RUN"
"""Set for this run alone and inherited by all it starts, at whatever remove."""
ENDS_WITH_US = "multiprocessing.resource_tracker"
"""A process of Python's own, which `multiprocessing` keeps beside this one."""

# The same examples everywhere, so that what passed here passes there. `make soak-properties` draws others each time.
settings.register_profile("repeatable", derandomize=True)
if not os.environ.get("BATON_RANDOM_EXAMPLES"):
    settings.load_profile("repeatable")

# A shell that starts the tests in the background has Ctrl-C ignored, which all that tests start would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _marked(value: str) -> list[str]:
    """Live processes, other than this one, that carry the mark."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.status() == psutil.STATUS_ZOMBIE or process.environ().get(MARK) != value:
                continue
            command = " ".join(process.cmdline())
            if ENDS_WITH_US not in command:
                found.append(f"{process.pid} {command}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.fixture(scope="session", autouse=True)
def nothing_outlives_the_run() -> Iterator[None]:
    """Pools are anonymous memory that goes with its processes, so processes are all there is to look for."""
    value = uuid.uuid4().hex
    os.environ[MARK] = value
    yield
    del os.environ[MARK]
    assert _marked(value) == []
