"""The other ways that a request may take where both pools are there: read by decode, or written by prefill."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from cluster.core.disaggregation import DisaggregationConfig
from cluster.core.ids import Route
from cluster.policy.break_even import (
    STAY_GAIN,
    LocalRead,
    local_read,
    staying_tpot_ms,
    step_limit_ms,
    why_not_staying,
)
from cluster.policy.costs import StepCosts, WorkerLike, mean_ms_per_token
from cluster.policy.decision import (
    NEARLY,
    NO_ROOM,
    READING_WEIGHT,
    Candidates,
    Cause,
    Option,
    Placement,
    best,
    has_room,
    keeps_tpot,
    may_read,
    reads,
    writes,
)

if TYPE_CHECKING:  # which calls this
    from cluster.policy.placement import Demand


def place_reading(
    demand: Demand, candidates: Candidates, options: list[Option], readers: list[Option], usual: StepCosts
) -> Placement | None:
    """On a decode worker that reads the prompt itself, if the rules or the costs are for it.

    Of decode workers, those that would write it more slowly than the best one pay for that here. `usual`: of them.
    """
    rules = candidates.rules
    if rules.max_local_tokens == 0:
        return None
    usual = _with_chunk_cost(usual, candidates)
    if rules.max_local_tokens is not None:
        short = [option for option in options if option.num_uncached_tokens <= rules.max_local_tokens]
        option = best([option for option in short if may_read(option)])
        if option is None:
            return None
        limit_ms = step_limit_ms(option.worker, demand.block_size, usual, rules)
        why = f"reads {option.num_uncached_tokens} tokens itself, {rules.max_local_tokens} may be"
        return _reading(option, Cause.FIXED, f"{writes(option)}, and {why}", limit_ms)
    reading_ms_per_token = mean_ms_per_token(candidates.prefill)
    if reading_ms_per_token is None:
        return None
    pushed_ms = min([_pushed_ms(reader, candidates, usual) for reader in readers], default=inf)
    least_token_ms = min([option.predicted_ms for option in options])
    found: tuple[float, Option, LocalRead] | None = None
    for option in options:
        others_ms = READING_WEIGHT * option.num_uncached_tokens * reading_ms_per_token
        reading_ms = option.num_uncached_tokens * (option.worker.chunk_token_ms or usual.chunk_token_ms)
        if reading_ms + others_ms >= pushed_ms or not may_read(option):
            continue
        read = local_read(option.worker, option.num_uncached_tokens, demand.block_size, usual, rules)
        if read is None:
            continue
        slower_ms = max(0.0, option.predicted_ms - (1 + NEARLY) * least_token_ms) * demand.num_emitted
        cost_ms = read.read_ms + read.held_up_ms + slower_ms + others_ms
        if cost_ms < pushed_ms and (found is None or (cost_ms, option.rank) < (found[0], found[1].rank)):
            found = cost_ms, option, read
    if found is None:
        return None
    cost_ms, option, read = found
    why = (
        f"reads {option.num_uncached_tokens} of {demand.num_tokens} tokens itself in {read.read_ms:.0f} ms, "
        f"which costs all {cost_ms:.0f} ms, and a push {pushed_ms:.0f}"
    )
    return _reading(option, Cause.BREAK_EVEN, f"{writes(option)}, and {why}", read.step_limit_ms)


def _reading(option: Option, cause: Cause, reason: str, limit_ms: float) -> Placement:
    return Placement(
        prefill=None,
        decode=option.worker.id,
        num_uncached_tokens=option.num_uncached_tokens,
        reason=reason,
        route=Route.LOCAL,
        cause=cause,
        step_limit_ms=limit_ms,
    )


def _pushed_ms(reader: Option, candidates: Candidates, usual: StepCosts) -> float:
    """What a push from there costs all. Of a short prompt a step is mostly what it costs whatever is in it."""
    hand_over = candidates.hand_over
    step_ms = usual.decode_base_ms + reader.num_uncached_tokens * _token_ms(reader.worker, usual)
    more_ms = max(0.0, step_ms - reader.predicted_ms)
    return hand_over.reserve_ms + reader.cost_ms + more_ms + hand_over.take_over_ms


def place_staying(
    demand: Demand, candidates: Candidates, readers: list[Option], decode: Option | None, usual: StepCosts
) -> Placement | None:
    """On a prefill worker that also writes the answer. `decode` would write it otherwise; None if all are full.
    `usual`: of decode workers."""
    rules, block_size = candidates.rules, demand.block_size
    if not rules.may_stay:
        return None
    num_context_tokens = demand.num_expected_blocks * block_size
    options = []
    for reader in readers:
        worker = reader.worker
        if worker.backlog_tokens:
            continue  # It does not idle.
        token_ms = staying_tpot_ms(worker, num_context_tokens, block_size, usual)
        if (
            (decode is None or _is_much_slower(decode.predicted_ms, token_ms, rules))
            and has_room(worker, demand.num_expected_blocks, demand.num_sequences)
            and keeps_tpot(worker, token_ms, candidates.max_tpot_ms)
            and why_not_staying(worker, num_context_tokens, demand.num_sequences, block_size, usual) is None
        ):
            cost_ms = reader.cost_ms + demand.num_emitted * token_ms
            options.append(replace(reader, cost_ms=cost_ms, predicted_ms=token_ms))
    option = best(options)
    if option is None:
        return None
    why = NO_ROOM
    if decode is not None:
        why = f"{decode.worker.id} should take {decode.predicted_ms:.1f} ms for a token"
    return Placement(
        prefill=None,
        decode=option.worker.id,
        num_uncached_tokens=option.num_uncached_tokens,
        reason=f"{why}: {reads(option, demand)}, and {writes(option)} itself",
        route=Route.STAYED,
        cause=Cause.DECODE_FULL if decode is None else Cause.DECODE_SLOW,
    )


def _is_much_slower(decode_ms: float, staying_ms: float, rules: DisaggregationConfig) -> bool:
    """Whether decode's time per token is a reason to stay, both being measured."""
    breaks_limit = rules.max_tpot_ms is not None and staying_ms <= rules.max_tpot_ms < decode_ms
    return staying_ms > 0 and (decode_ms >= STAY_GAIN * staying_ms or breaks_limit)


def _with_chunk_cost(usual: StepCosts, candidates: Candidates) -> StepCosts:
    """Where no decode worker has read anything lately, a token counts what it costs prefill workers, less its share of
    what a step costs whatever is in it."""
    if usual.chunk_token_ms:
        return usual
    costs_ms = [_token_ms(worker, usual) for worker in candidates.prefill if worker.ms_per_token > 0]
    return replace(usual, chunk_token_ms=sum(costs_ms) / max(1, len(costs_ms)))


def _token_ms(reader: WorkerLike, usual: StepCosts) -> float:
    """What a token adds to a step of a prefill worker: without the share of what each step costs."""
    return max(0.0, reader.ms_per_token - usual.decode_base_ms / reader.chunk_tokens)
