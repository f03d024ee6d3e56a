"""Turns a StepPlan into what the backend's operations read, in arrays that are reused from step to step.

Axes as in `engine.attention.batch`: T tokens of the step, S sequences of the step, R rows whose logits are wanted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.batch import StepBatch
from engine.core.step import SequenceStep, StepPlan

_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]


class StepTensorBuilder:
    """Holds the arrays; they grow to the largest step seen."""

    def __init__(self, *, vocab_size: int, block_size: int, num_blocks: int, max_positions: int) -> None:
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._max_positions = max_positions
        self._ids: _Int64 = np.zeros(0, dtype=np.int64)
        self._positions: _Int64 = np.zeros(0, dtype=np.int64)
        self._slots: _Int64 = np.zeros(0, dtype=np.int64)
        self._block_tables: _Int32 = np.zeros(0, dtype=np.int32)

    def build(self, plan: StepPlan, *, every_sequence: bool = False) -> StepBatch:
        """The rows wanted are the last tokens of the sequences that sample, or of every one.

        Its token ids, positions, slots and block tables are views into the builder's arrays: valid until the next
        step is built. Raises AssertionError if the plan names tokens, blocks or positions that do not exist.
        """
        num_tokens = plan.num_tokens
        self._reserve(num_tokens)
        query_starts, context_starts, table_starts, rows, tables = [0], [], [], [], []
        token = 0
        for sequence in plan.sequences:
            num_table_blocks = self._fill(sequence, token)
            token += len(sequence.token_ids)
            query_starts.append(token)
            context_starts.append(sequence.start)
            table_starts.append(len(tables))
            tables += sequence.block_table[:num_table_blocks]
            if sequence.sample or every_sequence:
                rows.append(token - 1)
        ids_T, slots_T = self._ids[:num_tokens], self._slots[:num_tokens]
        # The kernels read and write where they are told to: a wrong id would reach memory at large.
        assert num_tokens == 0 or 0 <= ids_T.min() <= ids_T.max() < self._vocab_size, "a token id does not exist"
        return StepBatch(
            ids_T=torch.from_numpy(ids_T),
            positions_T=torch.from_numpy(self._positions[:num_tokens]),
            slots_T=torch.from_numpy(slots_T),
            query_starts_S1=torch.tensor(query_starts, dtype=torch.int32),
            context_starts_S=torch.tensor(context_starts, dtype=torch.int32),
            table_starts_S=torch.tensor(table_starts, dtype=torch.int32),
            block_tables=torch.from_numpy(self._fill_tables(tables)),
            rows_R=torch.tensor(rows, dtype=torch.int64),
        )

    def _fill(self, sequence: SequenceStep, token: int) -> int:
        """Set ids, positions and slots from `token` on; returns the number of blocks that its tokens fill."""
        start, num_tokens, block_size = sequence.start, len(sequence.token_ids), self._block_size
        end = start + num_tokens
        assert num_tokens > 0 and start >= 0 and end <= self._max_positions
        num_blocks = -(-end // block_size)
        assert num_blocks <= len(sequence.block_table), "the block table does not cover the step's tokens"
        if num_tokens == 1:
            self._ids[token] = sequence.token_ids[0]
            self._positions[token] = start
            self._slots[token] = sequence.block_table[num_blocks - 1] * block_size + start % block_size
            return num_blocks
        span = slice(token, token + num_tokens)
        self._ids[span] = sequence.token_ids
        positions = np.arange(start, end)
        self._positions[span] = positions
        first_block = start // block_size
        blocks = np.array(sequence.block_table[first_block:num_blocks], dtype=np.int64)
        self._slots[span] = blocks[positions // block_size - first_block] * block_size + positions % block_size
        return num_blocks

    def _fill_tables(self, tables: list[int]) -> _Int32:
        if len(tables) > len(self._block_tables):
            self._block_tables = np.zeros(2 * len(tables), dtype=np.int32)
        block_tables = self._block_tables[: len(tables)]
        block_tables[:] = tables
        assert not tables or 0 <= block_tables.min() <= block_tables.max() < self._num_blocks, "no such block"
        return block_tables

    def _reserve(self, num_tokens: int) -> None:
        if num_tokens > len(self._ids):
            self._ids, self._positions, self._slots = (np.zeros(2 * num_tokens, dtype=np.int64) for _ in range(3))
