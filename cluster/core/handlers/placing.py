"""Placing: from the queue onto workers."""

from __future__ import annotations

from dataclasses import replace

from cluster.core.attempts import Attempt, Leg, LegState
from cluster.core.commands import Reserve, RunLocal
from cluster.core.disaggregation import ALWAYS_PUSHED
from cluster.core.handlers.accounting import demand_for
from cluster.core.handlers.ending import watch_deadline, withdraw_attempt
from cluster.core.handlers.fetching import start_fetch
from cluster.core.handlers.suspecting import keep_apart, on_placed
from cluster.core.ids import AttemptId, Outcome, Role, Route, WorkerId
from cluster.core.leases import Lease, Side
from cluster.core.limits import EXCLUDE_AFTER_REFUSAL_NS, NS_PER_MS
from cluster.core.messages import Placed
from cluster.core.parts import Parts
from cluster.core.prefix_map import HeldPrefixes
from cluster.core.requests import Phase, Request
from cluster.core.timers import TimerKey, TimerKind
from cluster.core.workers import Worker
from cluster.policy.candidates import MAX_HOLDERS, candidates_of
from cluster.policy.costs import usual_costs
from cluster.policy.decision import Cause
from cluster.policy.placement import Candidates, Demand, Placement, Wait, place, takes
from cluster.policy.prefix_fetch import MAX_SOURCES, fetch_of


def place_waiting(parts: Parts, now_ns: int) -> None:
    """Places requests in the queue's order until one must wait; those behind it wait as well, so none starves."""
    while (request_id := parts.queue.head()) is not None:
        request = parts.requests.get(request_id)
        assert request is not None and request.phase is Phase.QUEUED
        if request.excluded:
            request.excluded = {worker: until for worker, until in request.excluded.items() if until > now_ns}
        demand = demand_for(parts, request)
        candidates = keep_apart(parts, now_ns, request, _candidates(parts, now_ns, request))
        decision = candidates if isinstance(candidates, Wait) else _decide(parts, request, demand, candidates)
        if isinstance(candidates, Wait) or isinstance(decision, Wait):
            request.waiting_for = decision.reason
            return
        parts.queue.serve(request_id)
        request.is_charged = True
        _fetch_prefix(parts, now_ns, request, candidates, decision)
        request.attempt = request.next_attempt
        request.waiting_for = ""
        if decision.prefill is None:
            _start_local(parts, now_ns, request, demand, decision)
        else:
            _start_pair(parts, now_ns, request, demand, decision, decision.prefill)
        watch_deadline(parts, request)


def has_room_elsewhere(parts: Parts, now_ns: int, request: Request) -> bool:
    """Whether some decode worker that may be given work could take the request now, besides what it has."""
    demand = demand_for(parts, request)
    decode = _candidates(parts, now_ns, request).decode
    return any(takes(worker, demand) for worker in decode if worker.id not in request.excluded)


def _decide(parts: Parts, request: Request, demand: Demand, candidates: Candidates) -> Placement | Wait:
    why_local = _why_local(parts, request)
    source = None if request.suspicions else _source(parts, request)
    if source is not None and why_local is None:
        num_held = (demand.num_tokens - 1) // demand.block_size
        held = {**candidates.num_held_blocks, source.id: num_held}
        only = replace(candidates, prefill=(source,), num_held_blocks=held, rules=ALWAYS_PUSHED, sources=())
        decision = place(demand, only, request.excluded)
        if isinstance(decision, Placement) and decision.prefill is not None:
            return decision
    return place(demand, candidates, request.excluded, why_local)


def _source(parts: Parts, request: Request) -> Worker | None:
    """The worker that is being drained of the request and has its KV, as long as it can push it."""
    if request.source is None:
        return None
    drain = parts.drains.of(request.source)
    if drain is None or drain.is_told_to_leave:
        return None
    worker = parts.workers.get(request.source)
    return worker if worker is not None and _pushes(worker) else None


def _pushes(worker: Worker) -> bool:
    """Whether its pool is in memory that transports reach: to others that take whole requests nothing is pushed."""
    return worker.pool.device == "cpu"


