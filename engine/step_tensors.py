"""Turns a StepPlan into what the backend's operations read, in arrays that are reused from step to step.

Axes as in `engine.attention.batch`: T tokens of the step, S sequences of the step, R rows whose logits are wanted.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.batch import StepBatch
from engine.core.step import SequenceStep, StepPlan


class StepTensorBuilder:
    """Holds the arrays; they grow to the largest step seen.

    A tensor's view costs more than filling it for a decode step, so the views too are kept for as long as steps have
    the same numbers of tokens, sequences and rows.
    """

    def __init__(self, *, vocab_size: int, block_size: int, num_blocks: int, max_positions: int) -> None:
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._max_positions = max_positions
        self._arrays = _Arrays(0, 0, 0)
        self._batch: StepBatch | None = None
        self._batch_sizes = (0, 0, 0)

    def build(self, plan: StepPlan, *, every_sequence: bool = False) -> StepBatch:
        """The rows wanted are, sequence by sequence, the tokens after which another is scored, and the last token of
        those that sample, or of every one.

        The tensors are views into the builder's arrays: valid until the next step is built. Raises AssertionError if
        the plan names tokens, blocks or positions that do not exist.
        """
        sequences = plan.sequences
        arrays = self._reserve(plan.num_tokens, len(sequences))
        query_starts, context_starts, table_starts = arrays.query_starts, arrays.context_starts, arrays.table_starts
        tables: list[int] = []
        token, num_rows = 0, 0
        for index, sequence in enumerate(sequences):
            query_starts[index], context_starts[index], table_starts[index] = token, sequence.start, len(tables)
            num_table_blocks = self._fill_tokens(arrays, sequence, token)
            tables += sequence.block_table[:num_table_blocks]
            token += len(sequence.token_ids)
            num_scored = len(sequence.scored_ids)
            if num_scored:
                first_row = token - len(sequence.token_ids)
                arrays.rows[num_rows : num_rows + num_scored] = np.arange(first_row, first_row + num_scored)
                num_rows += num_scored
            if sequence.sample or every_sequence:
                arrays.rows[num_rows] = token - 1
                num_rows += 1
        query_starts[len(sequences)] = token
        self._fill_tables(tables)
        return self._views(token, len(sequences), num_rows)

    def _fill_tokens(self, arrays: _Arrays, sequence: SequenceStep, token: int) -> int:
        """Set ids, positions and slots from `token` on; returns the number of blocks that its tokens fill."""
        token_ids, block_table, start, block_size = (
            sequence.token_ids,
            sequence.block_table,
            sequence.start,
            self._block_size,
        )
        end = start + len(token_ids)
        assert token_ids and start >= 0 and end <= self._max_positions
        num_blocks = -(-end // block_size)
        assert num_blocks <= len(block_table), "the block table does not cover the step's tokens"
        # The kernels read and write where they are told to: a wrong id would reach memory at large.
        assert min(token_ids) >= 0 and max(token_ids) < self._vocab_size, "no such token"
        if len(token_ids) == 1:
            arrays.ids[token] = token_ids[0]
            arrays.positions[token] = start
            arrays.slots[token] = block_table[num_blocks - 1] * block_size + start % block_size
            return num_blocks
        span = slice(token, token + len(token_ids))
        positions = np.arange(start, end)
        arrays.ids[span] = token_ids
        arrays.positions[span] = positions
        first_block = start // block_size
        blocks = np.array(block_table[first_block:num_blocks], dtype=np.int64)
        arrays.slots[span] = blocks[positions // block_size - first_block] * block_size + positions % block_size
        return num_blocks

    def _fill_tables(self, tables: list[int]) -> None:
        arrays = self._arrays
        if len(tables) > len(arrays.block_tables):
            arrays.block_tables = np.zeros(2 * len(tables), dtype=np.int32)
            self._batch = None
        assert not tables or (min(tables) >= 0 and max(tables) < self._num_blocks), "no such block"
        arrays.block_tables[: len(tables)] = tables

    def _reserve(self, num_tokens: int, num_sequences: int) -> _Arrays:
        arrays = self._arrays
        if num_tokens > len(arrays.ids) or num_sequences > len(arrays.context_starts):
            self._arrays = _Arrays(
                max(2 * num_tokens, len(arrays.ids)),
                max(2 * num_sequences, len(arrays.context_starts)),
                len(arrays.block_tables),
            )
            self._batch = None
        return self._arrays

    def _views(self, num_tokens: int, num_sequences: int, num_rows: int) -> StepBatch:
        sizes = (num_tokens, num_sequences, num_rows)
        if self._batch is None or self._batch_sizes != sizes:
            arrays = self._arrays
            self._batch_sizes = sizes
            self._batch = StepBatch(
                ids_T=torch.from_numpy(arrays.ids[:num_tokens]),
                positions_T=torch.from_numpy(arrays.positions[:num_tokens]),
                slots_T=torch.from_numpy(arrays.slots[:num_tokens]),
                query_starts_S1=torch.from_numpy(arrays.query_starts[: num_sequences + 1]),
                context_starts_S=torch.from_numpy(arrays.context_starts[:num_sequences]),
                table_starts_S=torch.from_numpy(arrays.table_starts[:num_sequences]),
                block_tables=torch.from_numpy(arrays.block_tables),
                rows_R=torch.from_numpy(arrays.rows[:num_rows]),
            )
        return self._batch


class _Arrays:
    """Room for so many tokens, sequences and blocks of all tables together."""

    def __init__(self, num_tokens: int, num_sequences: int, num_blocks: int) -> None:
        self.ids, self.positions, self.slots = (np.zeros(num_tokens, dtype=np.int64) for _ in range(3))
        self.rows = np.zeros(num_tokens, dtype=np.int64)
        self.context_starts, self.table_starts = (np.zeros(num_sequences, dtype=np.int32) for _ in range(2))
        self.query_starts = np.zeros(num_sequences + 1, dtype=np.int32)
        self.block_tables = np.zeros(num_blocks, dtype=np.int32)
