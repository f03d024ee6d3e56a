"""A small world around a ClusterState: model workers and fronts that keep to the protocol, with delays and deaths.

All streams are queues that keep their order, as the real ones do; nothing moves until it is told to, so that a test
chooses every interleaving. Workers here hold no blocks and compute nothing: they only know which legs they have and
what they may say of them. The fronts check that every request gets exactly one outcome.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from cluster.core.commands import (
    CancelLeg,
    CommandBody,
    PeerLost,
    Prefill,
    Reserve,
    RunLocal,
    SenderStopped,
    WorkerRefused,
)
from cluster.core.disaggregation import ALWAYS_PUSHED, DisaggregationConfig
from cluster.core.drain_orders import DrainOrder, Leave, StartDrain, WorkerLeft
from cluster.core.effects import DropBody, Effect, GiveUpWorker, RetireWorker, ToFront, ToWorker
from cluster.core.events import DrainAsked, Event, FromFront, FromWorker, FrontGone, Tick, WorkerGone
from cluster.core.ids import AttemptId, Blame, FrontId, Outcome, Role, WorkerId
from cluster.core.limits import UNKNOWN_ATTEMPT
from cluster.core.messages import (
    AttemptFailed,
    CancelRequest,
    Committed,
    EndRequest,
    Finished,
    FrontHello,
    FrontMessage,
    Heartbeat,
    LegFailed,
    LegReleased,
    LegSurvived,
    PeerFenced,
    Placed,
    PrefillDone,
    Refused,
    RequestDone,
    ReserveGranted,
    ReserveRefused,
    Resubmit,
    StreamLost,
    Submit,
    ToFrontMessage,
    WorkerMessage,
)
from cluster.core.reports import LeaseInfo
from cluster.core.state import ClusterState
from tests.support.coordinator import MS, TIMELINE, make_config, make_hello, make_load

MAX_DRAIN_STEPS = 5_000
TENANTS = ("", "a", "b")


@dataclass(slots=True)
class ModelLeg:
    """state: reserved, quarantined, active (decode); reading, pushed (prefill). `peer` may write to a decode leg."""

    state: str
    peer: WorkerId | None = None
    lease_id: int = 0


@dataclass(slots=True)
class ModelWorker:
    id: WorkerId
    role: Role
    inbox: deque[CommandBody] = field(default_factory=deque)
    outbox: deque[WorkerMessage] = field(default_factory=deque)
    legs: dict[AttemptId, ModelLeg] = field(default_factory=dict)
    is_drained: bool = False

    def say(self, message: WorkerMessage) -> None:
        self.outbox.append(message)

    def obey(self, body: CommandBody, choice: int) -> None:
        """Takes one command; `choice` decides where it has a choice."""
        match body:
            case Reserve(attempt=attempt, source=source, lease_id=lease_id):
                assert attempt not in self.legs and not self.is_drained
                if choice % 4 == 0:
                    self.say(ReserveRefused(attempt=attempt, reason="no blocks"))
                    return
                self.legs[attempt] = ModelLeg("reserved", source.worker, lease_id)
                self.say(
                    ReserveGranted(attempt=attempt, lease_id=lease_id, num_cached_blocks=0, blocks=b"", ttl_ms=1000)
                )
            case Prefill(attempt=attempt, destination=destination, lease_id=lease_id):
                assert attempt not in self.legs
                assert not self.is_drained or self.role is Role.DECODE, "only decode hands answers over"
                self.legs[attempt] = ModelLeg("reading", destination.worker, lease_id)
            case RunLocal(attempt=attempt):
                assert attempt not in self.legs and not self.is_drained
                self.legs[attempt] = ModelLeg("active")
            case CancelLeg(attempt=attempt):
                self._cancel(attempt)
            case SenderStopped(attempt=attempt):
                leg = self.legs.get(attempt)
                assert leg is None or leg.state != "reserved", "said of a leg that is not cancelled"
                if leg is not None and leg.state == "quarantined":
                    self._release(attempt)
            case PeerLost(peer=peer):
                self._lose_peer(peer)
            case StartDrain():
                self.is_drained = True
            case Leave():
                assert not self.legs, "somebody may need them"
                self.say(WorkerLeft())
            case _:
                pass

    def act(self, attempt: AttemptId, choice: int, world: World) -> None:
        """One leg moves on by itself, if it can."""
        leg = self.legs[attempt]
        fails = choice % 5 == 0
        if leg.state == "reading":
            if fails:
                self._fail(attempt, choice)
            elif choice % 5 == 1:
                self.say(PrefillDone(attempt=attempt, outcome=Outcome.STOP, timeline=TIMELINE))
                world.finished_by[attempt] = self.id
                self._release(attempt)
            else:
                leg.state = "pushed"
                self.say(PrefillDone(attempt=attempt, outcome=None, timeline=TIMELINE))
                world.pushed[attempt] = None
        elif leg.state == "reserved":
            if fails:
                self.say(LegFailed(attempt=attempt, outcome=Outcome.TRANSFER_FAILED, reason="bad", retryable=True))
                leg.state = "quarantined"
            elif attempt in world.pushed:
                leg.state = "active"
                self.say(Committed(attempt=attempt, timeline=TIMELINE))
                world.committed[attempt] = None
        elif leg.state == "pushed":
            if attempt in world.committed:
                self._release(attempt)
        elif leg.state == "active":
            if fails:
                self._fail(attempt, choice)
            elif choice % 5 == 1:
                self.say(LegSurvived(attempt=attempt))
            else:
                del self.legs[attempt]
                world.finished_by[attempt] = self.id
                self.say(Finished(attempt=attempt, outcome=Outcome.LENGTH, num_output_tokens=2, timeline=TIMELINE))

    def heartbeat(self) -> Heartbeat:
        """With all leases it has."""
        leases = tuple(
            LeaseInfo(
                lease_id=leg.lease_id,
                attempt=attempt,
                side="held" if self.role is Role.PREFILL else leg.state,
                peer=leg.peer,
                num_blocks=1,
                size_bytes=1,
                age_ms=0,
                remaining_ms=0,
            )
            for attempt, leg in self.legs.items()
            if leg.peer is not None and leg.state != "active"
        )
        return Heartbeat(load=make_load(12), leases=leases)

    def _cancel(self, attempt: AttemptId) -> None:
        leg = self.legs.get(attempt)
        if leg is not None and leg.state in ("reserved", "quarantined"):
            leg.state = "quarantined"
        else:
            self._release(attempt)

    def _lose_peer(self, peer: WorkerId) -> None:
        self.say(PeerFenced(peer=peer))
        for attempt, leg in tuple(self.legs.items()):
            if leg.peer == peer and leg.state in ("reserved", "quarantined"):
                if leg.state == "reserved":
                    self._fail(attempt)
                else:
                    self._release(attempt)

    def _fail(self, attempt: AttemptId, choice: int = 0) -> None:
        """`choice` decides whose fault it is: a link's, that of a step, or the attempt's own."""
        blame = tuple(Blame)[choice // 5 % len(Blame)]
        outcome = Outcome.TRANSFER_FAILED if blame is Blame.NOBODY else Outcome.INTERNAL
        self.say(LegFailed(attempt=attempt, outcome=outcome, reason="broken", retryable=True, blame=blame))
        self._release(attempt)

    def _release(self, attempt: AttemptId) -> None:
        self.legs.pop(attempt, None)
        self.say(LegReleased(attempt=attempt))


@dataclass(slots=True)
class ModelFront:
    """`outcomes` of all its requests, None while one is live. `heard` are the terminal words of the coordinator."""

    id: FrontId
    inbox: deque[ToFrontMessage] = field(default_factory=deque)
    outbox: deque[FrontMessage] = field(default_factory=deque)
    outcomes: dict[str, Outcome | None] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    heard: dict[str, Outcome] = field(default_factory=dict)

    def hear(self, message: ToFrontMessage) -> None:
        match message:
            case Placed(attempt=attempt):
                assert attempt.attempt > self.attempts.get(attempt.request_id, 0), "attempts rise"
                self.attempts[attempt.request_id] = attempt.attempt
            case AttemptFailed(attempt=attempt):
                assert attempt.attempt == self.attempts[attempt.request_id], "it had heard of the attempt"
                if self.outcomes[attempt.request_id] is None:
                    self.outbox.append(
                        Resubmit(
                            request_id=attempt.request_id,
                            failed_attempt=attempt.attempt,
                            num_delivered=1,
                            num_choices=1 + attempt.attempt % 2,
                            num_unshared=attempt.attempt,
                        )
                    )
            case Refused(request_id=request_id, outcome=outcome) | EndRequest(request_id=request_id, outcome=outcome):
                # A Resubmit that crosses the end is answered with a second one.
                if request_id not in self.heard:
                    self.heard[request_id] = outcome
                    if self.outcomes[request_id] is None:
                        self.outcomes[request_id] = outcome
            case _:
                pass

    def end(self, request_id: str, outcome: Outcome) -> None:
        """Ends it for its client and tells the coordinator."""
        assert self.outcomes[request_id] is None
        self.outcomes[request_id] = outcome
        if outcome is Outcome.CANCELLED:
            self.outbox.append(CancelRequest(request_id=request_id, outcome=outcome, reason="left"))
        else:
            self.outbox.append(RequestDone(request_id=request_id, outcome=outcome, num_output_tokens=1))

    def live(self) -> list[str]:
        return [request_id for request_id, outcome in self.outcomes.items() if outcome is None]


class World:
    """`bodies` is what the coordinator's driver would keep; `pushed` and `committed` is what the KV plane knows."""

    def __init__(self, *, with_prefill: bool = True, disaggregation: DisaggregationConfig = ALWAYS_PUSHED) -> None:
        self.config = make_config(with_prefill=with_prefill, max_running=3, disaggregation=disaggregation)
        self.state = ClusterState(self.config, epoch=3)
        self.now_ns = 0
        self.workers: dict[WorkerId, ModelWorker] = {}
        self.fronts: dict[FrontId, ModelFront] = {}
        self.bodies: dict[str, None] = {}
        self.pushed: dict[AttemptId, None] = {}
        self.committed: dict[AttemptId, None] = {}
        self.finished_by: dict[AttemptId, WorkerId] = {}
        self.journal: list[tuple[int, Event, list[Effect]]] = []
        self.is_draining = False
        self.num_lives = 0
        self.num_requests = 0

    def handle(self, event: Event) -> None:
        effects = self.state.handle(self.now_ns, event)
        self.state.check_invariants()
        self.journal.append((self.now_ns, event, effects))
        self._check_views()
        for effect in effects:
            self._carry_out(effect)
        for effect in effects:
            if isinstance(effect, ToWorker) and isinstance(effect.command.body, WorkerRefused):
                self.kill_worker(effect.worker)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case ToWorker(worker=worker_id, command=command, body_of=body_of):
                if isinstance(command.body, CancelLeg):
                    assert command.body.reason != UNKNOWN_ATTEMPT, "a worker holds what the coordinator has forgotten"
                assert body_of is None or body_of in self.bodies, f"no body for {command}"
                if worker_id in self.workers:
                    self.workers[worker_id].inbox.append(command.body)
            case ToFront(front=front_id, message=message):
                if front_id in self.fronts:
                    self.fronts[front_id].inbox.append(message)
            case DropBody(request_id=request_id):
                del self.bodies[request_id]
            case GiveUpWorker(worker=worker_id, reason=reason):
                assert not (self.is_draining and "did not release" in reason), f"{worker_id} was not told enough"
                self.workers.pop(worker_id, None)
            case RetireWorker(worker=worker_id):
                self.workers.pop(worker_id, None)

    def _check_views(self) -> None:
        """What operators are shown agrees with itself."""
        requests = self.state.requests(self.now_ns)
        view = self.state.status(self.now_ns)
        assert len(requests) == view.num_requests
        assert sum(request.decode is not None for request in requests) == view.num_running
        assert sum(request.phase == "queued" for request in requests) == view.num_queued
        leases = self.state.leases(self.now_ns)
        assert sum(lease.known for lease in leases) == view.num_leases

    def replay(self) -> None:
        """The same events give a new state the same effects."""
        state = ClusterState(self.config, epoch=3)
        for now_ns, event, effects in self.journal:
            assert state.handle(now_ns, event) == effects

    # ---- what may happen ----

    def start_worker(self, name: str, role: Role) -> None:
        """A new life. The one before it, if it still runs, is replaced as soon as the coordinator hears the hello."""
        self.num_lives += 1
        worker = ModelWorker(WorkerId(name, self.num_lives), role)
        self.workers[worker.id] = worker
        worker.say(make_hello(worker.id, role, num_blocks=12))

    def kill_worker(self, worker_id: WorkerId) -> None:
        del self.workers[worker_id]
        self.handle(WorkerGone(worker=worker_id, reason="killed"))

    def start_front(self, name: str) -> FrontId:
        self.num_lives += 1
        front = ModelFront(FrontId(name, self.num_lives))
        self.fronts[front.id] = front
        front.outbox.append(FrontHello(front=front.id, address=name))
        return front.id

    def kill_front(self, front_id: FrontId) -> None:
        del self.fronts[front_id]
        self.handle(FrontGone(front=front_id))

    def submit(
        self, front_id: FrontId, num_prompt_tokens: int, deadline_ms: int | None, priority: int, num_choices: int = 1
    ) -> None:
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        self.fronts[front_id].outcomes[request_id] = None
        self.fronts[front_id].outbox.append(
            Submit(
                request_id=request_id,
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=4,
                num_choices=num_choices,
                deadline_ms=deadline_ms,
                priority=priority,
                tenant=TENANTS[self.num_requests % len(TENANTS)],
            )
        )

    def deliver_command(self, worker: ModelWorker, choice: int) -> None:
        body = worker.inbox.popleft()
        if isinstance(body, SenderStopped):
            self._check_stopped(worker, body.attempt)
        elif isinstance(body, PeerLost):
            assert body.peer not in self.workers, "only a life that is given up is lost"
        worker.obey(body, choice)

    def _check_stopped(self, decode: ModelWorker, attempt: AttemptId) -> None:
        """The point of it all: blocks are free again only when nobody can write to them."""
        leg = decode.legs.get(attempt)
        sender = None if leg is None or leg.peer is None else self.workers.get(leg.peer)
        if sender is not None:
            assert attempt not in sender.legs, f"{sender.id} still pushes {attempt}"
            assert not any(isinstance(body, Prefill) and body.attempt == attempt for body in sender.inbox)

    def deliver_report(self, worker: ModelWorker) -> None:
        message = worker.outbox.popleft()
        self.handle(FromWorker(worker=worker.id, message=message))
        if isinstance(message, WorkerLeft) and worker.id in self.workers:
            self.kill_worker(worker.id)

    def order_drain(self, order: DrainOrder, *, force: bool) -> None:
        self.handle(DrainAsked(order=order, force=force))

    def deliver_to_front(self, front: ModelFront) -> None:
        front.hear(front.inbox.popleft())

    def deliver_from_front(self, front: ModelFront) -> None:
        message = front.outbox.popleft()
        if isinstance(message, Submit):
            self.bodies[message.request_id] = None
        self.handle(FromFront(front=front.id, message=message))

    def read_finish(self, front: ModelFront, request_id: str) -> None:
        """The front gets the last token, if the worker that drew it still runs."""
        attempt = AttemptId(request_id, front.attempts.get(request_id, 0))
        if self.finished_by.get(attempt) in self.workers and front.outcomes[request_id] is None:
            front.end(request_id, Outcome.STOP)

    def break_stream(self, front: ModelFront, request_id: str, worker_id: WorkerId) -> None:
        """The front gives up hearing of that worker."""
        attempt = AttemptId(request_id, front.attempts.get(request_id, 0))
        front.outbox.append(StreamLost(attempt=attempt, worker=worker_id, reason="cut"))

    def pass_time(self, duration_ms: int) -> None:
        """Live workers' heartbeats are not held up by it."""
        self.now_ns += duration_ms * MS
        for worker in tuple(self.workers.values()):
            if worker.id in self.workers and not worker.outbox:
                self.handle(FromWorker(worker=worker.id, message=worker.heartbeat()))
        self.handle(Tick())

    # ---- to the end ----

    def drain(self) -> None:
        """Everybody does what is left to do, one thing after the other, until nothing moves."""
        self.is_draining = True
        for _ in range(MAX_DRAIN_STEPS):
            if not self._drain_step():
                return
        raise AssertionError("the world does not come to rest")

    def _drain_step(self) -> bool:
        moved = False
        for worker in tuple(self.workers.values()):
            while worker.outbox and worker.id in self.workers:
                self.deliver_report(worker)
                moved = True
            while worker.inbox and worker.id in self.workers:
                self.deliver_command(worker, 1)
                moved = True
        for front in tuple(self.fronts.values()):
            while front.outbox:
                self.deliver_from_front(front)
                moved = True
            while front.inbox:
                self.deliver_to_front(front)
                moved = True
        if moved:
            return True
        for worker in tuple(self.workers.values()):
            for attempt in tuple(worker.legs):
                worker.act(attempt, 2, self)
                moved = moved or bool(worker.outbox)
        for front in self.fronts.values():
            for request_id in front.live():
                self.read_finish(front, request_id)
                moved = moved or bool(front.outbox)
        if not moved and (deadline_ns := self.state.next_deadline_ns()) is not None and self._is_busy():
            self.pass_time(max(1, (deadline_ns - self.now_ns) // MS + 1))
            moved = True
        return moved

    def _is_busy(self) -> bool:
        view = self.state.status(self.now_ns)
        is_drain_going_on = any(drain.life is not None for drain in view.drains)
        return view.num_requests > 0 or is_drain_going_on or any(worker.legs for worker in self.workers.values())

    def assert_at_rest(self) -> None:
        """Every request of a front that lives has an outcome, and nothing is kept anywhere."""
        for front in self.fronts.values():
            assert front.live() == [], f"{front.id} still waits for {front.live()}"
        view = self.state.status(self.now_ns)
        assert view.num_requests == 0 and self.bodies == {}
        assert all(drain.life is None for drain in view.drains), "a drain has not come to its end"
        assert self.state.leases(self.now_ns) == ()
        assert all(worker.legs == {} for worker in self.workers.values())
        for pool in view.pools:
            assert all(worker.num_legs == 0 for worker in pool.workers), "the coordinator thinks it holds something"
