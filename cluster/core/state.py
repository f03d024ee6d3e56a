"""ClusterState: the coordinator's brain, a pure state machine.

    handle(now_ns, event) -> effects

is its only mutator. The driver reads streams and the clock, calls it, and carries out the effects in order. The life of
a request, with what moves it on (docs in `cluster.core.requests.Phase`):

    (an earlier life) --RECOVERING--> PREFILLING, DECODING, LOCAL, FINISHED or WAITING_FRONT

    QUEUED --placed--> RESERVING --granted--> PREFILLING --committed--> DECODING --finished--> FINISHED --done--> (gone)
       ^  |                |                      |                        |                      |
       |  |                `-- refused: QUEUED    `------ leg failed, worker lost, stream lost ---'
       |  `--without a push-----> LOCAL --finished--> FINISHED              |
       `------------------- Resubmit ---------------------------- WAITING_FRONT

Every phase can end in CancelRequest, FrontGone or a deadline. The state consists of small parts with invariants of
their own (`cluster.core.parts`); handlers are grouped by what they are about (`cluster.core.handlers`).
"""

from __future__ import annotations

from cluster.core.attempts import LegState
from cluster.core.config import ClusterConfig
from cluster.core.drain_orders import DrainOrder, DrainRefusal, WorkerLeft
from cluster.core.effects import Effect
from cluster.core.events import DrainAsked, Event, FromFront, FromWorker, FrontGone, Tick, WorkerGone
from cluster.core.handlers import draining, fronts, legs, rebuilding, workers
from cluster.core.handlers.ending import current_attempt
from cluster.core.handlers.placing import place_waiting
from cluster.core.handlers.timeouts import on_tick
from cluster.core.ids import FrontId, WorkerId
from cluster.core.leases import Side
from cluster.core.messages import (
    BlockEvents,
    CancelRequest,
    Committed,
    Finished,
    FrontHello,
    FrontMessage,
    Heartbeat,
    LegFailed,
    LegReleased,
    LegSurvived,
    PeerFenced,
    PrefillDone,
    RequestDone,
    ReserveGranted,
    ReserveRefused,
    Resubmit,
    StreamLost,
    Submit,
    WorkerHello,
    WorkerMessage,
)
from cluster.core.parts import Parts
from cluster.core.requests import PLACED_PHASES, Phase
from cluster.core.timers import TimerKind
from cluster.core.viewing import view_cluster, view_leases, view_request, view_requests
from cluster.core.views import ClusterView, LeaseView, RequestView


