"""What happens when nothing happens: every wait has a deadline."""

from __future__ import annotations

from cluster.core.handlers import draining
from cluster.core.handlers.admitting import retry_after_all_ms
from cluster.core.handlers.ending import (
    current_attempt,
    end_request,
    fail_attempt,
    refuse_waiting,
    watch_deadline,
)
from cluster.core.handlers.placing import exclude_and_withdraw
from cluster.core.handlers.rebuilding import on_window_due
from cluster.core.handlers.workers import lose_worker, on_silence, on_unreleased
from cluster.core.ids import AttemptId, Outcome, RefusalCause, WorkerId
from cluster.core.limits import MAX_LATE_TICK_NS, NS_PER_MS
from cluster.core.parts import Parts
from cluster.core.requests import Failure, Phase, Request
from cluster.core.timers import TimerKey, TimerKind
from cluster.policy.admission import limit_text

_AWAITING_WORD = (Phase.RESERVING, Phase.WAITING_FRONT, Phase.FINISHED)
"""Phases whose own deadline is a worker's, or the front's, for its answer."""


def on_tick(parts: Parts, now_ns: int) -> None:
    """Handles every deadline that has come, in the order of the deadlines."""
    while (due_ns := parts.timers.next_deadline_ns()) is not None and due_ns <= now_ns:
        key = parts.timers.pop_due(now_ns)
        assert key is not None
        # Where that is noticed late the coordinator itself was away (stopped, or its host slept).
        if now_ns - due_ns <= MAX_LATE_TICK_NS or not _hears_first(parts, now_ns, key):
            _on_due(parts, now_ns, key)


def _hears_first(parts: Parts, now_ns: int, key: TimerKey) -> bool:
    """If somebody was to say something by that deadline: sets another one, since what was said while the coordinator
    was away is still to be read. (The deadlines of silent workers and of the rebuild window see to it themselves.)"""
    until_ns = now_ns + parts.heartbeat_timeout_ns
    if key.kind is TimerKind.ATTEMPT or (key.kind is TimerKind.DRAIN and draining.is_word_awaited(parts, key.name)):
        parts.timers.set(key, until_ns)
        return True
    if key.kind is not TimerKind.REQUEST:
        return False
    request = parts.requests.get(key.name)
    assert request is not None, "a forgotten request clears its timer"
    is_deadline = (
        request.phase is not Phase.FINISHED and request.deadline_ns is not None and request.deadline_ns <= now_ns
    )
    if is_deadline or request.phase not in _AWAITING_WORD:
        return False
    request.phase_deadline_ns = until_ns
    watch_deadline(parts, request)
    return True


def _on_due(parts: Parts, now_ns: int, key: TimerKey) -> None:
    match key.kind:
        case TimerKind.WORKER:
            on_silence(parts, now_ns, WorkerId(key.name, key.number))
        case TimerKind.ATTEMPT:
            on_unreleased(parts, now_ns, AttemptId(key.name, key.number))
        case TimerKind.REQUEST:
            request = parts.requests.get(key.name)
            assert request is not None, "a forgotten request clears its timer"
            _on_request_due(parts, now_ns, request)
        case TimerKind.REBUILD:
            on_window_due(parts, now_ns)
        case TimerKind.DRAIN:
            hung = draining.on_due(parts, now_ns, key.name)
            if hung is not None:
                lose_worker(parts, now_ns, hung, "it was told to leave and did not")
        case TimerKind.RETRY:
            pass  # An exclusion has ended; placement, which follows every event, sees to it.


def _on_request_due(parts: Parts, now_ns: int, request: Request) -> None:
    if request.phase is Phase.FINISHED:
        _on_finished_timeout(parts, now_ns, request)
    elif request.deadline_ns is not None and request.deadline_ns <= now_ns:
        end_request(parts, now_ns, request, Outcome.DEADLINE_EXCEEDED, _deadline_reason(request))
    elif request.phase is Phase.QUEUED:
        _on_queue_timeout(parts, now_ns, request)
    elif request.phase is Phase.RESERVING:
        _on_reserve_timeout(parts, now_ns, request)
    else:
        assert request.phase is Phase.WAITING_FRONT, f"{request.phase.name} has no deadline of its own"
        end_request(parts, now_ns, request, Outcome.INTERNAL, "its front did not answer a failed attempt")


def _on_queue_timeout(parts: Parts, now_ns: int, request: Request) -> None:
    """Before the first attempt that counts, this is a refusal; after one, the end of a started answer."""
    waited_ms = (now_ns - request.queued_ns) // NS_PER_MS
    reason = f"no place in {waited_ms} ms: {request.waiting_for or 'others wait before it'}"
    if request.last_failure is not None:
        reason = f"{reason}; before that, {request.last_failure.reason}"
        end_request(parts, now_ns, request, request.last_failure.outcome, reason)
        return
    after_ms = retry_after_all_ms(parts)
    start_by = request.start_by
    if start_by is None or now_ns < start_by.due_ns:
        refuse_waiting(parts, now_ns, request, RefusalCause.NO_PLACE, reason, after_ms)
        return
    reason = f"{reason}; {limit_text(start_by.cause, start_by.limit_ms)}, which cannot be met any more"
    refuse_waiting(parts, now_ns, request, start_by.cause, reason, after_ms)


def _on_finished_timeout(parts: Parts, now_ns: int, request: Request) -> None:
    """The last tokens have not reached the front, or its word has not reached us: it answers either way."""
    attempt = current_attempt(parts, request)
    assert attempt is not None
    failure = Failure(Outcome.WORKER_LOST, "the last tokens did not reach the front")
    fail_attempt(parts, now_ns, request, attempt, failure)


def _on_reserve_timeout(parts: Parts, now_ns: int, request: Request) -> None:
    attempt = current_attempt(parts, request)
    assert attempt is not None
    exclude_and_withdraw(parts, now_ns, request, attempt, f"{attempt.decode.worker} did not answer a reservation")
    watch_deadline(parts, request)


def _deadline_reason(request: Request) -> str:
    return f"the client's deadline passed while the request was {request.phase.value}"
