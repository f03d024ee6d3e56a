"""Turns a StepPlan into the tensors that the model runs on, in arrays that are reused from step to step.

Axes: T tokens of the step, S sequences of the step, R sequences that sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.batch import AttentionBatch
from engine.core.step import SequenceStep, StepPlan

_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """Views into the builder's arrays: valid until the next step is built.

    Attributes:
        ids_T: int64 token ids.
        last_rows_S: int64, the row of each sequence's last token.
    """

    ids_T: torch.Tensor
    last_rows_S: torch.Tensor
    batch: AttentionBatch


class StepTensorBuilder:
    """Holds the arrays; they grow to the largest step seen."""

    def __init__(self, *, block_size: int, num_blocks: int, max_positions: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._max_positions = max_positions
        self._token_arrays: list[_Int64] = [np.zeros(0, dtype=np.int64) for _ in range(3)]
        self._sequence_arrays: list[_Int32] = [np.zeros(0, dtype=np.int32) for _ in range(3)]
        self._block_tables: _Int32 = np.zeros(0, dtype=np.int32)

    def build(self, plan: StepPlan) -> StepTensors:
        """Raises AssertionError if the plan names blocks or positions that do not exist."""
        sequences = plan.sequences
        num_tokens, num_sequences = plan.num_tokens, len(sequences)
        num_table_blocks = [self._num_blocks_of(sequence) for sequence in sequences]
        self._reserve(num_tokens, num_sequences + 1, sum(num_table_blocks))
        ids, positions, slots = (array[:num_tokens] for array in self._token_arrays)
        query_starts = self._sequence_arrays[0][: num_sequences + 1]
        context_starts, table_starts = (array[:num_sequences] for array in self._sequence_arrays[1:])
        block_tables = self._block_tables[: sum(num_table_blocks)]
        token, block = 0, 0
        for index, sequence in enumerate(sequences):
            next_token, next_block = token + len(sequence.token_ids), block + num_table_blocks[index]
            query_starts[index], context_starts[index], table_starts[index] = token, sequence.start, block
            block_tables[block:next_block] = sequence.block_table[: num_table_blocks[index]]
            ids[token:next_token] = sequence.token_ids
            positions[token:next_token] = np.arange(sequence.start, sequence.start + len(sequence.token_ids))
            _fill_slots(slots[token:next_token], positions[token:next_token], block_tables[block:], self._block_size)
            token, block = next_token, next_block
        query_starts[num_sequences] = token
        # The kernels write where the table says: a wrong block id would overwrite memory at large.
        assert num_sequences == 0 or 0 <= block_tables.min() <= block_tables.max() < self._num_blocks
        batch = AttentionBatch(
            positions_T=torch.from_numpy(positions),
            slots_T=torch.from_numpy(slots),
            query_starts_S1=torch.from_numpy(query_starts),
            context_starts_S=torch.from_numpy(context_starts),
            table_starts_S=torch.from_numpy(table_starts),
            block_tables=torch.from_numpy(block_tables),
        )
        last_rows_S = torch.from_numpy(query_starts[1:].astype(np.int64) - 1)
        return StepTensors(ids_T=torch.from_numpy(ids), last_rows_S=last_rows_S, batch=batch)

    def _num_blocks_of(self, sequence: SequenceStep) -> int:
        """Blocks that the sequence's tokens fill after this step."""
        end = sequence.start + len(sequence.token_ids)
        assert sequence.token_ids and sequence.start >= 0 and end <= self._max_positions
        num_blocks = -(-end // self._block_size)
        assert num_blocks <= len(sequence.block_table), "the block table does not cover the step's tokens"
        return num_blocks

    def _reserve(self, num_tokens: int, num_sequences: int, num_blocks: int) -> None:
        if num_tokens > len(self._token_arrays[0]):
            self._token_arrays = [np.zeros(2 * num_tokens, dtype=np.int64) for _ in self._token_arrays]
        if num_sequences > len(self._sequence_arrays[0]):
            self._sequence_arrays = [np.zeros(2 * num_sequences, dtype=np.int32) for _ in self._sequence_arrays]
        if num_blocks > len(self._block_tables):
            self._block_tables = np.zeros(2 * num_blocks, dtype=np.int32)


def _fill_slots(slots: _Int64, positions: _Int64, block_table: _Int32, block_size: int) -> None:
    np.multiply(block_table[positions // block_size], block_size, out=slots)
    slots += positions % block_size
