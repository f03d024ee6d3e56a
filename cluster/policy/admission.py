"""Admission: whether a new request may wait for a place, or is refused at once and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cluster.core.ids import Outcome, RefusalCause
from cluster.core.limits import MAX_CHOICES
from cluster.policy.first_token import Ahead, Capacity, FirstToken, predict

MIN_RETRY_AFTER_MS: Final = 100
MAX_RETRY_AFTER_MS: Final = 60_000
UNMEASURED_RETRY_AFTER_MS: Final = 1_000
"""What a refused client is told while no worker has been measured."""


@dataclass(slots=True, kw_only=True)  # not frozen: that would treble what it costs to make one
class Arrival:
    """The lengths and wishes of a new request.

    Attributes:
        max_tokens: of each of its `num_choices` answers.
        max_latency_ms: limits the time to its first token. deadline_ms: until its client's deadline.
        num_cached_tokens: of its prompt, that a reader is thought to have.
        num_blocks: that it is expected to need on its writer.
        quota_wait_ms: until its tenant's quota allows it.
    """

    num_prompt_tokens: int
    max_tokens: int
    num_choices: int = 1
    max_latency_ms: int | None = None
    deadline_ms: int | None = None
    num_cached_tokens: int = 0
    num_blocks: int = 1
    quota_wait_ms: int = 0

    @property
    def has_limit(self) -> bool:
        """Of its own, on the time to its first token."""
        return self.max_latency_ms is not None or self.deadline_ms is not None


@dataclass(slots=True, kw_only=True)  # not frozen: that would treble what it costs to make one
class Situation:
    """The cluster as admission sees it.

    Attributes:
        num_queued, queue_limit: requests that wait, and the most that may. can_displace: whether one of them would go.
        num_live, max_live: requests known in all, and the most that may be.
        max_model_tokens: the longest prompt and answer any worker takes, None while unknown.
        max_prompt_blocks: blocks of the largest decode worker, None while there is none. block_size: their tokens.
        slo_ttft_ms: the cluster's limit on the time to a first token, None if it has none.
        ahead: of those that wait, what comes before the new one. capacity: of the workers.
    """

    num_queued: int
    queue_limit: int
    can_displace: bool
    num_live: int
    max_live: int
    max_model_tokens: int | None
    max_prompt_blocks: int | None
    block_size: int
    slo_ttft_ms: int | None
    ahead: Ahead
    capacity: Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class StartLimit:
    """It must have a place within `within_ms`, or its first token cannot come in time any more."""

    within_ms: float
    cause: RefusalCause
    limit_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """The request may wait for a place; `start` says how long, None if nothing but the queue's timeout limits that."""

    start: StartLimit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """`retry_after_ms` is None where trying again cannot help."""

    outcome: Outcome
    cause: RefusalCause
    reason: str
    retry_after_ms: int | None = None


_LIMIT_NAMES: Final = {
    RefusalCause.MAX_LATENCY: "max_latency_ms",
    RefusalCause.DEADLINE: "the time to its deadline in ms",
    RefusalCause.SLO: "the cluster's slo.ttft_ms",
}


def admit(arrival: Arrival, situation: Situation) -> Admit | Refuse:
    """Decides on a new request; costs O(workers looked at)."""
    return (
        _never_fits(arrival, situation) or _over_quota(arrival) or _too_many(situation) or _in_time(arrival, situation)
    )


def limit_text(cause: RefusalCause, limit_ms: int) -> str:
    """The limit of a request that was refused for one of the limits on its first token."""
    return f"{_LIMIT_NAMES[cause]} is {limit_ms}"


def retry_after_ms(situation: Situation) -> int:
    """When what waits should have been read; a guess within named bounds."""
    first = predict(0, 1, situation.ahead, situation.capacity)
    return _bounded_ms(UNMEASURED_RETRY_AFTER_MS if first is None else first.wait_ms)


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
    if situation.num_queued >= situation.queue_limit and not situation.can_displace:
        reason = f"{situation.num_queued} requests wait already, which is the limit"
    elif situation.num_live >= situation.max_live:
        reason = f"{situation.num_live} requests are served already, which is the limit"
    else:
        return None
    return _overload(RefusalCause.TOO_MANY, reason, retry_after_ms(situation))


def _over_quota(arrival: Arrival) -> Refuse | None:
    if not arrival.quota_wait_ms:
        return None
    reason = f"the tenant's quota of tokens is used up for {arrival.quota_wait_ms} ms"
    return _overload(RefusalCause.QUOTA, reason, _bounded_ms(arrival.quota_wait_ms))


def _in_time(arrival: Arrival, situation: Situation) -> Admit | Refuse:
    """Refuses what cannot have its first token in time; otherwise says when it will be too late for that."""
    limits = _limits(arrival, situation)
    num_uncached_tokens = arrival.num_prompt_tokens - arrival.num_cached_tokens
    if not limits:
        return Admit()
    first = predict(num_uncached_tokens, arrival.num_blocks, situation.ahead, situation.capacity)
    if first is None:  # nothing is measured yet: only what has waited for that long is too late
        first = FirstToken(queue_ms=0.0, backlog_ms=0.0, read_ms=0.0)
    for cause, limit_ms in limits:
        refusal = _too_slow(cause, limit_ms, first)
        if refusal is not None:
            return refusal
    within_ms, cause, limit_ms = min(
        ((limit_ms - first.backlog_ms - first.read_ms, cause, limit_ms) for cause, limit_ms in limits),
        key=lambda limit: limit[0],
    )
    return Admit(start=StartLimit(within_ms=max(0.0, within_ms), cause=cause, limit_ms=limit_ms))


def _limits(arrival: Arrival, situation: Situation) -> list[tuple[RefusalCause, int]]:
    limits = (
        (RefusalCause.MAX_LATENCY, arrival.max_latency_ms),
        (RefusalCause.DEADLINE, arrival.deadline_ms),
        (RefusalCause.SLO, situation.slo_ttft_ms),
    )
    return [(cause, limit_ms) for cause, limit_ms in limits if limit_ms is not None]


def _too_slow(cause: RefusalCause, limit_ms: int, first: FirstToken) -> Refuse | None:
    """An idle cluster takes what is too long for its own limit, as that keeps nobody waiting. It also means that costs
    which were measured on a bad day, and would have everything refused, are measured again."""
    is_never = first.read_ms > limit_ms
    if first.latest_ms <= limit_ms or (cause is RefusalCause.SLO and first.wait_ms <= 0):
        return None
    times = f"{first.total_ms:.0f}" + (f" to {first.latest_ms:.0f}" if first.wait_ms > 0 else "")
    reason = f"the first token is expected in {times} ms, {limit_text(cause, limit_ms)}"
    if is_never and cause is not RefusalCause.SLO:
        return _overload(cause, reason, None)
    return _overload(cause, reason, _bounded_ms(min(first.wait_ms, first.latest_ms - limit_ms)))


def _bounded_ms(wait_ms: float) -> int:
    return int(min(max(wait_ms, MIN_RETRY_AFTER_MS), MAX_RETRY_AFTER_MS))


def _invalid(reason: str) -> Refuse:
    return Refuse(outcome=Outcome.REJECTED_INVALID, cause=RefusalCause.INVALID, reason=reason)


def _overload(cause: RefusalCause, reason: str, after_ms: int | None) -> Refuse:
    return Refuse(outcome=Outcome.REJECTED_OVERLOAD, cause=cause, reason=reason, retry_after_ms=after_ms)
