"""Scheduler and BlockPool under random work: every sequence must give the tokens that it gives alone.

Which model computes them is the machine's `engine`: a toy that betrays any mistake with blocks at once and costs next
to nothing, or a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cluster.agent.prefix_pins import pin_prefix
from engine.core.block_hash import hash_blocks
from engine.core.block_pool import BlockPool, OutOfBlocksError
from engine.core.lower_tiers import LowerTiers
from engine.core.outcome import ScoredPrompt
from engine.core.planning import MAX_SCORED_ROWS
from engine.core.request import Sibling, twins_of
from engine.core.sampling import SamplingParams
from engine.core.scheduler import (
    PrefillProgress,
    Scheduler,
    SchedulerConfig,
    SequenceMode,
    SequenceSpec,
)
from engine.core.sequence import num_blocks_for
from engine.core.step import SequenceKey, StepPlan, StepResult
from engine.core.tiers import BlockCopy
from tests.support.toy_engine import Answers, ToyRunner, Undisturbed, kv_of, scores_of, undisturbed

EOS = 3
MAX_BLOCKS = 38
"""Of any machine's pool."""
MAX_HOST_BLOCKS = 12
"""Of its host tier."""
KV = list[Any]
"""Of one token each, as an engine has it."""


class MachineRunner(Protocol):
    """Runs plans over the slots of a pool, and lets a test look into them."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None: ...

    def write(self, block_table: list[int], kv: KV) -> None:
        """Puts the KV of positions 0, 1, ... into their slots, as a push does."""

    def read(self, block_table: list[int], num_tokens: int) -> KV: ...


class MachineEngine(Protocol):
    """A model, and what it computes of a sequence that has all the memory it wants, at once and alone.

    `garbage` is what a token's slot holds that nobody should read. `salt` stands for an adapter or a cache salt.
    """

    garbage: Any

    def runner(self, pool: BlockPool, block_size: int, salt_of: Callable[[SequenceKey], int]) -> MachineRunner: ...

    def undisturbed(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        forced_ids: list[int],
        salt: int,
        choice: int,
        eos_token_ids: frozenset[int],
        max_model_tokens: int,
    ) -> Undisturbed: ...

    def kv_of(self, token_ids: list[int], salt: int) -> KV: ...

    def is_same_kv(self, found: KV, expected: KV) -> bool: ...

    def scores_of(self, prompt_ids: list[int], salt: int) -> list[float]:
        """Log-probabilities of prompt tokens 1, 2, ..."""

    def are_same_scores(self, found: list[float], expected: list[float]) -> bool: ...


class ToyEngine:
    """See tests.support.toy_engine."""

    garbage = -1

    def runner(self, pool: BlockPool, block_size: int, salt_of: Callable[[SequenceKey], int]) -> ToyRunner:
        return ToyRunner(pool, block_size, salt_of)

    def undisturbed(self, prompt_ids: list[int], params: SamplingParams, **rest: Any) -> Undisturbed:
        return undisturbed(prompt_ids, params, **rest)

    def kv_of(self, token_ids: list[int], salt: int) -> KV:
        return kv_of(token_ids, salt)

    def is_same_kv(self, found: KV, expected: KV) -> bool:
        return found == expected

    def scores_of(self, prompt_ids: list[int], salt: int) -> list[float]:
        return scores_of(prompt_ids, salt)

    def are_same_scores(self, found: list[float], expected: list[float]) -> bool:
        return found == expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """KV on its way into this worker: pinned cached blocks, and blocks that the sender may write."""

    spec: SequenceSpec
    pinned: list[int]
    granted: list[tuple[int, int]]

    @property
    def reserved(self) -> list[int]:
        """For the tokens of the sequence and the next one."""
        return [block_id for block_id, _ in self.granted][: len(self.granted) - len(self.spec.siblings)]

    @property
    def spare(self) -> list[int]:
        return [block_id for block_id, _ in self.granted][len(self.granted) - len(self.spec.siblings) :]


# Prompts share beginnings, so that the prefix cache has work to do.
prompts = st.builds(
    lambda family, num_shared, tail: ([family] * 40)[:num_shared] + tail,
    st.integers(0, 1),
    st.integers(0, 20),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)
params = st.builds(
    lambda max_tokens, min_share, ignore_eos, stop, seed, scored, temperature, penalty: SamplingParams(
        max_tokens=max_tokens,
        min_tokens=max_tokens * min_share // 4,
        ignore_eos=ignore_eos,
        stop_token_ids=stop,
        seed=seed,
        prompt_logprobs=scored,
        temperature=temperature,
        repetition_penalty=penalty,
    ),
    st.integers(1, 24),
    st.integers(0, 4),
    st.booleans(),
    st.sampled_from([(), (5, 7, 11)]),
    st.integers(0, 3),
    st.sampled_from([None, None, None, 0]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([1.0, 1.2]),
)
# The other answers of a prompt: how many of the leading one's forced tokens each has, and which tokens follow these.
families = st.lists(st.tuples(st.sampled_from([9, 9, 9, 0, 1]), st.lists(st.integers(20, 24), max_size=6)), max_size=3)


class SchedulerMachine(RuleBasedStateMachine):
    engine: ClassVar[MachineEngine] = ToyEngine()

    @initialize(
        block_size=st.integers(1, 4),
        max_model_tokens=st.integers(8, 30),
        num_spare_blocks=st.integers(0, 8),
        num_host_blocks=st.sampled_from([0, 2, MAX_HOST_BLOCKS]),
        max_running=st.integers(1, 6),
        num_chunk_blocks=st.integers(1, 3),
        num_spare_step_tokens=st.integers(0, 8),
    )
    def start(
        self,
        block_size: int,
        max_model_tokens: int,
        num_spare_blocks: int,
        num_host_blocks: int,
        max_running: int,
        num_chunk_blocks: int,
        num_spare_step_tokens: int,
    ) -> None:
        self.config = SchedulerConfig(
            block_size=block_size,
            max_step_tokens=max_running + block_size + num_spare_step_tokens,
            max_running=max_running,
            prefill_chunk_tokens=num_chunk_blocks * block_size,
            max_model_tokens=max_model_tokens,
            eos_token_ids=frozenset({EOS}),
        )
        num_blocks = num_blocks_for(max_model_tokens, block_size) + num_spare_blocks
        self.pool = BlockPool(num_blocks, lower_tiers=LowerTiers(num_host_blocks))
        assert self.pool.num_blocks <= MAX_BLOCKS
        self.scheduler = Scheduler(self.config, self.pool)
        self.salts: dict[SequenceKey, int] = {}
        self.runner = self.engine.runner(self.pool, block_size, self.salts.__getitem__)
        self.answers = Answers()
        self.expected: dict[SequenceKey, Undisturbed] = {}
        self.specs: dict[SequenceKey, SequenceSpec] = {}
        self.aborted: set[SequenceKey] = set()
        self.pushes: list[Push] = []
        self.held: list[list[int]] = []
        self.plan: StepPlan | None = None
        self.preempted_without_progress: set[SequenceKey] = set()
        self.scores: dict[SequenceKey, list[float]] = {}

    # Work arrives.

    def spec(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        num_forced: int,
        mode: SequenceMode,
        salt: int,
        priority: int,
        family: list[tuple[int, list[int]]],
    ) -> SequenceSpec:
        key = SequenceKey(f"request-{len(self.specs)}", 1, len(self.specs) % 2)
        prompt = prompt[: self.config.max_model_tokens - 1]
        most = min(sampling.max_tokens, self.config.max_model_tokens - len(prompt)) - 1
        forced = self.undisturbed(prompt, sampling, salt, key.choice, []).token_ids[:-1][:num_forced]
        siblings = tuple(
            Sibling(choice=key.choice + number, delivered_ids=tuple((forced[:num_shared] + tail)[:most]))
            for number, (num_shared, tail) in enumerate(family, start=1)
        )
        if mode is SequenceMode.PREFILL_ONLY:
            siblings = twins_of(siblings, forced)
        spec = SequenceSpec(
            key=key,
            prompt_ids=prompt,
            sampling=sampling,
            mode=mode,
            extra_key=bytes([salt]),
            forced_output_ids=forced,
            siblings=siblings,
            priority=priority,
        )
        self.salts[key] = salt
        for other, ids in self.answers_of(spec):
            self.salts[other] = salt
            self.expected[other] = self.undisturbed(prompt, sampling, salt, other.choice, ids)
            self.answers.expect(other, ids)
            self.specs[other] = spec
        return spec

    def undisturbed(
        self, prompt: list[int], sampling: SamplingParams, salt: int, choice: int, forced_ids: list[int]
    ) -> Undisturbed:
        return self.engine.undisturbed(
            prompt,
            sampling,
            forced_ids=forced_ids,
            salt=salt,
            choice=choice,
            eos_token_ids=self.config.eos_token_ids,
            max_model_tokens=self.config.max_model_tokens,
        )

    def answers_of(self, spec: SequenceSpec) -> list[tuple[SequenceKey, list[int]]]:
        """Keys of the sequence and its siblings, and what has been delivered of each."""
        siblings = [(replace(spec.key, choice=other.choice), list(other.delivered_ids)) for other in spec.siblings]
        return [(spec.key, spec.forced_output_ids), *siblings]

    def give_up(self, spec: SequenceSpec) -> None:
        """None of the spec's answers is run."""
        self.aborted.update(key for key, _ in self.answers_of(spec))

    @rule(
        burst=st.lists(st.tuples(prompts, params), min_size=1, max_size=5),
        num_forced=st.integers(0, 5),
        mode=st.sampled_from([SequenceMode.LOCAL, SequenceMode.LOCAL, SequenceMode.PREFILL_ONLY]),
        salt=st.sampled_from([0, 0, 0, 1]),
        priority=st.sampled_from([0, 0, 0, 1]),
        family=families,
    )
    def add(
        self,
        burst: list[tuple[list[int], SamplingParams]],
        num_forced: int,
        mode: SequenceMode,
        salt: int,
        priority: int,
        family: list[tuple[int, list[int]]],
    ) -> None:
        for prompt, sampling in burst:
            self.scheduler.add(self.spec(prompt, sampling, num_forced, mode, salt, priority, family))

    @rule(
        prompt=prompts,
        sampling=params,
        num_forced=st.integers(0, 5),
        salt=st.sampled_from([0, 0, 0, 1]),
        family=families,
    )
    def grant_push(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        num_forced: int,
        salt: int,
        family: list[tuple[int, list[int]]],
    ) -> None:
        spec = self.spec(prompt, sampling, num_forced, SequenceMode.DECODE, salt, 0, family)
        token_ids = spec.prompt_ids + spec.forced_output_ids
        # At least one token is left for the sender to compute, as with the scheduler's own hits.
        hashes = hash_blocks(token_ids[:-1], self.config.block_size, spec.extra_key)
        num_needed = num_blocks_for(len(token_ids) + 1, self.config.block_size) + len(spec.siblings)
        pinned = pin_prefix(self.pool, hashes, num_needed).block_ids
        try:
            granted = self.pool.reserve(num_needed - len(pinned))
        except OutOfBlocksError:
            self.pool.release(pinned)
            self.give_up(spec)
            return
        finally:
            self.runner.copy_blocks(self.pool.take_copies())
        self.pushes.append(Push(spec=spec, pinned=pinned, granted=granted))

    @precondition(lambda self: self.pushes)
    @rule(data=st.data())
    def finish_push(self, data: st.DataObject) -> None:
        push = self.pushes.pop(data.draw(st.integers(0, len(self.pushes) - 1)))
        self.deliver(push)

    def deliver(self, push: Push) -> None:
        spec = push.spec
        block_size = self.config.block_size
        kv = self.engine.kv_of(spec.prompt_ids + spec.forced_output_ids, self.salts[spec.key])
        self.runner.write(push.reserved, kv[len(push.pinned) * block_size :])
        self.pool.commit(push.granted)
        position = len(spec.forced_output_ids)
        twins = [replace(spec.key, choice=twin.choice) for twin in twins_of(spec.siblings, spec.forced_output_ids)]
        first_token_ids = [self.expected[key].token_ids[position] for key in (spec.key, *twins)]
        table = push.pinned + push.reserved
        for emitted in self.scheduler.add_with_kv(spec, table, first_token_ids, push.spare):
            self.answers.take(emitted)

    @precondition(lambda self: self.pushes)
    @rule(data=st.data())
    def cancel_push(self, data: st.DataObject) -> None:
        """The sender goes on writing until it is fenced."""
        push = self.pushes.pop(data.draw(st.integers(0, len(self.pushes) - 1)))
        self.pool.release(push.pinned)
        granted = push.reserved + push.spare
        self.pool.quarantine(granted)
        self.runner.write(granted, [self.engine.garbage] * (len(granted) * self.config.block_size))
        self.pool.release_reserved(granted)
        self.give_up(push.spec)

    # Work is done.

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self) -> None:
        self.plan = self.scheduler.schedule()
        if self.plan is None:
            self.check_nothing_is_stuck()
            return
        assert self.plan.num_tokens <= self.config.max_step_tokens
        num_scored = sum(len(step.scored_ids) for step in self.plan.sequences)
        assert num_scored <= max(MAX_SCORED_ROWS, self.config.block_size)
        for step in self.plan.sequences:
            end = step.start + len(step.token_ids)
            assert step.sample or end % self.config.block_size == 0, "a chunk ends inside a block"
            assert len(step.block_table) <= num_blocks_for(end + 1, self.config.block_size)

    def check_nothing_is_stuck(self) -> None:
        """Only blocks that others hold may keep the scheduler from going on."""
        counts = self.pool.counts()
        if self.scheduler.num_running + self.scheduler.num_waiting:
            assert self.pushes or self.held or counts.reserved, "sequences wait for each other"

    @precondition(lambda self: self.plan is not None)
    @rule()
    def apply(self) -> None:
        assert self.plan is not None
        outcome = self.scheduler.apply(self.runner.run(self.plan))
        self.plan = None
        for key in outcome.preempted:
            assert key not in self.preempted_without_progress, f"{key} was preempted twice without progress"
            assert self.specs[key].mode is not SequenceMode.PREFILL_ONLY
            self.preempted_without_progress.add(key)
        for progress in outcome.progress:
            self.check_progress(progress)
        for scored in outcome.scored:
            self.check_scores(scored)
        for emitted in outcome.emitted:
            self.preempted_without_progress.discard(emitted.key)
            self.answers.take(emitted)
            spec = self.specs[emitted.key]
            if spec.mode is SequenceMode.PREFILL_ONLY and emitted.key == spec.key:
                self.held.append(self.scheduler.take_blocks(emitted.key))
            if emitted.key == spec.key and spec.mode is not SequenceMode.DECODE:
                is_scored = spec.sampling.prompt_logprobs is not None
                assert len(self.scores.get(spec.key, [])) == is_scored * (len(spec.prompt_ids) - 1)

    def check_scores(self, scored: ScoredPrompt) -> None:
        """Each prompt token but the first is scored once, in order, from what was computed of the prompt before it."""
        prompt = self.specs[scored.key].prompt_ids
        known = self.scores.setdefault(scored.key, [])
        assert scored.position == len(known) + 1
        assert [token.token_id for token in scored.tokens] == prompt[scored.position :][: len(scored.tokens)]
        known.extend(token.logprob for token in scored.tokens)
        expected = self.engine.scores_of(prompt, self.salts[scored.key])
        assert self.engine.are_same_scores(known, expected[: len(known)])

    def check_progress(self, progress: PrefillProgress) -> None:
        """What is final now may be pushed now, so it must lie in the slots."""
        spec = self.specs[progress.key]
        token_ids = spec.prompt_ids + self.answers.token_ids[progress.key]
        assert progress.num_total_tokens == len(token_ids)
        kv = self.engine.kv_of(token_ids, self.salts[progress.key])[: progress.num_computed_tokens]
        assert self.engine.is_same_kv(self.runner.read(progress.block_table, progress.num_computed_tokens), kv)
        assert len(progress.block_table) == num_blocks_for(progress.num_computed_tokens, self.config.block_size)
        assert progress.num_cached_tokens % self.config.block_size == 0

    @precondition(lambda self: self.plan is not None)
    @rule()
    def fail(self) -> None:
        assert self.plan is not None
        planned = [step.key for step in self.plan.sequences]
        failed = self.scheduler.fail_step()
        assert failed == [key for key in planned if key not in self.aborted]
        for key in failed:
            self.lose(key)
        self.plan = None

    @precondition(lambda self: self.specs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.specs)))
        known = self.scheduler.has(key)
        assert self.scheduler.abort(key) == known
        assert not self.scheduler.has(key)
        if known:
            self.lose(key)

    def lose(self, key: SequenceKey) -> None:
        """It is gone, and so are its siblings that had not started."""
        self.aborted.add(key)
        spec = self.specs[key]
        if key == spec.key:
            others = [other for other, _ in self.answers_of(spec) if not self.scheduler.has(other)]
            self.aborted.update(other for other in others if other not in self.answers.finish_reasons)

    @precondition(lambda self: self.held)
    @rule()
    def source_released(self) -> None:
        self.pool.release(self.held.pop(0))

    @rule(num_steps=st.integers(1, 12))
    def run_on(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.plan is None:
                self.schedule()
            if self.plan is None:
                return
            self.apply()
            self.scheduler.check_invariants()

    @precondition(lambda self: hasattr(self, "scheduler"))
    @invariant()
    def holds_together(self) -> None:
        self.scheduler.check_invariants()
        for key, token_ids in self.answers.token_ids.items():
            assert token_ids == self.expected[key].token_ids[: len(token_ids)], f"{key} gives other tokens than alone"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for push in self.pushes:
            self.deliver(push)
        self.pushes = []
        while True:
            for block_ids in self.held:
                self.pool.release(block_ids)
            self.held = []
            if self.plan is None:
                self.schedule()
            if self.plan is None:
                break
            self.apply()
            self.holds_together()
        for key, spec in self.specs.items():
            if key in self.aborted or spec.mode is SequenceMode.PREFILL_ONLY:
                continue
            assert self.answers.token_ids[key] == self.expected[key].token_ids
            assert self.answers.finish_reasons[key] == self.expected[key].finish_reason
        counts = self.pool.counts()
        assert counts.active == counts.reserved == counts.quarantined == 0, "blocks are left behind"


def play(machine: type[SchedulerMachine], num_histories: int, num_steps: int) -> None:
    """So many random histories, of up to `num_steps` events each; others at every call."""
    histories = settings(
        max_examples=num_histories, stateful_step_count=num_steps, deadline=None, derandomize=False, print_blob=True
    )
    run_state_machine_as_test(machine, settings=histories)
