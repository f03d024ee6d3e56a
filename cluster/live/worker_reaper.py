"""Ends the processes of workers that were given up.

A worker that is given up may only be paused; before it wakes up and writes where it no longer may, its process has to
end. Whoever runs it (Ray, an operator's supervisor) starts its next life. A pidfd taken when the worker registers names
that process for good, where a pid could be another's by then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable

from cluster.core.drain_orders import DrainOrder
from cluster.core.ids import WorkerId

logger = logging.getLogger(__name__)

EndRemote = Callable[[WorkerId, str], None]
"""Ends the process of that life of a worker on another host; must not wait."""

RetireWorker = Callable[[WorkerId, DrainOrder], object]
"""Sees to it that what follows a life that has been drained is what the order says; must not wait."""


def _end_nothing(worker: WorkerId, reason: str) -> None:
    logger.warning("worker %s (%s) runs on another host and must be ended there", worker, reason)


class WorkerReaper:
    """Knows the processes of the registered workers. Used from one thread only.

    Args:
        end_remote: for workers of other hosts.
        host: the name under which this host's workers register.
    """

    def __init__(self, end_remote: EndRemote = _end_nothing, host: str | None = None) -> None:
        self._end_remote = end_remote
        self._host = socket.gethostname() if host is None else host
        self._pidfds: dict[WorkerId, int] = {}

    def adopt(self, worker: WorkerId, host: str, pid: int) -> None:
        """That life of a worker has registered."""
        self.release(worker)
        if host != self._host or pid <= 1 or pid == os.getpid():
            return
        try:
            self._pidfds[worker] = os.pidfd_open(pid)
        except OSError as error:
            # Gone already, or in another pid namespace of the same host.
            logger.info("worker %s: no handle on pid %d: %s", worker, pid, error)

    def end(self, worker: WorkerId, reason: str) -> None:
        """Ends the process if it still runs; SIGKILL also reaches a stopped one."""
        if not self.end_here(worker):
            self._end_remote(worker, reason)

    def end_here(self, worker: WorkerId) -> bool:
        """Likewise, on this host only. False if the process is not known here."""
        pidfd = self._pidfds.get(worker)
        if pidfd is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        self.release(worker)
        return True

    def release(self, worker: WorkerId) -> None:
        """Forgets the process without touching it."""
        pidfd = self._pidfds.pop(worker, None)
        if pidfd is not None:
            os.close(pidfd)

    def close(self) -> None:
        for worker in list(self._pidfds):
            self.release(worker)
