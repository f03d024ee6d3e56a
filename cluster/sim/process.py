"""A simulated operating-system process: it has its own clock, can be killed, stopped and continued."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cluster.sim.kernel import Action, Kernel, Timer


class Process:
    """One life of a process on a host of its own.

    Whatever reaches a process (messages, timers, completions) goes through `deliver`: a dead process gets nothing, a
    stopped one gets everything late, in order, when it is continued. Its monotonic clock runs at the kernel's pace from
    an offset of its own and may jump ahead, but goes on while the process is stopped.
    """

    def __init__(self, kernel: Kernel, name: str, incarnation: int = 0, clock_offset_ns: int = 0) -> None:
        self.kernel = kernel
        self.name = name
        self.incarnation = incarnation
        self.alive = True
        self.paused = False
        self._clock_offset_ns = clock_offset_ns
        self._backlog: deque[Action] = deque()
        self._exit_hooks: list[Callable[[str], None]] = []
        self._jump_hooks: list[Action] = []

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}" if self.incarnation else self.name

    def now_ns(self) -> int:
        return self.kernel.now_ns + self._clock_offset_ns

    def kernel_time_ns(self, local_ns: int) -> int:
        """When this process's clock will show `local_ns`, unless it jumps."""
        return local_ns - self._clock_offset_ns

    def on_exit(self, hook: Callable[[str], None]) -> None:
        """Calls `hook(reason)` when the process ends, in order of registration."""
        self._exit_hooks.append(hook)

    def on_clock_jump(self, hook: Action) -> None:
        self._jump_hooks.append(hook)

    def deliver(self, action: Action) -> None:
        if not self.alive:
            return
        if self.paused:
            self._backlog.append(action)
        else:
            action()

    def after(self, delay_ns: int, action: Action) -> Timer:
        return self.kernel.after(delay_ns, lambda: self.deliver(action))

    def exit(self, reason: str) -> None:
        """Ends the process, also a stopped one (SIGKILL). Nothing it had received counts any more."""
        if not self.alive:
            return
        self.alive = False
        self.paused = False
        self._backlog.clear()
        self.kernel.trace.note(self.kernel.now_ns, f"{self} exits: {reason}")
        for hook in self._exit_hooks:
            hook(reason)

    def pause(self) -> None:
        if self.alive and not self.paused:
            self.paused = True
            self.kernel.trace.note(self.kernel.now_ns, f"{self} is stopped")

    def resume(self) -> None:
        """Continues the process: what came meanwhile happens now, before anything else does."""
        if not self.paused:
            return
        self.paused = False
        self.kernel.trace.note(self.kernel.now_ns, f"{self} continues with {len(self._backlog)} late events")
        while self._backlog and self.alive and not self.paused:
            self._backlog.popleft()()

    def jump_clock(self, delta_ns: int) -> None:
        """The clock jumps ahead (a monotonic clock never goes back)."""
        if not self.alive:
            return
        self._clock_offset_ns += delta_ns
        self.kernel.trace.note(self.kernel.now_ns, f"{self}'s clock jumps by {delta_ns / 1e6:.1f} ms")
        for hook in self._jump_hooks:
            hook()


class Alarm:
    """Calls `ring` when the process's clock reaches the deadline last `set`.

    A deadline that moves later keeps its timer, which then finds it is early: machines move theirs at every event.
    """

    def __init__(self, process: Process, ring: Action) -> None:
        self._process = process
        self._ring = ring
        self._deadline_ns: int | None = None
        self._armed_ns: int | None = None
        self._timer: Timer | None = None
        process.on_clock_jump(self._rearm)

    def set(self, deadline_ns: int | None) -> None:
        self._deadline_ns = deadline_ns
        if deadline_ns is not None and (self._armed_ns is None or deadline_ns < self._armed_ns):
            self._rearm()

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._armed_ns = self._deadline_ns
        if self._deadline_ns is not None:
            time_ns = self._process.kernel_time_ns(self._deadline_ns)
            self._timer = self._process.kernel.at(time_ns, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._process.deliver(self._check)

    def _check(self) -> None:
        self._armed_ns = None
        if self._deadline_ns is None:
            return
        if self._process.now_ns() < self._deadline_ns:
            self._rearm()
            return
        self._deadline_ns = None
        self._ring()
