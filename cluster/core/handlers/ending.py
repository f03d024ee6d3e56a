"""Ends: of a leg, of an attempt, of a request. Everything that stops early passes through here."""

from __future__ import annotations

from cluster.core.attempts import Attempt, Leg, LegState
from cluster.core.commands import CancelLeg, SenderStopped
from cluster.core.handlers.accounting import close_account, uncharge
from cluster.core.ids import Outcome, RefusalCause, Role, WorkerId
from cluster.core.lane import QueueEntry
from cluster.core.leases import Side
from cluster.core.limits import RELEASE_TIMEOUT_NS, RESUBMIT_TIMEOUT_NS
from cluster.core.messages import AttemptFailed, EndRequest, Refused
from cluster.core.parts import Parts
from cluster.core.requests import PLACED_PHASES, Failure, Phase, Request
from cluster.core.timers import TimerKey, TimerKind


def watch_deadline(parts: Parts, request: Request) -> None:
    """To be called whenever the request's phase has changed."""
    parts.timers.set(TimerKey(TimerKind.REQUEST, request.request_id), request.due_ns)


def enqueue(parts: Parts, request: Request) -> None:
    """The request, in phase QUEUED, takes its place in the queue."""
    uncharge(parts, request)
    entry = QueueEntry(
        neg_priority=-request.priority,
        rank=request.rank,
        request_id=request.request_id,
        tenant=request.tenant,
        num_tokens=request.num_read_tokens,
        cost_tokens=request.cost_tokens,
        is_fixed=request.last_failure is not None,
    )
    parts.queue.push(entry, parts.tenants.of(request.tenant).weight)
    watch_deadline(parts, request)


# ---- legs -----------------------------------------------------------------------------------------------------


def stop_leg(parts: Parts, now_ns: int, attempt: Attempt, leg: Leg, reason: str) -> None:
    """The leg is to stop, in whatever state it is. Does nothing if it is stopping or released."""
    if leg.state is LegState.PLANNED:
        release_leg(parts, attempt, leg)
    elif leg.state is LegState.ACTIVE:
        parts.outbox.to_worker(leg.worker, CancelLeg(attempt=leg.attempt_id, reason=reason))
        mark_closing(parts, now_ns, attempt, leg)


def mark_closing(parts: Parts, now_ns: int, attempt: Attempt, leg: Leg) -> None:
    """The worker is stopping the leg and will say LegReleased, within a named time."""
    assert leg.state is LegState.ACTIVE
    worker = parts.workers.get(leg.worker)
    assert worker is not None, "a worker's loss releases its legs"
    leg.was_computed = attempt.is_computed(leg)
    leg.state = LegState.CLOSING
    worker.mark_read(leg)
    parts.timers.set(attempt_timer(attempt), now_ns + RELEASE_TIMEOUT_NS)
    _tell_if_sender_stopped(parts, attempt)


def release_leg(parts: Parts, attempt: Attempt, leg: Leg) -> None:
    """The worker holds nothing of the leg any more, or was never told of it."""
    worker = parts.workers.get(leg.worker)
    assert worker is not None, "a worker's loss releases its legs"
    worker.release(leg)
    if leg.expectation is not None:
        parts.prefixes.expect_no_more(leg.worker, leg.expectation)
        leg.expectation = None
    parts.leases.close(attempt.lease_id, Side.HELD if leg.half is Role.PREFILL else Side.RESERVED)
    if leg.half is Role.PREFILL:
        _tell_if_sender_stopped(parts, attempt)
    retire_if_over(parts, attempt)


def _tell_if_sender_stopped(parts: Parts, attempt: Attempt) -> None:
    """Decode may free what a push could have written to once the sender has acknowledged that it stopped.

    Reached when either leg changes, so it says so once. A sender that is lost has acknowledged nothing: PeerLost.
    """
    prefill, decode = attempt.prefill, attempt.decode
    if prefill is None or attempt.committed:
        return
    if prefill.state is LegState.RELEASED and decode.state is LegState.CLOSING:
        parts.outbox.to_worker(decode.worker, SenderStopped(attempt=attempt.attempt_id))


# ---- attempts -------------------------------------------------------------------------------------------------


def attempt_timer(attempt: Attempt) -> TimerKey:
    return TimerKey(TimerKind.ATTEMPT, attempt.attempt_id.request_id, attempt.attempt_id.attempt)


def close_attempt(parts: Parts, now_ns: int, attempt: Attempt, reason: str) -> None:
    """Nobody counts on the attempt any more: its legs stop, the sending one first."""
    assert attempt.is_current
    for leg in attempt.legs:
        stop_leg(parts, now_ns, attempt, leg, reason)
    attempt.is_current = False
    retire_if_over(parts, attempt)


def retire_if_over(parts: Parts, attempt: Attempt) -> None:
    """Forgets an attempt that nobody counts on and no worker holds anything of."""
    if not attempt.is_over:
        return
    parts.attempts.remove(attempt.attempt_id)
    parts.timers.set(attempt_timer(attempt), None)
    for leg in attempt.legs:
        worker = parts.workers.get(leg.worker)
        if worker is not None:
            del worker.legs[attempt.attempt_id]


