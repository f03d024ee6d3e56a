"""The processes of one run of a cluster: found by what they carry, ended together.

Every process that a launcher starts, and what those start in turn, inherits an environment variable with the run's id.
Some of Ray's processes overwrite it together with their command line; those are known by a title that begins with
`ray::` and a file kept open in the run's own folder. Neither needs the cooperation of anything that may have crashed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import psutil

RUN_ID_VARIABLE: Final = "BATON_RUN_ID"
END_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.02


class LeftoverError(Exception):
    """Processes of the run are still there after the time limit."""


def find_run_processes(run_id: str, temp_dir: str = "") -> list[psutil.Process]:
    """The live processes of the run, by pid; not the caller itself. A zombie is not alive: it holds nothing."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.status() != psutil.STATUS_ZOMBIE and _belongs(process, run_id, temp_dir):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def end_run_processes(run_id: str, temp_dir: str = "", timeout_s: float = END_TIMEOUT_S) -> int:
    """Kills them until none is left, and returns how many there were.

    Nothing in them needs a gentler end: pools are anonymous memory, sockets close, and clients see UNAVAILABLE.
    Sweeps again, since a process may start another between two looks.

    Raises: LeftoverError.
    """
    deadline_s = time.monotonic() + timeout_s
    ended: set[int] = set()
    while processes := find_run_processes(run_id, temp_dir):
        if time.monotonic() > deadline_s:
            names = ", ".join(f"{process.pid} ({_name(process)})" for process in processes)
            raise LeftoverError(f"these processes did not end within {timeout_s:g} s: {names}")
        for process in processes:
            ended.add(process.pid)
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        # Waiting for them here would take the exit status of a child from whoever started it.
        time.sleep(POLL_S)
    return len(ended)


def is_alive(pid: int, started_s: float) -> bool:
    """Whether that very process still runs: the pid alone may be another's by now."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - started_s) < 1.0
    except psutil.NoSuchProcess:
        return False


def own_start_time_s() -> float:
    return psutil.Process().create_time()


def _belongs(process: psutil.Process, run_id: str, temp_dir: str) -> bool:
    try:
        if process.environ().get(RUN_ID_VARIABLE) == run_id:
            return True
        titled_by_ray = "".join(process.cmdline()[:1]).startswith("ray::")
    except psutil.AccessDenied:
        return False
    return bool(temp_dir) and titled_by_ray and _has_file_open_in(process.pid, temp_dir)


def _has_file_open_in(pid: int, folder: str) -> bool:
    try:
        targets = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        # Ended in between.
        return False
    return any(target.startswith(folder.rstrip("/") + "/") for target in targets)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "ended"
