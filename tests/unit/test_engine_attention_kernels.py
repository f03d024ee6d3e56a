"""The native kernels against the torch reference: random shapes, block tables, lengths, both dtypes, every ISA."""

from __future__ import annotations

import random

import pytest
import torch

from engine.attention.batch import AttentionBatch
from engine.attention.cpu import NativeCpuBackend
from engine.attention.kv_cache import TORCH_DTYPES, KVCache, KVLayout
from engine.attention.native_library import ISA_NAMES, KernelsUnavailableError, load_kernels, supported_isas
from engine.attention.torch_reference import TorchReferenceBackend
from engine.model.config import DtypeName

# Of the outputs' absolute difference, for values of about unit size. bfloat16 keeps 8 bits, and the pair kernels
# also round the softmax weights to it.
TOLERANCE: dict[DtypeName, float] = {"float32": 2e-5, "bfloat16": 2e-2}
REFERENCE = TorchReferenceBackend()


@pytest.fixture(scope="module", params=ISA_NAMES)
def isa(request: pytest.FixtureRequest) -> str:
    try:
        supported = supported_isas(load_kernels())
    except KernelsUnavailableError as error:
        pytest.skip(str(error))
    if request.param not in supported:
        pytest.skip(f"this machine has no {request.param}")
    return str(request.param)


