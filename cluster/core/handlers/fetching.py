"""Fetches of prefixes: a worker that is to read a prompt gets its beginning from one that has read it before.

A fetch is an attempt that nobody counts on: its decode half reserves blocks at the reader, its prefill half pushes what
it has cached, and what arrives is only made findable. It runs beside the request's own attempt, which waits for it at
the reader for a bounded time. However it ends, the request goes on: what has not come is computed.
"""

from __future__ import annotations

from cluster.core.attempts import Attempt, Leg, LegState
from cluster.core.commands import Prefill, Reserve
from cluster.core.handlers.ending import retire_if_over, stop_leg
from cluster.core.ids import Role
from cluster.core.leases import Lease, Side
from cluster.core.messages import ReserveGranted
from cluster.core.parts import Parts
from cluster.core.requests import Request
from cluster.core.workers import Worker
from cluster.policy.prefix_fetch import PrefixFetch


def start_fetch(parts: Parts, now_ns: int, request: Request, reader: Worker, fetch: PrefixFetch) -> None:
    """Takes a number of the request's attempts, and asks the reader to reserve. The request has none yet."""
    holder = parts.workers.get(fetch.holder)
    assert holder is not None, "placement chooses among registered workers"
    attempt_id = request.attempt_id
    halves = ((holder, Role.PREFILL), (reader, Role.DECODE))
    source, sink = (
        Leg(attempt_id=attempt_id, worker=each.id, half=half, num_blocks=0, num_sequences=0, num_unread_tokens=0)
        for each, half in halves
    )
    attempt = Attempt(
        attempt_id=attempt_id,
        lease_id=parts.next_lease_id(),
        placed_ns=now_ns,
        prefill=source,
        decode=sink,
        why=fetch.reason,
        is_current=False,
        num_fetched_blocks=fetch.num_blocks,
    )
    parts.attempts.add(attempt)
    holder.take(now_ns, source)
    reader.take(now_ns, sink)
    sink.state = LegState.ACTIVE
    _open_lease(parts, now_ns, attempt, Side.RESERVED)
    command = Reserve(
        attempt=attempt_id,
        lease_id=attempt.lease_id,
        source=holder.hello.ref,
        num_tokens=fetch.num_blocks * parts.config.kv.block_size,
        ttl_ms=parts.lease_ttl_ms,
        num_prefix_blocks=fetch.num_blocks,
    )
    parts.outbox.to_worker(reader.id, command, body_of=request.request_id)


def on_granted(parts: Parts, now_ns: int, attempt: Attempt, message: ReserveGranted) -> None:
    """The reader has reserved: now the holder may push, if the request is still there."""
    source, sink = attempt.prefill, attempt.decode
    assert source is not None
    if source.state is not LegState.PLANNED or sink.state is not LegState.ACTIVE:
        return
    holder = parts.workers.get(source.worker)
    if holder is None or holder.is_leaving:
        abandon(parts, now_ns, attempt, f"{source.worker} is leaving")
        return
    if parts.requests.get(attempt.attempt_id.request_id) is None:
        abandon(parts, now_ns, attempt, "the request is over")
        return
    reader = parts.workers.get(sink.worker)
    assert reader is not None, "a worker's loss abandons its fetches"
    source.state = LegState.ACTIVE
    _open_lease(parts, now_ns, attempt, Side.HELD)
    command = Prefill(
        attempt=attempt.attempt_id,
        lease_id=attempt.lease_id,
        destination=reader.hello.ref,
        blocks=message.blocks,
        num_cached_blocks=message.num_cached_blocks,
        ttl_ms=message.ttl_ms,
        num_prefix_blocks=attempt.num_fetched_blocks,
    )
    parts.outbox.to_worker(source.worker, command, body_of=attempt.attempt_id.request_id)


def abandon(parts: Parts, now_ns: int, attempt: Attempt, reason: str) -> None:
    """One half has failed, or nobody wants it any more: both stop. Does nothing to what has ended."""
    for leg in attempt.legs:
        stop_leg(parts, now_ns, attempt, leg, reason)
    if parts.attempts.get(attempt.attempt_id) is attempt:
        retire_if_over(parts, attempt)


def _open_lease(parts: Parts, now_ns: int, attempt: Attempt, side: Side) -> None:
    source, sink = attempt.prefill, attempt.decode
    assert source is not None
    holder, peer = (sink.worker, source.worker) if side is Side.RESERVED else (source.worker, sink.worker)
    lease = Lease(
        lease_id=attempt.lease_id,
        side=side,
        attempt_id=attempt.attempt_id,
        holder=holder,
        peer=peer,
        num_blocks=attempt.num_fetched_blocks,
        opened_ns=now_ns,
    )
    parts.leases.open(lease)
