"""Keeps exactly one step of the scheduler outstanding while there is something to compute."""

from __future__ import annotations

from cluster.agent.step_costs import StepCosts
from cluster.policy.break_even import chunk_within
from engine.core.outcome import StepOutcome
from engine.core.scheduler import Scheduler
from engine.core.step import SequenceKey, StepPlan, StepResult


class Stepper:
    """The scheduler, its outstanding plan, and the aborted sequences whose blocks that plan still uses."""

    def __init__(self, scheduler: Scheduler, block_size: int) -> None:
        self.scheduler = scheduler
        self._block_size = block_size
        self.costs = StepCosts()
        self.num_failed_in_a_row = 0
        """Steps."""
        self.num_unusable_in_a_row = 0
        """Sequences that failed alone, since the last token that was drawn."""
        self._plan: StepPlan | None = None
        self._planned: dict[SequenceKey, None] = {}
        self._aborted: dict[SequenceKey, None] = {}

    def next_plan(self, limit_ms: float | None = None) -> StepPlan | None:
        """The next step to run; None while one is outstanding or nothing can run.

        `limit_ms`: if it writes answers, it reads of prompts no more than leaves it that short, or one block.
        """
        if self._plan is not None:
            return None
        max_prefill_tokens = None
        if limit_ms is not None and self.scheduler.num_decoding:
            token_ms = self.costs.chunk_token_ms or self.costs.prefill_token_ms
            max_prefill_tokens = chunk_within(limit_ms, self.costs.decode_step_ms, token_ms, self._block_size)
        self._plan = self.scheduler.schedule(max_prefill_tokens)
        if self._plan is not None:
            self._planned = dict.fromkeys(sequence.key for sequence in self._plan.sequences)
        return self._plan

    def is_running(self, step_id: int) -> bool:
        return self._plan is not None and self._plan.step_id == step_id

    def done(self, result: StepResult, duration_ns: int) -> StepOutcome:
        assert self._plan is not None and result.step_id == self._plan.step_id, "a result that no plan asked for"
        self.costs.add(self._plan, duration_ns)
        self.num_failed_in_a_row = 0
        self.num_unusable_in_a_row = 0 if any(result.tokens) else self.num_unusable_in_a_row + len(result.failures)
        self._clear()
        return self.scheduler.apply(result)

    def failed(self) -> list[SequenceKey]:
        """The step raised. Returns the keys of the sequences that are lost with it."""
        assert self._plan is not None, "no step is outstanding"
        self.num_failed_in_a_row += 1
        self._clear()
        return self.scheduler.fail_step()

    def abort(self, key: SequenceKey) -> None:
        """Ends the sequence, if it is here; what the running step uses of it is held until that step is over."""
        if self.scheduler.abort(key) and key in self._planned:
            self._aborted[key] = None

    def holds(self, key: SequenceKey) -> bool:
        return key in self._aborted or self.scheduler.has(key)

    def _clear(self) -> None:
        self._plan = None
        self._planned = {}
        self._aborted = {}

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()
        assert self._plan is not None or not self._planned
        for key in self._aborted:
            assert key in self._planned and not self.scheduler.has(key)
