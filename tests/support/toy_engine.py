"""A model small enough to think about, whose tokens betray any mistake with blocks.

The KV of a token is a number that depends on everything before it *as read from the slots through the block table*,
and the token drawn depends on all of it again. A block that is wrong, stale, shared across prompts that differ, or
not yet written changes the tokens from there on; `undisturbed` says what they should be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.core.block_pool import BlockPool, BlockState
from engine.core.sampling import SamplingParams
from engine.core.scheduler import EmittedToken, Scheduler, StepOutcome
from engine.core.step import SampledToken, ScoredToken, SequenceKey, SequenceStep, StepPlan, StepResult
from engine.core.tiers import BlockCopy

VOCABULARY_SIZE = 50
_START = 17


def sampling(max_tokens: int, **rest: int | bool | tuple[int, ...]) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **rest)  # type: ignore[arg-type]


def kv_of(token_ids: list[int], salt: int) -> list[int]:
    """The KV of each token, computed at once and without blocks."""
    fold, kv = _mix(_START, salt), []
    for token_id in token_ids:
        kv.append(_mix(fold, token_id))
        fold = _mix(fold, kv[-1])
    return kv


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """What a sequence must give: its whole output, forced tokens included, and how it ends."""

    token_ids: list[int]
    finish_reason: str


def undisturbed(
    prompt_ids: list[int],
    params: SamplingParams,
    *,
    forced_ids: list[int] | None = None,
    salt: int = 0,
    choice: int = 0,
    eos_token_ids: frozenset[int] = frozenset(),
    max_model_tokens: int = 10**9,
) -> Undisturbed:
    """The sequence run alone, one token after the other, with as much memory as it wants."""
    output = list(forced_ids or [])
    fold = _mix(_START, salt)
    for token_kv in kv_of(prompt_ids + output, salt):
        fold = _mix(fold, token_kv)
    while True:
        token_id = _draw(fold, params.seed, choice, len(output))
        output.append(token_id)
        ends = token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos)
        if ends and len(output) > params.min_tokens:
            return Undisturbed(token_ids=output, finish_reason="stop")
        if len(output) == params.max_tokens or len(prompt_ids) + len(output) == max_model_tokens:
            return Undisturbed(token_ids=output, finish_reason="length")
        fold = _mix(fold, _mix(fold, token_id))


def folds_of(token_ids: list[int]) -> list[int]:
    """What is known after each of the tokens, computed at once: all that logits could depend on."""
    fold, folds = _mix(_START, 0), []
    for token_kv in kv_of(token_ids, 0):
        fold = _mix(fold, token_kv)
        folds.append(fold)
    return folds


def scores_of(prompt_ids: list[int], salt: int = 0) -> list[float]:
    """Log-probabilities of prompt tokens 1, 2, ..., computed at once."""
    fold, scores = _mix(_START, salt), []
    for token_kv, following in zip(kv_of(prompt_ids, salt), prompt_ids[1:], strict=False):
        fold = _mix(fold, token_kv)
        scores.append(_logprob(fold, following))
    return scores


class ToyRunner:
    """Runs plans over the slots of a pool. `salt_of` stands for what else the KV depends on (adapter, cache salt).

    The first layer of a slot holds its KV, every other one a number that has to go with it.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        salt_of: Callable[[SequenceKey], int] = lambda key: 0,
        num_layers: int = 1,
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._salt_of = salt_of
        self._layers = [[0] * (pool.num_blocks * block_size) for _ in range(num_layers)]
        self._host_blocks: dict[int, list[list[int]]] = {}
        self.num_tokens_run = 0
        self.max_sequences_in_step = 0

    def slot(self, block_table: list[int], position: int) -> int:
        return block_table[position // self._block_size] * self._block_size + position % self._block_size

    def write(self, block_table: list[int], kv: list[int]) -> None:
        """Puts the KV of positions 0, 1, ... into their slots, as a push does."""
        for position, token_kv in enumerate(kv):
            self._put(self.slot(block_table, position), token_kv, range(len(self._layers)))

    def read(self, block_table: list[int], num_tokens: int) -> list[int]:
        return [self._get(self.slot(block_table, position)) for position in range(num_tokens)]

    def block(self, block_id: int, layers: range) -> list[list[int]]:
        """What these layers hold, slot by slot: what a push copies."""
        span = slice(block_id * self._block_size, (block_id + 1) * self._block_size)
        return [self._layers[layer][span] for layer in layers]

    def put_block(self, block_id: int, layers: range, content: list[list[int]]) -> None:
        span = slice(block_id * self._block_size, (block_id + 1) * self._block_size)
        for layer, slots in zip(layers, content, strict=True):
            self._layers[layer][span] = slots

    def copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        """Between the pool and the host tier."""
        layers = range(len(self._layers))
        for copy in copies:
            if copy.is_load:
                self.put_block(copy.block_id, layers, self._host_blocks[copy.slot])
            else:
                self._host_blocks[copy.slot] = self.block(copy.block_id, layers)

    def _put(self, slot: int, token_kv: int, layers: range) -> None:
        for layer in layers:
            self._layers[layer][slot] = _of_layer(token_kv, layer)

    def _get(self, slot: int) -> int:
        """The slot's KV, or something else if a layer of it is another token's."""
        token_kv = found = self._layers[0][slot]
        for layer in range(1, len(self._layers)):
            if self._layers[layer][slot] != _of_layer(token_kv, layer):
                found = _mix(found, self._layers[layer][slot])
        return found

    def run(self, plan: StepPlan) -> StepResult:
        self.num_tokens_run += plan.num_tokens
        self.max_sequences_in_step = max(self.max_sequences_in_step, len(plan.sequences))
        return self.run_layers(plan, range(len(self._layers)))

    def run_layers(self, plan: StepPlan, layers: range) -> StepResult:
        """As `run`, but writes only these layers."""
        if layers.start == 0:
            self.copy_blocks(plan.copies)
        # All reading comes before all writing, so that nobody can lean on what a neighbour computes in this step.
        folds = []
        for step in plan.sequences:
            fold = _mix(_START, self._salt_of(step.key))
            for token_kv in self.read(step.block_table, step.start):
                fold = _mix(fold, token_kv)
            folds.append(fold)
        written: set[int] = set()
        tokens: list[tuple[SampledToken, ...]] = []
        scores: dict[int, list[ScoredToken]] = {}
        for index, (step, fold) in enumerate(zip(plan.sequences, folds, strict=True)):
            after: list[int] = []
            for position, token_id in enumerate(step.token_ids, start=step.start):
                slot = self.slot(step.block_table, position)
                assert slot not in written, f"slot {slot} is written twice in a step"
                assert self._pool.state(slot // self._block_size) is BlockState.ACTIVE
                written.add(slot)
                token_kv = _mix(fold, token_id)
                self._put(slot, token_kv, layers)
                fold = _mix(fold, token_kv)
                after.append(fold)
            tokens.append(self._sample(fold, step) if step.sample else ())
            if step.scored_ids:
                scores[index] = self._score(after[: len(step.scored_ids)], step)
        return StepResult(step_id=plan.step_id, tokens=tokens, scores=scores)

    def _sample(self, fold: int, step: SequenceStep) -> tuple[SampledToken, ...]:
        choices = (step.key.choice, *step.twins)
        seed, position = step.sampling.seed, step.position
        return tuple(SampledToken(token_id=_draw(fold, seed, choice, position)) for choice in choices)

    def _score(self, folds: list[int], step: SequenceStep) -> list[ScoredToken]:
        pairs = zip(folds, step.scored_ids, strict=True)
        return [ScoredToken(token_id=token_id, logprob=_logprob(fold, token_id)) for fold, token_id in pairs]


def run_step(scheduler: Scheduler, runner: ToyRunner) -> StepOutcome | None:
    """One step, with the invariants checked around it. None if nothing could run."""
    plan = scheduler.schedule()
    scheduler.check_invariants()
    if plan is None:
        return None
    outcome = scheduler.apply(runner.run(plan))
    scheduler.check_invariants()
    return outcome


class Answers:
    """Collects what sequences emit and checks that no position is lost or repeated."""

    def __init__(self) -> None:
        self.token_ids: dict[SequenceKey, list[int]] = {}
        self.finish_reasons: dict[SequenceKey, str] = {}

    def expect(self, key: SequenceKey, forced_ids: list[int] | None = None) -> None:
        self.token_ids[key] = list(forced_ids or [])

    def take(self, emitted: EmittedToken) -> None:
        assert emitted.key not in self.finish_reasons, f"{emitted.key} goes on after its end"
        token_ids = self.token_ids[emitted.key]
        assert emitted.position == len(token_ids), f"{emitted.key} emits position {emitted.position}"
        token_ids.append(emitted.token_id)
        if emitted.finish_reason is not None:
            self.finish_reasons[emitted.key] = emitted.finish_reason


def run_all(scheduler: Scheduler, runner: ToyRunner, answers: Answers) -> None:
    """Steps until nothing can run any more."""
    while (outcome := run_step(scheduler, runner)) is not None:
        for emitted in outcome.emitted:
            answers.take(emitted)


def _of_layer(token_kv: int, layer: int) -> int:
    return _mix(token_kv, layer) if layer else token_kv


def _mix(left: int, right: int) -> int:
    return hash((left, right))


def _draw(fold: int, seed: int, choice: int, position: int) -> int:
    return hash((fold, seed + 1_000_003 * choice, position)) % VOCABULARY_SIZE


def _logprob(fold: int, token_id: int) -> float:
    return -(hash((fold, token_id)) % 1000) / 100
