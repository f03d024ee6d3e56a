"""Decides what every step computes: continuous batching over one block pool.

The owner alternates `schedule()` and `apply()` (or `fail_step()`), with one plan outstanding at most. Between the
two, sequences may be added and aborted; a plan's lists and blocks stay untouched until it is applied.
`engine.core.planning` holds the rules by which a step is filled; this module the life of a sequence around it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.core.block_hash import ROOT_HASH
from engine.core.block_pool import BlockPool
from engine.core.errors import SchedulerFullError
from engine.core.outcome import (
    EmittedToken,
    FailedSequence,
    FinishReason,
    PrefillProgress,
    ScoredPrompt,
    StepOutcome,
)
from engine.core.planning import PlannedSequence, SchedulerConfig, StepBuilder
from engine.core.request import Sibling, twins_of
from engine.core.sequence import (
    Sequence,
    SequenceMode,
    SequencePhase,
    SequenceQueue,
    SequenceSpec,
    num_blocks_for,
)
from engine.core.step import SampledToken, ScoredToken, SequenceKey, StepPlan, StepResult

__all__ = [
    "EmittedToken",
    "PrefillProgress",
    "Scheduler",
    "SchedulerConfig",
    "SequenceMode",
    "SequenceSpec",
    "StepOutcome",
]

MAX_WAITING_SEQUENCES = 4096
"""A backstop: the coordinator's queue is where requests wait, a worker's backlog is a few chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OutstandingStep:
    step_id: int
    planned: list[PlannedSequence]


