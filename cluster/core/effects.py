"""Effects of ClusterState: what its driver is to do, in order."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.commands import Command
from cluster.core.drain_orders import DrainOrder
from cluster.core.ids import FrontId, WorkerId
from cluster.core.links import Link
from cluster.core.messages import ToFrontMessage
from cluster.core.routes import FewPushes


@dataclass(frozen=True, slots=True, kw_only=True)
class ToWorker:
    """Send the command to that life of the worker. `body_of`: attach the body of that request."""

    worker: WorkerId
    command: Command
    body_of: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToFront:
    """Send the message to that life of the front; dropped if its stream has just ended."""

    front: FrontId
    message: ToFrontMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class DropBody:
    """The request is forgotten: so must be its body."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUpWorker:
    """That life is given up (silent, or its stream ended): end its process if it still runs, and its streams."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireWorker:
    """That life has ended while, or because, it was drained. Whoever runs it is to start none after it, or one in
    another pool, as the order says. Otherwise as GiveUpWorker."""

    worker: WorkerId
    order: DrainOrder
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WarnOfLink:
    """Tell operators, in the log: the link is slow beside the others between its two pools. Once for each link."""

    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class WarnOfFewPushes:
    """Tell operators, in the log: hardly anything is disaggregated any more. Once each time that it comes to that."""

    few: FewPushes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPoison:
    """Tell operators, in the log: the request was ended for what it does to the workers that compute it."""

    request_id: str
    reason: str


Effect = ToWorker | ToFront | DropBody | GiveUpWorker | RetireWorker | WarnOfLink | WarnOfFewPushes | ReportPoison