class ClusterState:
    """One life of the coordinator.

    Args:
        config: the cluster file.
        epoch: higher than that of any earlier life.
    """

    def __init__(self, config: ClusterConfig, epoch: int) -> None:
        self._parts = Parts.make(config, epoch)
        self._now_ns = 0

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        """Takes in one event. `now_ns` never falls. Whatever it decides, it looks at a few workers and at as
        many hashes of a prompt as are held somewhere, at each event while requests wait."""
        assert now_ns >= self._now_ns, "time runs backwards"
        self._now_ns = now_ns
        parts = self._parts
        if not parts.rebuild.has_begun:
            parts.rebuild.begin(now_ns)
        match event:
            case FromWorker(worker=worker, message=said):
                self._from_worker(now_ns, worker, said)
            case FromFront(front=front, message=message):
                self._from_front(now_ns, front, message)
            case FrontGone(front=front):
                fronts.on_front_gone(parts, now_ns, front)
            case WorkerGone(worker=worker, reason=reason):
                workers.lose_worker(parts, now_ns, worker, reason)
            case DrainAsked(order=order, force=force):
                draining.on_drain_asked(parts, now_ns, order, force=force)
            case Tick():
                on_tick(parts, now_ns)
        if parts.rebuild.is_open:
            rebuilding.settle(parts, now_ns)
        if not parts.rebuild.is_open:
            if parts.drains:
                draining.settle(parts, now_ns)
            if parts.queue:
                place_waiting(parts, now_ns)
        return parts.outbox.take()

    def next_deadline_ns(self) -> int | None:
        """When a Tick is due at the latest."""
        return self._parts.timers.next_deadline_ns()

    def status(self, now_ns: int) -> ClusterView:
        return view_cluster(self._parts, now_ns)

    def leases(self, now_ns: int) -> tuple[LeaseView, ...]:
        return view_leases(self._parts, now_ns)

    def requests(self, now_ns: int) -> tuple[RequestView, ...]:
        return view_requests(self._parts, now_ns)

    def request(self, request_id: str, now_ns: int) -> RequestView | None:
        """None if there is no request of that id, or it has ended."""
        return view_request(self._parts, request_id, now_ns)

    def why_refused(self, order: DrainOrder, *, force: bool) -> DrainRefusal | None:
        """What a DrainAsked with this order would do nothing for; None if it is carried out."""
        return draining.why_refused(self._parts, order, force=force)

    def front_of(self, request_id: str) -> FrontId | None:
        """Whose request it is, None if there is no such request."""
        request = self._parts.requests.get(request_id)
        return None if request is None else request.front

    def check_invariants(self) -> None:
        """Raises AssertionError if the parts contradict themselves or each other."""
        parts = self._parts
        for part in (
            parts.queue,
            parts.requests,
            parts.attempts,
            parts.workers,
            parts.leases,
            parts.links,
            parts.routes,
            parts.rebuild,
            parts.drains,
            parts.prefixes,
            parts.timers,
            parts.tenants,
        ):
            part.check_invariants()
        self._check_requests()
        self._check_accounts()
        self._check_attempts()
        self._check_leases()
        self._check_timers()
        self._check_drains()
        assert all(parts.workers.get(writer) is not None for writer in parts.links.writers()), "a lost worker's link"
        assert all(parts.workers.get(worker) is not None for worker in parts.trials.workers()), "a lost worker's trial"
        assert parts.prefixes.lives() == [worker.id for worker in parts.workers.all()], "blocks of a lost worker"

    def _from_front(self, now_ns: int, front: FrontId, message: FrontMessage) -> None:
        parts = self._parts
        if isinstance(message, FrontHello):
            fronts.on_front_hello(parts, now_ns, front, message)
            return
        if parts.fronts.get(front.name) != front:
            # A life that is over, or has not introduced itself. Its body must not stay behind.
            if isinstance(message, Submit) and parts.requests.get(message.request_id) is None:
                parts.outbox.drop_body(message.request_id)
            return
        match message:
            case Submit():
                fronts.on_submit(parts, now_ns, front, message)
            case CancelRequest():
                fronts.on_cancel(parts, now_ns, front, message)
            case Resubmit():
                fronts.on_resubmit(parts, now_ns, front, message)
            case StreamLost():
                fronts.on_stream_lost(parts, now_ns, front, message)
            case RequestDone():
                fronts.on_request_done(parts, now_ns, front, message)

    def _from_worker(self, now_ns: int, sender: WorkerId, message: WorkerMessage) -> None:
        parts = self._parts
        if isinstance(message, WorkerHello):
            workers.on_worker_hello(parts, now_ns, sender, message)
            return
        worker = parts.workers.get(sender)
        if worker is None:
            return  # A life that is lost, whatever it still says.
        worker.last_heard_ns = now_ns
        if parts.rebuild.is_open:
            rebuilding.follow(parts, now_ns, sender, message)
        match message:  # the commonest first
            case BlockEvents():
                workers.on_block_events(parts, worker, message)
            case ReserveGranted():
                legs.on_reserve_granted(parts, now_ns, sender, message)
            case PrefillDone():
                legs.on_prefill_done(parts, now_ns, worker, message)
            case Committed():
                legs.on_committed(parts, now_ns, sender, message)
            case LegReleased():
                legs.on_leg_released(parts, now_ns, sender, message)
            case Finished():
                legs.on_finished(parts, now_ns, sender, message)
            case Heartbeat():
                workers.on_heartbeat(parts, now_ns, worker, message)
            case LegFailed():
                legs.on_leg_failed(parts, now_ns, sender, message)
            case LegSurvived():
                legs.on_leg_survived(parts, sender, message)
            case ReserveRefused():
                legs.on_reserve_refused(parts, now_ns, sender, message)
            case PeerFenced():
                workers.on_peer_fenced(parts, now_ns, sender, message)
            case WorkerLeft():
                draining.on_left(parts, sender)

    def _check_requests(self) -> None:
        parts = self._parts
        for request in parts.requests.all():
            assert (request.request_id in parts.queue) == (request.phase is Phase.QUEUED)
            assert parts.fronts.get(request.front.name) == request.front, "the request of a front that is gone"
            attempt = current_attempt(parts, request)
            assert (attempt is not None) == (request.phase in PLACED_PHASES)
            assert request.phase is not Phase.RECOVERING or parts.rebuild.is_open, "nothing will come any more"
            if attempt is None:
                continue
            assert (request.phase is Phase.LOCAL) <= (attempt.prefill is None)
            assert (request.phase is Phase.FINISHED) == (attempt.finished_by is not None)
            assert (request.phase is Phase.DECODING) <= attempt.committed
            if request.phase is not Phase.FINISHED:
                assert attempt.decode.state is LegState.ACTIVE, "decode cannot go on"
        assert len(parts.queue) <= len(parts.requests)

    def _check_accounts(self) -> None:
        """Each tenant has as many requests as are known, and none that waits has been charged for its turn."""
        parts = self._parts
        num_live: dict[str, int] = {}
        num_queued: dict[str, int] = {}
        for request in parts.requests.all():
            is_queued = request.phase is Phase.QUEUED
            num_live[request.tenant] = num_live.get(request.tenant, 0) + 1
            num_queued[request.tenant] = num_queued.get(request.tenant, 0) + is_queued
            assert request.is_charged is not is_queued, f"{request.request_id} in {request.phase.name} and its charge"
        assert num_live == {tenant.name: tenant.num_live for tenant in parts.tenants.all() if tenant.num_live}
        assert all(parts.queue.num_of(tenant) == number for tenant, number in num_queued.items())

    def _check_attempts(self) -> None:
        parts = self._parts
        for attempt in parts.attempts.all():
            request = parts.requests.get(attempt.attempt_id.request_id)
            if attempt.is_current:
                assert request is not None and request.attempt_id == attempt.attempt_id
                assert request.phase in PLACED_PHASES
            for leg in attempt.legs:
                worker = parts.workers.get(leg.worker)
                assert worker is not None or leg.is_released, f"{leg} of a lost worker"
                assert worker is None or worker.legs.get(attempt.attempt_id) is leg
                is_wanted = attempt.is_current or attempt.num_fetched_blocks > 0
                assert is_wanted or leg.state is not LegState.ACTIVE, f"{leg} was not told to stop"
        for worker in parts.workers.all():
            assert all(parts.attempts.get(attempt_id) is not None for attempt_id in worker.legs)
            because = [leg.expectation for leg in worker.legs.values() if leg.expectation is not None]
            assert sorted(parts.prefixes.expectations_of(worker.id)) == sorted(because), "blocks expected of nobody"

    def _check_leases(self) -> None:
        parts = self._parts
        for lease in parts.leases.all():
            assert parts.workers.get(lease.holder) is not None, f"{lease} of a lost holder"
            attempt = parts.attempts.get(lease.attempt_id)
            assert attempt is not None, f"{lease} of no attempt"
            leg = attempt.decode if lease.side is Side.RESERVED else attempt.prefill
            assert leg is not None and leg.worker == lease.holder and not leg.is_released
            assert lease.side is Side.HELD or not attempt.committed

    def _check_drains(self) -> None:
        parts = self._parts
        keys = parts.timers.keys()
        timed = {key.name for key in keys if key.kind is TimerKind.DRAIN}
        for drain in parts.drains.all():
            worker = None if drain.life is None else parts.workers.get(drain.life)
            assert (worker is None) == (drain.life is None), f"the drain of {drain.life}, which is lost"
            assert worker is None or worker.is_leaving, f"{drain.life} may be given work"
            ends_by_itself = worker is not None and not drain.is_told_to_leave
            assert ends_by_itself or drain.order.worker in timed, f"{drain.order}, which nothing would end"

    def _check_timers(self) -> None:
        parts = self._parts
        keys = parts.timers.keys()
        for key in keys:
            if key.kind in (TimerKind.REQUEST, TimerKind.RETRY):
                assert parts.requests.get(key.name) is not None, f"{key} of no request"
            elif key.kind is TimerKind.DRAIN:
                assert parts.drains.named(key.name) is not None, f"{key} of no drain"
            elif key.kind is TimerKind.WORKER:
                assert parts.workers.get(WorkerId(key.name, key.number)) is not None, f"{key} of no worker"
        assert parts.rebuild.is_open == any(key.kind is TimerKind.REBUILD for key in keys)
        num_silence = sum(key.kind is TimerKind.WORKER for key in keys)
        assert num_silence == len(parts.workers), "a worker whose silence nobody would notice"
        timed = {key.name for key in keys if key.kind is TimerKind.REQUEST}
        for request in parts.requests.all():
            assert (request.due_ns is not None) == (request.request_id in timed)
