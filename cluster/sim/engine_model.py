"""Stands in for the model runner: what a step costs, and which tokens it draws from the KV it finds in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cluster.core.ids import Outcome
from cluster.sim.kv_memory import ContextHash, KVMemory, mix
from engine.core.sampling import SamplingParams
from engine.core.step import SampledToken, ScoredToken, SequenceStep, StepPlan, StepResult

VOCABULARY_SIZE = 64
EOS_TOKEN_ID = 2
RUBBISH = 0x0BAD
"""Content of a slot whose token's KV could not be computed."""


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
    context: ContextHash,
    sampling: SamplingParams,
    choice: int,
    position: int,
    history: Sequence[int],
    variant: int = 0,
) -> int:
    """The token after `context`.

    It depends on the context's KV, on seed and choice unless greedy, on the position, and, with penalties, on the
    history they are counted from. `variant` stands for the low bits that batching and chunking change in bfloat16. An
    end-of-sequence token cannot be drawn before `min_tokens`.
    """
    key = position if sampling.is_greedy else position + (sampling.seed + 1) * 1009 + choice * 1_000_003
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


def logprob(context: ContextHash, token_id: int) -> float:
    """Of a prompt token after `context`. (Its low bits do not vary here.)"""
    return -(mix(context.value, token_id) % 1000) / 100


def prompt_logprobs(prompt_ids: Sequence[int], sampling: SamplingParams) -> list[float]:
    """Of each prompt token but the first, if they are asked for; computed without pool or chunks."""
    if sampling.prompt_logprobs is None:
        return []
    context, scores = ContextHash(), []
    for token_id, following_id in pairwise(prompt_ids):
        context.append(token_id)
        scores.append(logprob(context, following_id))
    return scores


class StepRun:
    """A step under way. It computes at its first layer, or before if it is told to, and writes layer by layer."""

    def __init__(
        self, plan: StepPlan, memory: KVMemory, variant: int = 0, unusable: frozenset[int] = frozenset()
    ) -> None:
        """`unusable`: of the plan's sequences, those for which rubbish is computed."""
        self._plan = plan
        self._memory = memory
        self._variant = variant
        self._unusable = unusable
        self._slots: list[tuple[list[int], int, int]] = []
        """(block table, position, content) of what it writes."""
        self._result: StepResult | None = None
        self._num_layers_written = 0

    def compute(self) -> StepResult:
        """Reads each sequence's KV through its block table, scores and draws."""
        if self._result is not None:
            return self._result
        self._memory.copy(self._plan.copies)
        tokens: list[tuple[SampledToken, ...]] = []
        scores: dict[int, list[ScoredToken]] = {}
        failures: dict[int, str] = {}
        for index, step in enumerate(self._plan.sequences):
            if index in self._unusable:
                positions = range(step.start, step.start + len(step.token_ids))
                self._slots += [(step.block_table, position, RUBBISH) for position in positions]
                tokens.append(())
                if step.sample or step.scored_ids:
                    failures[index] = "what is computed for it is not finite"
                continue
            context = ContextHash(self._memory.read(step.block_table, step.start))
            for offset, token_id in enumerate(step.token_ids):
                self._slots.append((step.block_table, step.start + offset, context.append(token_id)))
                if offset < len(step.scored_ids):
                    scored_id = step.scored_ids[offset]
                    scored = ScoredToken(token_id=scored_id, logprob=logprob(context, scored_id))
                    scores.setdefault(index, []).append(scored)
            tokens.append(_sample(step, context, self._variant) if step.sample else ())
        self._result = StepResult(step_id=self._plan.step_id, tokens=tokens, scores=scores, failures=failures)
        return self._result

    def write_layers(self, num_layers: int) -> None:
        """Up to so many of them."""
        self.compute()
        layers = range(self._num_layers_written, num_layers)
        if layers:
            for block_table, position, content in self._slots:
                self._memory.write_slot(block_table, position, content, layers)
            self._num_layers_written = num_layers

    def finish(self) -> StepResult:
        self.write_layers(self._memory.num_layers)
        return self.compute()


def _sample(step: SequenceStep, context: ContextHash, variant: int) -> tuple[SampledToken, ...]:
    return tuple(
        SampledToken(token_id=draw(context, step.sampling, choice, step.position, step.output_ids, variant))
        for choice in (step.key.choice, *step.twins)
    )


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
        choice: int = 0,
        stop_pair: tuple[int, int] | None = None,
        num_variants: int = 1,
    ) -> None:
        """`stop_pair` is two token ids that stand for a stop string."""
        self.token_ids: list[int] = []
        self.outcome: Outcome | None = None
        """How the answer ends; None before its last token."""
        self.has_stop_match = False
        self._sampling = sampling
        self._choice = choice
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
        args = (self._context, self._sampling, self._choice, len(self.token_ids), self.token_ids)
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
