"""What a new life of the coordinator takes over from an earlier one, and what becomes of the rest.

Fronts say which requests they serve and workers which legs they have, in any order. A request whose attempt the workers
have, in a state in which it can go on, goes on and is not touched; its client never learns that anything happened. At
the end of the rebuild window the others are tried again from what their clients have, and what nobody claimed stops.
"""

from __future__ import annotations

from cluster.core.attempts import Attempt, Leg, LegState
from cluster.core.commands import CancelLeg, PeerLost
from cluster.core.handlers.accounting import demand_for, expected_output, take_account_over
from cluster.core.handlers.ending import (
    close_attempt,
    fail_request,
    forget_request,
    release_leg,
    stop_leg,
    watch_deadline,
)
from cluster.core.ids import AttemptId, FrontId, LegStage, Outcome, Role, WorkerId
from cluster.core.leases import Lease, Side
from cluster.core.limits import (
    FINISHED_TIMEOUT_NS,
    NS_PER_MS,
    RESUBMIT_TIMEOUT_NS,
    UNKNOWN_ATTEMPT,
)
from cluster.core.messages import (
    Committed,
    EndRequest,
    Finished,
    LegFailed,
    LegReleased,
    PrefillDone,
    Refused,
    WorkerMessage,
)
from cluster.core.parts import Parts
from cluster.core.reports import HeldLeg, LiveRequest
from cluster.core.requests import Failure, Phase, Request
from cluster.core.timers import TimerKey, TimerKind
from cluster.policy.placement import Demand

NOT_TAKEN_OVER = Failure(Outcome.WORKER_LOST, "the coordinator restarted, and no worker goes on with it")
DUPLICATE = "a request of that id is running already"
_TIMER = TimerKey(TimerKind.REBUILD, "")
_PushPair = tuple[tuple[WorkerId, HeldLeg], tuple[WorkerId, HeldLeg]]


def on_earlier_life(parts: Parts, now_ns: int) -> None:
    """Somebody has come who has known an earlier life of the coordinator."""
    end_ns = parts.rebuild.open(now_ns)
    if end_ns is not None:
        parts.timers.set(_TIMER, end_ns)


# ---- what is said ---------------------------------------------------------------------------------------------


def on_inventory(parts: Parts, now_ns: int, worker: WorkerId, inventory: tuple[HeldLeg, ...]) -> None:
    """A worker registers with what it has."""
    for leg in inventory:
        parts.requests.heard_of(leg.attempt)
        if not parts.rebuild.is_open:
            _cancel(parts, worker, leg)
            _give_absent_peer_up(parts, worker, leg)
            continue
        parts.rebuild.keep(worker, leg)
        _resolve(parts, now_ns, leg.attempt)


def on_announced(parts: Parts, now_ns: int, front: FrontId, live: LiveRequest) -> None:
    """A front still serves the request. If another one has asked for the same, whichever has started stays."""
    known = parts.requests.get(live.request_id)
    if known is not None and known.phase is Phase.QUEUED and known.last_failure is None:
        refuse_duplicate(parts, known.front, known.request_id)
        forget_request(parts, now_ns, known, DUPLICATE)
    elif known is not None:
        _end_for(parts, front, live.request_id, DUPLICATE)
        return
    is_awaited = live.is_running and parts.rebuild.is_open
    num_choices = max(1, live.num_choices)
    num_expected = expected_output(parts, parts.tenants.of(live.tenant), live.num_prompt_tokens, live.max_tokens)
    request = Request(
        request_id=live.request_id,
        front=front,
        rank=parts.requests.next_rank(),
        num_prompt_tokens=live.num_prompt_tokens,
        max_tokens=live.max_tokens,
        num_choices=num_choices,
        priority=live.priority,
        submitted_ns=now_ns,
        queued_ns=now_ns,
        deadline_ns=None if live.deadline_ms is None else now_ns + live.deadline_ms * NS_PER_MS,
        phase_deadline_ns=None if live.is_running else now_ns + RESUBMIT_TIMEOUT_NS,
        tenant=live.tenant,
        cost_tokens=live.num_prompt_tokens + num_choices * num_expected,
        phase=Phase.RECOVERING if live.is_running else Phase.WAITING_FRONT,
        attempt=live.attempt,
        attempt_floor=parts.requests.last_attempt(live.request_id),
        num_failures=min(live.num_failures, live.attempt),
        num_delivered=live.num_delivered,
        num_unshared=live.num_unshared,
        last_failure=NOT_TAKEN_OVER,
    )
    parts.requests.add(request)
    take_account_over(parts, now_ns, request)
    watch_deadline(parts, request)
    if is_awaited:
        _resolve(parts, now_ns, request.attempt_id)
    elif live.is_running:
        fail_request(parts, now_ns, request, NOT_TAKEN_OVER)