def make_batch(block_size: int, spans: list[tuple[int, int]], draw: random.Random) -> tuple[AttentionBatch, int]:
    """A batch of sequences given as (context start, new tokens), over shuffled blocks; and the pool's size.

    One block more than needed stays unused, and block ids of a sequence are never adjacent by design.
    """
    tables = []
    num_blocks = sum(-(-(start + count) // block_size) for start, count in spans) + 1
    blocks = list(range(num_blocks))
    draw.shuffle(blocks)
    positions, slots, query_starts = [], [], [0]
    for start, count in spans:
        table = [blocks.pop() for _ in range(-(-(start + count) // block_size))]
        tables.append(table)
        for position in range(start, start + count):
            positions.append(position)
            slots.append(table[position // block_size] * block_size + position % block_size)
        query_starts.append(query_starts[-1] + count)
    table_starts = [sum(len(table) for table in tables[:i]) for i in range(len(tables))]
    batch = AttentionBatch(
        positions_T=torch.tensor(positions),
        slots_T=torch.tensor(slots),
        query_starts_S1=torch.tensor(query_starts, dtype=torch.int32),
        context_starts_S=torch.tensor([start for start, _ in spans], dtype=torch.int32),
        table_starts_S=torch.tensor(table_starts, dtype=torch.int32),
        block_tables=torch.tensor([block for table in tables for block in table], dtype=torch.int32),
    )
    return batch, num_blocks


def make_pool(
    dtype: DtypeName, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, generator: torch.Generator
) -> KVCache:
    layout = KVLayout(
        num_blocks=num_blocks,
        num_layers=2,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        dtype=dtype,
    )
    cache = KVCache.allocate(layout)
    cache.pool_BLKCSD.copy_(torch.randn(layout.shape_BLKCSD, generator=generator))
    return cache


def poison_unwritten(layer_BKCSD: torch.Tensor, batch: AttentionBatch, spans: list[tuple[int, int]]) -> None:
    """Fill every slot that no position of the batch's sequences owns with NaN: reading one shows in the output."""
    block_size = layer_BKCSD.shape[3]
    owned = torch.zeros(layer_BKCSD.shape[0] * block_size, dtype=torch.bool)
    for sequence, (start, count) in enumerate(spans):
        table = batch.block_tables[int(batch.table_starts_S[sequence]) :]
        for position in range(start + count):
            owned[int(table[position // block_size]) * block_size + position % block_size] = True
    for slot in (~owned).nonzero().flatten().tolist():
        layer_BKCSD[slot // block_size, :, :, slot % block_size] = float("nan")


SHAPES = [
    # (query heads, kv heads, head dim, block size)
    (9, 3, 64, 16),
    (4, 4, 32, 16),
    (8, 1, 128, 32),
    (6, 2, 80, 16),
    (2, 1, 24, 5),
    (32, 8, 16, 1),
    (7, 7, 2, 3),
]
SPAN_KINDS = {
    "decode": [(0, 1), (1, 1), (15, 1), (16, 1), (63, 1), (64, 1), (200, 1)],
    "prefill": [(0, 1), (0, 16), (0, 65), (0, 150)],
    "chunk": [(64, 33), (31, 64), (100, 7)],
    "mixed": [(77, 1), (0, 40), (16, 16), (128, 1)],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", SPAN_KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_matches_reference(isa: str, dtype: DtypeName, kind: str, shape: tuple[int, int, int, int]) -> None:
    num_heads, num_kv_heads, head_dim, block_size = shape
    spans = SPAN_KINDS[kind]
    batch, num_blocks = make_batch(block_size, spans, random.Random(1))
    generator = torch.Generator().manual_seed(2)
    cache = make_pool(dtype, num_blocks, num_kv_heads, block_size, head_dim, generator)
    layer = cache.layer_BKCSD(1)
    poison_unwritten(layer, batch, spans)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = (torch.randn(batch.num_tokens, width, generator=generator) * 2).to(TORCH_DTYPES[dtype])
    expected = torch.empty(batch.num_tokens, num_heads * head_dim, dtype=qkv.dtype)
    REFERENCE.attend(qkv, layer, batch, expected)
    assert expected.isfinite().all()
    for num_threads in (1, 3):
        found = torch.full_like(expected, float("nan"))
        NativeCpuBackend(num_threads, isa).attend(qkv, layer, batch, found)
        torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_attention_does_not_depend_on_the_batch(isa: str) -> None:
    """Each sequence alone gives the same bits as all of them together."""
    spans = SPAN_KINDS["mixed"]
    batch, num_blocks = make_batch(16, spans, random.Random(3))
    generator = torch.Generator().manual_seed(4)
    layer = make_pool("float32", num_blocks, 3, 16, 64, generator).layer_BKCSD(0)
    qkv = torch.randn(batch.num_tokens, 15 * 64, generator=generator)
    together = torch.empty(batch.num_tokens, 9 * 64)
    backend = NativeCpuBackend(1, isa)
    backend.attend(qkv, layer, batch, together)
    for sequence, (start, count) in enumerate(spans):
        begin = int(batch.query_starts_S1[sequence])
        alone = torch.empty(count, 9 * 64)
        single = AttentionBatch(
            positions_T=batch.positions_T[begin : begin + count],
            slots_T=batch.slots_T[begin : begin + count],
            query_starts_S1=torch.tensor([0, count], dtype=torch.int32),
            context_starts_S=torch.tensor([start], dtype=torch.int32),
            table_starts_S=batch.table_starts_S[sequence : sequence + 1],
            block_tables=batch.block_tables,
        )
        backend.attend(qkv[begin : begin + count], layer, single, alone)
        assert torch.equal(alone, together[begin : begin + count])


def test_attention_with_large_scores_stays_finite(isa: str) -> None:
    batch, num_blocks = make_batch(16, [(0, 100)], random.Random(5))
    generator = torch.Generator().manual_seed(6)
    layer = make_pool("float32", num_blocks, 1, 16, 64, generator).layer_BKCSD(0)
    qkv = torch.randn(100, 4 * 64, generator=generator) * 200
    expected, found = torch.empty(100, 2 * 64), torch.empty(100, 2 * 64)
    REFERENCE.attend(qkv, layer, batch, expected)
    NativeCpuBackend(1, isa).attend(qkv, layer, batch, found)
    # Scores of about 2,000 have a last place of 1e-4, which is then the relative error of a weight.
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotary_write_matches_reference(isa: str, dtype: DtypeName, shape: tuple[int, int, int, int]) -> None:
    num_heads, num_kv_heads, head_dim, block_size = shape
    batch, num_blocks = make_batch(block_size, SPAN_KINDS["mixed"], random.Random(7))
    generator = torch.Generator().manual_seed(8)
    native = make_pool(dtype, num_blocks, num_kv_heads, block_size, head_dim, generator)
    reference = KVCache(native.layout, native.pool_BLKCSD.clone())
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(batch.num_tokens, width, generator=generator).to(TORCH_DTYPES[dtype])
    qkv_reference = qkv.clone()
    cos_sin = torch.randn(256, head_dim, generator=generator)
    REFERENCE.rotary_write(qkv_reference, cos_sin, reference.layer_BKCSD(1), batch)
    NativeCpuBackend(2, isa).rotary_write(qkv, cos_sin, native.layer_BKCSD(1), batch)
    query_width = num_heads * head_dim
    tolerance = 1e-5 if dtype == "float32" else 4e-2  # a last place of values up to 8
    torch.testing.assert_close(qkv[:, :query_width], qkv_reference[:, :query_width], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(native.pool_BLKCSD, reference.pool_BLKCSD, atol=tolerance, rtol=tolerance)
    assert torch.equal(native.pool_BLKCSD[:, 0], reference.pool_BLKCSD[:, 0]), "the other layer is untouched"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [3, 16, 100, 576])
@pytest.mark.parametrize("with_sum", [True, False])
def test_rms_norm_matches_reference(isa: str, dtype: DtypeName, size: int, with_sum: bool) -> None:
    generator = torch.Generator().manual_seed(9)
    x, residual = (torch.randn(70, size, generator=generator) for _ in range(2))
    x = x.to(TORCH_DTYPES[dtype])
    weight = torch.rand(size, generator=generator).to(TORCH_DTYPES[dtype])
    residual_reference = residual.clone()
    found, expected = torch.empty_like(x), torch.empty_like(x)
    REFERENCE.rms_norm(x if with_sum else None, residual_reference, weight, 1e-5, expected)
    NativeCpuBackend(2, isa).rms_norm(x if with_sum else None, residual, weight, 1e-5, found)
    assert torch.equal(residual, residual_reference)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [3, 16, 100, 1536])
def test_silu_mul_matches_reference(isa: str, dtype: DtypeName, size: int) -> None:
    generator = torch.Generator().manual_seed(10)
    gate_up = (torch.randn(40, 2 * size, generator=generator) * 10).to(TORCH_DTYPES[dtype])
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = 200.0, -200.0, 0.0
    found, expected = (torch.empty(40, size, dtype=gate_up.dtype) for _ in range(2))
    REFERENCE.silu_mul(gate_up, expected)
    NativeCpuBackend(2, isa).silu_mul(gate_up, found)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("size", [1, 7, 32, 33, 63, 100, 576])
def test_logits_match_reference(isa: str, size: int) -> None:
    """Every remainder of the tiles: of rows, of columns, and of a thread's share of the vocabulary."""
    generator = torch.Generator().manual_seed(11)
    for num_rows, vocab_size in [(1, 1), (1, 17), (2, 15), (3, 16), (4, 31), (5, 257), (7, 100), (8, 530), (23, 19)]:
        x = torch.randn(num_rows, size, generator=generator).bfloat16()
        weight = torch.randn(vocab_size, size, generator=generator).bfloat16()
        expected = torch.empty(num_rows, vocab_size)
        REFERENCE.logits(x, weight, expected)
        for num_threads in (1, 3):
            found = torch.full_like(expected, float("nan"))
            NativeCpuBackend(num_threads, isa).logits(x, weight, found)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_logits_read_and_write_nothing_beyond_their_arrays(isa: str) -> None:
    generator = torch.Generator().manual_seed(12)
    num_rows, vocab_size, size = 5, 21, 45
    x, weight = (torch.full((rows + 2, size), float("nan")).bfloat16() for rows in (num_rows, vocab_size))
    x[1:-1] = torch.randn(num_rows, size, generator=generator)
    weight[1:-1] = torch.randn(vocab_size, size, generator=generator)
    out = torch.full((num_rows + 2, vocab_size), 7.0)
    NativeCpuBackend(1, isa).logits(x[1:-1], weight[1:-1], out[1:-1])
    torch.testing.assert_close(out[1:-1], x[1:-1].float() @ weight[1:-1].float().T, atol=1e-4, rtol=1e-5)
    assert bool((out[0] == 7.0).all() and (out[-1] == 7.0).all())


def test_logits_of_a_row_that_is_not_finite_touch_no_other(isa: str) -> None:
    generator = torch.Generator().manual_seed(13)
    x = torch.randn(6, 70, generator=generator).bfloat16()
    weight = torch.randn(40, 70, generator=generator).bfloat16()
    found, expected = torch.empty(6, 40), torch.empty(6, 40)
    backend = NativeCpuBackend(1, isa)
    backend.logits(x, weight, expected)
    x[2, 69], x[4, 0] = float("nan"), float("inf")
    backend.logits(x, weight, found)
    assert found[2].isnan().all() and not found[4].isfinite().any()
    whole = [0, 1, 3, 5]
    assert torch.equal(found[whole], expected[whole])


def test_logits_do_not_depend_on_the_batch(isa: str) -> None:
    """Each row alone gives the same bits as all of them together."""
    generator = torch.Generator().manual_seed(14)
    x = torch.randn(11, 100, generator=generator).bfloat16()
    weight = torch.randn(50, 100, generator=generator).bfloat16()
    backend = NativeCpuBackend(1, isa)
    together, alone = torch.empty(11, 50), torch.empty(1, 50)
    backend.logits(x, weight, together)
    for row in range(len(x)):
        backend.logits(x[row : row + 1], weight, alone)
        assert torch.equal(alone[0], together[row])


def test_unknown_isa_and_threads_are_refused(isa: str) -> None:
    with pytest.raises(ValueError, match="isa 'mmx'"):
        NativeCpuBackend(1, "mmx")
    with pytest.raises(ValueError, match="num_threads"):
        NativeCpuBackend(0, isa)
