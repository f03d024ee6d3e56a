"""Requests that end the workers that compute them: found among those that were computed beside them, and ended.

Whoever is computed on a worker when it dies is suspected, since any of them may be the cause. A suspect's next attempt
is a trial: it is placed where nothing is computed that has not come through its own first steps, and until it has read
its input, and decode has drawn a few tokens of it, nobody else is placed there. A worker that dies in a trial convicts
the suspect, and nobody else. A suspect that comes through it is suspected no more. docs/decisions/0012 says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cluster.core.attempts import Attempt, Leg, LegState
from cluster.core.handlers.ending import end_request
from cluster.core.ids import Outcome, Role, WorkerId
from cluster.core.limits import MAX_APART_NS, MAX_OWN_FAILURES, MAX_SUSPICIONS, MAX_TRIAL_NS, MAX_UNCLEAR_NS
from cluster.core.parts import Parts
from cluster.core.requests import Request
from cluster.core.timers import TimerKey, TimerKind
from cluster.core.trials import Trial
from cluster.core.workers import Worker
from cluster.policy.costs import WorkerLike
from cluster.policy.placement import Candidates, Wait

_UNTOLD_OR_ACTIVE = (LegState.PLANNED, LegState.ACTIVE)


# ---- what has happened ----------------------------------------------------------------------------------------


def culprit_of_loss(parts: Parts, worker: Worker, *, may_be_away: bool) -> Request | None:
    """The worker is lost, and its legs are as they were. Returns the request that this convicts; if there is none,
    whoever was computed there is suspected.

    `may_be_away`: all that is known is that nobody hears it. Such a worker may have been stopped before it was given
    the request; it convicts only if it was heard since.
    """
    parts.trials.close(worker.id)
    if worker.is_leaving:
        return None  # it was asked to end
    computed = []
    for attempt_id, leg in worker.legs.items():
        attempt, request = parts.attempts.get(attempt_id), parts.requests.get(attempt_id.request_id)
        assert attempt is not None, "a retired attempt has no legs"
        # That the other side of its push has failed is sometimes heard before that the worker has died.
        is_closing = leg.state is LegState.CLOSING and leg.was_computed
        if request is not None and (is_closing or (attempt.is_current and attempt.is_computed(leg))):
            computed.append((request, attempt, leg))
    for request, attempt, leg in computed:
        if _convicts(request, attempt) and not (may_be_away and leg.unreported):
            _suspect(request, worker.id)
            return request
    for request, _, _ in computed:
        _suspect(request, worker.id)
    return None


def blame_for_step(request: Request, attempt: Attempt, leg: Leg) -> bool:
    """The engine failed in a step that the request was in. Whether that convicts it."""
    _suspect(request, leg.worker)
    return _convicts(request, attempt)


def blame_alone(request: Request, leg: Leg) -> bool:
    """The engine computed nothing usable for this request alone. Whether it is not to be tried again.

    It is tried elsewhere once, since the worker's memory may be at fault.
    """
    request.num_own_failures += 1
    request.avoided = leg.worker
    return request.num_own_failures >= MAX_OWN_FAILURES


def condemn(parts: Parts, now_ns: int, request: Request, reason: str) -> None:
    """The request is ended for what it does to workers, and operators are told."""
    parts.trials.num_condemned += 1
    parts.outbox.report_poison(request.request_id, reason)
    end_request(parts, now_ns, request, Outcome.INTERNAL, reason)


def poison_reason(request: Request, reason: str) -> str:
    """`reason`: of the last worker's end."""
    workers = ", ".join(str(worker) for worker in request.suspicions)
    return f"workers died or failed while they computed this request ({workers}), the last of them: {reason}"


def on_survived(request: Request, attempt: Attempt) -> None:
    """Decode has drawn a few tokens and lives: the request is not what ended the workers before."""
    attempt.has_survived = True
    request.suspicions = ()
    request.apart_until_ns = None


# ---- where it may be placed -----------------------------------------------------------------------------------


def keep_apart(parts: Parts, now_ns: int, request: Request, candidates: Candidates) -> Candidates | Wait:
    """Of the candidates those that the request may be placed on as far as trials are concerned, or why it waits.

    Newcomers keep away from workers with a trial; these last for MAX_TRIAL_NS at most. A suspect waits for workers for
    itself, for MAX_APART_NS at most; after that it is placed in company, and what happens there convicts nobody.
    """
    if _is_unclear(parts, request) and _may_wait(parts, now_ns, request):
        return Wait(reason="it is unclear what has become of the worker that computed it")
    if request.avoided is not None:
        elsewhere = _narrow(candidates, lambda worker: worker.id != request.avoided)
        candidates = candidates if isinstance(elsewhere, Wait) else elsewhere
    if not request.suspicions:
        if not parts.trials:
            return candidates
        return _narrow(candidates, lambda worker: _trial_on(parts, now_ns, worker.id) is None)
    apart = _narrow(candidates, lambda worker: _is_free(parts, now_ns, worker.id))
    return candidates if isinstance(apart, Wait) and not _may_wait(parts, now_ns, request) else apart