def follow(parts: Parts, now_ns: int, sender: WorkerId, message: WorkerMessage) -> None:
    """What a worker says of a leg that nobody has claimed yet changes what there is to claim."""
    match message:
        case PrefillDone(attempt=attempt, outcome=outcome):
            stage = LegStage.PUSHING if outcome is None else LegStage.FINISHED
        case Committed(attempt=attempt):
            stage = LegStage.RUNNING
        case Finished(attempt=attempt):
            stage = LegStage.FINISHED
        case LegFailed(attempt=attempt):
            stage = LegStage.CLOSING
        case LegReleased(attempt=attempt):
            held = parts.rebuild.held(attempt).get(sender)
            if held is not None and held.stage is not LegStage.FINISHED:
                parts.rebuild.move(sender, attempt, None)
            return
        case _:
            return
    if parts.rebuild.move(sender, attempt, stage):
        _resolve(parts, now_ns, attempt)


# ---- the end of the window ------------------------------------------------------------------------------------


def settle(parts: Parts, now_ns: int) -> None:
    """After every event in the window: stops what nobody will claim, and ends the window once everybody is back."""
    for attempt_id in parts.rebuild.abandoned():
        _stop(parts, now_ns, attempt_id)
    if _is_everybody_back(parts):
        end_window(parts, now_ns)


def on_window_due(parts: Parts, now_ns: int) -> None:
    """The window's time is over, unless the coordinator was away: what was said meanwhile is still to be read."""
    if parts.rebuild.is_late(now_ns):
        parts.timers.set(_TIMER, parts.rebuild.extend(now_ns))
    else:
        end_window(parts, now_ns)


def end_window(parts: Parts, now_ns: int) -> None:
    """What was not taken over is tried again, and what nobody claimed stops."""
    parts.timers.set(_TIMER, None)
    for request in parts.requests.all():
        if request.phase is Phase.RECOVERING:
            _resolve(parts, now_ns, request.attempt_id, is_last=True)
    for request in parts.requests.all():
        if request.phase is Phase.RECOVERING:
            fail_request(parts, now_ns, request, NOT_TAKEN_OVER)
    for attempt_id in parts.rebuild.attempts():
        _stop(parts, now_ns, attempt_id, is_last=True)
    parts.rebuild.close()


def _is_everybody_back(parts: Parts) -> bool:
    """As many workers of each pool, and as many fronts, as the cluster file has."""
    num_by_pool: dict[str, int] = {}
    for worker in parts.workers.all():
        num_by_pool[worker.pool.name] = num_by_pool.get(worker.pool.name, 0) + 1
    pools_are_back = all(num_by_pool.get(pool.name, 0) >= pool.replicas for pool in parts.config.pools)
    return pools_are_back and len(parts.fronts) >= parts.config.front.replicas


# ---- taking over ----------------------------------------------------------------------------------------------


def _resolve(parts: Parts, now_ns: int, attempt_id: AttemptId, *, is_last: bool = False) -> None:
    """Takes the attempt over if its request is known and its legs are. `is_last`: nobody else will come."""
    request = parts.requests.get(attempt_id.request_id)
    if request is None or request.phase is not Phase.RECOVERING or request.attempt_id != attempt_id:
        return
    held = parts.rebuild.held(attempt_id)
    finished = next(((worker, leg) for worker, leg in held.items() if leg.stage is LegStage.FINISHED), None)
    running = next(((worker, leg) for worker, leg in held.items() if leg.stage is LegStage.RUNNING), None)
    pair = _pushing_pair(held)
    if pair is not None:
        _take_over_push(parts, now_ns, request, pair)
    elif finished is not None and (is_last or finished[1].half is Role.DECODE or finished[1].peer is None):
        _take_over_end(parts, now_ns, request, finished[0])
    elif running is not None:
        _take_over_run(parts, now_ns, request, *running)


