"""A scheduler on a bench: its pool, a toy runner, and what has come out so far."""

from __future__ import annotations

import random
from dataclasses import replace

from engine.core.block_pool import BlockPool
from engine.core.request import Sibling
from engine.core.sampling import SamplingParams
from engine.core.scheduler import EmittedToken, Scheduler, SchedulerConfig, SequenceMode, SequenceSpec
from engine.core.step import SequenceKey, StepPlan
from tests.support.toy_engine import Answers, ToyRunner, kv_of, run_all, undisturbed

BLOCK_SIZE = 4


class Bench:
    """A scheduler, its pool, a toy runner, and what has come out so far."""

    def __init__(self, num_blocks: int = 64, **config: int | frozenset[int]) -> None:
        numbers = {
            "block_size": BLOCK_SIZE,
            "max_step_tokens": 64,
            "max_running": 16,
            "prefill_chunk_tokens": 16,
            "max_model_tokens": num_blocks * BLOCK_SIZE,
        }
        self.config = SchedulerConfig(**{**numbers, **config})  # type: ignore[arg-type]
        self.pool = BlockPool(num_blocks, max_reserved_blocks=num_blocks)
        self.scheduler = Scheduler(self.config, self.pool)
        self.runner = ToyRunner(self.pool, BLOCK_SIZE)
        self.answers = Answers()

    def spec(
        self,
        name: str,
        prompt: list[int] | int,
        max_tokens: int = 4,
        mode: SequenceMode = SequenceMode.LOCAL,
        choice: int = 0,
        forced: list[int] | None = None,
        priority: int = 0,
        extra_key: bytes = b"",
        siblings: tuple[Sibling, ...] = (),
        **sampling: int | bool | tuple[int, ...] | None,
    ) -> SequenceSpec:
        """`prompt` may be a length: the prompt is then one that shares nothing with those of other names."""
        key = SequenceKey(name, 1, choice)
        prompt_ids = prompt if isinstance(prompt, list) else random.Random(name).choices(range(1000), k=prompt)
        self.answers.expect(key, forced)
        for sibling in siblings:
            self.answers.expect(SequenceKey(name, 1, sibling.choice), list(sibling.delivered_ids))
        return SequenceSpec(
            key=key,
            prompt_ids=prompt_ids,
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
            mode=mode,
            extra_key=extra_key,
            forced_output_ids=forced or [],
            siblings=siblings,
            priority=priority,
        )

    def add(self, name: str, prompt: list[int] | int, max_tokens: int = 4, **rest: object) -> SequenceSpec:
        spec = self.spec(name, prompt, max_tokens, **rest)  # type: ignore[arg-type]
        self.scheduler.add(spec)
        return spec

    def receive(self, spec: SequenceSpec, num_extra_blocks: int = 0) -> EmittedToken:
        """What a push and its commit do, then the hand-over."""
        token_ids = spec.prompt_ids + spec.forced_output_ids
        granted = self.pool.reserve(-(-len(token_ids) // BLOCK_SIZE) + num_extra_blocks)
        block_table = [block_id for block_id, _ in granted]
        self.runner.write(block_table, kv_of(token_ids, 0))
        self.pool.commit(granted)
        first = undisturbed(spec.prompt_ids, spec.sampling, forced_ids=spec.forced_output_ids).token_ids
        (emitted,) = self.scheduler.add_with_kv(spec, block_table, [first[len(spec.forced_output_ids)]])
        self.answers.take(emitted)
        self.scheduler.check_invariants()
        return emitted

    def schedule(self) -> list[tuple[str, int, int]]:
        """The next plan as (name, start, number of tokens); it stays outstanding."""
        self.plan = self.scheduler.schedule()
        self.scheduler.check_invariants()
        return shape(self.plan)

    def apply(self) -> list[str]:
        """Runs and applies the outstanding plan. Names of those preempted."""
        assert self.plan is not None
        outcome = self.scheduler.apply(self.runner.run(self.plan))
        self.scheduler.check_invariants()
        for emitted in outcome.emitted:
            self.answers.take(emitted)
        return [key.request_id for key in outcome.preempted]

    def step(self) -> list[tuple[str, int, int]]:
        planned = self.schedule()
        if planned:
            self.apply()
        return planned

    def finish(self) -> None:
        run_all(self.scheduler, self.runner, self.answers)

    def tokens(self, spec: SequenceSpec) -> list[int]:
        return self.answers.token_ids[spec.key]

    def check_answer(self, spec: SequenceSpec) -> None:
        """Of the sequence and all its siblings."""
        siblings = [(sibling.choice, list(sibling.delivered_ids)) for sibling in spec.siblings]
        for choice, forced in [(spec.key.choice, spec.forced_output_ids), *siblings]:
            expected = undisturbed(
                spec.prompt_ids,
                spec.sampling,
                forced_ids=forced,
                choice=choice,
                eos_token_ids=frozenset(self.config.eos_token_ids),
                max_model_tokens=self.config.max_model_tokens,
            )
            key = replace(spec.key, choice=choice)
            assert self.answers.token_ids[key] == expected.token_ids
            assert self.answers.finish_reasons[key] == expected.finish_reason


def shape(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    return [(step.key.request_id, step.start, len(step.token_ids)) for step in plan.sequences] if plan else []
