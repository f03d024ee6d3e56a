"""What placement is asked, what it answers, and the rules of who may be taken at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from cluster.core.disaggregation import ALWAYS_PUSHED, DisaggregationConfig
from cluster.core.ids import Route, WorkerId
from cluster.policy.break_even import HandOver
from cluster.policy.costs import LinksLike, WorkerLike

if TYPE_CHECKING:  # which is built from it
    from cluster.policy.placement import Demand

MAX_BACKLOG_CHUNKS: Final = 4
"""A worker starts a prompt soon if it has at most so many chunks to read before it ..."""
MAX_BACKLOG_PER_HELD_TOKEN: Final = 2
"""... and so many tokens for each of the prompt's that are cached there and that no other worker could fetch."""
READING_WEIGHT: Final = 3
"""What is read keeps a worker from the prompts of others: each token counts so many times besides the request's own
wait. Without it busy holders are passed over too readily, and what they hold is computed again."""
NO_ROOM: Final = "no decode worker has room"
TOO_SLOW: Final = "no decode worker with room would keep to slo.tpot_ms"
NEARLY: Final = 0.1
"""Costs count as equal to the least up to this share of the request's own time more: predictions are no better than
that. What reading costs others is the larger part of a long prompt's cost, and the same share of it would let the
prompt wait for seconds beside an idle worker."""
NEARLY_READ: Final = 0.03
"""The same where a prompt is read. Most of what readers differ by is what they have to read before it, which is known
better than how an answer will go on: a tenth of its own time is half a second for a long prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The workers to choose from.

    Attributes:
        prefill, decode: of either role, those that hold most of the prompt first. Empty only where none is alive.
        num_held_blocks: of the prompt's beginning, by worker, as far as is known (a hint); never with its last token.
        links: between them.
        rules: when a request takes another way than a push. hand_over: what a push has cost besides reading.
        max_tpot_ms: what a token of a worker's answers may take at most; None for no limit.
        sources: workers that have told of blocks of the prompt, with how many, the most first: what a reader may fetch.
            Few, and none where fetches are off.
    """

    prefill: tuple[WorkerLike, ...]
    decode: tuple[WorkerLike, ...]
    num_held_blocks: Mapping[WorkerId, int]
    links: LinksLike
    rules: DisaggregationConfig = ALWAYS_PUSHED
    hand_over: HandOver = field(default_factory=HandOver)
    max_tpot_ms: float | None = None
    sources: tuple[tuple[WorkerLike, int], ...] = ()


class Cause(StrEnum):
    """Why a request takes its way: a push is the rule, all else has one of few causes.

    DECODE_FULL and DECODE_SLOW let it stay on prefill. All others have decode read it: BREAK_EVEN because that is
    cheaper, FIXED because the cluster file says so of so short a prompt, the last three because it cannot be pushed.
    """

    RULE = "rule"
    BREAK_EVEN = "break_even"
    FIXED = "fixed"
    DECODE_FULL = "decode_full"
    DECODE_SLOW = "decode_slow"
    NO_PREFILL = "no_prefill"
    TOO_LARGE = "too_large"
    TRANSFER_FAILED = "transfer_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`prefill` is None where `decode` reads the prompt itself; where the request stays, that is a prefill worker.

    `num_uncached_tokens` are those that whoever reads it is expected to compute. `step_limit_ms`: what steps that also
    write are to take at most while `decode` reads, 0 for no limit.
    """

    prefill: WorkerId | None
    decode: WorkerId
    num_uncached_tokens: int
    reason: str
    route: Route = Route.PUSHED
    cause: Cause = Cause.RULE
    step_limit_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Nothing can take the request now."""

    reason: str


@dataclass(slots=True, kw_only=True)
class Option:
    """A worker that could take it, and at what cost.

    `slack_ms`: how much more than the least it may cost and count as equal. `rank`: how heavy its load is, in two
    numbers, and its id; the least one is taken of those that cost the same. `num_bound_tokens`: what is cached there
    and could not be fetched by another. `predicted_ms`: time per output token of a decode worker; of a prefill worker
    the time until the prompt is read.
    """

    worker: WorkerLike
    cost_ms: float
    slack_ms: float
    rank: tuple[int, int, WorkerId]
    num_uncached_tokens: int
    num_bound_tokens: int
    predicted_ms: float


def starts_soon(worker: WorkerLike, num_bound_tokens: int = 0) -> bool:
    """Whether a prompt of which so much is to be had there alone would not wait long if it were given to it now."""
    worth_tokens = MAX_BACKLOG_PER_HELD_TOKEN * num_bound_tokens
    return worker.backlog_tokens <= MAX_BACKLOG_CHUNKS * worker.chunk_tokens + worth_tokens


def best(options: list[Option]) -> Option | None:
    """The one with the lightest load of those that cost nearly the least."""
    if not options:
        return None
    limit_ms = min([option.cost_ms + option.slack_ms for option in options])
    nearly = [option for option in options if option.cost_ms <= limit_ms]
    return min(nearly, key=attrgetter("rank"))


def has_room(worker: WorkerLike, num_blocks: int, num_sequences: int) -> bool:
    """An idle worker takes anything that was admitted: it holds at least one sequence of maximum length."""
    if worker.num_sequences == 0:
        return True
    has_blocks = worker.num_promised_blocks + num_blocks <= worker.num_total_blocks
    return has_blocks and worker.num_sequences + num_sequences <= worker.max_running


def keeps_tpot(worker: WorkerLike, token_ms: float, max_tpot_ms: float | None) -> bool:
    """Whether a worker may be given an answer with which a token of each would take so long. An idle one may: no other
    would be quicker, and costs that were measured on a bad day are so measured again."""
    return max_tpot_ms is None or worker.num_sequences == 0 or token_ms <= max_tpot_ms


def writes(option: Option) -> str:
    num_left = option.worker.num_total_blocks - option.worker.num_promised_blocks
    return f"{option.worker.id} with {num_left} blocks left should write a token in {option.predicted_ms:.1f} ms"


def may_read(option: Option) -> bool:
    """Whether the option's worker would begin with the prompt soon."""
    return starts_soon(option.worker, option.num_bound_tokens)


def reads(option: Option, demand: Demand) -> str:
    worker = option.worker
    return f"{worker.id} reads {option.num_uncached_tokens} of {demand.num_tokens} tokens after {worker.backlog_tokens}"
