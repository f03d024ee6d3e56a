"""An object in a process of its own: the benchmark's own half calls its methods, one at a time."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

ANSWER_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
SPAWN = multiprocessing.get_context("spawn")
"""Never a fork: the libraries that move bytes do not survive one."""

IsCalled = Callable[[], bool]


class RemoteFailedError(Exception):
    """The other process could not make its object, or a call raised, or nothing was heard of it in time."""


class Remote:
    """`make(is_called)` runs in the new process, on `cores`. `is_called()` there tells a method that runs until the
    next call that it has come."""

    def __init__(self, make: Callable[[IsCalled], object], cores: Sequence[int], name: str) -> None:
        """Raises: RemoteFailedError with the last line of what `make` raised."""
        self.name = name
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_serve, args=(make, list(cores), theirs), name=name, daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.result()
        except RemoteFailedError:
            self.close()
            raise

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(self, method: str, *arguments: Any) -> None:
        """Starts a call; `result` waits for its end. Raises: RemoteFailedError."""
        self._send((method, arguments))

    def result(self) -> Any:
        """Raises: RemoteFailedError."""
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise RemoteFailedError(f"{self.name} says nothing for {ANSWER_TIMEOUT_S:.0f} s")
        try:
            has_worked, answer = self._pipe.recv()
        except EOFError as error:
            raise RemoteFailedError(f"{self.name} has died") from error
        if not has_worked:
            raise RemoteFailedError(answer)
        return answer

    def call(self, method: str, *arguments: Any) -> Any:
        """Raises: RemoteFailedError."""
        self.begin(method, *arguments)
        return self.result()

    def interrupt(self) -> Any:
        """Ends a call that runs until the next one, and returns its answer. Raises: RemoteFailedError."""
        self._send(None)
        return self.result()

    def _send(self, call: tuple[str, tuple[Any, ...]] | None) -> None:
        try:
            self._pipe.send(call)
        except OSError as error:
            raise RemoteFailedError(f"{self.name} has ended") from error

    def close(self) -> None:
        """Ends the process, in order if it can. Idempotent."""
        if not self._pipe.closed:
            self._pipe.close()
        self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(make: Callable[[IsCalled], object], cores: list[int], pipe: Connection) -> None:
    os.sched_setaffinity(0, cores)
    target: Any = None
    try:
        target = make(pipe.poll)
        pipe.send((True, None))
        while True:
            call = pipe.recv()
            if call is not None:
                method, arguments = call
                pipe.send((True, getattr(target, method)(*arguments)))
    except (EOFError, BrokenPipeError):
        if target is not None:
            target.close()
    except Exception as error:  # noqa: BLE001 - whatever it is, the one who asked must hear of it
        traceback.print_exc()
        pipe.send((False, f"{type(error).__name__}: {error}".splitlines()[0]))
