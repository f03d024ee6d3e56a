"""What fronts say: requests come, are cancelled, go on after a failure, and are done."""

from __future__ import annotations

from cluster.core.handlers.ending import current_attempt, enqueue, fail_attempt, fail_request, forget_request
from cluster.core.handlers.rebuilding import on_announced, on_earlier_life, refuse_duplicate
from cluster.core.ids import FrontId, Outcome, Role
from cluster.core.limits import MAX_LIVE_REQUESTS, NS_PER_MS
from cluster.core.messages import (
    BLOCK_HASH_BYTES,
    CancelRequest,
    EndRequest,
    FrontHello,
    FrontWelcome,
    Refused,
    RequestDone,
    Resubmit,
    StreamLost,
    Submit,
)
from cluster.core.parts import Parts
from cluster.core.requests import Failure, Phase, Request
from cluster.policy.admission import Arrival, Refuse, Situation, admit
from cluster.policy.candidates import candidates_of


def on_front_hello(parts: Parts, now_ns: int, front: FrontId, message: FrontHello) -> None:
    """A front connects. Any earlier stream of it is over, and with it the requests that came over it."""
    assert message.front == front, "the driver names the front by its hello"
    present = parts.fronts.get(front.name)
    if present is not None and present.incarnation > front.incarnation:
        return
    if present is not None:
        on_front_gone(parts, now_ns, present)
    parts.fronts[front.name] = front
    if message.epoch and message.epoch != parts.outbox.epoch:
        parts.outbox.raise_epoch(message.epoch + 1)
        on_earlier_life(parts, now_ns)
    parts.outbox.to_front(front, FrontWelcome(epoch=parts.outbox.epoch))
    for live in message.live:
        on_announced(parts, now_ns, front, live)


def on_front_gone(parts: Parts, now_ns: int, front: FrontId) -> None:
    """Its clients are gone: all its requests are cancelled."""
    if parts.fronts.get(front.name) == front:
        del parts.fronts[front.name]
    for request in parts.requests.of_front(front):
        forget_request(parts, now_ns, request, f"{front} is gone")


def on_submit(parts: Parts, now_ns: int, front: FrontId, message: Submit) -> None:
    """A new request waits for a place or is refused; one that is known already is left alone."""
    known = parts.requests.get(message.request_id)
    if known is not None:
        if known.front != front:
            refuse_duplicate(parts, front, message.request_id)
        return
    decision = admit(_arrival(message), situation(parts))
    if isinstance(decision, Refuse):
        refused = Refused(
            request_id=message.request_id,
            outcome=decision.outcome,
            reason=decision.reason,
            retry_after_ms=decision.retry_after_ms,
        )
        parts.outbox.to_front(front, refused)
        parts.outbox.drop_body(message.request_id)
        return
    max_chain_bytes = (message.num_prompt_tokens - 1) // parts.config.kv.block_size * BLOCK_HASH_BYTES
    request = Request(
        request_id=message.request_id,
        front=front,
        rank=parts.requests.next_rank(),
        num_prompt_tokens=message.num_prompt_tokens,
        max_tokens=message.max_tokens,
        num_choices=message.num_choices,
        priority=message.priority,
        submitted_ns=now_ns,
        queued_ns=now_ns,
        deadline_ns=None if message.deadline_ms is None else now_ns + message.deadline_ms * NS_PER_MS,
        phase_deadline_ns=now_ns + parts.queue_timeout_ns,
        attempt_floor=max(message.attempt_floor, parts.requests.last_attempt(message.request_id)),
        chain=message.block_hashes[:max_chain_bytes],
    )
    parts.requests.add(request)
    enqueue(parts, request)


def on_cancel(parts: Parts, now_ns: int, front: FrontId, message: CancelRequest) -> None:
    request = _request_of(parts, front, message.request_id)
    if request is not None:
        forget_request(parts, now_ns, request, f"{message.outcome.value}: {message.reason}")


def on_request_done(parts: Parts, now_ns: int, front: FrontId, message: RequestDone) -> None:
    request = _request_of(parts, front, message.request_id)
    if request is not None:
        forget_request(parts, now_ns, request, f"done: {message.outcome.value}")


def on_resubmit(parts: Parts, now_ns: int, front: FrontId, message: Resubmit) -> None:
    """The request goes on after the tokens its client has: back into the queue, before all admitted after it."""
    request = _request_of(parts, front, message.request_id)
    if request is None:
        if parts.requests.get(message.request_id) is None:
            _end_unknown(parts, front, message.request_id)
        return
    if request.phase is not Phase.WAITING_FRONT or message.failed_attempt != request.attempt:
        return
    request.attempt_floor = max(request.attempt_floor, message.attempt_floor)
    request.num_delivered = message.num_delivered
    request.num_choices = max(1, message.num_choices)
    request.num_unshared = message.num_unshared
    request.queued_ns = now_ns
    request.enter(Phase.QUEUED, now_ns + parts.queue_timeout_ns)
    enqueue(parts, request)


def on_stream_lost(parts: Parts, now_ns: int, front: FrontId, message: StreamLost) -> None:
    """Tokens of a worker do not reach the front. That ends the attempt, not the worker, which may serve others."""
    request = _request_of(parts, front, message.attempt.request_id)
    failure = Failure(Outcome.WORKER_LOST, f"{front} cannot reach {message.worker}: {message.reason}")
    if request is not None and request.phase is Phase.RECOVERING and request.attempt_id == message.attempt:
        parts.rebuild.abandon(message.attempt)
        fail_request(parts, now_ns, request, failure)
        return
    attempt = None if request is None else current_attempt(parts, request)
    if request is None or attempt is None or attempt.attempt_id != message.attempt:
        return
    if request.phase is Phase.RESERVING or attempt.leg_on(message.worker) is None:
        return
    fail_attempt(parts, now_ns, request, attempt, failure)


def situation(parts: Parts) -> Situation:
    """The cluster as admission sees it: of the workers that read prompts, a few."""
    readers = parts.workers.with_role(Role.PREFILL) or parts.workers.with_role(Role.DECODE)
    lengths = (parts.workers.max_model_tokens, parts.config.model.max_model_tokens)
    return Situation(
        num_queued=len(parts.queue),
        num_queued_tokens=parts.queue.num_tokens,
        queue_limit=parts.queue.limit,
        num_live=len(parts.requests),
        max_live=MAX_LIVE_REQUESTS,
        max_model_tokens=min((length for length in lengths if length is not None), default=None),
        max_prompt_blocks=parts.workers.max_decode_blocks,
        block_size=parts.config.kv.block_size,
        num_readers=len(readers),
        readers=candidates_of(readers, (), parts.next_seed()),
    )


def _arrival(message: Submit) -> Arrival:
    return Arrival(
        num_prompt_tokens=message.num_prompt_tokens,
        max_tokens=message.max_tokens,
        num_choices=message.num_choices,
        max_latency_ms=message.max_latency_ms,
    )


def _request_of(parts: Parts, front: FrontId, request_id: str) -> Request | None:
    """The front's own request of that id."""
    request = parts.requests.get(request_id)
    return request if request is not None and request.front == front else None


def _end_unknown(parts: Parts, front: FrontId, request_id: str) -> None:
    """The front still waits for a request that is not known here any more; its client may try again."""
    message = EndRequest(
        epoch=parts.outbox.epoch,
        request_id=request_id,
        outcome=Outcome.WORKER_LOST,
        reason="the coordinator does not know the request any more",
    )
    parts.outbox.to_front(front, message)