def _pushing_pair(held: dict[WorkerId, HeldLeg]) -> _PushPair | None:
    """(prefill, decode) of a push that both sides have, or that the first token has made superfluous."""
    prefill_stages = (LegStage.READING, LegStage.PUSHING, LegStage.FINISHED)
    for decode, target in held.items():
        source = None if target.peer is None else held.get(target.peer)
        if (
            target.peer is not None
            and source is not None
            and (target.half, target.stage) == (Role.DECODE, LegStage.RESERVED)
            and source.half is Role.PREFILL
            and source.stage in prefill_stages
            and (source.peer, source.lease_id) == (decode, target.lease_id)
        ):
            return (target.peer, source), (decode, target)
    return None


def _take_over_run(parts: Parts, now_ns: int, request: Request, worker: WorkerId, leg: HeldLeg) -> None:
    """Decode owns the KV, or reads the prompt itself. What prefill may still hold is stopped at the window's end."""
    parts.rebuild.move(worker, leg.attempt, None)
    attempt = _whole_attempt(parts, now_ns, request, worker)
    attempt.decode.state = LegState.ACTIVE
    request.enter(Phase.LOCAL if leg.peer is None else Phase.DECODING)
    watch_deadline(parts, request)


def _take_over_end(parts: Parts, now_ns: int, request: Request, worker: WorkerId) -> None:
    """All is drawn: the worker that drew the last token has what the front still wants, whatever its role."""
    attempt_id = request.attempt_id
    for holder, leg in parts.rebuild.take(attempt_id).items():
        _cancel(parts, holder, leg)
        _give_absent_peer_up(parts, holder, leg)
    attempt = _whole_attempt(parts, now_ns, request, worker)
    attempt.finished_by = Role.DECODE
    request.enter(Phase.FINISHED, now_ns + FINISHED_TIMEOUT_NS)
    release_leg(parts, attempt, attempt.decode)
    watch_deadline(parts, request)


def _take_over_push(parts: Parts, now_ns: int, request: Request, pair: _PushPair) -> None:
    """Both sides of the push are there. If the first token was the last one, decode is not needed."""
    attempt = _open_pair(parts, now_ns, pair, demand_for(parts, request))
    request.enter(Phase.PREFILLING)
    source = pair[0][1]
    if source.stage is LegStage.FINISHED:
        stop_leg(parts, now_ns, attempt, attempt.decode, "the first token ended the request")
        attempt.finished_by = Role.PREFILL
        request.enter(Phase.FINISHED, now_ns + FINISHED_TIMEOUT_NS)
    watch_deadline(parts, request)


def _whole_attempt(parts: Parts, now_ns: int, request: Request, worker_id: WorkerId) -> Attempt:
    """The request's attempt, which needs nothing but this worker. Its leg is PLANNED."""
    demand = demand_for(parts, request)
    leg = Leg(
        attempt_id=request.attempt_id,
        worker=worker_id,
        half=Role.DECODE,
        num_blocks=demand.num_expected_blocks,
        num_sequences=demand.num_sequences,
        num_unread_tokens=0,
    )
    return _open(parts, now_ns, leg, prefill=None, lease_id=parts.next_lease_id())


def _open_pair(parts: Parts, now_ns: int, pair: _PushPair, demand: Demand | None) -> Attempt:
    """The attempt of a push that both sides have, with its leases. `demand`: None if nobody wants it any more."""
    (prefill, source), (decode, target) = pair
    num_unread = demand.num_tokens if demand is not None and source.stage is LegStage.READING else 0
    reading = _held_leg(source, prefill, num_unread_tokens=num_unread)
    reading.state = LegState.ACTIVE
    writing = _held_leg(target, decode)
    if demand is not None:
        writing.num_blocks, writing.num_sequences = demand.num_expected_blocks, demand.num_sequences
    writing.state = LegState.ACTIVE
    parts.rebuild.take(target.attempt)
    attempt = _open(parts, now_ns, writing, reading, lease_id=target.lease_id)
    _lease(parts, now_ns, attempt, Side.RESERVED, target.num_blocks)
    _lease(parts, now_ns, attempt, Side.HELD, source.num_blocks)
    return attempt


def _open(parts: Parts, now_ns: int, decode: Leg, prefill: Leg | None, *, lease_id: int) -> Attempt:
    attempt = Attempt(
        attempt_id=decode.attempt_id,
        lease_id=lease_id,
        placed_ns=now_ns,
        prefill=prefill,
        decode=decode,
        why="taken over from an earlier life of the coordinator",
        committed=prefill is None,
    )
    parts.attempts.add(attempt)
    for leg in attempt.legs:
        worker = parts.workers.get(leg.worker)
        assert worker is not None, "a worker's loss drops what it had said"
        worker.take(now_ns, leg)
    return attempt