def _candidates(parts: Parts, now_ns: int, request: Request) -> Candidates:
    """Those that hold most of the prompt, and others drawn anew for each decision."""
    seed = parts.next_seed()
    held = parts.prefixes.look_up(request.chain)
    prefill = _candidates_with(parts, now_ns, Role.PREFILL, held, seed)
    decode = _candidates_with(parts, now_ns, Role.DECODE, held, seed)
    return Candidates(
        prefill=prefill,
        decode=decode,
        num_held_blocks=held.num_blocks_by_worker([worker.id for worker in (*prefill, *decode)]),
        links=parts.links,
        rules=parts.config.disaggregation,
        hand_over=parts.hand_over.usual,
        max_tpot_ms=parts.config.slo.tpot_ms,
        sources=_sources(request, held, (*prefill, *decode)) if parts.config.coordinator.fetch_prefixes else (),
    )


def _candidates_with(parts: Parts, now_ns: int, role: Role, held: HeldPrefixes, seed: int) -> tuple[Worker, ...]:
    holders = [_registered(parts, worker) for worker in held.longest(role, MAX_HOLDERS)]
    staying = [worker for worker in holders if not worker.is_leaving]
    found = candidates_of(parts.workers.with_role(role), staying, seed)
    for worker in found:
        if worker.backlog_tokens:
            worker.foresee(now_ns)
    return found


def _sources(request: Request, held: HeldPrefixes, workers: tuple[Worker, ...]) -> tuple[tuple[Worker, int], ...]:
    """Those from whom the reader could fetch most. What a worker is only expected to compute is not there yet."""
    if request.suspicions:
        return ()
    told = [(worker, held.num_told_blocks_of(worker.id)) for worker in workers if _pushes(worker)]
    told = [(worker, num_blocks) for worker, num_blocks in told if num_blocks]
    return tuple(sorted(told, key=lambda each: (-each[1], each[0].id))[:MAX_SOURCES])


def _fetch_prefix(parts: Parts, now_ns: int, request: Request, candidates: Candidates, placement: Placement) -> None:
    """Where it is worth it, whoever reads the prompt fetches what another worker has of it, beside the attempt."""
    if not candidates.sources:
        return
    reader = _registered(parts, placement.prefill or placement.decode)
    if reader.id == request.source or not _pushes(reader):  # the former is being drained, and has all of it
        return
    num_own_blocks = candidates.num_held_blocks.get(reader.id, 0)
    usual = usual_costs(candidates.prefill or candidates.decode)
    fetch = fetch_of(reader, candidates.sources, num_own_blocks, parts.config.kv.block_size, parts.links, usual)
    if fetch is not None:
        request.attempt = request.next_attempt
        start_fetch(parts, now_ns, request, reader, fetch)


def _why_local(parts: Parts, request: Request) -> str | None:
    """Why the request's next attempt must do without a push; None where it need not.

    The last attempt that a request has after a failed transfer: a push that cannot succeed costs time, not the answer.
    """
    failure = request.last_failure
    if failure is None or failure.outcome is not Outcome.TRANSFER_FAILED:
        return None
    is_last = request.num_failures == parts.config.coordinator.max_attempts - 1
    return "the last transfer failed" if is_last else None


def count_route(parts: Parts, route: Route, cause: Cause) -> None:
    """An attempt has started. Warns if too few are still pushed, where they could be."""
    few = parts.routes.add(route, cause, are_pools_whole=parts.workers.are_pools_whole)
    if few is not None:
        parts.outbox.warn_of_few_pushes(few)


def exclude_and_withdraw(parts: Parts, now_ns: int, request: Request, attempt: Attempt, reason: str) -> None:
    """Decode would not or did not reserve: placement runs again, for a short time without that worker."""
    until_ns = now_ns + EXCLUDE_AFTER_REFUSAL_NS
    request.excluded[attempt.decode.worker] = until_ns
    parts.timers.set(TimerKey(TimerKind.RETRY, request.request_id), until_ns)
    withdraw_attempt(parts, now_ns, request, attempt, reason)


def _start_pair(
    parts: Parts, now_ns: int, request: Request, demand: Demand, placement: Placement, prefill_id: WorkerId
) -> None:
    prefill = _registered(parts, prefill_id)
    decode = _registered(parts, placement.decode)
    attempt_id = request.attempt_id
    attempt = Attempt(
        attempt_id=attempt_id,
        lease_id=parts.next_lease_id(),
        placed_ns=now_ns,
        prefill=_leg(attempt_id, prefill, Role.PREFILL, demand.num_read_blocks, 1, placement.num_uncached_tokens),
        decode=_leg(attempt_id, decode, Role.DECODE, demand.num_expected_blocks, demand.num_sequences, 0),
        why=placement.reason,
    )
    _open(parts, now_ns, request, attempt)
    attempt.decode.state = LegState.ACTIVE
    parts.leases.open(
        Lease(
            lease_id=attempt.lease_id,
            side=Side.RESERVED,
            attempt_id=attempt.attempt_id,
            holder=decode.id,
            peer=prefill.id,
            num_blocks=demand.num_kv_blocks,
            opened_ns=now_ns,
        )
    )
    # A worker that cannot answer within the time in which its silence would cost its life is passed over.
    request.enter(Phase.RESERVING, now_ns + parts.heartbeat_timeout_ns)
    reserve = Reserve(
        attempt=attempt.attempt_id,
        lease_id=attempt.lease_id,
        source=prefill.hello.ref,
        num_tokens=demand.num_tokens + 1,
        ttl_ms=parts.lease_ttl_ms,
        is_trial=attempt.is_trial,
    )
    parts.outbox.to_worker(decode.id, reserve, body_of=request.request_id)


def _start_local(parts: Parts, now_ns: int, request: Request, demand: Demand, placement: Placement) -> None:
    decode = _registered(parts, placement.decode)
    attempt_id = request.attempt_id
    attempt = Attempt(
        attempt_id=attempt_id,
        lease_id=parts.next_lease_id(),
        placed_ns=now_ns,
        prefill=None,
        decode=_leg(
            attempt_id,
            decode,
            Role.DECODE,
            demand.num_expected_blocks,
            demand.num_sequences,
            placement.num_uncached_tokens,
        ),
        why=placement.reason,
        committed=True,
    )
    _open(parts, now_ns, request, attempt)
    attempt.decode.state = LegState.ACTIVE
    request.enter(Phase.LOCAL)
    command = RunLocal(attempt=attempt.attempt_id, step_limit_ms=placement.step_limit_ms, is_trial=attempt.is_trial)
    parts.outbox.to_worker(decode.id, command, body_of=request.request_id)
    count_route(parts, placement.route, placement.cause)
    placed = Placed(
        epoch=parts.outbox.epoch,
        attempt=attempt.attempt_id,
        prefill=None,
        decode=decode.hello.ref,
        queued_ms=(now_ns - request.queued_ns) / NS_PER_MS,
        reserved_ms=0.0,
        route=placement.route,
        why=placement.reason,
    )
    parts.outbox.to_front(request.front, placed)


def _leg(
    attempt_id: AttemptId, worker: Worker, half: Role, num_blocks: int, num_sequences: int, num_unread_tokens: int
) -> Leg:
    return Leg(
        attempt_id=attempt_id,
        worker=worker.id,
        half=half,
        num_blocks=num_blocks,
        num_sequences=num_sequences,
        num_unread_tokens=num_unread_tokens,
    )


def _open(parts: Parts, now_ns: int, request: Request, attempt: Attempt) -> None:
    on_placed(parts, now_ns, request, attempt)
    reader = attempt.prefill or attempt.decode
    reader.expectation = parts.prefixes.expect(reader.worker, request.chain)
    parts.attempts.add(attempt)
    for leg in attempt.legs:
        _registered(parts, leg.worker).take(now_ns, leg)


def _registered(parts: Parts, worker_id: WorkerId) -> Worker:
    worker = parts.workers.get(worker_id)
    assert worker is not None, "placement chooses among registered workers"
    return worker
