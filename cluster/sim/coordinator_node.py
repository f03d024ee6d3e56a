"""The coordinator's process in the simulator: feeds ClusterState and carries out its effects, as the live driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.core import effects, events
from cluster.core.commands import WorkerRefused
from cluster.core.drain_orders import DrainOrder
from cluster.core.ids import FrontId, WorkerId
from cluster.core.messages import FrontHello, FrontMessage, Resubmit, Submit, WorkerHello, WorkerMessage
from cluster.core.routes import FewPushes
from cluster.core.state import ClusterState
from cluster.sim.network import Network, StreamEnd
from cluster.sim.process import Alarm, Process
from engine.core.request import RequestBody

ADDRESS = "coordinator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A message that may carry a body, on a stream to or from the coordinator."""

    message: object
    body: RequestBody | None = None

    def __str__(self) -> str:
        return str(self.message)


class CoordinatorNode:
    """Bodies and streams live here; all decisions in the state."""

    def __init__(
        self,
        process: Process,
        network: Network,
        state: ClusterState,
        *,
        end_worker: Callable[[WorkerId], None],
        after_event: Callable[[ClusterState], None],
    ) -> None:
        self.process = process
        self.state = state
        self.bodies: dict[str, RequestBody] = {}
        self.warnings: list[FewPushes] = []
        self.reports: list[effects.ReportPoison] = []
        """What operators are told."""
        self._fronts: dict[FrontId, StreamEnd] = {}
        self._workers: dict[WorkerId, StreamEnd] = {}
        self._end_worker = end_worker
        self._after_event = after_event
        self._alarm = Alarm(process, lambda: self._handle(events.Tick()))
        network.listen(ADDRESS, process, self._accept)

    def drain(self, order: DrainOrder, *, force: bool) -> bool:
        """An operator's call of Drain or Flip. Whether the order is taken."""
        is_taken = self.state.why_refused(order, force=force) is None
        if is_taken:
            self._handle(events.DrainAsked(order=order, force=force))
        return is_taken

    def _accept(self, stream: StreamEnd) -> None:
        def on_first(envelope: Envelope) -> None:
            message = envelope.message
            if isinstance(message, FrontHello):
                self._front_joined(message, stream)
            else:
                assert isinstance(message, WorkerHello)
                self._worker_joined(message, stream)

        stream.on_message = on_first

    # ---- fronts -----------------------------------------------------------------------------------------------

    def _front_joined(self, hello: FrontHello, stream: StreamEnd) -> None:
        front = hello.front
        older = self._fronts.get(front)
        if older is not None:
            older.close()
            self._front_left(front, older)
        self._fronts[front] = stream
        stream.on_message = lambda envelope: self._front_said(front, envelope.message, envelope.body)
        stream.on_closed = lambda _reason: self._front_left(front, stream)
        self._front_said(front, hello, None)

    def _front_said(self, front: FrontId, message: FrontMessage, body: RequestBody | None) -> None:
        # The first Submit of an id counts, and a Resubmit only of a request that is the front's own.
        if body is not None and isinstance(message, Submit | Resubmit):
            owner = self.state.front_of(message.request_id)
            if owner == (front if isinstance(message, Resubmit) else None):
                self.bodies[message.request_id] = body
        self._handle(events.FromFront(front=front, message=message))

    def _front_left(self, front: FrontId, stream: StreamEnd) -> None:
        if self._fronts.get(front) is stream:
            del self._fronts[front]
            self._handle(events.FrontGone(front=front))

    # ---- workers ----------------------------------------------------------------------------------------------

    def _worker_joined(self, hello: WorkerHello, stream: StreamEnd) -> None:
        worker = hello.ref.worker
        older = self._workers.get(worker)
        if older is not None:
            older.close()
            self._worker_left(worker, older, "it connected a second time")
        self._workers[worker] = stream
        stream.on_message = lambda envelope: self._worker_said(worker, envelope.message)
        stream.on_closed = lambda reason: self._worker_left(worker, stream, reason)
        self._worker_said(worker, hello)

    def _worker_said(self, worker: WorkerId, message: WorkerMessage) -> None:
        self._handle(events.FromWorker(worker=worker, message=message))

    def _worker_left(self, worker: WorkerId, stream: StreamEnd, reason: str) -> None:
        if self._workers.get(worker) is stream:
            del self._workers[worker]
            self._handle(events.WorkerGone(worker=worker, reason=reason))

    # ---- the state machine ------------------------------------------------------------------------------------

    def _handle(self, event: events.Event) -> None:
        for effect in self.state.handle(self.process.now_ns(), event):
            self._carry_out(effect)
        self._alarm.set(self.state.next_deadline_ns())
        self._after_event(self.state)

    def _carry_out(self, effect: effects.Effect) -> None:
        match effect:
            case effects.ToWorker():
                self._to_worker(effect)
            case effects.ToFront():
                stream = self._fronts.get(effect.front)
                if stream is not None:
                    stream.send(effect.message)
            case effects.DropBody():
                self.bodies.pop(effect.request_id, None)
            case effects.GiveUpWorker() | effects.RetireWorker():
                given_up = self._workers.pop(effect.worker, None)
                if given_up is not None:
                    given_up.close()
                self._end_worker(effect.worker)
            case effects.ReportPoison():
                self.reports.append(effect)
            case effects.WarnOfLink():
                raise AssertionError("simulated links have no measured bandwidth")
            case effects.WarnOfFewPushes(few=few):
                self.warnings.append(few)

    def _to_worker(self, effect: effects.ToWorker) -> None:
        stream = self._workers.get(effect.worker)
        if stream is None:
            return
        body = None if effect.body_of is None else self.bodies[effect.body_of]
        stream.send(Envelope(message=effect.command, body=body))
        if isinstance(effect.command.body, WorkerRefused):
            stream.close()
