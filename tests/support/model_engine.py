"""A tiny random model in float32 as the engine of a SchedulerMachine.

Axes: B block, L layer, K key/value head, C key (0) or value (1), S slot in the block, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.core.block_pool import BlockPool, BlockState
from engine.core.sampling import SamplingParams
from engine.core.step import SequenceKey, StepPlan, StepResult
from engine.core.tiers import BlockCopy
from engine.runner import Runner
from tests.support.engine_model import make_step, write_tiny_model
from tests.support.scheduler_machine import EOS, KV, MAX_BLOCKS, MAX_HOST_BLOCKS
from tests.support.toy_engine import Undisturbed

NUM_ALONE_BLOCKS = 64
"""Behind those of the machine's pool, for sequences that are computed alone."""
KV_TOLERANCE = 1e-5
LOGPROB_TOLERANCE = 1e-4


class ModelRunner:
    """Runs plans on the first blocks of a real runner's pool. They hold garbage at first."""

    def __init__(self, runner: Runner, pool: BlockPool, block_size: int, garbage_LKCD: torch.Tensor) -> None:
        self._runner = runner
        self._pool = pool
        self._block_size = block_size
        self._pool_BLKCSD = runner.cache.pool_BLKCSD
        for slot in range(block_size):
            self._pool_BLKCSD[:MAX_BLOCKS, :, :, :, slot] = garbage_LKCD

    def run(self, plan: StepPlan) -> StepResult:
        for step in plan.sequences:
            for position in range(step.start, step.start + len(step.token_ids)):
                block_id = step.block_table[position // self._block_size]
                assert self._pool.state(block_id) is BlockState.ACTIVE
        return self._runner.run(plan)

    def copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        self._runner.copy_blocks(copies)

    def write(self, block_table: list[int], kv: KV) -> None:
        for position, kv_LKCD in enumerate(kv):
            block_index, slot = divmod(position, self._block_size)
            self._pool_BLKCSD[block_table[block_index], :, :, :, slot] = kv_LKCD

    def read(self, block_table: list[int], num_tokens: int) -> KV:
        return read_kv(self._pool_BLKCSD, block_table, num_tokens)


class ModelEngine:
    """A salt changes nothing for the model: that blocks are not shared across salts is for the toy to show."""

    def __init__(self, folder: Path) -> None:
        """Writes the model's files to `folder`."""
        write_tiny_model(folder, eos_token_id=EOS, num_hidden_layers=2)
        self._folder = folder
        self._runners: dict[int, Runner] = {}
        self._alone: dict[Any, Undisturbed] = {}
        self._step_id = 0
        layout = self._runner(1).cache.layout
        # Finite, since any bytes in a pool are what some model computed once; but far from all that this one computes.
        self.garbage = torch.full((layout.num_layers, layout.num_kv_heads, 2, layout.head_dim), 1e4)

    def runner(self, pool: BlockPool, block_size: int, salt_of: Callable[[SequenceKey], int]) -> ModelRunner:
        return ModelRunner(self._runner(block_size), pool, block_size, self.garbage)

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
    ) -> Undisturbed:
        """All input at once, then token by token."""
        name = (tuple(prompt_ids), params, tuple(forced_ids), choice, max_model_tokens)
        known = self._alone.get(name)
        if known is not None:
            return known
        output, start, ends = list(forced_ids), 0, params.stop_token_ids
        if not params.ignore_eos:
            ends += tuple(eos_token_ids)
        reason = None
        while reason is None:
            ids = [*prompt_ids, *output]
            token_id = self._draw(ids[start:], start, params, choice, prompt_ids, output)
            start = len(ids)
            output.append(token_id)
            if token_id in ends and len(output) > params.min_tokens:
                reason = "stop"
            elif len(output) == params.max_tokens or len(ids) + 1 == max_model_tokens:
                reason = "length"
        return self._alone.setdefault(name, Undisturbed(token_ids=output, finish_reason=reason))

    def kv_of(self, token_ids: list[int], salt: int) -> KV:
        self._run_alone(token_ids, 0, sample=False)
        return read_kv(self._runner(1).cache.pool_BLKCSD, _ALONE_TABLE, len(token_ids))

    def is_same_kv(self, found: KV, expected: KV) -> bool:
        return len(found) == len(expected) and all(
            torch.allclose(each, other, rtol=KV_TOLERANCE, atol=KV_TOLERANCE)
            for each, other in zip(found, expected, strict=True)
        )

    def scores_of(self, prompt_ids: list[int], salt: int) -> list[float]:
        if len(prompt_ids) == 1:
            return []
        params = SamplingParams(prompt_logprobs=0)
        result = self._run_alone(prompt_ids, 0, sample=False, sampling=params, scored_ids=prompt_ids[1:])
        return [token.logprob for token in result.scores[0]]

    def are_same_scores(self, found: list[float], expected: list[float]) -> bool:
        return len(found) == len(expected) and all(
            abs(each - other) <= LOGPROB_TOLERANCE for each, other in zip(found, expected, strict=True)
        )

    def _draw(
        self,
        token_ids: list[int],
        start: int,
        params: SamplingParams,
        choice: int,
        prompt_ids: list[int],
        output_ids: list[int],
    ) -> int:
        result = self._run_alone(
            token_ids,
            start,
            sample=True,
            sampling=params,
            choice=choice,
            position=len(output_ids),
            prompt_ids=prompt_ids,
            output_ids=output_ids,
        )
        ((token,),) = result.tokens
        return token.token_id

    def _run_alone(self, token_ids: Sequence[int], start: int, **fields: Any) -> StepResult:
        self._step_id += 1
        step = make_step(token_ids, start, _ALONE_TABLE, **fields)
        return self._runner(1).run(StepPlan(step_id=self._step_id, sequences=[step]))

    def _runner(self, block_size: int) -> Runner:
        runner = self._runners.get(block_size)
        if runner is None:
            num_blocks = MAX_BLOCKS + NUM_ALONE_BLOCKS
            runner = Runner.from_directory(
                self._folder, "float32", num_blocks, block_size, 1, num_host_blocks=MAX_HOST_BLOCKS
            )
            self._runners[block_size] = runner
        return runner


_ALONE_TABLE = list(range(MAX_BLOCKS, MAX_BLOCKS + NUM_ALONE_BLOCKS))


def read_kv(pool_BLKCSD: torch.Tensor, block_table: list[int], num_tokens: int) -> KV:
    block_size = pool_BLKCSD.shape[4]
    places = (divmod(position, block_size) for position in range(num_tokens))
    return [pool_BLKCSD[block_table[block_index], :, :, :, slot].clone() for block_index, slot in places]
