"""The native attention kernels against the torch reference, and that a row's bits do not depend on its company.

Random shapes, block tables, head counts, lengths and windows; both dtypes; every instruction set that the machine has.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from engine.attention.base import Backend, Rows
from engine.attention.batch import StepBatch
from engine.attention.cpu import NativeCpuBackend
from engine.attention.kv_cache import TORCH_DTYPES, KVCache, KVLayout
from engine.attention.torch_reference import TorchReferenceBackend
from engine.model.config import DtypeName
from tests.support.native_isas import isas_here
from tests.support.step_batches import make_batch

# Of the outputs' absolute difference, for values of about unit size. bfloat16 keeps 8 bits, and the pair kernels
# also round the softmax weights to it.
TOLERANCE: dict[DtypeName, float] = {"float32": 2e-5, "bfloat16": 2e-2}
Spans = Sequence[tuple[int, int]]


@pytest.fixture(scope="module", params=isas_here())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def spans_batch(block_size: int, spans: Spans, seed: int) -> tuple[StepBatch, int]:
    """The batch, and the number of blocks of its pool: two more than its sequences fill."""
    num_blocks = sum(-(-(start + count) // block_size) for start, count in spans) + 2
    draw = random.Random(seed)
    return make_batch(spans, block_size=block_size, num_blocks=num_blocks, vocab_size=2, draw=draw), num_blocks


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


def poison_unwritten(layer_BKCSD: torch.Tensor, batch: StepBatch, spans: Spans) -> None:
    """Fill every slot that no position of the batch's sequences owns with NaN: reading one shows in the output."""
    block_size = layer_BKCSD.shape[3]
    owned = torch.zeros(layer_BKCSD.shape[0] * block_size, dtype=torch.bool)
    for sequence, (start, count) in enumerate(spans):
        table = batch.block_tables[int(batch.table_starts_S[sequence]) :].long()
        positions = torch.arange(start + count)
        owned[table[positions // block_size] * block_size + positions % block_size] = True
    slots = (~owned).nonzero().flatten()
    layer_BKCSD[slots // block_size, :, :, slots % block_size] = float("nan")


def run_native(backend: NativeCpuBackend, batch: StepBatch, body: Callable[[Backend], None]) -> None:
    backend.compile(lambda: body(backend)).run(batch)


def run_reference(batch: StepBatch, body: Callable[[Backend], None]) -> None:
    reference = TorchReferenceBackend()
    reference.run(lambda: body(reference), batch)


SHAPES = [
    # (query heads, kv heads, head dim, block size)
    (9, 3, 64, 16),
    (4, 4, 32, 16),
    (8, 1, 128, 32),
    (4, 1, 256, 16),
    (6, 2, 80, 16),
    (3, 1, 96, 8),
    (2, 1, 24, 5),
    (32, 8, 16, 1),
    (7, 7, 2, 3),
]
SPAN_KINDS: dict[str, Spans] = {
    "decode": [(0, 1), (1, 1), (15, 1), (16, 1), (63, 1), (64, 1), (200, 1)],
    "prefill": [(0, 1), (0, 16), (0, 65), (0, 150)],
    "chunk": [(64, 33), (31, 64), (100, 7)],
    "mixed": [(77, 1), (0, 40), (16, 16), (128, 1)],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    batch: StepBatch
    qkv_TX: torch.Tensor
    layer_BKCSD: torch.Tensor
    scale: float
    expected_TX: torch.Tensor


@functools.cache
def attention_case(
    dtype: DtypeName, window: int, kind: str, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> AttentionCase:
    """Random inputs and what the reference makes of them: once for all instruction sets."""
    spans = SPAN_KINDS[kind]
    batch, num_blocks = spans_batch(block_size, spans, seed=1)
    generator = torch.Generator().manual_seed(2)
    layer = make_pool(dtype, num_blocks, num_kv_heads, block_size, head_dim, generator).layer_BKCSD(1)
    poison_unwritten(layer, batch, spans)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = (torch.randn(batch.num_tokens, width, generator=generator) * 2).to(TORCH_DTYPES[dtype])
    expected = torch.empty(batch.num_tokens, num_heads * head_dim, dtype=qkv.dtype)
    scale = 0.7 * head_dim**-0.5
    run_reference(batch, lambda backend: backend.attend(qkv, layer, scale, window, expected))
    assert expected.isfinite().all()
    return AttentionCase(batch=batch, qkv_TX=qkv, layer_BKCSD=layer, scale=scale, expected_TX=expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [0, 1, 50])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_matches_reference(isa: str, dtype: DtypeName, window: int, shape: tuple[int, int, int, int]) -> None:
    backends = [NativeCpuBackend(num_threads, isa) for num_threads in (1, 3)]
    for kind in SPAN_KINDS:
        case = attention_case(dtype, window, kind, *shape)
        for backend in backends:
            found = torch.full_like(case.expected_TX, float("nan"))

            def body(native: Backend, case: AttentionCase = case, found: torch.Tensor = found) -> None:
                native.attend(case.qkv_TX, case.layer_BKCSD, case.scale, window, found)

            run_native(backend, case.batch, body)
            torch.testing.assert_close(
                found, case.expected_TX, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], msg=lambda m, k=kind: f"{k}: {m}"
            )


def test_attention_with_large_scores_stays_finite(isa: str) -> None:
    batch, num_blocks = spans_batch(16, [(0, 100)], seed=5)
    generator = torch.Generator().manual_seed(6)
    layer = make_pool("float32", num_blocks, 1, 16, 64, generator).layer_BKCSD(0)
    qkv = torch.randn(100, 4 * 64, generator=generator) * 200
    expected, found = torch.empty(100, 2 * 64), torch.empty(100, 2 * 64)
    run_reference(batch, lambda backend: backend.attend(qkv, layer, 0.125, 0, expected))
    run_native(NativeCpuBackend(1, isa), batch, lambda backend: backend.attend(qkv, layer, 0.125, 0, found))
    # Scores of about 2,000 have a last place of 1e-4, which is then the relative error of a weight.
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("damaged", ["query", "key", "value"])
def test_a_nan_does_not_vanish(isa: str, damaged: str) -> None:
    """Of the sequence it belongs to, every row that sees it is NaN; the other sequence is as ever."""
    batch, num_blocks = spans_batch(16, [(20, 1), (70, 1)], seed=7)
    generator = torch.Generator().manual_seed(8)
    layer = make_pool("bfloat16", num_blocks, 1, 16, 64, generator).layer_BKCSD(0)
    qkv = torch.randn(2, 4 * 64, generator=generator).bfloat16()
    out, before = (torch.zeros(2, 2 * 64).bfloat16() for _ in range(2))
    backend = NativeCpuBackend(1, isa)
    run_native(backend, batch, lambda backend: backend.attend(qkv, layer, 0.125, 0, before))
    if damaged == "query":
        qkv[1, 3] = qkv[1, 64 + 5] = float("nan")
    else:
        block = int(batch.block_tables[int(batch.table_starts_S[1]) + 1])
        layer[block, 0, 0 if damaged == "key" else 1, 3] = float("nan")
    run_native(backend, batch, lambda backend: backend.attend(qkv, layer, 0.125, 0, out))
    assert torch.equal(out[0], before[0])
    assert out[1].isnan().all()


class Prompt:
    """One sequence's queries, keys and values, which are run through a backend in steps of any size."""

    num_heads, num_kv_heads, block_size = 6, 2, 16

    def __init__(self, dtype: DtypeName, length: int, head_dim: int, window: int, seed: int) -> None:
        self.dtype, self.length, self.head_dim, self.window = dtype, length, head_dim, window
        generator = torch.Generator().manual_seed(seed)
        width = (self.num_heads + 2 * self.num_kv_heads) * head_dim
        self.qkv_TX = torch.randn(length, width, generator=generator).to(TORCH_DTYPES[dtype])

    def attended(self, backend: NativeCpuBackend, ends: list[int], company: Spans = ()) -> torch.Tensor:
        """The outputs of all its positions, in steps that end at `ends`; other sequences may run beside it.

        Slots that are not written yet hold NaN, as do those of the sequences beside it beyond their own tokens.
        """
        num_blocks = sum(-(-(start + count) // self.block_size) for start, count in ((0, self.length), *company)) + 1
        generator = torch.Generator().manual_seed(1)
        cache = make_pool(self.dtype, num_blocks, self.num_kv_heads, self.block_size, self.head_dim, generator)
        layer = cache.layer_BKCSD(0)
        pieces = []
        start = 0
        for end in ends:
            spans = [(start, end - start), *company]
            # The same draw each time: the sequence's table must begin with the blocks of the step before.
            batch = make_batch(
                [(0, self.length), *company],
                block_size=self.block_size,
                num_blocks=num_blocks,
                vocab_size=2,
                draw=random.Random(3),
            )
            batch = _narrowed(batch, spans)
            if start == 0:
                poison_unwritten(layer, batch, [(0, 0), *company])
            qkv = torch.cat([self.qkv_TX[start:end], torch.randn(batch.num_tokens - end + start, self.qkv_TX.shape[1])])
            qkv = qkv.to(self.qkv_TX.dtype)
            out = torch.full((batch.num_tokens, self.num_heads * self.head_dim), float("nan"), dtype=qkv.dtype)
            run_native(backend, batch, lambda backend, qkv=qkv, out=out: self._operations(backend, qkv, layer, out))
            pieces.append(out[: end - start])
            start = end
        return torch.cat(pieces)

    def _operations(self, backend: Backend, qkv: torch.Tensor, layer: torch.Tensor, out: torch.Tensor) -> None:
        backend.rotary_write(qkv, None, None, None, 0.0, layer)
        backend.attend(qkv, layer, self.head_dim**-0.5, self.window, out)


def _narrowed(batch: StepBatch, spans: Spans) -> StepBatch:
    """The batch whose first sequence has only the tokens of the first of `spans`; its blocks are the same."""
    (start, count), *_ = spans
    whole = int(batch.query_starts_S1[1])
    tokens = torch.cat([torch.arange(start, start + count), torch.arange(whole, batch.num_tokens)])
    starts = batch.query_starts_S1.clone()
    starts[1:] -= whole - count
    contexts = batch.context_starts_S.clone()
    contexts[0] = start
    return StepBatch(
        ids_T=batch.ids_T[tokens],
        positions_T=batch.positions_T[tokens],
        slots_T=batch.slots_T[tokens],
        query_starts_S1=starts,
        context_starts_S=contexts,
        table_starts_S=batch.table_starts_S,
        block_tables=batch.block_tables,
        rows_R=starts[1:].long() - 1,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("head_dim", "window"), [(64, 0), (80, 0), (24, 37), (64, 100)])
def test_a_rows_bits_do_not_depend_on_its_company(isa: str, dtype: DtypeName, head_dim: int, window: int) -> None:
    """A prompt in one chunk, in random chunks, token by token, and beside other sequences: equal bit for bit."""
    length = 150
    prompt = Prompt(dtype, length, head_dim, window, seed=4)
    backend = NativeCpuBackend(2, isa)
    expected = prompt.attended(backend, [length])
    assert expected.isfinite().all()
    draw = random.Random(5)
    for _ in range(4):
        ends = [*sorted(draw.sample(range(1, length), draw.randint(1, 12))), length]
        assert torch.equal(prompt.attended(backend, ends), expected), ends
    assert torch.equal(prompt.attended(backend, list(range(1, length + 1))), expected)
    company = [(100, 1), (3, 50), (0, 70)]
    assert torch.equal(prompt.attended(backend, [64, 65, 100, length], company), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_selected_rows_have_the_bits_they_have_among_all(isa: str, dtype: DtypeName) -> None:
    """None, one or several rows of a sequence, the same row twice; queries of the others are not even numbers."""
    whole, num_blocks = spans_batch(16, [(30, 150), (0, 70), (99, 1), (5, 20)], seed=11)
    generator = torch.Generator().manual_seed(12)
    layer = make_pool(dtype, num_blocks, 2, 16, 64, generator).layer_BKCSD(0)
    qkv = torch.randn(whole.num_tokens, 10 * 64, generator=generator).to(TORCH_DTYPES[dtype])
    expected = torch.empty(whole.num_tokens, 6 * 64, dtype=qkv.dtype)
    run_native(NativeCpuBackend(1, isa), whole, lambda native: native.attend(qkv, layer, 0.125, 40, expected))
    for selected in ([], [149], [3, 80, 149, 219, 220], [7, 7, 225, 240], list(range(150, 220))):
        batch = replace(whole, rows_R=torch.tensor(selected, dtype=torch.int64))
        others = [row for row in range(whole.num_tokens) if row not in selected]
        damaged, found = qkv.clone(), torch.full_like(expected, float("nan"))
        damaged[others, : 6 * 64] = float("nan")

        def body(native: Backend, damaged: torch.Tensor = damaged, found: torch.Tensor = found) -> None:
            native.attend(damaged, layer, 0.125, 40, found, Rows.SELECTED)

        for num_threads in (1, 3):
            run_native(NativeCpuBackend(num_threads, isa), batch, body)
            assert torch.equal(found[selected], expected[selected])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norms", ["", "q", "qk"])
def test_rotary_write_matches_reference(
    isa: str, dtype: DtypeName, shape: tuple[int, int, int, int], norms: str
) -> None:
    num_heads, num_kv_heads, head_dim, block_size = shape
    batch, num_blocks = spans_batch(block_size, SPAN_KINDS["mixed"], seed=9)
    generator = torch.Generator().manual_seed(10)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    cos_sin = torch.randn(256, head_dim, generator=generator)
    q_norm, k_norm = (torch.rand(head_dim, generator=generator) if name in norms else None for name in "qk")
    native = NativeCpuBackend(2, isa)
    for table in (cos_sin, None):
        cache = make_pool(dtype, num_blocks, num_kv_heads, block_size, head_dim, generator)
        expected = KVCache(cache.layout, cache.pool_BLKCSD.clone())
        qkv = torch.randn(batch.num_tokens, width, generator=generator).to(TORCH_DTYPES[dtype])
        expected_qkv = qkv.clone()

        def write(backend: Backend, qkv: torch.Tensor, cache: KVCache, table: torch.Tensor | None = table) -> None:
            backend.rotary_write(qkv, table, q_norm, k_norm, 1e-5, cache.layer_BKCSD(1))

        run_reference(batch, lambda backend, qkv=expected_qkv, cache=expected: write(backend, qkv, cache))
        run_native(native, batch, lambda backend, qkv=qkv, cache=cache: write(backend, qkv, cache))
        tolerance = 1e-5 if dtype == "float32" else 4e-2  # a last place of values up to 8
        queries = slice(0, num_heads * head_dim)
        torch.testing.assert_close(qkv[:, queries], expected_qkv[:, queries], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(cache.pool_BLKCSD, expected.pool_BLKCSD, atol=tolerance, rtol=tolerance)
        assert torch.equal(cache.pool_BLKCSD[:, 0], expected.pool_BLKCSD[:, 0]), "the other layer is untouched"
