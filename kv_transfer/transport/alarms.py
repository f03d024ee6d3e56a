"""Deadlines that make a descriptor readable, for transports that are polled only when their `fileno` is."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

ALARM_MARGIN_S = 0.001
"""An alarm comes so much after its deadline, so that nobody who looks at the clock then finds it too early."""

K = TypeVar("K", bound=Hashable)


class Alarms(Generic[K]):
    """At most one alarm a key; each writes `wake_fd`, an eventfd, once. Iterates over the keys that are set."""

    def __init__(self, wake_fd: int) -> None:
        self._wake_fd = wake_fd
        self._timers: dict[K, threading.Timer] = {}

    def __iter__(self) -> Iterator[K]:
        return iter(self._timers)

    def set(self, key: K, delay_s: float) -> None:
        """Replaces the key's alarm."""
        self.stop(key)
        timer = threading.Timer(delay_s + ALARM_MARGIN_S, os.eventfd_write, (self._wake_fd, 1))
        timer.name, timer.daemon = "kv-alarm", True
        self._timers[key] = timer
        timer.start()

    def stop(self, key: K) -> None:
        """From the return on it writes nothing. Idempotent."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
            timer.join()

    def close(self) -> None:
        for key in list(self._timers):
            self.stop(key)