def current_attempt(parts: Parts, request: Request) -> Attempt | None:
    """The attempt the request counts on, None while it has none."""
    if request.phase not in PLACED_PHASES:
        return None
    attempt = parts.attempts.get(request.attempt_id)
    assert attempt is not None and attempt.is_current
    return attempt


def is_needed(request: Request, attempt: Attempt, leg: Leg) -> bool:
    """Whether the request, which counts on the attempt, cannot do without what this leg's worker still has to give.

    After the last token was drawn that is the worker that drew it: the front may not have all tokens yet.
    """
    if request.phase is Phase.FINISHED:
        return leg.half is attempt.finished_by
    return leg.half is Role.DECODE or request.phase is not Phase.DECODING


def fail_attempt(parts: Parts, now_ns: int, request: Request, attempt: Attempt, failure: Failure) -> None:
    """The current attempt has failed after the front heard of it: the next one, or the end of the request."""
    close_attempt(parts, now_ns, attempt, failure.reason)
    fail_request(parts, now_ns, request, failure)


def fail_request(parts: Parts, now_ns: int, request: Request, failure: Failure) -> None:
    """Its latest attempt has failed, and has been closed."""
    request.num_failures += 1
    request.last_failure = failure
    request.source = None
    request.enter(Phase.WAITING_FRONT, now_ns + RESUBMIT_TIMEOUT_NS)
    if request.num_failures >= parts.config.coordinator.max_attempts:
        reason = f"attempt {request.num_failures} of {request.num_failures} failed: {failure.reason}"
        end_request(parts, now_ns, request, failure.outcome, reason)
        return
    message = AttemptFailed(epoch=parts.outbox.epoch, attempt=request.attempt_id, reason=failure.reason)
    parts.outbox.to_front(request.front, message)
    watch_deadline(parts, request)


def move_on(
    parts: Parts,
    now_ns: int,
    request: Request,
    attempt: Attempt,
    reason: str,
    *,
    source: WorkerId | None = None,
) -> None:
    """The request is to go on elsewhere, which is nobody's failure. `source`: a worker that then has its KV."""
    close_attempt(parts, now_ns, attempt, reason)
    request.source = source
    # Should it find no other place, it has to end somehow.
    request.last_failure = request.last_failure or Failure(Outcome.WORKER_LOST, reason)
    request.enter(Phase.WAITING_FRONT, now_ns + RESUBMIT_TIMEOUT_NS)
    message = AttemptFailed(epoch=parts.outbox.epoch, attempt=request.attempt_id, reason=reason, is_planned=True)
    parts.outbox.to_front(request.front, message)
    watch_deadline(parts, request)


def withdraw_attempt(parts: Parts, now_ns: int, request: Request, attempt: Attempt, reason: str) -> None:
    """The current attempt ends before the front has heard of it: back into the queue, with the deadline it had."""
    assert request.phase is Phase.RESERVING
    close_attempt(parts, now_ns, attempt, reason)
    request.enter(Phase.QUEUED, request.wait_until_ns(parts.queue_timeout_ns))
    request.waiting_for = reason
    enqueue(parts, request)


# ---- requests -------------------------------------------------------------------------------------------------


def end_request(parts: Parts, now_ns: int, request: Request, outcome: Outcome, reason: str) -> None:
    """The coordinator ends the request: its front is told, nothing of it is kept."""
    message = EndRequest(epoch=parts.outbox.epoch, request_id=request.request_id, outcome=outcome, reason=reason)
    parts.outbox.to_front(request.front, message)
    forget_request(parts, now_ns, request, reason)


def refuse_waiting(
    parts: Parts, now_ns: int, request: Request, cause: RefusalCause, reason: str, retry_after_ms: int
) -> None:
    """It waits for its first place, and does so in vain."""
    parts.tenants.refuse(parts.tenants.of(request.tenant), cause)
    refused = Refused(
        request_id=request.request_id,
        outcome=Outcome.REJECTED_OVERLOAD,
        reason=reason,
        retry_after_ms=retry_after_ms,
        cause=cause,
    )
    parts.outbox.to_front(request.front, refused)
    forget_request(parts, now_ns, request, reason)


def forget_request(parts: Parts, now_ns: int, request: Request, reason: str) -> None:
    """Whatever phase it is in: its legs stop, and the request and its body are forgotten."""
    attempt = current_attempt(parts, request)
    if attempt is not None:
        close_attempt(parts, now_ns, attempt, reason)
    close_account(parts, now_ns, request)
    if request.phase is Phase.QUEUED:
        parts.queue.remove(request.request_id)
    elif request.phase is Phase.RECOVERING:
        parts.rebuild.abandon(request.attempt_id)
    parts.requests.remove(request.request_id)
    for kind in (TimerKind.REQUEST, TimerKind.RETRY):
        parts.timers.set(TimerKey(kind, request.request_id), None)
    parts.outbox.drop_body(request.request_id)
