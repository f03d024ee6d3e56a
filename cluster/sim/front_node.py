"""A front's process in the simulator: one FrontRequest a client's request, and the streams that they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.core.ids import FrontId, WorkerId
from cluster.core.messages import FrontHello, FrontWelcome, ToFrontMessage, WorkerRef
from cluster.core.reports import LiveRequest
from cluster.core.token_messages import Forget, StreamHello, TokenBatch
from cluster.front import request_effects as effects
from cluster.front import request_events as events
from cluster.front.request import FrontRequest, ended_meanwhile
from cluster.front.request_spec import RequestLimits, RequestSpec
from cluster.sim.client import Client
from cluster.sim.coordinator_node import ADDRESS, Envelope
from cluster.sim.kernel import MILLISECOND_NS
from cluster.sim.network import Network, StreamEnd
from cluster.sim.process import Alarm, Process

RECONNECT_DELAY_NS = 200 * MILLISECOND_NS


@dataclass(slots=True)
class _Live:
    """A request that has not ended."""

    request: FrontRequest
    client: Client
    alarm: Alarm


class _WorkerLink:
    """The token stream to one life of a worker; dialled again while a request needs it."""

    def __init__(self, ref: WorkerRef) -> None:
        self.ref = ref
        self.stream: StreamEnd | None = None
        self.is_down = False


class FrontNode:
    """One life of a front."""

    def __init__(
        self,
        process: Process,
        network: Network,
        limits: RequestLimits,
        *,
        after_event: Callable[[FrontRequest], None],
    ) -> None:
        self.process = process
        self.front = FrontId(process.name, process.incarnation)
        self._network = network
        self._limits = limits
        self._after_event = after_event
        self._live: dict[str, _Live] = {}
        self._links: dict[WorkerId, _WorkerLink] = {}
        self._coordinator: StreamEnd | None = None
        """The stream once it is welcome; what is sent before that is dropped, and repeated then."""
        self._epoch = 0
        self._announced: tuple[LiveRequest, ...] = ()
        self._dial_coordinator()

    @property
    def requests(self) -> list[FrontRequest]:
        """That have not ended."""
        return [entry.request for entry in self._live.values()]

    @property
    def num_live(self) -> int:
        return len(self._live) if self.process.alive else 0

    # ---- clients ----------------------------------------------------------------------------------------------

    def submit(self, spec: RequestSpec, client: Client) -> None:
        """A client calls. It hears of its tokens and its end, or that the front is gone."""
        request = FrontRequest(spec, self._limits)
        alarm = Alarm(self.process, lambda: self._handle(spec.request_id, events.Tick()))
        self._live[spec.request_id] = _Live(request, client, alarm)
        self._handle(spec.request_id, events.Start(epoch=None if self._coordinator is None else self._epoch))
        if self._coordinator is None:
            self._handle(spec.request_id, events.CoordinatorLost())

    def hang_up(self, request_id: str) -> None:
        """The client cancels, or its connection breaks."""
        self._handle(request_id, events.ClientGone(reason="the client left"))

    # ---- coordinator ------------------------------------------------------------------------------------------

    def _dial_coordinator(self) -> None:
        self._network.dial(self.process, ADDRESS, self._coordinator_opened, self._coordinator_failed)

    def _coordinator_opened(self, stream: StreamEnd) -> None:
        stream.on_message = lambda message: self._coordinator_said(stream, message)
        stream.on_closed = self._coordinator_failed
        now_ns = self.process.now_ns()
        live = tuple(live for request in self.requests if (live := request.live(now_ns)) is not None)
        self._announced = live
        hello = FrontHello(front=self.front, address=self.process.name, live=live, epoch=self._epoch)
        stream.send(Envelope(message=hello))

    def _coordinator_failed(self, _reason: str) -> None:
        self._coordinator = None
        self.process.after(RECONNECT_DELAY_NS, self._dial_coordinator)
        self._handle_all(events.CoordinatorLost())

    def _coordinator_said(self, stream: StreamEnd, message: ToFrontMessage) -> None:
        if isinstance(message, FrontWelcome):
            self._coordinator, self._epoch = stream, message.epoch
            for announced in self._announced:
                if announced.request_id not in self._live:
                    stream.send(Envelope(message=ended_meanwhile(announced.request_id)))
            self._handle_all(events.CoordinatorRegained(epoch=message.epoch))
            return
        attempt = getattr(message, "attempt", None)
        request_id: str = message.request_id if attempt is None else attempt.request_id  # type: ignore[union-attr]
        self._handle(request_id, events.FromCoordinator(message=message))

    # ---- token streams ----------------------------------------------------------------------------------------

    def _watch(self, effect: effects.WatchWorker) -> events.Event | None:
        worker = effect.ref.worker
        link = self._links.get(worker)
        if link is None:
            link = self._links[worker] = _WorkerLink(effect.ref)
            self._dial_worker(link)
        elif link.stream is not None:
            link.stream.send(effect.watch)
        elif link.is_down:
            return events.WorkerStreamLost(worker=worker, reason="the stream is down")
        return None

    def _dial_worker(self, link: _WorkerLink) -> None:
        self._network.dial(
            self.process,
            link.ref.token_address,
            lambda stream: self._worker_opened(link, stream),
            lambda reason: self._worker_failed(link, reason),
        )

    def _worker_opened(self, link: _WorkerLink, stream: StreamEnd) -> None:
        link.stream, link.is_down = stream, False
        stream.on_message = self._tokens_came
        stream.on_closed = lambda reason: self._worker_failed(link, reason)
        stream.send(StreamHello(front=self.front))
        for request_id in self._watching(link.ref.worker):
            self._handle(request_id, events.WorkerStreamRestored(worker=link.ref.worker))

    def _worker_failed(self, link: _WorkerLink, reason: str) -> None:
        link.stream, link.is_down = None, True
        for request_id in self._watching(link.ref.worker):
            self._handle(request_id, events.WorkerStreamLost(worker=link.ref.worker, reason=reason))
        self.process.after(RECONNECT_DELAY_NS, lambda: self._redial(link))

    def _redial(self, link: _WorkerLink) -> None:
        if self._watching(link.ref.worker):
            self._dial_worker(link)
        else:
            del self._links[link.ref.worker]

    def _watching(self, worker: WorkerId) -> list[str]:
        return [request_id for request_id, live in self._live.items() if worker in live.request.workers]

    def _tokens_came(self, batch: TokenBatch) -> None:
        for run in batch.runs:
            self._handle(run.attempt.request_id, events.RunReceived(worker=batch.worker, run=run))

    # ---- the state machines -----------------------------------------------------------------------------------

    def _handle_all(self, event: events.Event) -> None:
        for request_id in list(self._live):
            self._handle(request_id, event)

    def _handle(self, request_id: str, event: events.Event) -> None:
        live = self._live.get(request_id)
        if live is None:
            return
        answers: list[events.Event] = []
        for effect in live.request.handle(self.process.now_ns(), event):
            answer = self._carry_out(request_id, live, effect)
            if answer is not None:
                answers.append(answer)
        live.alarm.set(live.request.next_deadline_ns())
        self._after_event(live.request)
        for answer in answers:
            self._handle(request_id, answer)

    def _carry_out(self, request_id: str, live: _Live, effect: effects.Effect) -> events.Event | None:
        match effect:
            case effects.ToCoordinator():
                if self._coordinator is not None:
                    self._coordinator.send(Envelope(message=effect.message, body=effect.body))
            case effects.WatchWorker():
                return self._watch(effect)
            case effects.ForgetWorker():
                self._forget(effect)
            case effects.Deliver():
                return self._deliver(live, effect)
            case effects.DeliverScores():
                live.client.on_scores(effect.position, effect.tokens)
            case effects.EndChoice():
                live.client.on_choice_end(effect.choice, effect.outcome)
            case effects.End():
                del self._live[request_id]
                live.client.on_end(effect.outcome, effect.reason, effect.retry_after_ms, effect.cause)
        return None

    def _forget(self, effect: effects.ForgetWorker) -> None:
        link = self._links.get(effect.worker)
        if link is not None and link.stream is not None:
            link.stream.send(Forget(attempt=effect.attempt, choice=effect.choice))

    def _deliver(self, live: _Live, effect: effects.Deliver) -> events.Event | None:
        """The detokenizer's part: the text is searched for a stop string, here a pair of tokens."""
        choice = effect.choice
        matched = live.client.on_tokens(choice, effect.position, tuple(token.token_id for token in effect.tokens))
        if matched is not None:
            return events.StopMatched(choice=choice, num_tokens=matched)
        return events.NoStopMatched(choice=choice) if effect.last else None
