"""Placement: which decode worker and which prefill worker run the next request, or why it waits.

Decode comes first (it holds the request longer): the one where the answer should be written soonest, that is by the
predicted time per output token and what of the prompt would have to be pushed there. Then prefill, by the predicted
time until the prompt is read and pushed, which depends on what has to be read before it and on what of it is neither
cached there nor worth fetching from another worker; the latter counts again, since others have to wait for it. Both or
neither. Among nearly equals the one with the lightest load is taken, then the smallest worker id.

That a conversation comes back to the workers that hold its beginning follows from this; there is no rule for it.

Where it is cheaper, decode reads the prompt itself, or prefill writes the answer (`cluster.policy.other_ways`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cluster.core.ids import Route, WorkerId
from cluster.core.output_estimate import UNMEASURED_OUTPUT_TOKENS
from cluster.policy.costs import StepCosts, WorkerLike, decode_step_ms, push_ms, read_ms, usual_costs
from cluster.policy.decision import (
    NEARLY,
    NEARLY_READ,
    NO_ROOM,
    READING_WEIGHT,
    TOO_SLOW,
    Candidates,
    Cause,
    Option,
    Placement,
    Wait,
    best,
    has_room,
    keeps_tpot,
    may_read,
    reads,
    starts_soon,
    writes,
)
from cluster.policy.other_ways import place_reading, place_staying
from cluster.policy.prefix_fetch import PrefixFetch, fetch_of

__all__ = ["Candidates", "Demand", "Placement", "Wait", "break_even_tokens", "demand_of", "place"]

MAX_RESERVED_PERCENT: Final = 75
"""A reservation of a larger share of a decode worker's blocks than this is never granted: it is read there instead."""
TYPICAL_ANSWER_TOKENS: Final = 128
"""For the break-even that operators are shown."""


@dataclass(slots=True, kw_only=True)  # not frozen: that would treble what it costs to make one
class Demand:
    """What a request needs.

    Attributes:
        num_tokens: to be read before the first token is drawn.
        num_sequences: answers that are written at once. num_emitted: tokens that each is expected to have.
        num_read_blocks: for the tokens and one more: what prefill takes.
        num_kv_blocks: these, and one for each further answer: what is reserved.
        num_expected_blocks: with the answers expected of it: what placement counts with.
        block_size: tokens of a block.
    """

    num_tokens: int
    num_sequences: int
    num_emitted: int
    num_read_blocks: int
    num_kv_blocks: int
    num_expected_blocks: int
    block_size: int


