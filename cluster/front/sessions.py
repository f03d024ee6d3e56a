"""The running requests of a front: feeds their state machines with what comes in, and carries out their effects."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable

from cluster.core.errors import DuplicateRequestError
from cluster.core.ids import FrontId, Outcome, WorkerId
from cluster.core.limits import NS_PER_S
from cluster.core.messages import EndRequest, FrontHello, FrontWelcome, Refused, ToFrontMessage
from cluster.core.reports import LiveRequest
from cluster.core.token_messages import TokenBatch
from cluster.front import request_effects as effects
from cluster.front import request_events as events
from cluster.front.client_output import MAX_WAITING_TOKENS, ClientOutput
from cluster.front.coordinator_link import CoordinatorLink
from cluster.front.output_text import OutputText
from cluster.front.request import FrontRequest, ended_meanwhile
from cluster.front.request_spec import RequestLimits, RequestSpec
from cluster.front.worker_streams import WorkerStreams
from kv_transfer.protocol.lease import Recent

MAX_USED_IDS = 8192
"""Ids of ended requests that are remembered, so that a request that uses one again is told apart from it."""

logger = logging.getLogger(__name__)


class _Session:
    """One request: its state machine, the text of each answer whose end has not been found, and what waits for its
    client, who knows it as `request_id`."""

    def __init__(
        self, request_id: str, request: FrontRequest, texts: dict[int, OutputText], output: ClientOutput
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.texts = texts
        self.output = output
        self.alarm: asyncio.TimerHandle | None = None
        self.alarm_ns: int | None = None


class Sessions:
    """Everything runs on one event loop, and nothing here waits.

    A client may use an id again as soon as its request has ended, when what the coordinator and workers said of that
    one may still be on its way. The cluster therefore gets to know the later one by another id, its *cluster id*.
    """

    def __init__(
        self,
        front: FrontId,
        coordinator_address: str,
        limits: RequestLimits,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.front = front
        self.address = ""
        self.link = CoordinatorLink(coordinator_address, self)
        self.streams = WorkerStreams(front, self)
        self._limits = limits
        self._clock_ns = clock_ns
        self._sessions: dict[str, _Session] = {}
        """By cluster id."""
        self._cluster_ids: dict[str, str] = {}
        """Of the running requests, by the id that their clients know."""
        self._announced: tuple[LiveRequest, ...] = ()
        """What the latest hello said; some may have ended before it was answered."""
        self._used_ids: Recent[str, None] = Recent(MAX_USED_IDS)

    # ---- clients -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._cluster_ids

    def now_ns(self) -> int:
        return self._clock_ns()

    def open(self, spec: RequestSpec, make_text: Callable[[], OutputText]) -> ClientOutput:
        """Starts the request; `make_text` is called once for each answer.

        Raises DuplicateRequestError if one of that id is running.
        """
        request_id = spec.request_id
        if request_id in self._cluster_ids:
            raise DuplicateRequestError(f"request_id: a request {request_id!r} is running already")
        choices = spec.body.choices
        output = ClientOutput(request_id, choices=choices, with_logprobs=spec.body.sampling.logprobs is not None)
        cluster_id = f"{request_id}/{uuid.uuid4().hex}" if request_id in self._used_ids else request_id
        request = FrontRequest(dataclasses.replace(spec, request_id=cluster_id), self._limits)
        self._cluster_ids[request_id] = cluster_id
        self._sessions[cluster_id] = _Session(request_id, request, {choice: make_text() for choice in choices}, output)
        self.handle(cluster_id, events.Start(epoch=self.link.epoch if self.link.is_up else None))
        if not self.link.is_up:
            self.handle(cluster_id, events.CoordinatorLost())
        return output

    def cancel(self, request_id: str, reason: str) -> bool:
        """Whether such a request was running."""
        cluster_id = self._cluster_ids.get(request_id)
        if cluster_id is None:
            return False
        self.handle(cluster_id, events.ClientGone(reason=reason))
        return True

    def cancel_all(self, reason: str) -> None:
        self._handle_all(events.ClientGone(reason=reason))

    # ---- the coordinator ---------------------------------------------------------------------------------------

    def hello(self) -> FrontHello:
        now_ns = self._clock_ns()
        announced = (session.request.live(now_ns) for session in self._sessions.values())
        live = self._announced = tuple(request for request in announced if request is not None)
        return FrontHello(front=self.front, address=self.address, live=live, epoch=self.link.epoch)

    def coordinator_regained(self, epoch: int) -> None:
        for announced in self._announced:
            if announced.request_id not in self._sessions:
                self.link.send(ended_meanwhile(announced.request_id))
        self._handle_all(events.CoordinatorRegained(epoch=epoch))

    def coordinator_lost(self) -> None:
        self._handle_all(events.CoordinatorLost())

    def coordinator_said(self, message: ToFrontMessage) -> None:
        if isinstance(message, FrontWelcome):
            return
        if isinstance(message, Refused | EndRequest):
            self.handle(message.request_id, events.FromCoordinator(message=message))
        elif message.attempt.request_id in self._sessions:
            self.handle(message.attempt.request_id, events.FromCoordinator(message=message))
        else:
            # It has ended here. The word of that is on its way, unless it was lost with an earlier stream.
            self.link.send(ended_meanwhile(message.attempt.request_id))

    # ---- workers -----------------------------------------------------------------------------------------------

    def is_watching(self, worker: WorkerId) -> bool:
        return any(worker in session.request.workers for session in self._sessions.values())

    def worker_restored(self, worker: WorkerId) -> None:
        self._handle_watchers(worker, events.WorkerStreamRestored(worker=worker))

    def worker_lost(self, worker: WorkerId, reason: str) -> None:
        self._handle_watchers(worker, events.WorkerStreamLost(worker=worker, reason=reason))

    def tokens_came(self, batch: TokenBatch) -> None:
        for run in batch.runs:
            self.handle(run.attempt.request_id, events.RunReceived(worker=batch.worker, run=run))

    # ---- the state machines ------------------------------------------------------------------------------------

    def handle(self, cluster_id: str, event: events.Event) -> None:
        """Feeds the event to the request, if it is still running, and carries out what follows from it."""
        session = self._sessions.get(cluster_id)
        queue: list[events.Event] = [event]
        while session is not None and queue:
            for effect in session.request.handle(self._clock_ns(), queue.pop(0)):
                answer = self._carry_out(session, effect)
                if answer is not None:
                    queue.append(answer)
        if session is not None:
            self._set_alarm(cluster_id, session)

    def _handle_all(self, event: events.Event) -> None:
        for cluster_id in list(self._sessions):
            self.handle(cluster_id, event)

    def _handle_watchers(self, worker: WorkerId, event: events.Event) -> None:
        watchers = [name for name, session in self._sessions.items() if worker in session.request.workers]
        for cluster_id in watchers:
            self.handle(cluster_id, event)

    def _carry_out(self, session: _Session, effect: effects.Effect) -> events.Event | None:
        """Returns the event that answers the effect, if one is due."""
        match effect:
            case effects.Deliver():
                return self._deliver(session, effect)
            case effects.ToCoordinator():
                self.link.send(effect.message, effect.body)
            case effects.WatchWorker():
                down_reason = self.streams.watch(effect.ref, effect.watch)
                if down_reason is not None:
                    return events.WorkerStreamLost(worker=effect.ref.worker, reason=down_reason)
            case effects.ForgetWorker():
                self.streams.forget(effect.worker, effect.attempt, effect.choice)
            case effects.DeliverScores():
                session.output.add_scores(effect.tokens)
            case effects.EndChoice():
                self._finish_text(session, effect.choice)
                session.output.end_choice(effect.choice, effect.outcome)
            case effects.End():
                self._end(session, effect)
        return None

    def _deliver(self, session: _Session, effect: effects.Deliver) -> events.Event | None:
        choice = effect.choice
        piece = session.texts[choice].push([token.token_id for token in effect.tokens])
        session.output.add(choice, effect.tokens[: piece.num_tokens], piece.text)
        is_stopped = piece.is_stopped
        if is_stopped:
            del session.texts[choice]
        elif effect.last:
            is_stopped = self._finish_text(session, choice)
        if is_stopped:
            return events.StopMatched(choice=choice, num_tokens=effect.position + piece.num_tokens)
        if session.output.is_overflowing:
            return events.ClientGone(reason=f"the client is more than {MAX_WAITING_TOKENS} tokens behind")
        return events.NoStopMatched(choice=choice) if effect.last else None

    def _finish_text(self, session: _Session, choice: int) -> bool:
        """Sends what was held back, if the text has not ended; returns whether that completes a stop string."""
        text = session.texts.pop(choice, None)
        if text is None:
            return False
        rest = text.finish()
        session.output.add(choice, (), rest.text)
        return rest.is_stopped

    def _end(self, session: _Session, end: effects.End) -> None:
        for choice in list(session.texts):
            self._finish_text(session, choice)
        session.output.finish(end)
        del self._sessions[session.request.spec.request_id]
        del self._cluster_ids[session.request_id]
        self._used_ids.add(session.request_id, None)
        if end.outcome is Outcome.INTERNAL:
            logger.error("request %s ended as internal: %s", session.request.spec.request_id, end.reason)

    def _set_alarm(self, cluster_id: str, session: _Session) -> None:
        """One alarm a request. One that rings early is harmless, so it is only moved forward."""
        due_ns = session.request.next_deadline_ns()
        if due_ns is None:
            if session.alarm is not None:
                session.alarm.cancel()
            session.alarm, session.alarm_ns = None, None
            return
        if session.alarm_ns is not None and session.alarm_ns <= due_ns:
            return
        if session.alarm is not None:
            session.alarm.cancel()
        delay_s = max(0, due_ns - self._clock_ns()) / NS_PER_S
        session.alarm_ns = due_ns
        session.alarm = asyncio.get_running_loop().call_later(delay_s, self._ring, cluster_id, session)

    def _ring(self, cluster_id: str, session: _Session) -> None:
        session.alarm, session.alarm_ns = None, None
        if self._sessions.get(cluster_id) is session:
            self.handle(cluster_id, events.Tick())
