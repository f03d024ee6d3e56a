"""Builds one step: who takes part, with how many tokens, and who makes room.

The rules, in the order they are applied (vocabulary and shape follow continuous batching with chunked prefill as in
Sarathi-Serve, Agrawal et al. 2024):

1. Decoding sequences come first, one token each, in serving order.
2. Prefilling sequences get chunks in serving order, then waiting ones are admitted, in serving order and without
   skipping one that does not fit. A chunk ends on a block boundary unless it ends the prompt.
3. A waiting sequence is admitted only if its whole prompt and one more token fit beside what the prefills in progress
   still need. So sequences that must not be preempted can always finish, and no two of them wait for each other.
4. A waiting sequence whose next block is just being computed for one that is served before it is put off until it
   finds that block in the prefix cache. Its place among the running ones and its room are kept meanwhile. One that is
   held back, for what its owner is bringing to the prefix cache, is passed over.
5. A sequence that needs a block when none is left preempts the last in serving order, perhaps itself. Never
   preempted are the only one running, one that has drawn nothing since its last preemption, one planned into this
   very step, and a PREFILL_ONLY one, whose blocks a push may be reading.
6. Of a prompt whose tokens are to be scored, a chunk is no longer than MAX_SCORED_ROWS over all sequences allow: each
   scored token costs a row of logits. Nobody is put off for such a prompt, which is read in smaller steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.block_pool import BlockPool
from engine.core.sequence import Sequence, SequenceMode, SequencePhase, SequenceQueue, num_blocks_for
from engine.core.step import SequenceKey, SequenceStep

MAX_SCORED_ROWS = 64
"""Prompt tokens whose log-probabilities a step computes at most; one block's if a block is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How a worker spends its steps; the two roles differ in nothing but these numbers.

    Attributes:
        block_size: tokens a block.
        max_step_tokens: tokens a step computes at most. At least max_running + block_size, so that prefill cannot
            be starved by decoding.
        max_running: waiting sequences are admitted up to so many running ones. Sequences that arrive with their KV
            join beyond it; if they then outnumber max_step_tokens, they take turns.
        prefill_chunk_tokens: of a step's tokens, so many are spent on prefill at most, over all sequences.
        max_model_tokens: prompt and output together never pass it. The pool must hold so many.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    block_size: int
    max_step_tokens: int
    max_running: int
    prefill_chunk_tokens: int
    max_model_tokens: int
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Raises ValueError naming the field that is out of range."""
        for name in ("block_size", "max_running"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_step_tokens < self.max_running + self.block_size:
            raise ValueError(
                f"max_step_tokens must be at least max_running + block_size = {self.max_running + self.block_size}, "
                f"got {self.max_step_tokens}"
            )
        if self.prefill_chunk_tokens < self.block_size:
            raise ValueError(
                f"prefill_chunk_tokens must be at least block_size = {self.block_size}, got {self.prefill_chunk_tokens}"
            )
        if self.max_model_tokens < 2:
            raise ValueError(f"max_model_tokens must be at least 2, got {self.max_model_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSequence:
    """A sequence's part of the step that is running. `step` is what the runner sees of it."""

    sequence: Sequence
    step: SequenceStep
    is_prefill: bool


