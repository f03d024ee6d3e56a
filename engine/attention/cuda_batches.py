"""The arithmetic of the CUDA path that needs no device: batches of few sizes, block tables in FlashInfer's form.

A CUDA graph is recorded for a number of rows and replays with that number. So a decode batch is padded to the next of
few sizes: with sequences of one token at position 0, whose keys and values go to a scratch block that no sequence has.
A padded batch is a batch like any other, and nothing downstream tells the two apart.

Axes as in `engine.attention.batch`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from engine.attention.batch import StepBatch

MAX_GRAPH_ROWS = 256
"""Larger decode batches are not recorded: their kernels run longer than it takes to launch them."""


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """The sizes to pad to, ascending, none above `max_rows`: 1, 2, 4, 8, 16, 24 ... 64, 80 ... 128, 160 ... 256.

    The steps grow with the size, so that padding costs little and few graphs are held.
    """
    sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, MAX_GRAPH_ROWS + 1, 32))
    return tuple(size for size in sizes if size <= max_rows)


def graph_size(num_rows: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest of the ascending `sizes` that holds so many rows; None if none does."""
    index = bisect_left(sizes, num_rows)
    return sizes[index] if index < len(sizes) else None


def is_decode(batch: StepBatch) -> bool:
    """Whether every sequence runs one token and somebody wants logits: what is worth recording."""
    return batch.num_tokens == batch.num_sequences and batch.num_selected > 0


def scratch_batch(num_rows: int, *, scratch_block: int, block_size: int) -> StepBatch:
    """A decode batch of padding alone, all of it selected: it touches nothing but the scratch block."""
    none, none_int32 = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
    empty = StepBatch(
        ids_T=none,
        positions_T=none,
        slots_T=none,
        query_starts_S1=torch.zeros(1, dtype=torch.int32),
        context_starts_S=none_int32,
        table_starts_S=none_int32,
        block_tables=none_int32,
        rows_R=none,
    )
    return pad_batch(empty, num_rows, scratch_block=scratch_block, block_size=block_size)


def pad_batch(batch: StepBatch, num_rows: int, *, scratch_block: int, block_size: int) -> StepBatch:
    """`batch`, of one token a sequence, with sequences added up to `num_rows`; as many rows are selected.

    The first `batch.num_selected` selected rows are the batch's own, the others any rows at all. New tensors.
    """
    assert batch.num_tokens == batch.num_sequences <= num_rows
    missing = (0, num_rows - batch.num_tokens)
    return replace(
        batch,
        ids_T=pad(batch.ids_T, missing),
        positions_T=pad(batch.positions_T, missing),
        slots_T=pad(batch.slots_T, missing, value=scratch_block * block_size),
        query_starts_S1=torch.arange(num_rows + 1, dtype=torch.int32),
        context_starts_S=pad(batch.context_starts_S, missing),
        # All padding reads one table, of the one scratch block.
        table_starts_S=pad(batch.table_starts_S, missing, value=len(batch.block_tables)),
        block_tables=pad(batch.block_tables, (0, 1), value=scratch_block),
        rows_R=pad(batch.rows_R, (0, num_rows - batch.num_selected), value=num_rows - 1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedTables:
    """A step's block tables in compressed rows, as FlashInfer's planners take them: int32, on the host.

    Attributes:
        query_starts_S1: the tokens of sequence s are query_starts[s] .. query_starts[s + 1] - 1.
        block_starts_S1: likewise its blocks in `blocks`; exactly those that hold its tokens after this step.
        blocks: block ids of all sequences, one after the other.
        last_block_tokens_S: how many tokens of each sequence lie in its last block, 1 .. block_size.
    """

    query_starts_S1: torch.Tensor
    block_starts_S1: torch.Tensor
    blocks: torch.Tensor
    last_block_tokens_S: torch.Tensor

    @classmethod
    def from_batch(cls, batch: StepBatch, block_size: int) -> PagedTables:
        context_ends_S = batch.context_starts_S + batch.query_starts_S1.diff()
        num_blocks_S = (context_ends_S + (block_size - 1)) // block_size
        block_starts_S1 = pad(num_blocks_S.cumsum(0, dtype=torch.int32), (1, 0))
        # Where each block id stands in `block_tables`: its sequence's place there, and how far into that it is.
        shifts = (batch.table_starts_S - block_starts_S1[:-1]).repeat_interleave(num_blocks_S)
        places = shifts + torch.arange(len(shifts), dtype=torch.int32)
        return cls(
            query_starts_S1=batch.query_starts_S1,
            block_starts_S1=block_starts_S1,
            blocks=batch.block_tables[places],
            last_block_tokens_S=context_ends_S - (num_blocks_S - 1) * block_size,
        )
