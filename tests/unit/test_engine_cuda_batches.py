"""The CUDA path's arithmetic: sizes of recorded batches, padding, block tables in compressed rows."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.batch import StepBatch
from engine.attention.cuda_batches import (
    MAX_GRAPH_ROWS,
    PagedTables,
    graph_size,
    graph_sizes,
    is_decode,
    pad_batch,
    scratch_batch,
)
from tests.support.step_batches import make_batch

BLOCK_SIZE = 4
NUM_BLOCKS = 200
SCRATCH_BLOCK = 200
SPANS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=12)


def batch_of(spans: list[tuple[int, int]], seed: int = 0, selected: list[int] | None = None) -> StepBatch:
    draw = random.Random(seed)
    return make_batch(spans, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, vocab_size=50, draw=draw, selected=selected)


def padded(batch: StepBatch, num_rows: int) -> StepBatch:
    return pad_batch(batch, num_rows, scratch_block=SCRATCH_BLOCK, block_size=BLOCK_SIZE)


def test_sizes_are_few_and_close_enough() -> None:
    sizes = graph_sizes(MAX_GRAPH_ROWS)
    assert sizes[:5] == (1, 2, 4, 8, 16) and sizes[-1] == MAX_GRAPH_ROWS
    assert list(sizes) == sorted(set(sizes)) and len(sizes) < 24
    for num_rows in range(9, MAX_GRAPH_ROWS + 1):
        size = graph_size(num_rows, sizes)
        assert size is not None and num_rows <= size < num_rows + max(8, num_rows // 3)


@pytest.mark.parametrize(
    ("max_rows", "expected"), [(0, ()), (1, (1,)), (3, (1, 2)), (9, (1, 2, 4, 8)), (16, (1, 2, 4, 8, 16))]
)
def test_no_size_is_above_the_room_there_is(max_rows: int, expected: tuple[int, ...]) -> None:
    assert graph_sizes(max_rows) == expected


def test_the_smallest_size_that_holds_the_rows() -> None:
    sizes = (1, 2, 4, 8)
    assert [graph_size(num_rows, sizes) for num_rows in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, None]
    assert graph_size(1, ()) is None


def test_a_decode_batch_runs_one_token_a_sequence_and_wants_logits() -> None:
    assert is_decode(batch_of([(3, 1), (0, 1)]))
    assert is_decode(batch_of([(3, 1), (0, 1)], selected=[1]))
    assert not is_decode(batch_of([(3, 1), (0, 2)]))
    assert not is_decode(batch_of([(3, 1)], selected=[]))


def test_padding_is_sequences_of_one_token_in_the_scratch_block() -> None:
    batch = batch_of([(5, 1), (8, 1), (0, 1)], selected=[0, 2])
    tables = PagedTables.from_batch(batch, BLOCK_SIZE)
    result = padded(batch, 8)
    assert (result.num_tokens, result.num_sequences, result.num_selected) == (8, 8, 8)
    assert result.ids_T[:3].tolist() == batch.ids_T.tolist()
    assert result.positions_T.tolist() == [5, 8, 0, 0, 0, 0, 0, 0]
    assert result.slots_T[:3].tolist() == batch.slots_T.tolist()
    assert result.slots_T[3:].tolist() == [SCRATCH_BLOCK * BLOCK_SIZE] * 5
    assert result.rows_R[:2].tolist() == [0, 2] and result.rows_R.max() < 8
    in_rows = PagedTables.from_batch(result, BLOCK_SIZE)
    assert in_rows.query_starts_S1.tolist() == list(range(9))
    assert in_rows.block_starts_S1.tolist() == [0, 2, 5, 6, 7, 8, 9, 10, 11]
    assert in_rows.blocks.tolist() == [*tables.blocks.tolist(), *[SCRATCH_BLOCK] * 5]
    assert in_rows.last_block_tokens_S.tolist() == [2, 1, 1, 1, 1, 1, 1, 1]


@given(spans=SPANS, extra=st.integers(0, 9), seed=st.integers(0, 99))
def test_padding_changes_nothing_of_the_batch(spans: list[tuple[int, int]], extra: int, seed: int) -> None:
    batch = batch_of([(start, 1) for start, _ in spans], seed)
    num_rows = batch.num_tokens + extra
    result = padded(batch, num_rows)
    for name in (name for name in StepBatch.__slots__ if not name.startswith("num_")):
        before, after = getattr(batch, name), getattr(result, name)
        assert after.dtype == before.dtype and after.is_contiguous()
        assert torch.equal(after[: len(before)], before)
    assert is_decode(result) and result.num_tokens == result.num_selected == num_rows


def test_a_scratch_batch_touches_nothing_else() -> None:
    batch = scratch_batch(5, scratch_block=SCRATCH_BLOCK, block_size=BLOCK_SIZE)
    assert is_decode(batch) and batch.num_tokens == batch.num_selected == 5
    assert set(batch.slots_T.tolist()) == {SCRATCH_BLOCK * BLOCK_SIZE}
    assert set(PagedTables.from_batch(batch, BLOCK_SIZE).blocks.tolist()) == {SCRATCH_BLOCK}


@given(spans=SPANS, seed=st.integers(0, 99))
def test_compressed_rows_hold_each_sequences_own_blocks(spans: list[tuple[int, int]], seed: int) -> None:
    batch = batch_of(spans, seed)
    tables = PagedTables.from_batch(batch, BLOCK_SIZE)
    for tensor in (tables.query_starts_S1, tables.block_starts_S1, tables.blocks, tables.last_block_tokens_S):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
    assert tables.block_starts_S1[-1] == len(tables.blocks)
    for sequence, (start, count) in enumerate(spans):
        begin, end = tables.block_starts_S1[sequence : sequence + 2].tolist()
        blocks = tables.blocks[begin:end].tolist()
        length = (len(blocks) - 1) * BLOCK_SIZE + int(tables.last_block_tokens_S[sequence])
        assert length == start + count and 1 <= int(tables.last_block_tokens_S[sequence]) <= BLOCK_SIZE
        # The sequence's last token was written where its last block says.
        token = int(batch.query_starts_S1[sequence + 1]) - 1
        assert int(batch.slots_T[token]) == blocks[-1] * BLOCK_SIZE + int(tables.last_block_tokens_S[sequence]) - 1
        table_start = int(batch.table_starts_S[sequence])
        assert blocks == batch.block_tables[table_start : table_start + len(blocks)].tolist()
