"""What workers say of the legs they run, from the reservation to the release.

A message about an attempt that is over, or from a worker without a leg in it, is stale and ignored. One about an
attempt that its request no longer counts on can only release what it held.
"""

from __future__ import annotations

from cluster.core.attempts import Attempt, Leg, LegState
from cluster.core.commands import Prefill
from cluster.core.handlers import fetching
from cluster.core.handlers.ending import (
    end_request,
    fail_attempt,
    is_needed,
    mark_closing,
    release_leg,
    stop_leg,
    watch_deadline,
)
from cluster.core.handlers.placing import count_route, exclude_and_withdraw
from cluster.core.handlers.suspecting import blame_alone, blame_for_step, condemn, on_survived, poison_reason
from cluster.core.ids import AttemptId, Blame, Outcome, Role, Route, WorkerId
from cluster.core.leases import Lease, Side
from cluster.core.limits import FINISHED_TIMEOUT_NS, NS_PER_MS
from cluster.core.messages import (
    GRANTED_BLOCK_BYTES,
    Committed,
    Finished,
    LegFailed,
    LegReleased,
    LegSurvived,
    Placed,
    PrefillDone,
    ReserveGranted,
    ReserveRefused,
)
from cluster.core.parts import Parts
from cluster.core.requests import Failure, Phase, Request
from cluster.core.workers import Worker
from cluster.policy.decision import Cause


