"""One asyncio program in a thread of its own, inside a process that has other things to do on its main thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

logger = logging.getLogger(__name__)

OnReady = Callable[[str], None]
Program = Callable[[OnReady, asyncio.Event], Awaitable[None]]
"""Runs until the event is set; calls the function once with the address on which it serves."""


class Phase(Enum):
    STARTING = "starting"
    SERVING = "serving"
    ENDED = "ended"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramReport:
    """How the program is doing. `error`: why it failed, one line; empty otherwise."""

    phase: Phase
    address: str = ""
    error: str = ""


class HostedLoop:
    """Starts the program at once.

    Args:
        name: of the thread.
        program: made into a coroutine inside the thread.
        on_end: called in that thread with the last report.
    """

    def __init__(self, name: str, program: Program, on_end: Callable[[ProgramReport], None]) -> None:
        self._program = program
        self._on_end = on_end
        self._lock = threading.Lock()
        self._report = ProgramReport(phase=Phase.STARTING)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._stop_requested = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def report(self) -> ProgramReport:
        with self._lock:
            return self._report

    def stop(self) -> None:
        """Asks the program to end; returns at once."""
        with self._lock:
            self._stop_requested = True
            if self._loop is not None and self._stop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._stop.set)

    def join(self, timeout_s: float) -> bool:
        """Whether the program has ended within that time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            # Whatever ends the thread must reach the one who waits for it.
            logger.error("%s failed", self._thread.name, exc_info=error)
            self._set(ProgramReport(phase=Phase.FAILED, address=self._report.address, error=describe_error(error)))
        else:
            self._set(ProgramReport(phase=Phase.ENDED, address=self._report.address))
        self._on_end(self.report)

    async def _main(self) -> None:
        stop = asyncio.Event()
        with self._lock:
            self._loop, self._stop = asyncio.get_running_loop(), stop
            if self._stop_requested:
                stop.set()
        await self._program(self._ready, stop)

    def _ready(self, address: str) -> None:
        self._set(ProgramReport(phase=Phase.SERVING, address=address))

    def _set(self, report: ProgramReport) -> None:
        with self._lock:
            self._report = report


def describe_error(error: BaseException) -> str:
    """One line: the message, with the class where the message alone would not be understood."""
    message = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return f"out of memory{': ' + message if message else ''}"
    if not message or isinstance(error, KeyError | AssertionError | AttributeError | TypeError | ImportError):
        return f"{type(error).__name__}: {message}".rstrip(": ")
    return message