class StepBuilder:
    """One attempt at filling one step. Grows block tables and moves sequences between the queues as it goes."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, running: SequenceQueue, waiting: SequenceQueue, step_id: int
    ) -> None:
        self.planned: list[PlannedSequence] = []
        self.preempted: list[SequenceKey] = []
        self._config = config
        self._pool = pool
        self._running = running
        self._waiting = waiting
        self._step_id = step_id
        self._num_tokens_left = config.max_step_tokens
        self._num_prefill_tokens_left = config.prefill_chunk_tokens
        self._num_scored_rows_left = max(MAX_SCORED_ROWS, config.block_size)

    def build(self) -> None:
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self._running:
            (prefilling if sequence.is_prefilling else decoding).append(sequence)
        self._plan_decodes(decoding)
        for sequence in prefilling:
            if sequence.phase is SequencePhase.RUNNING:
                self._plan_chunk(sequence)
        self._admit_waiting([sequence for sequence in prefilling if sequence.phase is SequencePhase.RUNNING])

    def _plan_decodes(self, decoding: list[Sequence]) -> None:
        if len(decoding) > self._num_tokens_left:
            decoding.sort(key=lambda sequence: (sequence.last_step_id, sequence.order))
        for sequence in decoding:
            if self._num_tokens_left == 0:
                break
            if sequence.phase is SequencePhase.RUNNING and self._grow(sequence, sequence.num_computed + 1):
                self._plan(sequence, 1, is_prefill=False)

    def _plan_chunk(self, sequence: Sequence) -> None:
        end = self._chunk_end(sequence, sequence.num_computed, sequence.num_to_prefill)
        num_tokens = end - sequence.num_computed
        if num_tokens > 0 and self._grow(sequence, end):
            self._num_prefill_tokens_left -= num_tokens
            self._plan(sequence, num_tokens, is_prefill=True)

    @property
    def _chunk_budget(self) -> int:
        return min(self._num_tokens_left, self._num_prefill_tokens_left)

    def _chunk_end(self, sequence: Sequence, start: int, total: int) -> int:
        """Where a chunk from `start` ends within the budget; `start` itself if not even a block fits."""
        budget = self._chunk_budget
        if sequence.is_scoring:
            budget = min(budget, self._num_scored_rows_left)
        end = start + budget
        if end >= total:
            return total
        return max(start, end - end % self._config.block_size)

    def _admit_waiting(self, prefilling: list[Sequence]) -> None:
        """Admits in serving order for as long as there is budget and room. `prefilling` are those under way."""
        block_size = self._config.block_size
        num_claimed = sum(sequence.num_missing_blocks(1, block_size) for sequence in prefilling)
        num_put_off = 0  # they are the first in the queue
        while (
            num_put_off < len(self._waiting)
            and len(self._running) + num_put_off < self._config.max_running
            and self._chunk_budget > 0
        ):
            sequence = self._waiting[num_put_off]
            if sequence.is_held_back:
                num_put_off += 1
                continue
            num_matchable = sequence.num_matchable_tokens // block_size
            hashes = sequence.block_hashes(num_matchable, block_size)
            cached = self._pool.match(hashes)
            loadable = hashes[len(cached) :]
            loadable = loadable[: self._pool.num_loadable(loadable)]
            num_cached_tokens = (len(cached) + len(loadable)) * block_size
            if self._chunk_end(sequence, num_cached_tokens, sequence.num_tokens) == num_cached_tokens:
                break
            num_needed = sequence.num_missing_blocks(1, block_size) - len(cached)
            if num_needed + num_claimed > self._pool.num_allocatable - self._pool.num_cached_in(cached):
                break
            if len(cached) < num_matchable and self._is_under_way(prefilling, sequence, hashes[: len(cached) + 1]):
                num_put_off += 1
                num_claimed += num_needed
                continue
            self._admit(sequence, cached, loadable)
            self._plan_chunk(sequence)
            prefilling.append(sequence)
            num_claimed += sequence.num_missing_blocks(1, block_size)

    def _is_under_way(self, prefilling: list[Sequence], sequence: Sequence, hashes: list[bytes]) -> bool:
        """Whether one of `prefilling` that is served before `sequence` will compute or load the last block of `hashes`.

        Waiting for it then takes no longer than computing it a second time, since chunks go in serving order.
        """
        block_size = self._config.block_size
        num_blocks = len(hashes)
        return any(
            other.order < sequence.order
            and not other.is_scoring
            and other.num_indexed_blocks < num_blocks <= other.num_to_prefill // block_size
            and other.block_hashes(num_blocks, block_size)[-1] == hashes[-1]
            for other in prefilling
        )

    def _admit(self, sequence: Sequence, cached: list[int], loadable: list[bytes]) -> None:
        """`cached` are blocks of the pool, `loadable` is the content after them that the host tier has. What is loaded
        counts as computed, and is found by others once the step is over."""
        self._pool.acquire(cached)
        loaded = self._pool.load(loadable)
        sequence.block_table = cached + loaded
        sequence.num_indexed_blocks = len(cached)
        sequence.num_computed = len(sequence.block_table) * self._config.block_size
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed
            if not sequence.is_scoring:
                num_loaded_tokens = len(loaded) * self._config.block_size
                self._pool.count_lookup(sequence.num_tokens, sequence.num_computed, num_loaded_tokens)
        sequence.phase = SequencePhase.RUNNING
        self._waiting.remove(sequence)
        self._running.add(sequence)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes the block table cover `num_tokens`, preempting where needed. False if it cannot be done now."""
        num_new = num_blocks_for(num_tokens, self._config.block_size) - len(sequence.block_table)
        if num_new <= 0:
            return True
        while self._pool.num_allocatable < num_new:
            victim = self._choose_victim()
            if victim is None:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_table.extend(self._pool.allocate(num_new))
        return True

    def _choose_victim(self) -> Sequence | None:
        """The last in serving order that may be preempted.

        That is somebody served after the requester, or the requester itself; somebody served before it only if the
        requester may not be preempted.
        """
        if len(self._running) < 2:
            return None
        for candidate in reversed(self._running):
            is_planned = candidate.last_step_id == self._step_id
            is_preemptible = candidate.mode is not SequenceMode.PREFILL_ONLY and not candidate.is_shielded
            if is_preemptible and not is_planned:
                return candidate
        return None

    def _preempt(self, victim: Sequence) -> None:
        self._pool.release(victim.block_table)
        victim.restart()
        self._running.remove(victim)
        self._waiting.add(victim)
        self.preempted.append(victim.key)

    def _plan(self, sequence: Sequence, num_tokens: int, *, is_prefill: bool) -> None:
        start = sequence.num_computed
        end = start + num_tokens
        sample = end == sequence.num_tokens
        scored_ids = sequence.prompt_ids[start + 1 : end + 1] if sequence.is_scoring else []
        step = SequenceStep(
            key=sequence.key,
            token_ids=sequence.tokens(start, end),
            start=start,
            block_table=sequence.block_table,
            sample=sample,
            sampling=sequence.sampling,
            position=len(sequence.output_ids),
            prompt_ids=sequence.prompt_ids if sample else [],
            output_ids=sequence.output_ids if sample else [],
            twins=tuple(sibling.choice for sibling in sequence.twins) if sample else (),
            scored_ids=scored_ids,
        )
        sequence.last_step_id = self._step_id
        self._num_tokens_left -= num_tokens
        self._num_scored_rows_left -= len(scored_ids)
        self.planned.append(PlannedSequence(sequence=sequence, step=step, is_prefill=is_prefill))