def on_reserve_granted(parts: Parts, now_ns: int, sender: WorkerId, message: ReserveGranted) -> None:
    """Decode has reserved: now prefill may start, and the front is told of both."""
    known = _known(parts, sender, message.attempt)
    if known is None:
        return
    attempt, _ = known
    if attempt.num_fetched_blocks:
        fetching.on_granted(parts, now_ns, attempt, message)
        return
    request = _request_of(parts, attempt)
    prefill = attempt.prefill
    if request is None or request.phase is not Phase.RESERVING or prefill is None or prefill.worker == sender:
        return
    prefill_worker = parts.workers.get(prefill.worker)
    decode_worker = parts.workers.get(sender)
    assert prefill_worker is not None and decode_worker is not None, "a worker's loss withdraws the attempt"
    _open_held(parts, now_ns, attempt, prefill, num_blocks=len(message.blocks) // GRANTED_BLOCK_BYTES)
    prefill.state = LegState.ACTIVE
    request.enter(Phase.PREFILLING)
    watch_deadline(parts, request)
    command = Prefill(
        attempt=attempt.attempt_id,
        lease_id=attempt.lease_id,
        destination=decode_worker.hello.ref,
        blocks=message.blocks,
        num_cached_blocks=message.num_cached_blocks,
        ttl_ms=message.ttl_ms,
    )
    parts.outbox.to_worker(prefill.worker, command, body_of=request.request_id)
    placed = Placed(
        epoch=parts.outbox.epoch,
        attempt=attempt.attempt_id,
        prefill=prefill_worker.hello.ref,
        decode=decode_worker.hello.ref,
        queued_ms=(attempt.placed_ns - request.queued_ns) / NS_PER_MS,
        reserved_ms=(now_ns - attempt.placed_ns) / NS_PER_MS,
        route=Route.PUSHED,
        why=attempt.why,
    )
    parts.hand_over.reserved(placed.reserved_ms)
    count_route(parts, Route.PUSHED, Cause.RULE)
    parts.outbox.to_front(request.front, placed)


def on_reserve_refused(parts: Parts, now_ns: int, sender: WorkerId, message: ReserveRefused) -> None:
    """Decode holds nothing. The request is placed again, and does not count this as a failure."""
    known = _known(parts, sender, message.attempt)
    if known is None:
        return
    attempt, leg = known
    if leg.is_released:
        return
    request = _request_of(parts, attempt)
    release_leg(parts, attempt, leg)
    if attempt.num_fetched_blocks:
        fetching.abandon(parts, now_ns, attempt, message.reason)
    if request is not None and request.phase is Phase.RESERVING:
        exclude_and_withdraw(parts, now_ns, request, attempt, f"{sender} cannot reserve: {message.reason}")


def on_prefill_done(parts: Parts, now_ns: int, sender: Worker, message: PrefillDone) -> None:
    """The prompt has been read. If its first token was also the last, decode is not needed."""
    known = _known(parts, sender.id, message.attempt)
    if known is None:
        return
    attempt, leg = known
    if not leg.is_released:
        sender.mark_read(leg)
    attempt.read_ns = now_ns
    request = _request_of(parts, attempt)
    if message.outcome is None or request is None or request.phase is not Phase.PREFILLING:
        return
    stop_leg(parts, now_ns, attempt, attempt.decode, "the first token ended the request")
    _finish(parts, now_ns, request, attempt, Role.PREFILL)


def on_committed(parts: Parts, now_ns: int, sender: WorkerId, message: Committed) -> None:
    """Decode owns the KV: from here on it needs no lease and no prefill worker."""
    known = _known(parts, sender, message.attempt)
    if known is None or known[1].half is not Role.DECODE:
        return
    attempt, _ = known
    if not attempt.committed and attempt.read_ns is not None:
        parts.hand_over.taken_over((now_ns - attempt.read_ns) / NS_PER_MS)
    attempt.committed = True
    parts.leases.close(attempt.lease_id, Side.RESERVED)
    request = _request_of(parts, attempt)
    if request is not None and request.phase is Phase.PREFILLING:
        request.enter(Phase.DECODING)
        watch_deadline(parts, request)


def on_finished(parts: Parts, now_ns: int, sender: WorkerId, message: Finished) -> None:
    """The last token is drawn and the worker has let go of the sequence; the front will say RequestDone."""
    known = _known(parts, sender, message.attempt)
    if known is None or known[1].half is not Role.DECODE:
        return
    attempt, leg = known
    request = _request_of(parts, attempt)
    if not leg.is_released:
        release_leg(parts, attempt, leg)
    if request is not None and request.phase in (Phase.PREFILLING, Phase.DECODING, Phase.LOCAL):
        _finish(parts, now_ns, request, attempt, Role.DECODE)


def on_leg_failed(parts: Parts, now_ns: int, sender: WorkerId, message: LegFailed) -> None:
    """The worker is releasing its part by itself; the other leg must not wait for it."""
    known = _known(parts, sender, message.attempt)
    if known is None:
        return
    attempt, leg = known
    if leg.is_released:
        return
    if leg.state is LegState.ACTIVE:
        mark_closing(parts, now_ns, attempt, leg)
    failure = Failure(message.outcome, f"{sender}: {message.reason}")
    if attempt.num_fetched_blocks:
        fetching.abandon(parts, now_ns, attempt, message.reason)
        return
    if _condemn_blamed(parts, now_ns, attempt, leg, message.blame, failure.reason):
        return
    request = _request_of(parts, attempt)
    if request is None or not is_needed(request, attempt, leg):
        return
    if not message.retryable:
        end_request(parts, now_ns, request, failure.outcome, failure.reason)
    elif request.phase is Phase.RESERVING:
        exclude_and_withdraw(parts, now_ns, request, attempt, failure.reason)
    else:
        fail_attempt(parts, now_ns, request, attempt, failure)


def on_leg_survived(parts: Parts, sender: WorkerId, message: LegSurvived) -> None:
    """An attempt on trial has come through its first steps at decode."""
    known = _known(parts, sender, message.attempt)
    request = None if known is None else _request_of(parts, known[0])
    if known is not None and request is not None and known[1].half is Role.DECODE:
        on_survived(request, known[0])


def on_leg_released(parts: Parts, now_ns: int, sender: WorkerId, message: LegReleased) -> None:
    """The worker holds nothing of the attempt. If it was to go on with it, the attempt has failed."""
    known = _known(parts, sender, message.attempt)
    if known is None or known[1].is_released:
        return
    attempt, leg = known
    request = _request_of(parts, attempt)
    is_working = leg.state is LegState.ACTIVE and (leg.half is Role.DECODE or leg.num_unread_tokens > 0)
    release_leg(parts, attempt, leg)
    if attempt.num_fetched_blocks and not attempt.committed and leg.half is Role.DECODE:
        fetching.abandon(parts, now_ns, attempt, f"{sender} holds nothing of it any more")
    if request is None or not is_working or not is_needed(request, attempt, leg):
        return
    failure = Failure(Outcome.INTERNAL, f"{sender} let go of {attempt.attempt_id} unasked")
    if request.phase is Phase.RESERVING:
        exclude_and_withdraw(parts, now_ns, request, attempt, failure.reason)
    else:
        fail_attempt(parts, now_ns, request, attempt, failure)


def _condemn_blamed(parts: Parts, now_ns: int, attempt: Attempt, leg: Leg, blame: Blame, reason: str) -> bool:
    """Ends the request if it is certain by now that the engine's failure is its work.

    The other side of a push may have told of the failure first, so the attempt need not be current any more.
    """
    request = parts.requests.get(attempt.attempt_id.request_id)
    if request is None or blame is Blame.NOBODY:
        return False
    if blame is Blame.SHARED:
        is_certain, why = blame_for_step(request, attempt, leg), poison_reason(request, reason)
    else:
        is_certain = blame_alone(request, leg)
        why = f"nothing usable was computed for this request in {request.num_own_failures} attempts: {reason}"
    if is_certain:
        condemn(parts, now_ns, request, why)
    return is_certain


def _known(parts: Parts, sender: WorkerId, attempt_id: AttemptId) -> tuple[Attempt, Leg] | None:
    """The attempt and the sender's leg in it, None if there is none."""
    attempt = parts.attempts.get(attempt_id)
    leg = None if attempt is None else attempt.leg_on(sender)
    return None if attempt is None or leg is None else (attempt, leg)


def _request_of(parts: Parts, attempt: Attempt) -> Request | None:
    """The request that counts on this attempt, None if none does any more."""
    return parts.requests.get(attempt.attempt_id.request_id) if attempt.is_current else None


def _finish(parts: Parts, now_ns: int, request: Request, attempt: Attempt, by: Role) -> None:
    attempt.finished_by = by
    request.enter(Phase.FINISHED, now_ns + FINISHED_TIMEOUT_NS)
    watch_deadline(parts, request)


def _open_held(parts: Parts, now_ns: int, attempt: Attempt, prefill: Leg, num_blocks: int) -> None:
    """Prefill holds its source blocks for as long as the push may read them."""
    reserved = parts.leases.get(attempt.lease_id, Side.RESERVED)
    if reserved is not None:
        reserved.num_blocks = num_blocks
    parts.leases.open(
        Lease(
            lease_id=attempt.lease_id,
            side=Side.HELD,
            attempt_id=attempt.attempt_id,
            holder=prefill.worker,
            peer=attempt.decode.worker,
            num_blocks=num_blocks,
            opened_ns=now_ns,
        )
    )
