"""Admission: a new request takes its place in the queue, or is refused."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from cluster.core.handlers.accounting import cut_chain, expected_output, open_account
from cluster.core.handlers.ending import enqueue, refuse_waiting
from cluster.core.ids import FrontId, RefusalCause, Role
from cluster.core.limits import MAX_LIVE_REQUESTS, NS_PER_MS
from cluster.core.messages import Refused, Submit
from cluster.core.parts import Parts
from cluster.core.requests import Request, StartBy
from cluster.core.tenants import Tenant
from cluster.policy.admission import Admit, Arrival, Refuse, Situation, StartLimit, admit, retry_after_ms
from cluster.policy.candidates import candidates_of
from cluster.policy.first_token import NOBODY, Ahead, Capacity
from cluster.policy.placement import demand_of

_NOTHING_AHEAD: Final = Ahead()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Newcomer:
    """A request that is not known yet. `chain`: as in Request. `num_expected_tokens`: of each of its answers."""

    front: FrontId
    message: Submit
    tenant: Tenant
    chain: bytes
    num_expected_tokens: int

    @property
    def cost_tokens(self) -> int:
        return self.message.num_prompt_tokens + self.message.num_choices * self.num_expected_tokens


def on_new_request(parts: Parts, now_ns: int, front: FrontId, message: Submit) -> None:
    """Its id is not known. It may cost another one its place in a full queue."""
    tenant = parts.tenants.of(message.tenant)
    new = _Newcomer(
        front=front,
        message=message,
        tenant=tenant,
        chain=cut_chain(parts, message.block_hashes, message.num_prompt_tokens),
        num_expected_tokens=expected_output(parts, tenant, message.num_prompt_tokens, message.max_tokens),
    )
    displaced = _displaced(parts, new)
    arrival = _arrival(parts, now_ns, new)
    decision = admit(arrival, _situation_of(parts, new, arrival, can_displace=displaced is not None))
    if isinstance(decision, Refuse):
        _refuse(parts, new, decision)
        return
    if displaced is not None:
        _displace(parts, now_ns, displaced)
    _take_in(parts, now_ns, new, decision)


def _situation_of(parts: Parts, new: _Newcomer, arrival: Arrival, *, can_displace: bool) -> Situation:
    """Nobody asks for predictions of a request without limits, if there is room for it."""
    is_predicted = arrival.has_limit or parts.config.slo.ttft_ms is not None or len(parts.queue) >= parts.queue.limit
    if not is_predicted:
        return _situation(parts, _NOTHING_AHEAD, NOBODY)
    waiting = parts.queue.ahead_of(new.tenant.name, new.message.priority, new.tenant.weight)
    ahead = Ahead(num_requests=waiting.num_requests, num_tokens=waiting.num_tokens)
    return _situation(parts, ahead, _capacity(parts), can_displace=can_displace)


def _situation(parts: Parts, ahead: Ahead, capacity: Capacity, *, can_displace: bool = False) -> Situation:
    """The cluster as admission sees it."""
    return Situation(
        num_queued=len(parts.queue),
        queue_limit=parts.queue.limit,
        can_displace=can_displace,
        num_live=len(parts.requests),
        max_live=MAX_LIVE_REQUESTS,
        max_model_tokens=parts.workers.max_model_tokens,
        max_prompt_blocks=parts.workers.max_decode_blocks,
        block_size=parts.config.kv.block_size,
        slo_ttft_ms=parts.config.slo.ttft_ms,
        ahead=ahead,
        capacity=capacity,
    )


def retry_after_all_ms(parts: Parts) -> int:
    """When everything that waits now should have been read."""
    ahead = Ahead(num_requests=len(parts.queue), num_tokens=parts.queue.num_tokens)
    return retry_after_ms(_situation(parts, ahead, _capacity(parts)))


def _capacity(parts: Parts) -> Capacity:
    """Of the workers, a few."""
    readers = parts.workers.with_role(Role.PREFILL) or parts.workers.with_role(Role.DECODE)
    writers = parts.workers.with_role(Role.DECODE)
    seed = parts.next_seed()
    return Capacity(
        num_readers=len(readers),
        readers=candidates_of(readers, (), seed),
        num_writers=len(writers),
        writers=candidates_of(writers, (), seed),
        usual_output_tokens=parts.tenants.usual_output.mean_tokens,
        block_size=parts.config.kv.block_size,
        max_tpot_ms=parts.config.slo.tpot_ms,
    )


def _arrival(parts: Parts, now_ns: int, new: _Newcomer) -> Arrival:
    message, bucket = new.message, new.tenant.bucket
    arrival = Arrival(
        num_prompt_tokens=message.num_prompt_tokens,
        max_tokens=message.max_tokens,
        num_choices=message.num_choices,
        max_latency_ms=message.max_latency_ms,
        deadline_ms=message.deadline_ms,
        quota_wait_ms=0 if bucket is None else bucket.wait_ms(now_ns, new.cost_tokens),
    )
    if not arrival.has_limit and parts.config.slo.ttft_ms is None:
        return arrival
    demand = demand_of(
        message.num_prompt_tokens,
        message.max_tokens,
        parts.config.kv.block_size,
        num_expected=new.num_expected_tokens,
        num_choices=message.num_choices,
    )
    return dataclasses.replace(
        arrival,
        num_cached_tokens=_num_cached_tokens(parts, new.chain),
        num_blocks=max(1, demand.num_expected_blocks),
    )


def _num_cached_tokens(parts: Parts, chain: bytes) -> int:
    """Of the prompt, at the reader that holds most of it."""
    role = Role.PREFILL if parts.workers.with_role(Role.PREFILL) else Role.DECODE
    held = parts.prefixes.look_up(chain).longest(role, 1)
    return max(held.values(), default=0) * parts.config.kv.block_size


def _displaced(parts: Parts, new: _Newcomer) -> str | None:
    """Who would have to go for the request to come in; None while there is room, or where nobody has to."""
    if len(parts.queue) < parts.queue.limit:
        return None
    return parts.queue.displaced_by(new.tenant.name, new.message.priority, new.tenant.weight)


def _displace(parts: Parts, now_ns: int, request_id: str) -> None:
    request = parts.requests.get(request_id)
    assert request is not None, "what waits is known"
    reason = "the queue is full, and its tenant had more than its share of it"
    refuse_waiting(parts, now_ns, request, RefusalCause.DISPLACED, reason, retry_after_all_ms(parts))


def _refuse(parts: Parts, new: _Newcomer, decision: Refuse) -> None:
    parts.tenants.refuse(new.tenant, decision.cause)
    refused = Refused(
        request_id=new.message.request_id,
        outcome=decision.outcome,
        reason=decision.reason,
        retry_after_ms=decision.retry_after_ms,
        cause=decision.cause,
    )
    parts.outbox.to_front(new.front, refused)
    parts.outbox.drop_body(new.message.request_id)


def _take_in(parts: Parts, now_ns: int, new: _Newcomer, decision: Admit) -> None:
    message = new.message
    request = Request(
        request_id=message.request_id,
        front=new.front,
        rank=parts.requests.next_rank(),
        num_prompt_tokens=message.num_prompt_tokens,
        max_tokens=message.max_tokens,
        num_choices=message.num_choices,
        priority=message.priority,
        tenant=message.tenant,
        cost_tokens=new.cost_tokens,
        start_by=None if decision.start is None else _start_by(now_ns, decision.start),
        submitted_ns=now_ns,
        queued_ns=now_ns,
        deadline_ns=None if message.deadline_ms is None else now_ns + message.deadline_ms * NS_PER_MS,
        phase_deadline_ns=None,
        attempt_floor=max(message.attempt_floor, parts.requests.last_attempt(message.request_id)),
        chain=new.chain,
    )
    request.phase_deadline_ns = request.wait_until_ns(parts.queue_timeout_ns)
    parts.requests.add(request)
    open_account(parts, now_ns, request)
    enqueue(parts, request)


def _start_by(now_ns: int, start: StartLimit) -> StartBy:
    return StartBy(due_ns=now_ns + int(start.within_ms * NS_PER_MS), cause=start.cause, limit_ms=start.limit_ms)
