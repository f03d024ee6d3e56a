"""What the operations need to know of a step: whose tokens these are, where they stand, where their KV lies.

Axes: T tokens of the step, flat over its sequences; S sequences of the step; R rows whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One step's tokens. All tensors are contiguous and on the CPU.

    Attributes:
        ids_T: int64 token ids.
        positions_T: int64, the position of each token in its sequence.
        slots_T: int64, `block_id * block_size + offset` where each token's KV is written.
        query_starts_S1: int32 [S + 1], the tokens of sequence s are query_starts[s] .. query_starts[s + 1] - 1.
        context_starts_S: int32, the position of each sequence's first token of the step.
        table_starts_S: int32, where each sequence's block ids begin in `block_tables`.
        block_tables: int32, the block ids of all sequences, one after the other; there may be more behind them.
        rows_R: int64, the tokens (0 .. T - 1, ascending) whose logits are wanted.
    """

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    query_starts_S1: torch.Tensor
    context_starts_S: torch.Tensor
    table_starts_S: torch.Tensor
    block_tables: torch.Tensor
    rows_R: torch.Tensor
    # The lengths are asked for many times a step; a tensor takes microseconds to tell its own.
    num_tokens: int = field(init=False)
    num_sequences: int = field(init=False)
    num_selected: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", len(self.ids_T))
        object.__setattr__(self, "num_sequences", len(self.context_starts_S))
        object.__setattr__(self, "num_selected", len(self.rows_R))
