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
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def report(self) -> ProgramReport:
        with self._lock:
            return self._report

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
        # Nobody sets the event: what holds the program ends with its process.
        await self._program(self._ready, asyncio.Event())

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
