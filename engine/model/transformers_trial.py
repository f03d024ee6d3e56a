"""The trial of a model that transformers computes: Baton's way against transformers' own, on two short prompts.

Both are run whole and alone first, with the attention that transformers chooses; then in chunks, beside each other,
token by token at last, with paged attention. Whatever carries information between tokens other than by keys and values
shows as a difference. Axes: T tokens of a prompt or step, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.attention.batch import StepBatch
from engine.attention.kv_cache import KVLayout
from engine.model.config_fields import UnsupportedModelError

_PROMPT_LENGTHS = (20, 11)
# Of each step: (prompt, begin, end) of its chunks.
_STEPS = (((0, 0, 10),), ((1, 0, 4), (0, 10, 17)), ((1, 4, 10), (0, 17, 19)), ((0, 19, 20), (1, 10, 11)))
_MAX_ERROR_FLOAT32 = 1e-3
# In bfloat16 every layer rounds, and one token whose experts change is no fault: the mean is bounded.
_MAX_MEAN_ERROR_BFLOAT16 = 0.1

RunStep = Callable[[StepBatch], torch.Tensor]


def num_trial_blocks(layout: KVLayout) -> int:
    """Of the pool, the first so many blocks are written to."""
    return sum(_num_blocks(length, layout) for length in _PROMPT_LENGTHS)


def trial_prompts(vocab_size: int) -> list[torch.Tensor]:
    """Token ids spread over the vocabulary."""
    return [(torch.arange(length) * 7919 + 17 * length) % vocab_size for length in _PROMPT_LENGTHS]


def plain_logits(model: Any, prompts: list[torch.Tensor]) -> list[torch.Tensor]:
    """What transformers computes by itself: float32 [T, V] for each prompt."""
    return [model(input_ids=ids_T.unsqueeze(0), use_cache=False).logits[0].float() for ids_T in prompts]


def paged_logits(run_step: RunStep, prompts: list[torch.Tensor], layout: KVLayout) -> list[torch.Tensor]:
    """What the prompts' chunks give, put together again: float32 [T, V] for each prompt."""
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for chunks in _STEPS:
        logits_RV = run_step(_step_batch(chunks, prompts, layout))
        sizes = [end - begin for _, begin, end in chunks]
        for (prompt, _, _), chunk_RV in zip(chunks, torch.split(logits_RV, sizes), strict=True):
            rows[prompt].append(chunk_RV.clone())
    return [torch.cat(chunk_rows) for chunk_rows in rows]


def check_logits(paged: list[torch.Tensor], plain: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Raises UnsupportedModelError where they differ by more than rounding."""
    errors_R = torch.cat([_relative_errors(*pair) for pair in zip(paged, plain, strict=True)])
    error, limit = float(errors_R.max()), _MAX_ERROR_FLOAT32
    if dtype != torch.float32:
        error, limit = float(errors_R.mean()), _MAX_MEAN_ERROR_BFLOAT16
    if not error <= limit:  # also where it is not a number
        raise UnsupportedModelError(
            f"its logits in chunks and in company differ from those of whole prompts by {error:.2g} of their size: "
            "its tokens depend on each other elsewhere than in causal attention"
        )


def _relative_errors(paged_TV: torch.Tensor, plain_TV: torch.Tensor) -> torch.Tensor:
    """Of each row. What all logits of a row have in common changes no probability, and does not count as their size."""
    size_T = (plain_TV - plain_TV.mean(dim=-1, keepdim=True)).norm(dim=-1)
    error_T: torch.Tensor = (paged_TV - plain_TV).norm(dim=-1) / size_T
    return error_T


def _step_batch(chunks: tuple[tuple[int, int, int], ...], prompts: list[torch.Tensor], layout: KVLayout) -> StepBatch:
    """All rows' logits are wanted."""
    positions = [torch.arange(begin, end) for _, begin, end in chunks]
    tables = [_block_table(prompt, layout) for prompt, _, _ in chunks]
    slots = [
        table[positions_T // layout.block_size] * layout.block_size + positions_T % layout.block_size
        for table, positions_T in zip(tables, positions, strict=True)
    ]
    sizes = torch.tensor([0, *(end - begin for _, begin, end in chunks)])
    table_sizes = torch.tensor([0, *(len(table) for table in tables)])
    return StepBatch(
        ids_T=torch.cat([prompts[prompt][begin:end] for prompt, begin, end in chunks]),
        positions_T=torch.cat(positions),
        slots_T=torch.cat(slots),
        query_starts_S1=sizes.cumsum(0).int(),
        context_starts_S=torch.tensor([begin for _, begin, _ in chunks], dtype=torch.int32),
        table_starts_S=table_sizes.cumsum(0)[:-1].int(),
        block_tables=torch.cat(tables).int(),
        rows_R=torch.arange(int(sizes.sum())),
    )


def _block_table(prompt: int, layout: KVLayout) -> torch.Tensor:
    """The prompts' blocks lie one prompt after the other, each in reverse."""
    first = sum(_num_blocks(length, layout) for length in _PROMPT_LENGTHS[:prompt])
    return torch.arange(first, first + _num_blocks(_PROMPT_LENGTHS[prompt], layout)).flip(0)


def _num_blocks(length: int, layout: KVLayout) -> int:
    return -(-length // layout.block_size)