def _held_leg(leg: HeldLeg, worker: WorkerId, *, num_unread_tokens: int = 0) -> Leg:
    return Leg(
        attempt_id=leg.attempt,
        worker=worker,
        half=leg.half,
        num_blocks=leg.num_blocks,
        num_sequences=1,
        num_unread_tokens=num_unread_tokens,
    )


def _lease(parts: Parts, now_ns: int, attempt: Attempt, side: Side, num_blocks: int) -> None:
    assert attempt.prefill is not None
    decode, prefill = attempt.decode.worker, attempt.prefill.worker
    holder, peer = (decode, prefill) if side is Side.RESERVED else (prefill, decode)
    parts.leases.open(
        Lease(
            lease_id=attempt.lease_id,
            side=side,
            attempt_id=attempt.attempt_id,
            holder=holder,
            peer=peer,
            num_blocks=num_blocks,
            opened_ns=now_ns,
        )
    )


# ---- stopping what nobody wants -------------------------------------------------------------------------------


def _stop(parts: Parts, now_ns: int, attempt_id: AttemptId, *, is_last: bool = False) -> None:
    """Stops all unclaimed legs of the attempt.

    A reservation whose sender is registered is booked as an attempt and closed like any other: decode frees its blocks
    once the sender has stopped, or at once if it never had a part in it. A push whose other side is not back may have
    to wait for the end of the window, and of that life.
    """
    held = parts.rebuild.held(attempt_id)
    target = next(((w, leg) for w, leg in held.items() if leg.half is Role.DECODE and leg.lease_id), None)
    is_known = parts.attempts.get(attempt_id) is not None
    if target is None or is_known or target[1].peer is None or parts.workers.get(target[1].peer) is None:
        for worker, leg in parts.rebuild.take(attempt_id).items():
            _cancel(parts, worker, leg)
            if is_last:
                _give_absent_peer_up(parts, worker, leg)
            elif _is_peer_absent(parts, leg):
                parts.rebuild.keep(worker, leg)
        return
    peer = target[1].peer
    source = held.get(peer)
    if source is not None and source.peer is not None:  # also where only a write is left that may still land
        attempt = _open_pair(parts, now_ns, ((peer, source), target), None)
    else:
        parts.rebuild.take(attempt_id)
        writing, absent = _held_leg(target[1], target[0]), _held_leg(target[1], peer)
        absent.half, absent.num_blocks = Role.PREFILL, 0
        writing.state = LegState.ACTIVE
        attempt = _open(parts, now_ns, writing, absent, lease_id=target[1].lease_id)
        _lease(parts, now_ns, attempt, Side.RESERVED, target[1].num_blocks)
    close_attempt(parts, now_ns, attempt, UNKNOWN_ATTEMPT)


def _cancel(parts: Parts, worker: WorkerId, leg: HeldLeg) -> None:
    """Nothing needs be said where only tokens are kept: those have a time of their own."""
    if leg.stage is LegStage.FINISHED and leg.peer is None:
        return
    parts.outbox.to_worker(worker, CancelLeg(attempt=leg.attempt, reason=UNKNOWN_ATTEMPT))


def _is_peer_absent(parts: Parts, leg: HeldLeg) -> bool:
    """Whether something is left of a push with a life that is not registered."""
    has_push = leg.half is Role.PREFILL or leg.lease_id > 0
    return has_push and leg.peer is not None and parts.workers.get(leg.peer) is None


def _give_absent_peer_up(parts: Parts, worker: WorkerId, leg: HeldLeg) -> None:
    """Such a life is over, or has stayed away: only its end releases what the worker keeps for their push."""
    if leg.peer is not None and _is_peer_absent(parts, leg):
        parts.workers.lose(leg.peer)
        parts.outbox.to_worker(worker, PeerLost(peer=leg.peer))


# ---- two fronts, one id ---------------------------------------------------------------------------------------


def refuse_duplicate(parts: Parts, front: FrontId, request_id: str) -> None:
    refused = Refused(request_id=request_id, outcome=Outcome.REJECTED_INVALID, reason=DUPLICATE, is_duplicate=True)
    parts.outbox.to_front(front, refused)


def _end_for(parts: Parts, front: FrontId, request_id: str, reason: str) -> None:
    message = EndRequest(epoch=parts.outbox.epoch, request_id=request_id, outcome=Outcome.WORKER_LOST, reason=reason)
    parts.outbox.to_front(front, message)