class Scheduler:
    """Holds the sequences of one worker and the blocks they use.

    Cost of a step: O(running sequences), plus the lists of token ids and one hash for each block that fills up.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        """Raises ValueError if the pool cannot hold one sequence of max_model_tokens."""
        num_needed = num_blocks_for(config.max_model_tokens, config.block_size)
        if pool.num_blocks < num_needed:
            raise ValueError(
                f"max_model_tokens {config.max_model_tokens} needs {num_needed} blocks, the pool has {pool.num_blocks}"
            )
        self._config = config
        self._pool = pool
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._waiting = SequenceQueue()
        self._running = SequenceQueue()
        self._outstanding: _OutstandingStep | None = None
        self._preempted: list[SequenceKey] = []
        self._next_step_id = 0
        self._next_arrival = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_decoding(self) -> int:
        """Running sequences that have been read and write."""
        return sum(not sequence.is_prefilling for sequence in self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_prefill_tokens(self) -> int:
        """Tokens to compute before everything waiting or being prefilled now has drawn its next token."""
        num_waiting_tokens = sum(sequence.num_to_prefill for sequence in self._waiting)
        return num_waiting_tokens + sum(
            sequence.num_to_prefill - sequence.num_computed for sequence in self._running if sequence.is_prefilling
        )

    def has(self, key: SequenceKey) -> bool:
        """Whether the sequence waits, runs, or holds blocks for a push."""
        return key in self._sequences

    def output_ids(self, key: SequenceKey) -> list[int]:
        """Forced and drawn tokens so far. Raises KeyError if the sequence is not here."""
        return list(self._sequences[key].output_ids)

    def add(self, spec: SequenceSpec) -> None:
        """Queues a LOCAL or PREFILL_ONLY sequence. What the prefix cache holds of it is taken when it first runs.

        Raises:
            ValueError: empty or too long a prompt, forced output that leaves nothing to draw, or the key is in use.
            SchedulerFullError: MAX_WAITING_SEQUENCES wait already.
        """
        if spec.mode is SequenceMode.DECODE:
            raise ValueError("mode DECODE comes with its KV: use add_with_kv")
        if len(self._waiting) >= MAX_WAITING_SEQUENCES:
            raise SchedulerFullError(f"{MAX_WAITING_SEQUENCES} sequences wait already")
        self._waiting.add(self._register(spec))
        self._update_growth_headroom()

    def add_with_kv(
        self,
        spec: SequenceSpec,
        block_table: list[int],
        first_token_ids: list[int],
        spare_blocks: list[int] | None = None,
    ) -> list[EmittedToken]:
        """A DECODE sequence, and its siblings with it, join the next step.

        Takes over one use of every block. A sequence that its first token ends is released at once, and the scheduler
        knows nothing of it.

        Args:
            block_table: active blocks that hold the KV of prompt and forced output, all of it. They may be followed by
                one block more, for the tokens to come.
            first_token_ids: drawn by another worker for the sequence itself and then for each of its twins.
            spare_blocks: one more for each sibling, for what it does not share.

        Returns: the first tokens.

        Raises:
            ValueError: as for `add`, or blocks or tokens do not fit the spec. The blocks then stay the caller's.
        """
        if spec.mode is not SequenceMode.DECODE:
            raise ValueError(f"mode must be DECODE, got {spec.mode.name}")
        num_kv_tokens = len(spec.prompt_ids) + len(spec.forced_output_ids)
        block_size = self._config.block_size
        num_least, num_most = num_blocks_for(num_kv_tokens, block_size), num_blocks_for(num_kv_tokens + 1, block_size)
        if not num_least <= len(block_table) <= num_most:
            raise ValueError(
                f"block_table has {len(block_table)} blocks, {num_kv_tokens} tokens need {num_least} to {num_most}"
            )
        spare_blocks = spare_blocks or []
        if len(spare_blocks) != len(spec.siblings):
            raise ValueError(f"spare_blocks has {len(spare_blocks)} blocks for {len(spec.siblings)} siblings")
        num_drawn = 1 + len(twins_of(spec.siblings, spec.forced_output_ids))
        if len(first_token_ids) != num_drawn:
            raise ValueError(f"first_token_ids has {len(first_token_ids)} ids for {num_drawn} answers")
        sequence = self._register(spec)
        sequence.block_table = list(block_table)
        sequence.num_computed = num_kv_tokens
        sequence.num_cached_tokens = 0
        sequence.phase = SequencePhase.RUNNING
        self._running.add(sequence)
        self._index_full_blocks(sequence)
        tokens = tuple(SampledToken(token_id=token_id) for token_id in first_token_ids)
        emitted = self._accept_tokens(sequence, tokens, spare_blocks)
        self._update_growth_headroom()
        return emitted

    def hold_back(self, key: SequenceKey, *, is_held_back: bool) -> None:
        """Whether a waiting sequence is passed over when sequences are admitted; of one that is not here, nothing."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            sequence.is_held_back = is_held_back

    def abort(self, key: SequenceKey) -> bool:
        """Forgets a sequence in any state; False if it is not here.

        Its blocks are released at once or, where the running step uses them, when that step is applied or fails.
        """
        sequence = self._sequences.get(key)
        if sequence is None:
            return False
        in_step = self._outstanding is not None and sequence.last_step_id == self._outstanding.step_id
        self._forget(sequence, keep_blocks=in_step)
        self._update_growth_headroom()
        return True

    def schedule(self, max_prefill_tokens: int | None = None) -> StepPlan | None:
        """Plans the next step; None if nothing can run now. The plan must be applied or failed before the next.

        Args:
            max_prefill_tokens: at least a block. Fewer than the configuration's are spent on prefill in this step.
        """
        assert self._outstanding is None, "the last plan was neither applied nor failed"
        step_id = self._next_step_id
        config = self._config
        if max_prefill_tokens is not None and max_prefill_tokens < config.prefill_chunk_tokens:
            config = replace(config, prefill_chunk_tokens=max_prefill_tokens)
        builder = StepBuilder(config, self._pool, self._running, self._waiting, step_id)
        builder.build()
        self._preempted.extend(builder.preempted)
        self._update_growth_headroom()
        if not builder.planned:
            return None
        self._next_step_id += 1
        self._outstanding = _OutstandingStep(step_id=step_id, planned=builder.planned)
        copies = self._pool.start_step()
        return StepPlan(step_id=step_id, sequences=[planned.step for planned in builder.planned], copies=copies)

    def apply(self, result: StepResult) -> StepOutcome:
        """Takes in what the runner computed for the outstanding plan. The order of `emitted` is the plan's."""
        planned_sequences = self._end_step(result.step_id)
        self._pool.end_step()
        assert len(result.tokens) == len(planned_sequences), "the result does not fit the plan"
        outcome = StepOutcome(preempted=self._preempted)
        self._preempted = []
        for index, (planned, tokens) in enumerate(zip(planned_sequences, result.tokens, strict=True)):
            sequence = planned.sequence
            failure = result.failures.get(index)
            if failure is not None:
                self._fail(sequence, failure, outcome)
                continue
            sequence.num_computed += len(planned.step.token_ids)
            self._index_full_blocks(sequence)
            if sequence.phase is SequencePhase.GONE:
                self._pool.release(sequence.block_table)
                continue
            if planned.is_prefill:
                outcome.progress.append(self._progress(sequence))
            if planned.step.scored_ids:
                outcome.scored.extend(self._accept_scores(sequence, planned.step.start, result.scores[index]))
            assert len(tokens) == (1 + len(planned.step.twins) if planned.step.sample else 0), f"of {sequence.key}"
            if planned.step.sample:
                outcome.emitted.extend(self._accept_tokens(sequence, tokens))
        self._update_growth_headroom()
        return outcome

    def fail_step(self) -> list[SequenceKey]:
        """The runner raised, and nothing of the step runs any more: its sequences are aborted. Returns their keys.

        What the failed step wrote is not trusted: none of its blocks enters the prefix index.
        """
        assert self._outstanding is not None, "no plan is outstanding"
        failed: list[SequenceKey] = []
        self._pool.end_step(is_failed=True)
        for planned in self._end_step(self._outstanding.step_id):
            sequence = planned.sequence
            if sequence.phase is SequencePhase.GONE:
                self._pool.release(sequence.block_table)
            else:
                self._forget(sequence)
                failed.append(sequence.key)
        self._update_growth_headroom()
        return failed

    def take_blocks(self, key: SequenceKey) -> list[int]:
        """Hands over the block table of a finished PREFILL_ONLY sequence and forgets it.

        The caller must release the blocks. Raises KeyError if no blocks are held under that key.
        """
        sequence = self._sequences[key]
        if sequence.phase is not SequencePhase.HELD:
            raise KeyError(f"{key} is {sequence.phase.value}, it holds no finished prefill")
        self._forget(sequence, keep_blocks=True)
        return sequence.block_table

    def _register(self, spec: SequenceSpec) -> Sequence:
        keys = [spec.key, *(replace(spec.key, choice=sibling.choice) for sibling in spec.siblings)]
        for key in keys:
            if key in self._sequences:
                raise ValueError(f"key {key} is in use")
        if len(dict.fromkeys(keys)) != len(keys):
            raise ValueError(f"siblings of {spec.key} must have different choices")
        if not spec.prompt_ids:
            raise ValueError("prompt_ids must hold at least one token")
        for forced in (spec.forced_output_ids, *(sibling.delivered_ids for sibling in spec.siblings)):
            num_tokens = len(spec.prompt_ids) + len(forced)
            if num_tokens >= self._config.max_model_tokens:
                raise ValueError(
                    f"prompt_ids and forced_output_ids have {num_tokens} tokens together; at most "
                    f"{self._config.max_model_tokens - 1} leave room for one to draw"
                )
            if len(forced) >= spec.sampling.max_tokens:
                raise ValueError(
                    f"forced_output_ids has {len(forced)} tokens, max_tokens is {spec.sampling.max_tokens}"
                )
        sequence = Sequence(
            spec,
            arrival=self._next_arrival,
            max_model_tokens=self._config.max_model_tokens,
            eos_token_ids=self._config.eos_token_ids,
        )
        assert spec.mode is not SequenceMode.PREFILL_ONLY or sequence.twins == spec.siblings, "decode starts the others"
        self._next_arrival += 1
        self._sequences[spec.key] = sequence
        return sequence

    def _fail(self, sequence: Sequence, reason: str, outcome: StepOutcome) -> None:
        """What its blocks hold is not trusted: those that no other sequence computes with cannot be found any more. (A
        push may have them still.)"""
        if sequence.phase is not SequencePhase.GONE:
            self._forget(sequence, keep_blocks=True)
            outcome.failed.append(FailedSequence(key=sequence.key, reason=reason))
        others = {block_id for other in self._sequences.values() for block_id in other.block_table}
        self._pool.forget([block_id for block_id in sequence.block_table if block_id not in others])
        self._pool.release(sequence.block_table)

    def _forget(self, sequence: Sequence, *, keep_blocks: bool = False) -> None:
        if sequence.phase is SequencePhase.WAITING:
            self._waiting.remove(sequence)
        elif sequence.phase is SequencePhase.RUNNING:
            self._running.remove(sequence)
        sequence.phase = SequencePhase.GONE
        del self._sequences[sequence.key]
        if not keep_blocks:
            self._pool.release(sequence.block_table)

    def _end_step(self, step_id: int) -> list[PlannedSequence]:
        outstanding = self._outstanding
        assert outstanding is not None and outstanding.step_id == step_id, f"step {step_id} is not outstanding"
        self._outstanding = None
        return outstanding.planned

    def _accept_scores(self, sequence: Sequence, start: int, scores: list[ScoredToken]) -> list[ScoredPrompt]:
        """Of prompt tokens start + 1, start + 2, ...; those that were scored before a preemption are left out."""
        news = scores[sequence.num_scored - start :]
        if not news:
            return []
        scored = ScoredPrompt(key=sequence.key, position=sequence.num_scored + 1, tokens=news)
        sequence.num_scored += len(news)
        return [scored]

    def _accept_tokens(
        self, sequence: Sequence, tokens: tuple[SampledToken, ...], spare_blocks: list[int] | None = None
    ) -> list[EmittedToken]:
        """The sequence's token and, where its input is now computed, those of its twins. Its siblings then start."""
        siblings, twins = sequence.siblings, sequence.twins
        if not siblings:
            return [self._accept_token(sequence, tokens[0])]
        if sequence.mode is SequenceMode.PREFILL_ONLY:
            position = len(sequence.output_ids)
            keys = [replace(sequence.key, choice=twin.choice) for twin in twins]
            twin_tokens = [
                _emitted(key, position, token, sequence.finish_reason(position, token.token_id))
                for key, token in zip(keys, tokens[1:], strict=True)
            ]
            return [self._accept_token(sequence, tokens[0]), *twin_tokens]
        sequence.siblings = ()
        # They take their shares before the sequence may end and let go of its own.
        forks = [self._start_fork(sequence, sibling) for sibling in siblings]
        for fork, block_id in zip(forks, spare_blocks or [], strict=False):
            fork.block_table.append(block_id)
        drawing = [fork for fork, sibling in zip(forks, siblings, strict=True) if sibling in twins]
        pairs = zip([sequence, *drawing], tokens, strict=True)
        return [self._accept_token(other, token) for other, token in pairs]

    def _start_fork(self, sequence: Sequence, sibling: Sibling) -> Sequence:
        fork = sequence.fork(sibling, self._config.block_size)
        assert fork.key not in self._sequences, f"key {fork.key} is in use"
        self._pool.acquire(fork.block_table)
        self._sequences[fork.key] = fork
        self._running.add(fork)
        return fork

    def _accept_token(self, sequence: Sequence, token: SampledToken) -> EmittedToken:
        position = len(sequence.output_ids)
        sequence.output_ids.append(token.token_id)
        sequence.is_shielded = False
        finish_reason = sequence.finish_reason(position, token.token_id)
        if sequence.mode is SequenceMode.PREFILL_ONLY:
            self._running.remove(sequence)
            sequence.phase = SequencePhase.HELD
        elif finish_reason is not None:
            self._forget(sequence)
        return _emitted(sequence.key, position, token, finish_reason)

    def _progress(self, sequence: Sequence) -> PrefillProgress:
        return PrefillProgress(
            key=sequence.key,
            num_computed_tokens=sequence.num_computed,
            num_total_tokens=sequence.num_to_prefill,
            block_table=list(sequence.block_table),
            num_cached_tokens=sequence.num_cached_tokens or 0,
        )

    def _index_full_blocks(self, sequence: Sequence) -> None:
        """Offers the blocks that have become full to the prefix index, now that their KV is computed.

        Where the same content lies in the pool already, the sequence goes on with that block.
        """
        num_full = sequence.num_computed // self._config.block_size
        num_indexed = sequence.num_indexed_blocks
        if num_full == num_indexed:
            return
        hashes = sequence.block_hashes(num_full, self._config.block_size)
        for index in range(num_indexed, num_full):
            parent_hash = hashes[index - 1] if index else ROOT_HASH
            block_id = self._pool.index(sequence.block_table[index], hashes[index], parent_hash)
            sequence.block_table[index] = block_id
        sequence.num_indexed_blocks = num_full

    def _update_growth_headroom(self) -> None:
        """Keeps reservations off the blocks that are wanted soon by what is here.

        That is the rest of every prefill under way, for a decoding sequence the block after its current one (a push
        takes about as long as it takes to fill a block), and what the next one to be admitted needs: else one that was
        preempted would wait for as long as short requests come, each taking what another gave back.
        """
        block_size = self._config.block_size
        num_wanted = sum(
            sequence.num_missing_blocks(1 if sequence.is_prefilling else block_size, block_size)
            for sequence in self._running
        )
        if self._waiting:
            num_wanted += self._waiting[0].num_missing_blocks(1, block_size)
        self._pool.set_growth_headroom(num_wanted)

    def check_invariants(self) -> None:
        block_size = self._config.block_size
        assert len(self._waiting) + len(self._running) <= len(self._sequences)
        for queue, phase in ((self._waiting, SequencePhase.WAITING), (self._running, SequencePhase.RUNNING)):
            orders = [sequence.order for sequence in queue]
            assert orders == sorted(orders), f"{phase.name} sequences are out of order"
            expected = [key for key, sequence in self._sequences.items() if sequence.phase is phase]
            assert sorted(sequence.key for sequence in queue) == sorted(expected), f"{phase.name} queue is wrong"
        planned = {id(p.sequence): p for p in self._outstanding.planned} if self._outstanding else {}
        for key, sequence in self._sequences.items():
            assert sequence.phase is not SequencePhase.GONE, f"{key} is gone but known"
            assert sequence.num_computed <= sequence.num_tokens <= self._config.max_model_tokens, f"{key} overran"
            if sequence.phase is SequencePhase.WAITING:
                assert not sequence.block_table, f"{key} waits but holds blocks"
                continue
            num_tokens = sequence.num_computed
            if id(sequence) in planned:
                num_tokens += len(planned[id(sequence)].step.token_ids)
            # A table that came with the KV may have one block for the token to come.
            num_most = num_blocks_for(num_tokens + (sequence.mode is SequenceMode.DECODE), block_size)
            num_held = len(sequence.block_table)
            assert num_blocks_for(num_tokens, block_size) <= num_held <= num_most, f"{key} holds {num_held} blocks"
            assert len(set(sequence.block_table)) == num_held, f"{key} holds a block twice"
            indexed = sequence.block_table[: sequence.num_indexed_blocks]
            found = self._pool.match(sequence.block_hashes(len(indexed), block_size))
            assert found == indexed, f"{key} holds {indexed}, but its content is found in {found}"
        self._pool.check_invariants()


def _emitted(key: SequenceKey, position: int, token: SampledToken, finish_reason: FinishReason | None) -> EmittedToken:
    return EmittedToken(
        key=key,
        position=position,
        token_id=token.token_id,
        logprob=token.logprob,
        top=token.top,
        finish_reason=finish_reason,
    )
