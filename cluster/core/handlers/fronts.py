"""What fronts say: requests come, are cancelled, go on after a failure, and are done."""

from __future__ import annotations

from cluster.core.handlers.accounting import cut_chain, settle
from cluster.core.handlers.admitting import on_new_request
from cluster.core.handlers.ending import current_attempt, enqueue, fail_attempt, fail_request, forget_request
from cluster.core.handlers.rebuilding import on_announced, on_earlier_life, refuse_duplicate
from cluster.core.ids import FrontId, Outcome
from cluster.core.messages import (
    CancelRequest,
    EndRequest,
    FrontHello,
    FrontWelcome,
    RequestDone,
    Resubmit,
    StreamLost,
    Submit,
)
from cluster.core.parts import Parts
from cluster.core.requests import Failure, Phase, Request


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
    on_new_request(parts, now_ns, front, message)


def on_cancel(parts: Parts, now_ns: int, front: FrontId, message: CancelRequest) -> None:
    request = _request_of(parts, front, message.request_id)
    if request is not None:
        forget_request(parts, now_ns, request, f"{message.outcome.value}: {message.reason}")


def on_request_done(parts: Parts, now_ns: int, front: FrontId, message: RequestDone) -> None:
    request = _request_of(parts, front, message.request_id)
    if request is not None:
        settle(parts, now_ns, request, message.outcome, message.num_output_tokens)
        forget_request(parts, now_ns, request, f"done: {message.outcome}")


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
    if message.block_hashes:
        request.chain = cut_chain(parts, message.block_hashes, request.num_read_tokens)
    request.start_by = None
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
