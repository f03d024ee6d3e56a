"""Steps for tests of backends: sequences given as (context start, new tokens), over shuffled blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from engine.attention.batch import StepBatch


def make_batch(
    spans: Sequence[tuple[int, int]],
    *,
    block_size: int,
    num_blocks: int,
    vocab_size: int,
    draw: random.Random,
    selected: Sequence[int] | None = None,
) -> StepBatch:
    """`selected` are the sequences whose last token's logits are wanted: all, if not given.

    Each sequence has blocks of its own, in no order, and its table stands anywhere among the tables: between two of
    them lie block ids that belong to nobody.
    """
    free = list(range(num_blocks))
    draw.shuffle(free)
    positions, slots, query_starts, table_starts, tables = [], [], [0], [], []
    for start, count in spans:
        table = [free.pop() for _ in range(-(-(start + count) // block_size))]
        span = range(start, start + count)
        positions += span
        slots += [table[position // block_size] * block_size + position % block_size for position in span]
        query_starts.append(query_starts[-1] + count)
        table_starts.append(len(tables))
        tables += [*table, num_blocks - 1]
    rows = [query_starts[sequence + 1] - 1 for sequence in (range(len(spans)) if selected is None else selected)]
    return StepBatch(
        ids_T=torch.tensor([draw.randrange(vocab_size) for _ in positions]),
        positions_T=torch.tensor(positions),
        slots_T=torch.tensor(slots),
        query_starts_S1=torch.tensor(query_starts, dtype=torch.int32),
        context_starts_S=torch.tensor([start for start, _ in spans], dtype=torch.int32),
        table_starts_S=torch.tensor(table_starts, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        rows_R=torch.tensor(rows, dtype=torch.int64),
    )
