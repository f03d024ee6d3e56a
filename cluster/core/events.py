"""Events of ClusterState: everything the coordinator's driver can tell it."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.drain_orders import DrainOrder
from cluster.core.ids import FrontId, WorkerId
from cluster.core.messages import FrontMessage, WorkerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class FromFront:
    """A message on the stream of that life of a front; FrontHello is the first."""

    front: FrontId
    message: FrontMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontGone:
    """The front's stream has ended: its clients are gone, what they held is released."""

    front: FrontId


@dataclass(frozen=True, slots=True, kw_only=True)
class FromWorker:
    """A message on the control stream of that life of a worker; WorkerHello is the first."""

    worker: WorkerId
    message: WorkerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGone:
    """That life of the worker is over, or given up: its stream ended, or its actor died."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainAsked:
    """An operator orders a worker to be drained. `force`: also if it is the last of its role.

    What would be refused (`ClusterState.why_refused`) does nothing.
    """

    order: DrainOrder
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed; the driver sends one at ClusterState.next_deadline_ns() at the latest."""


Event = FromFront | FrontGone | FromWorker | WorkerGone | DrainAsked | Tick
