"""Ray actors: each holds one process of the cluster. Ray places them, and starts them anew when they die.

What they say to each other does not go through Ray. They know their plan, and so need nothing from whoever started
them once they live.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from typing import Any, Final

import ray
import ray.actor
import ray.exceptions

from cluster.core.drain_orders import DrainOrder
from cluster.core.ids import WorkerId
from cluster.live.hosted_loop import ProgramReport
from cluster.live.plan import ClusterPlan, FrontPlan, WorkerPlan
from cluster.live.program_host import ProgramHost
from cluster.live.programs import coordinator_program, front_program, worker_program
from cluster.live.reachability import is_loopback

logger = logging.getLogger(__name__)

LIFE_TIMEOUT_S: Final = 2.0
"""How long a worker of another host has to say which life it is before it is ended unasked."""


def now_ms() -> int:
    """Wall-clock time: it rises from one life of a process to the next, also on another host."""
    return time.time_ns() // 1_000_000


class CoordinatorActor:
    """The epoch of each life is the time at its start, in seconds."""

    def __init__(self, plan: ClusterPlan, namespace: str) -> None:
        def end_remote(worker: WorkerId, reason: str) -> None:
            # Asking takes time, and the caller must not wait.
            threading.Thread(target=_end_life, args=(worker, namespace, reason), daemon=True).start()

        def retire(worker: WorkerId, order: DrainOrder) -> None:
            from cluster.live.retiring import retire_actor  # which imports this module

            arguments = (worker, order, plan, namespace)
            threading.Thread(target=retire_actor, args=arguments, daemon=True).start()

        self._host = ProgramHost(
            "coordinator",
            lambda: coordinator_program(plan, epoch=now_ms() // 1000, end_remote=end_remote, retire=retire),
            restarted=_is_restarted(),
        )

    def report(self) -> ProgramReport:
        return self._host.report

    def supervise(self) -> None:
        self._host.supervise()


class WorkerActor:
    """The incarnation of each life is the time at its start, in milliseconds."""

    def __init__(self, plan: ClusterPlan, worker: WorkerPlan) -> None:
        self._life = now_ms()
        self._host = ProgramHost(
            worker.name,
            lambda: worker_program(plan, worker, incarnation=self._life, host=_own_host(plan)),
            restarted=_is_restarted(),
        )

    def report(self) -> ProgramReport:
        return self._host.report

    def supervise(self) -> None:
        self._host.supervise()

    def life(self) -> int:
        """The incarnation that runs here."""
        return self._life


class FrontActor:
    """As WorkerActor, for a front."""

    def __init__(self, plan: ClusterPlan, front: FrontPlan) -> None:
        self._host = ProgramHost(
            front.name, lambda: front_program(plan, front, incarnation=now_ms()), restarted=_is_restarted()
        )

    def report(self) -> ProgramReport:
        return self._host.report

    def supervise(self) -> None:
        self._host.supervise()


def _own_host(plan: ClusterPlan) -> str:
    """What this machine is called by the cluster's other parts."""
    if is_loopback(plan.host):
        return plan.host
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _is_restarted() -> bool:
    with warnings.catch_warnings():
        # Ray's own code warns of itself here.
        warnings.simplefilter("ignore", DeprecationWarning)
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _end_life(worker: WorkerId, namespace: str, reason: str) -> None:
    """Ends that life of a worker wherever it runs, unless a later one has taken its place. Ray starts the next."""
    try:
        actor = ray.get_actor(worker.name, namespace=namespace)
    except ValueError:
        return
    try:
        life: Any = ray.get(actor.life.remote(), timeout=LIFE_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        # It hangs: then it is the one.
        life = worker.incarnation
    except ray.exceptions.RayActorError:
        return
    if life != worker.incarnation:
        return
    logger.warning("ending worker %s: %s", worker, reason)
    ray.kill(actor, no_restart=False)
