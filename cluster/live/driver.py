"""The driver of ClusterState: brings it events and the time, and carries out its effects, in order.

Everything here runs on one event loop's thread and nothing waits, so events are handled one after the other and the
effects of one are carried out before the next is looked at. Bodies of requests (prompt ids, parameters) stay here, as
the bytes they came as; the state knows only their request ids.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from baton.v1 import control_pb2
from cluster.core import effects, events
from cluster.core.commands import WorkerRefused
from cluster.core.drain_orders import DrainOrder, DrainRefusal
from cluster.core.ids import FrontId, WorkerId
from cluster.core.limits import NS_PER_S
from cluster.core.messages import FrontMessage, Resubmit, Submit, WorkerMessage
from cluster.core.state import ClusterState
from cluster.live.journal import Journal
from cluster.live.worker_reaper import RetireWorker
from cluster.wire.codec import encode_command, encode_to_front
from cluster.wire.stream_outbox import StreamOutbox

logger = logging.getLogger(__name__)

FrontStream = StreamOutbox[control_pb2.ToFrontEnvelope]
WorkerStream = StreamOutbox[control_pb2.Command]
FLUSH_AFTER_S: Final = 0.2
"""So much of the journal is lost at most if the process is killed."""
EndWorker = Callable[[WorkerId, str], None]
"""Ends the process of that life of a worker, if it still runs; must not wait."""


class Driver:
    """Feeds one ClusterState.

    Args:
        state: owned by the driver from now on.
        end_worker: called for each life that is given up.
        clock_ns: monotonic time.
        journal: takes down every event and its effects; None: nobody does.
        retire_worker: called for each life that ends because it was drained.
    """

    def __init__(
        self,
        state: ClusterState,
        end_worker: EndWorker,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        journal: Journal | None = None,
        retire_worker: RetireWorker = lambda worker, order: None,
    ) -> None:
        self.state = state
        self._end_worker = end_worker
        self._retire_worker = retire_worker
        self._clock_ns = clock_ns
        self._fronts: dict[FrontId, FrontStream] = {}
        self._workers: dict[WorkerId, WorkerStream] = {}
        self._bodies: dict[str, bytes] = {}
        """By request id. Of a request taken over from an earlier life there is none before its next attempt."""
        self._journal = journal
        self._flush_timer: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises what the state machine raised: a bug, after which its state cannot be trusted."""

    def now_ns(self) -> int:
        return self._clock_ns()

    # ---- fronts ----

    def front_joined(self, front: FrontId, stream: FrontStream) -> None:
        """A stream of that life of a front; one that it already has is over."""
        older = self._fronts.get(front)
        if older is not None:
            self.front_left(front, older)
        self._fronts[front] = stream

    def front_said(self, front: FrontId, message: FrontMessage, body: bytes | None) -> None:
        # The first Submit of an id counts, and a Resubmit only of a request that is this front's own: anything else
        # would leave a body behind that no effect ever drops, or answer another front's request with this one's prompt.
        if body is not None and isinstance(message, Submit | Resubmit):
            owner = self.state.front_of(message.request_id)
            if owner == (front if isinstance(message, Resubmit) else None):
                self._bodies[message.request_id] = body
        self._handle(events.FromFront(front=front, message=message))

    def front_left(self, front: FrontId, stream: FrontStream) -> None:
        """That stream has ended; does nothing if a newer one has taken its place."""
        stream.close()
        if self._fronts.get(front) is stream:
            del self._fronts[front]
            self._handle(events.FrontGone(front=front))

    # ---- workers ----

    def worker_joined(self, worker: WorkerId, stream: WorkerStream) -> None:
        """A stream of that life of a worker; one that it already has is over, and so, then, is that life."""
        older = self._workers.get(worker)
        if older is not None:
            self.worker_left(worker, older, "it connected a second time")
        self._workers[worker] = stream

    def worker_said(self, worker: WorkerId, message: WorkerMessage) -> None:
        self._handle(events.FromWorker(worker=worker, message=message))

    def worker_left(self, worker: WorkerId, stream: WorkerStream, reason: str) -> None:
        stream.close()
        if self._workers.get(worker) is stream:
            del self._workers[worker]
            self._handle(events.WorkerGone(worker=worker, reason=reason))

    # ---- operators ----

    def drain(self, order: DrainOrder, *, force: bool) -> DrainRefusal | None:
        """Begins to drain a worker. Returns why not, if it does not."""
        refusal = self.state.why_refused(order, force=force)
        if refusal is None:
            self._handle(events.DrainAsked(order=order, force=force))
        return refusal

    # ---- the state machine ----

    def close(self) -> None:
        """Ends all streams. The driver must not be used any more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        if self._journal is not None:
            self._journal.close()
        for front_stream in self._fronts.values():
            front_stream.close()
        for worker_stream in self._workers.values():
            worker_stream.close()
        self._fronts.clear()
        self._workers.clear()

    def check_invariants(self) -> None:
        self.state.check_invariants()
        assert all(not stream.is_closed or stream.has_overflowed for stream in self._fronts.values())

    def _handle(self, event: events.Event) -> None:
        if self.failure.done():
            return
        now_ns = self._clock_ns()
        try:
            done = self.state.handle(now_ns, event)
            self._take_down(now_ns, event, done)
            for effect in done:
                self._carry_out(effect)
        except Exception as error:
            logger.exception("the state machine failed on %s", type(event).__name__)
            self.failure.set_exception(error)
            return
        self._set_timer()

    def _take_down(self, now_ns: int, event: events.Event, done: list[effects.Effect]) -> None:
        if self._journal is None:
            return
        self._journal.write(now_ns, event, done)
        if self._flush_timer is None:
            self._flush_timer = asyncio.get_running_loop().call_later(FLUSH_AFTER_S, self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        if self._journal is not None:
            self._journal.flush()

    def _carry_out(self, effect: effects.Effect) -> None:
        match effect:
            case effects.ToWorker():
                self._to_worker(effect)
            case effects.ToFront():
                front_stream = self._fronts.get(effect.front)
                if front_stream is not None:
                    front_stream.send(encode_to_front(effect.message))
            case effects.DropBody():
                self._bodies.pop(effect.request_id, None)
            case effects.GiveUpWorker():
                self._give_up(effect)
            case effects.RetireWorker(worker=worker, order=order, reason=reason):
                logger.info("worker %s, which was to be drained, is over: %s", worker, reason)
                self._close_stream(worker)
                self._retire_worker(worker, order)
            case effects.WarnOfLink(link=link):
                logger.warning("slow link: %s", link)
            case effects.WarnOfFewPushes(few=few):
                logger.warning("few pushes: %s", few)
            case effects.ReportPoison(request_id=request_id, reason=reason):
                logger.error("poison request %s is ended: %s", request_id, reason)

    def _to_worker(self, effect: effects.ToWorker) -> None:
        stream = self._workers.get(effect.worker)
        if stream is None:
            return
        body = None if effect.body_of is None else self._bodies[effect.body_of]
        stream.send(encode_command(effect.command, body))
        if isinstance(effect.command.body, WorkerRefused):
            stream.close()

    def _give_up(self, effect: effects.GiveUpWorker) -> None:
        logger.warning("worker %s is given up: %s", effect.worker, effect.reason)
        self._close_stream(effect.worker)
        self._end_worker(effect.worker, effect.reason)

    def _close_stream(self, worker: WorkerId) -> None:
        stream = self._workers.pop(worker, None)
        if stream is not None:
            stream.close()

    def _set_timer(self) -> None:
        """A timer that is due earlier than it need be is left alone: nearly every event moves the next deadline."""
        deadline_ns = self.state.next_deadline_ns()
        if deadline_ns is None or (self._timer is not None and self._timer_ns <= deadline_ns):
            return
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, (deadline_ns - self._clock_ns()) / NS_PER_S)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)
        self._timer_ns = deadline_ns

    def _tick(self) -> None:
        self._timer = None
        deadline_ns = self.state.next_deadline_ns()
        if deadline_ns is not None and deadline_ns <= self._clock_ns():
            self._handle(events.Tick())
        else:
            self._set_timer()
