"""A process of the cluster as a Ray actor holds it: one program, its report, and the end of the process with it.

A first life that cannot start stays, so that whoever is bringing the cluster up can ask why. Once supervised, and in
every later life, the process ends with its program, and Ray starts the next life.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, NoReturn

from cluster.live.hosted_loop import HostedLoop, OnReady, Phase, Program, ProgramReport

logger = logging.getLogger(__name__)

RESTART_DELAY_S: Final = 1.0
"""Before a later life starts: it bounds how fast something that cannot live is tried again, and keeps the coordinator's
epochs, which are seconds, apart."""
FAILED_EXIT_CODE: Final = 70


class ProgramHost:
    """Starts the program at once.

    Args:
        name: for logs.
        make_program: called in the program's thread, so that what it imports holds nobody up.
        restarted: whether this is a later life.
    """

    def __init__(self, name: str, make_program: Callable[[], Program], *, restarted: bool) -> None:
        log_to_stderr()
        if restarted:
            time.sleep(RESTART_DELAY_S)
        self._lock = threading.Lock()
        self._supervised = restarted
        self._make_program = make_program
        self._loop = HostedLoop(name, self._run, self._ended)

    @property
    def report(self) -> ProgramReport:
        return self._loop.report

    def supervise(self) -> None:
        """The cluster is up: from now on the process ends with its program."""
        with self._lock:
            self._supervised = True
        if self._loop.report.phase in (Phase.ENDED, Phase.FAILED):
            _end_process()

    async def _run(self, on_ready: OnReady, stop: asyncio.Event) -> None:
        await self._make_program()(on_ready, stop)

    def _ended(self, report: ProgramReport) -> None:
        with self._lock:
            ends_process = self._supervised
        if ends_process:
            logger.error("the program %s: %s", report.phase.value, report.error or "nobody asked it to end")
            _end_process()


def log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _end_process() -> NoReturn:
    sys.stderr.flush()
    os._exit(FAILED_EXIT_CODE)
