"""When a new request should have its first token, from the costs that workers have measured of their own steps.

It waits in the queue until those before it have been read, and until as many answers have ended as are needed for it to
have a place; the longer of the two counts. Then comes what its reader has still to read, and its own prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cluster.policy.costs import StepCosts, WorkerLike, decode_step_ms, mean_ms_per_token, tpot_ms, usual_costs

WAIT_MARGIN: Final = 2
"""Answers end when they end, and others may come with a better claim: a wait may well be so many times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Who reads and who writes.

    Attributes:
        num_readers, num_writers: workers in all. readers, writers: some of them, to judge all by.
        usual_output_tokens: of an answer, whoever's.
        block_size: tokens of a KV block.
        max_tpot_ms: what a token of a writer's answers may take at most; None for no limit.
    """

    num_readers: int
    readers: Sequence[WorkerLike]
    num_writers: int
    writers: Sequence[WorkerLike]
    usual_output_tokens: float
    block_size: int
    max_tpot_ms: float | None = None


NOBODY: Final = Capacity(num_readers=0, readers=(), num_writers=0, writers=(), usual_output_tokens=0.0, block_size=1)
"""Where nobody is asked: nothing can be predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """What comes before a new request, as far as is expected: requests, and tokens to be read for them."""

    num_requests: float = 0
    num_tokens: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """`queue_ms`: until it has a place. `backlog_ms`: of what its reader reads before it. `read_ms`: its own prompt."""

    queue_ms: float
    backlog_ms: float
    read_ms: float

    @property
    def wait_ms(self) -> float:
        return self.queue_ms + self.backlog_ms

    @property
    def total_ms(self) -> float:
        return self.wait_ms + self.read_ms

    @property
    def latest_ms(self) -> float:
        """It will hardly be later than this."""
        return WAIT_MARGIN * self.wait_ms + self.read_ms


def predict(num_uncached_tokens: int, num_blocks: int, ahead: Ahead, capacity: Capacity) -> FirstToken | None:
    """None while no reader has measured anything. Costs O(readers + writers).

    Args:
        num_uncached_tokens: that have to be read for it. num_blocks: that it is expected to need on its writer.
    """
    ms_per_token = mean_ms_per_token(capacity.readers)
    if ms_per_token is None:
        return None
    backlog_ms = min(worker.backlog_tokens * (worker.ms_per_token or ms_per_token) for worker in capacity.readers)
    queue_ms = ahead.num_tokens * ms_per_token / capacity.num_readers
    place_ms = _place_ms(ahead.num_requests, num_blocks, capacity)
    return FirstToken(
        queue_ms=max(queue_ms, place_ms), backlog_ms=backlog_ms, read_ms=num_uncached_tokens * ms_per_token
    )


def _place_ms(num_ahead: float, num_blocks: int, capacity: Capacity) -> float:
    """Until a writer has room for one request more than those ahead; nothing while no writer has measured anything.

    In equilibrium as many answers end in the time that one takes as are being written.
    """
    usual = usual_costs(capacity.writers)
    num_free, num_ends_per_ms = 0.0, 0.0
    for worker in capacity.writers:
        answer_ms = capacity.usual_output_tokens * tpot_ms(worker, 0, capacity.block_size, usual)
        if answer_ms <= 0:
            return 0.0
        num_more = min(
            worker.max_running - worker.num_sequences,
            (worker.num_total_blocks - worker.num_promised_blocks) // num_blocks,
            _num_quick_enough(worker, num_blocks, capacity, usual),
        )
        num_places = max(num_more, 0 if worker.num_sequences else 1)
        num_free += num_places
        num_ends_per_ms += (worker.num_sequences + num_places) / answer_ms
    if not capacity.writers:
        return 0.0
    scale = capacity.num_writers / len(capacity.writers)
    num_missing = num_ahead + 1 - num_free * scale
    return max(0.0, num_missing / (num_ends_per_ms * scale))


def _num_quick_enough(worker: WorkerLike, num_blocks: int, capacity: Capacity, usual: StepCosts) -> int:
    """Answers more of `num_blocks` each with which the worker would keep to the limit on time per token."""
    if capacity.max_tpot_ms is None:
        return worker.max_running
    num_tokens = num_blocks * capacity.block_size
    each_ms = decode_step_ms(worker, num_tokens, usual) - decode_step_ms(worker, 0, usual)
    left_ms = capacity.max_tpot_ms - tpot_ms(worker, 0, capacity.block_size, usual)
    if each_ms <= 0:
        return worker.max_running if left_ms >= 0 else 0
    return max(0, min(worker.max_running, int(left_ms / each_ms)))
