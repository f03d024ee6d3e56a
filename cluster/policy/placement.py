"""Placement: which decode worker and which prefill worker run the next request, or why it waits.

Decode comes first (it holds the request longer): the one where the answer should be written soonest, that is by the
predicted time per output token and what of the prompt would have to be pushed there. Then prefill, by the predicted
time until the prompt is read and pushed, which depends on what has to be read before it and on what of it is not cached
there; the latter counts again, since others have to wait for it. Both or neither. Among nearly equals the one with the
lightest load is taken, then the smallest worker id.

That a conversation comes back to the workers that hold its beginning follows from this; there is no rule for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cluster.core.ids import WorkerId
from cluster.policy.costs import LinksLike, StepCosts, WorkerLike, push_ms, read_ms, tpot_ms, usual_costs

MAX_BACKLOG_CHUNKS: Final = 4
"""A worker starts a prompt soon if it has at most so many chunks to read before it ..."""
MAX_BACKLOG_PER_HELD_TOKEN: Final = 2
"""... and so many tokens for each of the prompt's that are cached there."""
READING_WEIGHT: Final = 3
"""What is read keeps a worker from the prompts of others: each token counts so many times besides the request's own
wait. Without it busy holders are passed over too readily, and what they hold is computed again."""
MAX_RESERVED_PERCENT: Final = 75
"""A reservation of a larger share of a decode worker's blocks than this is never granted: it is read there instead."""
EXPECTED_OUTPUT_TOKENS: Final = 256
"""An answer is expected to be no longer than this; where it is, decode preempts as the last resort."""
NEARLY: Final = 0.1
"""Costs count as equal to the least up to this share of the request's own time more: predictions are no better than
that. What reading costs others is the larger part of a long prompt's cost, and the same share of it would let the
prompt wait for seconds beside an idle worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    num_tokens: int, num_tokens_left: int, block_size: int, *, num_choices: int = 1, num_unshared: int = 0
) -> Demand:
    """What a request needs that has `num_tokens` to be read and may emit `num_tokens_left` more.

    With several choices, each emits so many. They share the tokens read, except for a part of the last block and
    `num_unshared` tokens that all of them together have been given beyond.
    """
    num_emitted = max(1, min(num_tokens_left, EXPECTED_OUTPUT_TOKENS))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The workers to choose from.

    Attributes:
        prefill, decode: of either role, those that hold most of the prompt first. Empty only where none is alive.
        num_held_blocks: of the prompt's beginning, by worker, as far as is known (a hint); never with its last token.
        links: between them.
    """

    prefill: tuple[WorkerLike, ...]
    decode: tuple[WorkerLike, ...]
    num_held_blocks: Mapping[WorkerId, int]
    links: LinksLike


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`prefill` is None where the decode worker reads the prompt itself.

    `num_uncached_tokens` are those that whoever reads it is expected to compute.
    """

    prefill: WorkerId | None
    decode: WorkerId
    num_uncached_tokens: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Nothing can take the request now."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """A worker that could take it: at what cost, and how heavy its load is (compared in order).

    `own_ms`: what of the cost is the request's own time, and not that of others. `predicted_ms`: time per output token
    of a decode worker; of a prefill worker the time until the prompt is read.
    """

    worker: WorkerLike
    cost_ms: float
    own_ms: float
    load: tuple[int, int]
    num_uncached_tokens: int
    predicted_ms: float


def place(
    demand: Demand, candidates: Candidates, excluded: Mapping[WorkerId, int], why_local: str | None = None
) -> Placement | Wait:
    """Chooses workers for one request; costs O(candidates).

    Args:
        excluded: decode workers that must not be taken now.
        why_local: if given, decode is to read the prompt itself, for this reason.
    """
    prefill = () if why_local else candidates.prefill
    decode = _best(_decode_options(demand, candidates, prefill, excluded))
    if decode is None:
        return Wait(reason="no decode worker has room" if candidates.decode else "no decode worker is alive")
    if not prefill:
        return _place_local(demand, decode, why_local or "no prefill worker is alive")
    if demand.num_kv_blocks > max(1, decode.worker.num_total_blocks * MAX_RESERVED_PERCENT // 100):
        return _place_local(demand, decode, f"{demand.num_kv_blocks} blocks are too large a share for a push")
    reader = _best(_prefill_options(demand, candidates, decode.worker))
    if reader is None:
        return Wait(reason="no prefill worker can start soon")
    return Placement(
        prefill=reader.worker.id,
        decode=decode.worker.id,
        num_uncached_tokens=reader.num_uncached_tokens,
        reason=f"{_writes(decode)}; {_reads(reader, demand)}, done in {reader.predicted_ms:.0f} ms",
    )


def starts_soon(worker: WorkerLike, num_held_tokens: int = 0) -> bool:
    """Whether a prompt of which so much is cached there would not wait long if it were given to it now."""
    worth_tokens = MAX_BACKLOG_PER_HELD_TOKEN * num_held_tokens
    return worker.backlog_tokens <= MAX_BACKLOG_CHUNKS * worker.chunk_tokens + worth_tokens


def _decode_options(
    demand: Demand, candidates: Candidates, prefill: tuple[WorkerLike, ...], excluded: Mapping[WorkerId, int]
) -> list[_Option]:
    usual = usual_costs(candidates.decode)
    return [
        _decode_option(demand, candidates, prefill, worker, usual)
        for worker in candidates.decode
        if worker.id not in excluded
        and _has_room(worker, demand.num_expected_blocks, demand.num_sequences)
        and (prefill or starts_soon(worker, _num_held_tokens(demand, candidates, worker)))
    ]


def _decode_option(
    demand: Demand, candidates: Candidates, prefill: tuple[WorkerLike, ...], worker: WorkerLike, usual: StepCosts
) -> _Option:
    """Its cost is the time until the whole answer is written. What comes from prefill counts as if it came from the
    first of these, which is the likeliest to be taken."""
    num_held_blocks = candidates.num_held_blocks.get(worker.id, 0)
    num_uncached_tokens = demand.num_tokens - num_held_blocks * demand.block_size
    token_ms = tpot_ms(worker, demand.num_expected_blocks * demand.block_size, demand.block_size, usual)
    own_ms = demand.num_emitted * token_ms
    others_ms = 0.0
    if prefill:
        own_ms += push_ms(candidates.links, prefill[0], worker, demand.num_read_blocks - num_held_blocks)
    else:
        own_ms += read_ms(worker, num_uncached_tokens, usual)
        others_ms = _others_ms(num_uncached_tokens, usual)
    return _Option(
        worker=worker,
        cost_ms=own_ms + others_ms,
        own_ms=own_ms,
        load=(worker.num_promised_blocks - num_held_blocks - worker.num_total_blocks, worker.num_sequences),
        num_uncached_tokens=num_uncached_tokens,
        predicted_ms=token_ms,
    )


def _prefill_options(demand: Demand, candidates: Candidates, decode: WorkerLike) -> list[_Option]:
    """What costs is the reading, or the push where that is slower: they go on at the same time."""
    usual = usual_costs(candidates.prefill)
    num_pushed_blocks = demand.num_read_blocks - candidates.num_held_blocks.get(decode.id, 0)
    options = []
    for worker in candidates.prefill:
        num_held_tokens = _num_held_tokens(demand, candidates, worker)
        if not starts_soon(worker, num_held_tokens) or not _has_room(worker, demand.num_read_blocks, 1):
            continue
        num_uncached_tokens = demand.num_tokens - num_held_tokens
        pushed_ms = read_ms(worker, 0, usual) + push_ms(candidates.links, worker, decode, num_pushed_blocks)
        predicted_ms = max(read_ms(worker, num_uncached_tokens, usual), pushed_ms)
        options.append(
            _Option(
                worker=worker,
                cost_ms=predicted_ms + _others_ms(num_uncached_tokens, usual),
                own_ms=predicted_ms,
                load=(worker.num_given_tokens, worker.num_sequences),
                num_uncached_tokens=num_uncached_tokens,
                predicted_ms=predicted_ms,
            )
        )
    return options


def _others_ms(num_tokens: int, usual: StepCosts) -> float:
    """What reading so many tokens costs those that come after, wherever it is done."""
    return READING_WEIGHT * num_tokens * usual.ms_per_token


def _best(options: list[_Option]) -> _Option | None:
    """The one with the lightest load of those that cost nearly the least."""
    if not options:
        return None
    limit_ms = min(option.cost_ms + NEARLY * option.own_ms for option in options)
    nearest = [option for option in options if option.cost_ms <= limit_ms]
    return min(nearest, key=lambda option: (option.load, option.worker.id))


def _place_local(demand: Demand, option: _Option, why: str) -> Placement | Wait:
    worker = option.worker
    if not starts_soon(worker, demand.num_tokens - option.num_uncached_tokens):
        return Wait(reason=f"{why}, and {worker.id} cannot start soon")
    return Placement(
        prefill=None,
        decode=worker.id,
        num_uncached_tokens=option.num_uncached_tokens,
        reason=f"{why}: {_writes(option)}, and reads {option.num_uncached_tokens} tokens itself",
    )


def _writes(option: _Option) -> str:
    num_left = option.worker.num_total_blocks - option.worker.num_promised_blocks
    return f"{option.worker.id} with {num_left} blocks left should write a token in {option.predicted_ms:.1f} ms"


def _reads(option: _Option, demand: Demand) -> str:
    worker = option.worker
    return f"{worker.id} reads {option.num_uncached_tokens} of {demand.num_tokens} tokens after {worker.backlog_tokens}"


def _num_held_tokens(demand: Demand, candidates: Candidates, worker: WorkerLike) -> int:
    return candidates.num_held_blocks.get(worker.id, 0) * demand.block_size


def _has_room(worker: WorkerLike, num_blocks: int, num_sequences: int) -> bool:
    """An idle worker takes anything that was admitted: it holds at least one sequence of maximum length."""
    if worker.num_sequences == 0:
        return True
    has_blocks = worker.num_promised_blocks + num_blocks <= worker.num_total_blocks
    return has_blocks and worker.num_sequences + num_sequences <= worker.max_running