def on_placed(parts: Parts, now_ns: int, request: Request, attempt: Attempt) -> None:
    """To be called before the workers are given its legs: a suspect's trial begins, that of another ends early."""
    if not request.suspicions and not parts.trials:
        request.apart_until_ns = None
        return
    is_alone = bool(request.suspicions) and all(_is_free(parts, now_ns, leg.worker) for leg in attempt.legs)
    for leg in attempt.legs:
        disturbed = parts.trials.close(leg.worker)
        other = None if disturbed is None else parts.attempts.get(disturbed.attempt_id)
        if other is not None:
            other.is_alone = False
    request.apart_until_ns = None
    if not request.suspicions:
        return
    attempt.is_trial, attempt.is_alone = True, is_alone
    beside = "alone" if is_alone else "in company"
    attempt.why = f"{attempt.why}; on trial {beside}, after the end of {', '.join(map(str, request.suspicions))}"
    for leg in attempt.legs:
        parts.trials.open(leg.worker, Trial(attempt.attempt_id, now_ns + MAX_TRIAL_NS))


# ---- inside ---------------------------------------------------------------------------------------------------


def _convicts(request: Request, attempt: Attempt) -> bool:
    """Whether the attempt's failure, by the worker that computed it, is the request's own work for certain."""
    return attempt.is_alone and not attempt.has_survived and bool(request.suspicions)


def _suspect(request: Request, worker: WorkerId) -> None:
    request.suspicions = (*request.suspicions, worker)[-MAX_SUSPICIONS:]
    request.apart_until_ns = None


def _is_unclear(parts: Parts, request: Request) -> bool:
    """Whether the last attempt has failed, as the other side of its push said, while a worker that may have died of it
    has not yet said that it lives."""
    failure = request.last_failure
    if failure is None or failure.outcome is not Outcome.TRANSFER_FAILED:
        return False
    last = parts.attempts.get(request.attempt_id)
    if last is None or last.prefill is None:
        return False
    return last.prefill.state is LegState.CLOSING and last.prefill.was_computed


def _may_wait(parts: Parts, now_ns: int, request: Request) -> bool:
    """Whether the request, which is at the head of the queue, may go on waiting. If so, it will be looked at again."""
    if request.apart_until_ns is None:
        request.apart_until_ns = now_ns + (MAX_APART_NS if request.suspicions else MAX_UNCLEAR_NS)
    if now_ns >= request.apart_until_ns:
        return False
    parts.timers.set(TimerKey(TimerKind.RETRY, request.request_id), request.apart_until_ns)
    return True


def _trial_on(parts: Parts, now_ns: int, worker: WorkerId) -> Trial | None:
    """The trial that the worker is kept to; one that is over is forgotten, one that only takes too long is not."""
    trial = parts.trials.get(worker)
    if trial is None:
        return None
    attempt = parts.attempts.get(trial.attempt_id)
    leg = None if attempt is None else attempt.leg_on(worker)
    if attempt is None or leg is None or not _is_tried(attempt, leg):
        parts.trials.close(worker)
        return None
    return trial if now_ns < trial.until_ns else None


def _is_tried(attempt: Attempt, leg: Leg) -> bool:
    if not attempt.is_current or attempt.has_survived or leg.state not in _UNTOLD_OR_ACTIVE:
        return False
    return leg.half is Role.DECODE or leg.num_unread_tokens > 0


def _is_free(parts: Parts, now_ns: int, worker_id: WorkerId) -> bool:
    """Whether nothing is, or will be, computed on the worker that may end it as well as a suspect may."""
    worker = parts.workers.get(worker_id)
    assert worker is not None, "placement chooses among registered workers"
    if _trial_on(parts, now_ns, worker_id) is not None:
        return False
    return not any(_is_untried(parts, worker, leg) for leg in worker.legs.values())


def _is_untried(parts: Parts, worker: Worker, leg: Leg) -> bool:
    """Whether it has still to be read there, or will join those that decode there."""
    attempt = parts.attempts.get(leg.attempt_id)
    if attempt is None or not attempt.is_current or leg.state not in _UNTOLD_OR_ACTIVE:
        return False
    if leg.half is Role.PREFILL:
        return leg.num_unread_tokens > 0
    if attempt.is_trial:
        return not attempt.has_survived
    if attempt.prefill is not None:
        return not attempt.committed
    # Of a prompt that decode reads itself the coordinator hears only that nothing is left to read there.
    return leg.num_unread_tokens > 0 and (leg.unreported or worker.load.waiting_prefill_tokens > 0)


def _narrow(candidates: Candidates, admits: Callable[[WorkerLike], bool]) -> Candidates | Wait:
    """Those that it admits. Where none of a role is left, the request waits: its absence would mean something else."""
    prefill = tuple(worker for worker in candidates.prefill if admits(worker))
    decode = tuple(worker for worker in candidates.decode if admits(worker))
    if (candidates.prefill and not prefill) or (candidates.decode and not decode):
        return Wait(reason="a request that may be what ended a worker is kept apart from others")
    return replace(candidates, prefill=prefill, decode=decode)
