"""One thread that runs jobs in order and reports each on the event loop that asked for it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], Any]
    on_done: Callable[[Any], None]
    on_error: Callable[[BaseException], None]


class JobThread:
    """The engine's thread and the verifier's: what they run must not hold up the loop, nor each other.

    A thread of its own with a plain queue, since a step's start and end are on every token's path: an executor's
    future would cost as much again as the hand-over itself.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], T], on_done: Callable[[T], None], on_error: Callable[[BaseException], None]
    ) -> None:
        """Runs `work` after everything submitted before; then one of the two others, on the loop."""
        self._jobs.put(_Job(work, on_done, on_error))

    async def call(self, work: Callable[[], T]) -> T:
        """As `submit`, awaited. If the caller is cancelled the work still runs to its end."""
        future: asyncio.Future[T] = self._loop.create_future()

        def set_result(result: T) -> None:
            if not future.done():
                future.set_result(result)

        def set_error(error: BaseException) -> None:
            if not future.done():
                future.set_exception(error)

        self.submit(work, set_result, set_error)
        return await future

    def close(self, timeout_s: float) -> bool:
        """Ends the thread after the job it is at. Whether it has ended in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                result = job.work()
            except BaseException as error:  # noqa: BLE001 - whatever the job raises belongs to the one who asked for it
                self.report(job.on_error, error)
            else:
                self.report(job.on_done, result)

    def report(self, callback: Callable[[T], None], value: T) -> None:
        """For jobs that have something to say while they run: the callback is called on the loop, in this order."""
        # A loop that is closed has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, value)
