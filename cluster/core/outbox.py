"""Collects the effects of one event, in order."""

from __future__ import annotations

from cluster.core.commands import Command, CommandBody
from cluster.core.drain_orders import DrainOrder
from cluster.core.effects import (
    DropBody,
    Effect,
    GiveUpWorker,
    ReportPoison,
    RetireWorker,
    ToFront,
    ToWorker,
    WarnOfFewPushes,
    WarnOfLink,
)
from cluster.core.ids import FrontId, WorkerId
from cluster.core.links import Link
from cluster.core.messages import ToFrontMessage
from cluster.core.routes import FewPushes


class Outbox:
    """Every command leaves with this coordinator's epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._effects: list[Effect] = []

    def raise_epoch(self, least: int) -> None:
        """Somebody has seen a higher one than this life was given, so its commands would be refused."""
        self.epoch = max(self.epoch, least)

    def to_worker(self, worker: WorkerId, body: CommandBody, *, body_of: str | None = None) -> None:
        command = Command(epoch=self.epoch, worker=worker, body=body)
        self._effects.append(ToWorker(worker=worker, command=command, body_of=body_of))

    def to_front(self, front: FrontId, message: ToFrontMessage) -> None:
        self._effects.append(ToFront(front=front, message=message))

    def drop_body(self, request_id: str) -> None:
        self._effects.append(DropBody(request_id=request_id))

    def give_up(self, worker: WorkerId, reason: str) -> None:
        self._effects.append(GiveUpWorker(worker=worker, reason=reason))

    def retire(self, worker: WorkerId, order: DrainOrder, reason: str) -> None:
        self._effects.append(RetireWorker(worker=worker, order=order, reason=reason))

    def warn_of(self, link: Link) -> None:
        self._effects.append(WarnOfLink(link=link))

    def warn_of_few_pushes(self, few: FewPushes) -> None:
        self._effects.append(WarnOfFewPushes(few=few))

    def report_poison(self, request_id: str, reason: str) -> None:
        self._effects.append(ReportPoison(request_id=request_id, reason=reason))

    def take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects
