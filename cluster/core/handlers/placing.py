"""Placing: from the queue onto workers."""

from __future__ import annotations

from cluster.core.attempts import Attempt, Leg, LegState
from cluster.core.handlers.ending import watch_deadline, withdraw_attempt
from cluster.core.handlers.fetching import start_fetch
from cluster.core.ids import Outcome, Role, WorkerId
from cluster.core.leases import Lease, Side
from cluster.core.limits import EXCLUDE_AFTER_REFUSAL_NS, NS_PER_MS
from cluster.core.messages import Placed, Reserve, RunLocal
from cluster.core.parts import Parts
from cluster.core.prefix_map import BLOCK_HASH_BYTES
from cluster.core.requests import Phase, Request
from cluster.core.timers import TimerKey, TimerKind
from cluster.core.workers import Worker
from cluster.policy.candidates import MAX_HOLDERS, candidates_of
from cluster.policy.costs import usual_costs
from cluster.policy.placement import Candidates, Demand, Placement, Wait, demand_of, place
from cluster.policy.prefix_fetch import fetch_of


def place_waiting(parts: Parts, now_ns: int) -> None:
    """Places requests in the queue's order until one must wait; those behind it wait as well, so none starves."""
    while (request_id := parts.queue.head()) is not None:
        request = parts.requests.get(request_id)
        assert request is not None and request.phase is Phase.QUEUED
        request.excluded = {worker: until for worker, until in request.excluded.items() if until > now_ns}
        num_left = request.max_tokens - request.num_delivered
        demand = demand_of(
            request.num_read_tokens,
            num_left,
            parts.config.kv.block_size,
            num_choices=request.num_choices,
            num_unshared=request.num_unshared,
        )
        candidates = _candidates(parts, request)
        decision = place(demand, candidates, request.excluded, _why_local(parts, request))
        if isinstance(decision, Wait):
            request.waiting_for = decision.reason
            return
        parts.queue.remove(request_id)
        _fetch_prefix(parts, now_ns, request, candidates, decision)
        request.attempt = request.next_attempt
        request.waiting_for = ""
        if decision.prefill is None:
            _start_local(parts, now_ns, request, demand, decision)
        else:
            _start_pair(parts, now_ns, request, demand, decision, decision.prefill)
        watch_deadline(parts, request)


def _candidates(parts: Parts, request: Request) -> Candidates:
    """Those that hold most of the prompt, and others drawn anew for each decision."""
    seed = parts.next_seed()
    held = parts.prefixes.look_up(request.chain)
    found: dict[Role, tuple[Worker, ...]] = {}
    for role in Role:
        holders = [_registered(parts, worker) for worker in held.longest(role, MAX_HOLDERS)]
        staying = [worker for worker in holders if not worker.is_leaving]
        found[role] = candidates_of(parts.workers.with_role(role), staying, seed)
    num_held_blocks = {worker.id: held.num_blocks_of(worker.id) for workers in found.values() for worker in workers}
    return Candidates(
        prefill=found[Role.PREFILL],
        decode=found[Role.DECODE],
        num_held_blocks=num_held_blocks,
        links=parts.links,
    )


def _fetch_prefix(parts: Parts, now_ns: int, request: Request, candidates: Candidates, placement: Placement) -> None:
    """Where it is worth it, whoever reads the prompt fetches what another worker has of it, beside the attempt."""
    if not parts.config.coordinator.fetch_prefixes:
        return
    reader = _registered(parts, placement.prefill or placement.decode)
    workers = {worker.id: worker for worker in (*candidates.prefill, *candidates.decode)}
    holders = []
    for worker_id, num_blocks in candidates.num_held_blocks.items():
        last_hash = request.chain[(num_blocks - 1) * BLOCK_HASH_BYTES : num_blocks * BLOCK_HASH_BYTES]
        # What it is only expected to compute is not there yet.
        if num_blocks and last_hash not in parts.prefixes.expected_of(worker_id):
            holders.append((workers[worker_id], num_blocks))
    num_own_blocks = candidates.num_held_blocks.get(reader.id, 0)
    usual = usual_costs(tuple(workers.values()))
    fetch = fetch_of(reader, holders, num_own_blocks, parts.config.kv.block_size, parts.links, usual)
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
    attempt = Attempt(
        attempt_id=request.attempt_id,
        lease_id=parts.next_lease_id(),
        placed_ns=now_ns,
        prefill=_leg(request, prefill, Role.PREFILL, demand.num_read_blocks, 1, placement.num_uncached_tokens),
        decode=_leg(request, decode, Role.DECODE, demand.num_expected_blocks, demand.num_sequences, 0),
        why=placement.reason,
    )
    _open(parts, request, attempt)
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
    )
    parts.outbox.to_worker(decode.id, reserve, body_of=request.request_id)


def _start_local(parts: Parts, now_ns: int, request: Request, demand: Demand, placement: Placement) -> None:
    decode = _registered(parts, placement.decode)
    attempt = Attempt(
        attempt_id=request.attempt_id,
        lease_id=parts.next_lease_id(),
        placed_ns=now_ns,
        prefill=None,
        decode=_leg(
            request,
            decode,
            Role.DECODE,
            demand.num_expected_blocks,
            demand.num_sequences,
            placement.num_uncached_tokens,
        ),
        why=placement.reason,
        committed=True,
    )
    _open(parts, request, attempt)
    attempt.decode.state = LegState.ACTIVE
    request.enter(Phase.LOCAL)
    parts.outbox.to_worker(decode.id, RunLocal(attempt=attempt.attempt_id), body_of=request.request_id)
    placed = Placed(
        epoch=parts.outbox.epoch,
        attempt=attempt.attempt_id,
        prefill=None,
        decode=decode.hello.ref,
        queued_ms=(now_ns - request.queued_ns) / NS_PER_MS,
        reserved_ms=0.0,
    )
    parts.outbox.to_front(request.front, placed)


def _leg(
    request: Request, worker: Worker, half: Role, num_blocks: int, num_sequences: int, num_unread_tokens: int
) -> Leg:
    return Leg(
        attempt_id=request.attempt_id,
        worker=worker.id,
        half=half,
        num_blocks=num_blocks,
        num_sequences=num_sequences,
        num_unread_tokens=num_unread_tokens,
    )


def _open(parts: Parts, request: Request, attempt: Attempt) -> None:
    reader = attempt.prefill or attempt.decode
    reader.expected = parts.prefixes.expect(reader.worker, request.chain)
    parts.attempts.add(attempt)
    for leg in attempt.legs:
        _registered(parts, leg.worker).take(leg)


def _registered(parts: Parts, worker_id: WorkerId) -> Worker:
    worker = parts.workers.get(worker_id)
    assert worker is not None, "placement chooses among registered workers"
    return worker
