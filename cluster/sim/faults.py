"""Carries out a scenario's faults: begins each at its time and ends it when its duration is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cluster.core.brief import brief
from cluster.core.drain_orders import AfterDrain, DrainOrder
from cluster.core.limits import MS_PER_S
from cluster.sim.fabric import Fabric, Family
from cluster.sim.kernel import Kernel
from cluster.sim.network import Network
from cluster.sim.process import Process
from cluster.sim.scenario import Fault, FaultKind
from cluster.sim.worker_node import WorkerNode


class Cluster(Protocol):
    """What faults need of the world."""

    kernel: Kernel
    network: Network
    fabric: Fabric

    def process(self, name: str) -> Process | None:
        """The running life of a process, None while there is none."""

    def worker(self, name: str) -> WorkerNode | None:
        """The running life of a worker, None while there is none."""

    def hold_down(self, name: str, until_ns: int) -> None:
        """The process is not started again before then."""

    def drain(self, order: DrainOrder, *, force: bool) -> None:
        """An operator asks the coordinator, if it lives."""

    def start_twin(self, name: str) -> None:
        """Starts another life of the worker beside the one that runs."""


class FaultInjector:
    """Schedules all faults of a scenario on construction."""

    def __init__(self, cluster: Cluster, faults: tuple[Fault, ...]) -> None:
        self._cluster = cluster
        self._begin: dict[FaultKind, Callable[[Fault], Callable[[], None] | None]] = {
            FaultKind.CRASH: self._crash,
            FaultKind.LEAVE: self._leave,
            FaultKind.DRAIN: self._drain,
            FaultKind.PAUSE: self._pause,
            FaultKind.TWIN: self._twin,
            FaultKind.CUT: self._cut,
            FaultKind.PARTITION: self._partition,
            FaultKind.STALL: self._stall,
            FaultKind.CUT_DATA: self._cut_data,
            FaultKind.DATA: self._data,
            FaultKind.CLOCK_JUMP: self._clock_jump,
            FaultKind.SLOW_ENGINE: self._slow_engine,
            FaultKind.FAIL_STEPS: self._fail_steps,
            FaultKind.STUCK_ENGINE: self._stuck_engine,
        }
        for fault in faults:
            cluster.kernel.at(fault.at_ns, self._action(fault))

    def _action(self, fault: Fault) -> Callable[[], None]:
        def begin() -> None:
            kernel = self._cluster.kernel
            kernel.trace.note(kernel.now_ns, f"FAULT {brief(fault)}")
            end = self._begin[fault.kind](fault)
            if end is not None:
                kernel.after(fault.duration_ns, end)

        return begin

    def _crash(self, fault: Fault) -> None:
        """The process dies and is away for the duration."""
        process = self._cluster.process(fault.target)
        self._cluster.hold_down(fault.target, fault.at_ns + fault.duration_ns)
        if process is not None:
            process.exit("crashed")

    def _leave(self, fault: Fault) -> None:
        """SIGTERM to a worker; it is away for the duration, or until it has left."""
        node = self._cluster.worker(fault.target)
        self._cluster.hold_down(fault.target, fault.at_ns + fault.duration_ns)
        if node is not None:
            node.leave()

    def _drain(self, fault: Fault) -> None:
        """`baton drain` or `baton flip`."""
        deadline_ms = int(fault.amount * MS_PER_S) or None
        then = AfterDrain(fault.detail)
        order = DrainOrder(worker=fault.target, then=then, migrate=fault.migrate, deadline_ms=deadline_ms)
        self._cluster.drain(order, force=fault.force)

    def _pause(self, fault: Fault) -> Callable[[], None] | None:
        """SIGSTOP, and SIGCONT when the duration is over, unless it has been killed meanwhile."""
        process = self._cluster.process(fault.target)
        if process is None or process.paused:
            return None
        process.pause()
        return process.resume

    def _twin(self, fault: Fault) -> Callable[[], None] | None:
        """The worker is stopped, a new life of it starts beside it, and then the old one continues."""
        end = self._pause(fault)
        self._cluster.start_twin(fault.target)
        return end

    def _cut(self, fault: Fault) -> None:
        self._cluster.network.cut(fault.target, fault.other)

    def _partition(self, fault: Fault) -> Callable[[], None]:
        self._cluster.network.partition(fault.target, fault.other)
        if self._cluster.fabric.family is Family.REMOTE:
            self._cut_data(fault)
        return lambda: self._cluster.network.heal(fault.target, fault.other)

    def _stall(self, fault: Fault) -> None:
        self._cluster.network.stall(fault.target, fault.other, fault.duration_ns)

    def _cut_data(self, fault: Fault) -> None:
        """Breaks the worker's data connections, all or (a partition) those to the other one."""
        self._cluster.fabric.cut(fault.target, fault.other)

    def _data(self, fault: Fault) -> Callable[[], None]:
        faults = self._cluster.fabric.faults
        setattr(faults, fault.detail, fault.amount)
        return lambda: setattr(faults, fault.detail, 0.0)

    def _clock_jump(self, fault: Fault) -> None:
        process = self._cluster.process(fault.target)
        if process is not None:
            process.jump_clock(fault.duration_ns)

    def _slow_engine(self, fault: Fault) -> Callable[[], None] | None:
        node = self._cluster.worker(fault.target)
        if node is None:
            return None
        faults = node.faults
        faults.slowness = fault.amount
        return lambda: setattr(faults, "slowness", 1.0)

    def _fail_steps(self, fault: Fault) -> None:
        node = self._cluster.worker(fault.target)
        if node is not None:
            node.faults.num_steps_to_fail = int(fault.amount)

    def _stuck_engine(self, fault: Fault) -> Callable[[], None] | None:
        """A step that begins within the duration never ends. Everything else of the worker goes on."""
        node = self._cluster.worker(fault.target)
        if node is None:
            return None
        faults = node.faults
        faults.is_stuck = True
        return lambda: setattr(faults, "is_stuck", False)
