"""The comparison's own half: starts one worker a side on given cores and puts requests to it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STOP_SECONDS = 30.0


class WorkerFailedError(Exception):
    """A worker ended before it answered; its log says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How a worker of one side is started.

    Attributes:
        command: program and arguments, to which the worker's own arguments are added.
        environment: added to this process's own.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class Worker:
    """A running worker. Its first answer, `ready`, is what it says when it can take requests."""

    def __init__(self, side: Side, cores: Sequence[int], log_path: Path) -> None:
        self.side = side
        self._log_path = log_path
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", **side.environment}
        command = [*side.command, "--num-threads", str(len(cores))]
        self._started_s = time.perf_counter()
        with log_path.open("w") as log, _affinity(cores):
            # The child inherits the affinity, so that no library ever sees more cores.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=environment
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It has ended already, and its log says why.
            self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def read_answer(self) -> Any:
        """The next answer. Raises WorkerFailedError if the worker has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log_path.read_text(errors="replace").splitlines()[-20:])
            raise WorkerFailedError(f"the {self.side.name} worker has ended; the end of {self._log_path}:\n{tail}")
        return json.loads(line)

    def call(self, op: str, **arguments: Any) -> Any:
        """Puts one request and waits for its answer. Raises WorkerFailedError if the worker ends before it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # Reading the answer finds out as well, and knows the log.
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
        return self.read_answer()

    @property
    def age_s(self) -> float:
        """Seconds since the process was started."""
        return time.perf_counter() - self._started_s


@contextlib.contextmanager
def _affinity(cores: Sequence[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
