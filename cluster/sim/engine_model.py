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


def draw(
    context: ContextHash, sampling: SamplingParams, position: int, history: Sequence[int], variant: int = 0
) -> int:
    """The token after `context`.

    It depends on the context's KV, on the seed unless greedy, on the position, and, with penalties, on the history
    they are counted from. `variant` stands for the low bits that batching and chunking change in bfloat16. An
    end-of-sequence token cannot be drawn before `min_tokens`.
    """
    key = position if sampling.is_greedy else position + (sampling.seed + 1) * 1009
    if sampling.presence_penalty:
        key = mix(key, hash_history(history))
    token_id = mix(context.value + variant, key) % VOCABULARY_SIZE
    if position < sampling.min_tokens:
        while token_id == EOS_TOKEN_ID or token_id in sampling.stop_token_ids:
            token_id = (token_id + 1) % VOCABULARY_SIZE
    return token_id


def hash_history(token_ids: Sequence[int]) -> int:
    value = len(token_ids)
    for token_id in token_ids:
        value = mix(value, token_id)
    return value


def run_plan(plan: StepPlan, memory: KVMemory, variant: int = 0) -> StepResult:
    """Reads each sequence's KV through its block table, writes that of the step's tokens, and draws."""
    return StepResult(step_id=plan.step_id, tokens=[_run_sequence(step, memory, variant) for step in plan.sequences])


def _run_sequence(step: SequenceStep, memory: KVMemory, variant: int) -> SampledToken | None:
    context = ContextHash(memory.read(step.block_table, step.start))
    for position, token_id in enumerate(step.token_ids, start=step.start):
        memory.write_slot(step.block_table, position, context.append(token_id))
    if not step.sample:
        return None
    return SampledToken(token_id=draw(context, step.sampling, step.position, step.output_ids, variant))


class Oracle:
    """Knows which tokens may come next in an answer, computed without pool, scheduler or transfer.

    Where arithmetic is inexact several are right, but the one that was given decides what may follow it: tokens of
    two runs of one request do not mix.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        max_model_tokens: int,
        *,
        stop_pair: tuple[int, int] | None = None,
        num_variants: int = 1,
    ) -> None:
        """`stop_pair` is two token ids that stand for a stop string."""
        self.token_ids: list[int] = []
        self.outcome: Outcome | None = None
        """How the answer ends; None before its last token."""
        self.has_stop_match = False
        self._sampling = sampling
        self._room = max_model_tokens - len(prompt_ids)
        self._stop_pair = stop_pair
        self._num_variants = num_variants
        self._context = ContextHash()
        for token_id in prompt_ids:
            self._context.append(token_id)

    def choices(self) -> list[int]:
        """The tokens that are right at the next position; none after the last one."""
        if self.outcome is not None:
            return []
        args = (self._context, self._sampling, len(self.token_ids), self.token_ids)
        return [draw(*args, variant) for variant in range(self._num_variants)]

    def accept(self, token_id: int) -> None:
        """That token was given."""
        self.token_ids.append(token_id)
        self._context.append(token_id)
        sampling = self._sampling
        self.has_stop_match = self._stop_pair is not None and tuple(self.token_ids[-2:]) == self._stop_pair
        is_eos = token_id == EOS_TOKEN_ID and not sampling.ignore_eos
        if self.has_stop_match or is_eos or token_id in sampling.stop_token_ids:
            self.outcome = Outcome.STOP
        elif len(self.token_ids) in (sampling.max_tokens, self._room):
            self.outcome = Outcome.LENGTH