def demand_of(
    num_tokens: int,
    num_tokens_left: int,
    block_size: int,
    *,
    num_expected: int = UNMEASURED_OUTPUT_TOKENS,
    num_choices: int = 1,
    num_unshared: int = 0,
) -> Demand:
    """What a request needs that has `num_tokens` to be read and may emit `num_tokens_left` more.

    It is expected to emit no more than `num_expected`; if it does, decode preempts as the last resort. With several
    choices, each emits so many. They share the tokens read, except for a part of the last block and `num_unshared`
    tokens that all of them together have been given beyond.
    """
    num_emitted = max(1, min(num_tokens_left, num_expected))
    num_read_blocks = -(-(num_tokens + 1) // block_size)
    num_others = num_choices - 1
    num_own_tokens = num_others * (block_size - 1 + num_emitted) + num_unshared
    return Demand(
        num_tokens=num_tokens,
        num_sequences=num_choices,
        num_emitted=num_emitted,
        num_read_blocks=num_read_blocks,
        num_kv_blocks=num_read_blocks + num_others,
        num_expected_blocks=-(-(num_tokens + num_emitted) // block_size) + -(-num_own_tokens // block_size),
        block_size=block_size,
    )


def place(
    demand: Demand, candidates: Candidates, excluded: Mapping[WorkerId, int], why_local: str | None = None
) -> Placement | Wait:
    """Chooses workers for one request; costs O(candidates).

    Args:
        excluded: decode workers that must not be taken now.
        why_local: if given, decode is to read the prompt itself, for this reason.
    """
    prefill = () if why_local else candidates.prefill
    usual, usual_reader = usual_costs(candidates.decode), usual_costs(candidates.prefill)
    roomy = _decode_options(demand, candidates, prefill, excluded, usual)
    options = [option for option in roomy if keeps_tpot(option.worker, option.predicted_ms, candidates.max_tpot_ms)]
    decode = best(options)
    if not candidates.decode:
        return Wait(reason="no decode worker is alive")
    if decode is None:
        readers = _prefill_options(demand, candidates, None, usual_reader) if prefill else []
        other = place_staying(demand, candidates, readers, None, usual)
        return other or Wait(reason=TOO_SLOW if roomy else NO_ROOM)
    if why_local:
        return _place_local(demand, decode, Cause.TRANSFER_FAILED, why_local)
    if not prefill:
        return _place_local(demand, decode, Cause.NO_PREFILL, "no prefill worker is alive")
    if demand.num_kv_blocks > max(1, decode.worker.num_total_blocks * MAX_RESERVED_PERCENT // 100):
        why = f"{demand.num_kv_blocks} blocks are too large a share for a push"
        return _place_local(demand, decode, Cause.TOO_LARGE, why)
    readers = _prefill_options(demand, candidates, decode.worker, usual_reader)
    other = place_reading(demand, candidates, options, readers, usual)
    other = other or place_staying(demand, candidates, readers, decode, usual)
    if other is not None:
        return other
    reader = best([option for option in readers if may_read(option)])
    if reader is None:
        return Wait(reason="no prefill worker can start soon")
    return Placement(
        prefill=reader.worker.id,
        decode=decode.worker.id,
        num_uncached_tokens=reader.num_uncached_tokens,
        reason=f"{writes(decode)}; {reads(reader, demand)}, done in {reader.predicted_ms:.0f} ms",
    )


def break_even_tokens(candidates: Candidates, block_size: int, most: int) -> int:
    """The longest prompt of up to `most` tokens, of those cached nowhere, that decode would read itself if it came now,
    although it could be pushed; 0 if none. Costs O(candidates log most)."""
    if not candidates.prefill or candidates.rules.max_local_tokens == 0:
        return 0

    def is_pushed(num_tokens: int) -> bool:
        decision = place(demand_of(num_tokens, TYPICAL_ANSWER_TOKENS, block_size), candidates, {})
        return not (isinstance(decision, Placement) and decision.cause in (Cause.BREAK_EVEN, Cause.FIXED))

    return bisect_left(range(1, most + 1), True, key=is_pushed)


def takes(worker: WorkerLike, demand: Demand) -> bool:
    """Whether a decode worker has room for it."""
    return has_room(worker, demand.num_expected_blocks, demand.num_sequences)


def _decode_options(
    demand: Demand,
    candidates: Candidates,
    prefill: tuple[WorkerLike, ...],
    excluded: Mapping[WorkerId, int],
    usual: StepCosts,
) -> list[Option]:
    return [
        _decode_option(demand, candidates, prefill, worker, usual)
        for worker in candidates.decode
        if worker.id not in excluded
        and has_room(worker, demand.num_expected_blocks, demand.num_sequences)
        and (prefill or starts_soon(worker, _num_held_tokens(demand, candidates, worker)))
    ]


def _decode_option(
    demand: Demand, candidates: Candidates, prefill: tuple[WorkerLike, ...], worker: WorkerLike, usual: StepCosts
) -> Option:
    """Its cost is the time until the whole answer is written. What comes from prefill counts as if it came from the
    first of these, which is the likeliest to be taken."""
    num_held_blocks = candidates.num_held_blocks.get(worker.id, 0)
    num_uncached_tokens = demand.num_tokens - num_held_blocks * demand.block_size
    num_context_tokens = (worker.num_promised_blocks + demand.num_expected_blocks) * demand.block_size
    token_ms = decode_step_ms(worker, num_context_tokens, usual)
    own_ms = demand.num_emitted * token_ms
    others_ms = 0.0
    if prefill:
        own_ms += push_ms(candidates.links, prefill[0], worker, demand.num_read_blocks - num_held_blocks)
    else:
        own_ms += read_ms(worker, num_uncached_tokens, usual)
        others_ms = READING_WEIGHT * num_uncached_tokens * usual.ms_per_token
    return Option(
        worker=worker,
        cost_ms=own_ms + others_ms,
        slack_ms=NEARLY * own_ms,
        rank=(worker.num_promised_blocks - num_held_blocks - worker.num_total_blocks, worker.num_sequences, worker.id),
        num_uncached_tokens=num_uncached_tokens,
        num_bound_tokens=num_held_blocks * demand.block_size,
        predicted_ms=token_ms,
    )


def _prefill_options(
    demand: Demand, candidates: Candidates, decode: WorkerLike | None, usual: StepCosts
) -> list[Option]:
    """What costs is the reading, or the push to `decode` where that is slower: they go on at the same time. Answers
    that are written there wait for it as well. Whether it can start soon is not asked here."""
    fetches = _fetches(demand, candidates, usual) if candidates.sources else {}
    num_fetchable_blocks = max([fetch.num_blocks for fetch in fetches.values()], default=0)
    held = candidates.num_held_blocks
    num_pushed_blocks = demand.num_read_blocks
    if decode is not None:
        num_pushed_blocks -= held.get(decode.id, 0)
    options = []
    for worker in candidates.prefill:
        if not has_room(worker, demand.num_read_blocks, 1):
            continue
        num_own_blocks = held.get(worker.id, 0)
        fetch = fetches.get(worker.id)
        num_held_blocks = num_own_blocks if fetch is None else fetch.num_blocks
        num_uncached_tokens = demand.num_tokens - num_held_blocks * demand.block_size
        token_ms = worker.ms_per_token or usual.ms_per_token
        predicted_ms = (worker.backlog_tokens + num_uncached_tokens) * token_ms
        if fetch is not None:  # while that comes, what is before it is read
            predicted_ms += max(0.0, fetch.predicted_ms - worker.backlog_tokens * token_ms)
        if decode is not None:
            pushed_ms = worker.backlog_tokens * token_ms + push_ms(candidates.links, worker, decode, num_pushed_blocks)
            predicted_ms = max(predicted_ms, pushed_ms)
        held_up_ms = worker.num_writing * num_uncached_tokens * token_ms
        options.append(
            Option(
                worker=worker,
                cost_ms=predicted_ms + held_up_ms + READING_WEIGHT * num_uncached_tokens * usual.ms_per_token,
                slack_ms=NEARLY_READ * predicted_ms,
                rank=(worker.num_given_tokens, worker.num_sequences, worker.id),
                num_uncached_tokens=num_uncached_tokens,
                num_bound_tokens=max(0, num_own_blocks - num_fetchable_blocks) * demand.block_size,
                predicted_ms=predicted_ms,
            )
        )
    return options


def _fetches(demand: Demand, candidates: Candidates, usual: StepCosts) -> dict[WorkerId, PrefixFetch]:
    """What each prefill worker would fetch, if it were to read the prompt."""
    fetches = {}
    for worker in candidates.prefill:
        num_own_blocks = candidates.num_held_blocks.get(worker.id, 0)
        fetch = fetch_of(worker, candidates.sources, num_own_blocks, demand.block_size, candidates.links, usual)
        if fetch is not None:
            fetches[worker.id] = fetch
    return fetches


def _place_local(demand: Demand, option: Option, cause: Cause, why: str) -> Placement | Wait:
    """Decode reads, since nothing else is possible."""
    worker = option.worker
    if not may_read(option):
        return Wait(reason=f"{why}, and {worker.id} cannot start soon")
    return Placement(
        prefill=None,
        decode=worker.id,
        num_uncached_tokens=option.num_uncached_tokens,
        reason=f"{why}: {writes(option)}, and reads {option.num_uncached_tokens} tokens itself",
        route=Route.LOCAL,
        cause=cause,
    )


def _num_held_tokens(demand: Demand, candidates: Candidates, worker: WorkerLike) -> int:
    return candidates.num_held_blocks.get(worker.id, 0) * demand.block_size
