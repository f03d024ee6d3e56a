"""What a worker knows of its coordinator: the epoch it obeys, whether it is registered, when to report."""

from __future__ import annotations

from cluster.core.commands import Command
from cluster.core.ids import WorkerId
from cluster.core.limits import NS_PER_MS


class CoordinatorLink:
    """Commands of an older epoch or for another life are refused; a coordinator gone for too long ends the worker."""

    def __init__(self, worker: WorkerId, *, grace_ns: int, now_ns: int) -> None:
        self.epoch = 0
        self.num_refused_commands = 0
        self.is_connected = False
        self._worker = worker
        self._grace_ns = grace_ns
        self._unregistered_since_ns: int | None = now_ns
        self._heartbeat_ns = 0
        self._next_heartbeat_ns: int | None = None

    @property
    def is_registered(self) -> bool:
        return self._unregistered_since_ns is None

    def connected(self) -> None:
        self.is_connected = True
        self._next_heartbeat_ns = None

    def lost(self, now_ns: int) -> None:
        self.is_connected = False
        self._next_heartbeat_ns = None
        if self._unregistered_since_ns is None:
            self._unregistered_since_ns = now_ns

    def accepts(self, command: Command) -> bool:
        """Whether the command is from this coordinator's life or a newer one, and meant for this life of the worker."""
        if command.worker != self._worker or command.epoch < self.epoch:
            self.num_refused_commands += 1
            return False
        self.epoch = command.epoch
        return True

    def welcomed(self, now_ns: int, heartbeat_ms: int) -> None:
        self._unregistered_since_ns = None
        self._heartbeat_ns = heartbeat_ms * NS_PER_MS
        self._next_heartbeat_ns = now_ns + self._heartbeat_ns

    def is_heartbeat_due(self, now_ns: int) -> bool:
        """True once a period; the next one is counted from now, so that a late tick causes no burst."""
        if self._next_heartbeat_ns is None or now_ns < self._next_heartbeat_ns:
            return False
        self._next_heartbeat_ns = now_ns + self._heartbeat_ns
        return True

    def is_given_up(self, now_ns: int) -> bool:
        return self._unregistered_since_ns is not None and now_ns >= self._unregistered_since_ns + self._grace_ns

    def next_deadline_ns(self) -> int | None:
        if self._unregistered_since_ns is not None:
            return self._unregistered_since_ns + self._grace_ns
        return self._next_heartbeat_ns

    def check_invariants(self) -> None:
        assert not self.is_registered or self.is_connected, "registered without a stream"
        assert (self._next_heartbeat_ns is not None) == self.is_registered, "a registered worker reports"
