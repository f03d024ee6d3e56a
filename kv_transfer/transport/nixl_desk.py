"""What a transport's owner and the thread of one connection hand to each other. Neither waits for the other."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kv_transfer.transport.base import Copy, PeerId
from kv_transfer.transport.nixl_limits import MAX_QUEUED
from kv_transfer.transport.nixl_wire import Hello

BUSY_CALL_NS = 10_000
"""A look that takes longer has found something to move."""
SPIN_NS = 100_000
SHORT_SLEEP_S = 50e-6
LONG_SLEEP_S = 200e-6
LONG_SLEEP_AFTER_NS = 20_000_000


class Order(Enum):
    SERVE = "serve"
    LEAVE = "leave"
    """In good order: what is in flight may land, and the peer is told."""
    DROP = "drop"


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A write, the first `num_sums` copies of which are summed, or with no copies a notification alone."""

    handle: int
    copies: Sequence[Copy]
    notify: bytes
    num_sums: int
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloArrived:
    """A writer asks to come in: answer with `Desk.admit` or `Desk.drop`."""

    desk: Desk
    hello: Hello


@dataclass(frozen=True, slots=True, kw_only=True)
class Established:
    desk: Desk


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """There are notifications in `Desk.arrived`."""

    desk: Desk


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteEnded:
    """As base.WriteCompleted if `failure` is None, else as base.WriteFailed."""

    handle: int
    failure: str | None
    quiesced: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The thread's last word: its agent is destroyed, its connection closed, and all its writes have ended."""

    desk: Desk
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DialTimedOut:
    desk: Desk


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    """A bug has ended the thread. Its agent may live."""

    error: Exception


Report = HelloArrived | Established | Arrived | WriteEnded | Ended | DialTimedOut | Crashed


class Desk:
    """One connection's desk. `report` takes what the thread has to say; it may be called from any thread."""

    def __init__(self, report: Callable[[Report], None]) -> None:
        self.report = report
        self.peer: PeerId | None = None
        """Known from the start where we dial, else from admission on."""
        self.target_size_bytes = 0
        """Of the pool that is written to, where we are the writer."""
        self.arrived: deque[bytes] = deque()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.order = Order.SERVE
        self.reason = ""
        self.is_admitted = False
        self._jobs: deque[Job] = deque()
        self._is_over = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    # ---- the owner's side ------------------------------------------------------------------------------------

    def start(self, run: Callable[[], None], name: str) -> None:
        self._thread = threading.Thread(target=self._run, args=(run,), name=name, daemon=True)
        self._thread.start()

    def post(self, job: Job) -> bool:
        """False if the connection has ended, or ends because too much waits on it."""
        with self._lock:
            if self._is_over or self.order is not Order.SERVE:
                return False
            is_full = len(self._jobs) >= MAX_QUEUED
            if not is_full:
                self._jobs.append(job)
        if is_full:
            self.drop(f"it leaves {MAX_QUEUED} writes and notifications unread")
            return False
        self.wake()
        return True

    def admit(self, peer: PeerId) -> None:
        self.peer = peer
        self.is_admitted = True
        self.wake()

    def leave(self, reason: str) -> None:
        self._set_order(Order.LEAVE, reason)

    def drop(self, reason: str) -> None:
        self._set_order(Order.DROP, reason)

    def wake(self) -> None:
        with self._lock:
            if self.wake_fd >= 0:
                os.eventfd_write(self.wake_fd, 1)

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended. Call it after Ended, or to wait for it."""
        assert self._thread is not None
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _set_order(self, order: Order, reason: str) -> None:
        if self.order is not Order.DROP:
            self.order, self.reason = order, self.reason or reason
        self.wake()

    # ---- the thread's side -----------------------------------------------------------------------------------

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            self.report(Crashed(error=error))
            raise

    def next_job(self) -> Job | None:
        return self._jobs.popleft() if self._jobs else None

    def take_jobs(self) -> list[Job]:
        with self._lock:
            jobs = list(self._jobs)
            self._jobs.clear()
        return jobs

    def finish(self) -> list[Job]:
        """No job is taken from here on; returns those that were never begun."""
        with self._lock:
            self._is_over = True
            os.close(self.wake_fd)
            self.wake_fd = -1
        return self.take_jobs()


class Pace:
    """How often to look while something is in flight: at once while looks find something to move, else ever less."""

    def __init__(self) -> None:
        self._busy_ns = time.monotonic_ns()

    def start(self) -> None:
        self._busy_ns = time.monotonic_ns()

    def rest(self, started_ns: int) -> None:
        """`started_ns` is when the look began."""
        now_ns = time.monotonic_ns()
        if now_ns - started_ns >= BUSY_CALL_NS:
            self._busy_ns = now_ns
            return
        idle_ns = now_ns - self._busy_ns
        if idle_ns >= SPIN_NS:
            time.sleep(SHORT_SLEEP_S if idle_ns < LONG_SLEEP_AFTER_NS else LONG_SLEEP_S)
