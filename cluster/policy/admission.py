"""Admission: whether a new request may wait for a place, or is refused at once and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cluster.core.ids import Outcome
from cluster.core.limits import MAX_CHOICES
from cluster.policy.costs import WorkerLike, mean_ms_per_token

MIN_RETRY_AFTER_MS: Final = 100
MAX_RETRY_AFTER_MS: Final = 60_000
UNMEASURED_RETRY_AFTER_MS: Final = 1_000
"""What a refused client is told while no worker has been measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The lengths and wishes of a new request.

    Attributes:
        max_tokens: of each of its `num_choices` answers.
        max_latency_ms: limits the time to its first token.
    """

    num_prompt_tokens: int
    max_tokens: int
    num_choices: int
    max_latency_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The cluster as admission sees it.

    Attributes:
        num_queued, num_queued_tokens: requests that wait, and their prompts' tokens. queue_limit: the most that may.
        num_live, max_live: requests known in all, and the most that may be.
        max_model_tokens: the longest prompt and answer any worker takes, None while unknown.
        max_prompt_blocks: blocks of the largest decode worker, None while there is none. block_size: their tokens.
        num_readers: workers that read prompts. readers: some of them, to judge all by.
    """

    num_queued: int
    num_queued_tokens: int
    queue_limit: int
    num_live: int
    max_live: int
    max_model_tokens: int | None
    max_prompt_blocks: int | None
    block_size: int
    num_readers: int
    readers: Sequence[WorkerLike]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """The request may wait for a place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """`retry_after_ms` is None where trying again cannot help."""

    outcome: Outcome
    reason: str
    retry_after_ms: int | None = None


def admit(arrival: Arrival, situation: Situation) -> Admit | Refuse:
    """Decides on a new request; costs O(readers)."""
    return _never_fits(arrival, situation) or _too_many(situation) or _too_slow(arrival, situation) or Admit()


def retry_after_ms(situation: Situation) -> int:
    """When the queue should have been read; a guess within named bounds."""
    wait_ms = _queue_wait_ms(situation)
    return _bounded_ms(UNMEASURED_RETRY_AFTER_MS if wait_ms is None else wait_ms)


def _never_fits(arrival: Arrival, situation: Situation) -> Refuse | None:
    if not 1 <= arrival.num_choices <= MAX_CHOICES:
        return _invalid(f"{arrival.num_choices} choices were asked for, 1 to {MAX_CHOICES} can be given")
    if arrival.num_prompt_tokens < 1 or arrival.max_tokens < 1:
        return _invalid("a request needs at least one prompt token and max_tokens of at least 1")
    num_tokens = arrival.num_prompt_tokens + 1
    if situation.max_model_tokens is not None and num_tokens > situation.max_model_tokens:
        return _invalid(
            f"the prompt has {arrival.num_prompt_tokens} tokens, at most {situation.max_model_tokens - 1} can be read"
        )
    num_blocks = -(-num_tokens // situation.block_size)
    if situation.max_prompt_blocks is not None and num_blocks > situation.max_prompt_blocks:
        return _invalid(
            f"the prompt needs {num_blocks} KV blocks, the largest worker has {situation.max_prompt_blocks}"
        )
    return None


def _too_many(situation: Situation) -> Refuse | None:
    if situation.num_queued >= situation.queue_limit:
        reason = f"{situation.num_queued} requests wait already, which is the limit"
    elif situation.num_live >= situation.max_live:
        reason = f"{situation.num_live} requests are served already, which is the limit"
    else:
        return None
    return _overload(reason, retry_after_ms(situation))


def _too_slow(arrival: Arrival, situation: Situation) -> Refuse | None:
    ms_per_token = mean_ms_per_token(situation.readers)
    wait_ms = _queue_wait_ms(situation)
    if arrival.max_latency_ms is None or ms_per_token is None or wait_ms is None:
        return None
    read_ms = arrival.num_prompt_tokens * ms_per_token
    backlog_ms = min(worker.backlog_tokens * (worker.ms_per_token or ms_per_token) for worker in situation.readers)
    first_token_ms = wait_ms + backlog_ms + read_ms
    if first_token_ms <= arrival.max_latency_ms:
        return None
    reason = f"the first token is expected in {first_token_ms:.0f} ms, max_latency_ms is {arrival.max_latency_ms}"
    if read_ms > arrival.max_latency_ms:
        return _overload(reason, None)
    return _overload(reason, _bounded_ms(first_token_ms - arrival.max_latency_ms))


def _queue_wait_ms(situation: Situation) -> float | None:
    """Time to read all that wait, shared among the readers; None while nothing is measured."""
    ms_per_token = mean_ms_per_token(situation.readers)
    return None if ms_per_token is None else situation.num_queued_tokens * ms_per_token / situation.num_readers


def _bounded_ms(wait_ms: float) -> int:
    return int(min(max(wait_ms, MIN_RETRY_AFTER_MS), MAX_RETRY_AFTER_MS))


def _invalid(reason: str) -> Refuse:
    return Refuse(outcome=Outcome.REJECTED_INVALID, reason=reason)


def _overload(reason: str, after_ms: int | None) -> Refuse:
    return Refuse(outcome=Outcome.REJECTED_OVERLOAD, reason=reason, retry_after_ms=after_ms)
