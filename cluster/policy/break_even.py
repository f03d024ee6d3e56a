"""Whether decode should read a prompt itself, or prefill write an answer, and what is measured to tell.

Both break what disaggregation is for, so both are bounded. A prompt that decode reads is cut so small that the running
answers' steps stay within a limit. It is read there if everybody waits less than with a push: the request itself, the
answers that the reading holds up, and those who would wait behind it at prefill. An answer is written where its prompt
was read if decode has no room for it or would write it much more slowly, prefill has been idle, and its steps for the
prompts of others do not get much longer by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cluster.core.disaggregation import DisaggregationConfig
from cluster.policy.costs import StepCosts, WorkerLike, decode_step_ms

MAX_STRETCH: Final = 1.5
"""While decode reads a prompt, a step of its running answers takes at most so many times what it takes without, unless
the cluster file sets a time."""
MAX_READING_SHARE: Final = 0.5
"""A prefill worker that has lately read for more of its time than this does not idle."""
STAY_GAIN: Final = 1.5
"""An answer stays on prefill only where decode would take at least so many times as long for each token."""
MAX_TTFT_STRETCH: Final = 1.25
"""Answers written on prefill make its steps for others' prompts at most so many times as long ..."""
MAX_WRITING_SHARE: Final = 1 / 16
"""... and they are at most so many for each token of these steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """What a push costs a request besides reading: medians of what was measured, 0 while nothing was.

    Attributes:
        reserve_ms: from the placement until decode has reserved.
        take_over_ms: from the first token until decode has the KV.
    """

    reserve_ms: float = 0.0
    take_over_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRead:
    """A prompt read on a decode worker.

    Attributes:
        read_ms: until its first token. held_up_ms: what the answers there wait for it, in all.
        step_limit_ms: of a step that also writes, meanwhile; 0 for none.
    """

    read_ms: float
    held_up_ms: float
    step_limit_ms: float


def chunk_within(limit_ms: float, step_ms: float, token_ms: float, block_size: int) -> int:
    """Prompt tokens that may join a step of `step_ms` so that it takes no longer than `limit_ms`; at least a block,
    below which reading does not get on."""
    if token_ms <= 0:
        return block_size
    return max(block_size, int((limit_ms - step_ms) / token_ms))


def step_limit_ms(worker: WorkerLike, block_size: int, usual: StepCosts, rules: DisaggregationConfig) -> float:
    """What a step of a decode worker may take while it reads beside its answers; 0 while unmeasured."""
    return _limit_ms(decode_step_ms(worker, worker.num_promised_blocks * block_size, usual), rules)


def _limit_ms(undisturbed_ms: float, rules: DisaggregationConfig) -> float:
    return rules.max_tpot_ms or MAX_STRETCH * undisturbed_ms


def local_read(
    worker: WorkerLike, num_tokens: int, block_size: int, usual: StepCosts, rules: DisaggregationConfig
) -> LocalRead | None:
    """What reading so many tokens on a decode worker would cost. None while its costs are unknown, or if not even a
    small chunk would leave the running answers within their limit."""
    step_ms = decode_step_ms(worker, worker.num_promised_blocks * block_size, usual)
    token_ms = worker.chunk_token_ms or usual.chunk_token_ms
    if step_ms <= 0 or token_ms <= 0:
        return None
    limit_ms = _limit_ms(step_ms, rules)
    num_to_read = worker.backlog_tokens + num_tokens
    chunk = worker.chunk_tokens
    is_beside_answers = worker.num_sequences > 0 or num_to_read > chunk  # which come before a longer one is read
    if is_beside_answers and step_ms + min(block_size, num_to_read) * token_ms > limit_ms:
        return None
    if worker.num_sequences:
        chunk = min(chunk, chunk_within(limit_ms, step_ms, token_ms, block_size))
    read_ms = -(-num_to_read // chunk) * step_ms + num_to_read * token_ms
    held_up_ms = max(1, worker.num_sequences) * num_tokens * token_ms  # on an idle one, by whoever comes meanwhile
    return LocalRead(read_ms=read_ms, held_up_ms=held_up_ms, step_limit_ms=limit_ms)


def staying_tpot_ms(worker: WorkerLike, num_context_tokens: int, block_size: int, usual: StepCosts) -> float:
    """Time per output token of an answer written on a prefill worker, which writes next to nothing while it reads."""
    num_all_tokens = worker.num_writing_blocks * block_size + num_context_tokens
    return decode_step_ms(worker, num_all_tokens, usual) / (1 - min(worker.reading_share, MAX_READING_SHARE))


def why_not_staying(
    worker: WorkerLike, num_context_tokens: int, num_sequences: int, block_size: int, usual: StepCosts
) -> str | None:
    """What speaks against writing so many more answers with so much context on a prefill worker; None if nothing.

    `usual`: of decode workers, for what the prefill worker has not measured itself.
    """
    if worker.backlog_tokens or worker.reading_share > MAX_READING_SHARE:
        return f"{worker.id} does not idle: it has read for {worker.reading_share:.0%} of its time"
    num_writing = worker.num_writing + num_sequences
    if num_writing > max(1, int(worker.chunk_tokens * MAX_WRITING_SHARE)):
        return f"{worker.id} writes {worker.num_writing} answers already"
    num_all_tokens = worker.num_writing_blocks * block_size + num_context_tokens
    context_ms = decode_step_ms(worker, num_all_tokens, usual) - decode_step_ms(worker, 0, usual)
    if worker.ms_per_token > 0 and context_ms > (MAX_TTFT_STRETCH - 1) * worker.chunk_tokens * worker.ms_per_token:
        return f"answers on {worker.id} would make its prompts' steps {context_ms:.0f} ms longer"
    return None
