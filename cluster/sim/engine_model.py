"""Stands in for the model runner: what a step costs, and which tokens it draws from the KV it finds in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core.ids import Outcome
from cluster.sim.kv_memory import ContextHash, KVMemory, mix
from engine.core.sampling import SamplingParams
from engine.core.step import SampledToken, SequenceStep, StepPlan, StepResult

VOCABULARY_SIZE = 64
EOS_TOKEN_ID = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Duration of a step: a base, a share a token run, a share a token of context read; all in nanoseconds."""

    base_ns: int = 4_000_000
    token_ns: int = 250_000
    context_ns: int = 4_000

    def duration_ns(self, plan: StepPlan) -> int:
        context = sum(sequence.start for sequence in plan.sequences)
        return self.base_ns + plan.num_tokens * self.token_ns + context * self.context_ns


def draw(context: ContextHash, sampling: SamplingParams, position: int, history: Sequence[int]) -> int:
    """The token after `context`: depends on its KV, on the seed unless greedy, on the position, and, with penalties, on
    the history they are counted from. An end-of-sequence token cannot be drawn before `min_tokens`."""
    key = position if sampling.is_greedy else position + (sampling.seed + 1) * 1009
    if sampling.presence_penalty:
        key = mix(key, hash_history(history))
    token_id = mix(context.value, key) % VOCABULARY_SIZE
    if position < sampling.min_tokens and (token_id == EOS_TOKEN_ID or token_id in sampling.stop_token_ids):
        banned = {EOS_TOKEN_ID, *sampling.stop_token_ids}
        token_id = next(other for other in range(token_id + 1, token_id + 99) if other % VOCABULARY_SIZE not in banned)
    return token_id % VOCABULARY_SIZE


def hash_history(token_ids: Sequence[int]) -> int:
    value = len(token_ids)
    for token_id in token_ids:
        value = mix(value, token_id)
    return value


def run_plan(plan: StepPlan, memory: KVMemory) -> StepResult:
    """Reads each sequence's KV through its block table, writes that of the step's tokens, and draws."""
    return StepResult(step_id=plan.step_id, tokens=[_run_sequence(step, memory) for step in plan.sequences])


def _run_sequence(step: SequenceStep, memory: KVMemory) -> SampledToken | None:
    context = ContextHash(memory.read(step.block_table, step.start))
    for position, token_id in enumerate(step.token_ids, start=step.start):
        memory.write_slot(step.block_table, position, context.append(token_id))
    if not step.sample:
        return None
    return SampledToken(token_id=draw(context, step.sampling, step.position, step.output_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The whole right answer of a request. `stop_at`: number of tokens up to the end of its stop string, if any."""

    token_ids: tuple[int, ...]
    outcome: Outcome
    stop_at: int | None = None


def expected_answer(
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    max_model_tokens: int,
    stop_pair: tuple[int, int] | None = None,
) -> Answer:
    """What a request must get, computed without pool, scheduler or transfer.

    `stop_pair` is two token ids that stand for a stop string.
    """
    context = ContextHash()
    for token_id in prompt_ids:
        context.append(token_id)
    output: list[int] = []
    while True:
        token_id = draw(context, sampling, len(output), output)
        output.append(token_id)
        if stop_pair is not None and tuple(output[-2:]) == stop_pair:
            return Answer(token_ids=tuple(output), outcome=Outcome.STOP, stop_at=len(output))
        if token_id in sampling.stop_token_ids or (token_id == EOS_TOKEN_ID and not sampling.ignore_eos):
            return Answer(token_ids=tuple(output), outcome=Outcome.STOP)
        if len(output) == sampling.max_tokens or len(prompt_ids) + len(output) == max_model_tokens:
            return Answer(token_ids=tuple(output), outcome=Outcome.LENGTH)
        context.append(token_id)
