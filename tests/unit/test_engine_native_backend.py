"""The native backend's small operations against the torch reference, and what its recordings promise."""

from __future__ import annotations

import functools
import gc
import random
import weakref
from collections.abc import Callable

import pytest
import torch

from engine.attention.base import Activation, Backend, Rows
from engine.attention.batch import StepBatch
from engine.attention.cpu import NativeCpuBackend
from engine.attention.kv_cache import TORCH_DTYPES, KVCache, KVLayout
from engine.attention.native_library import KernelsUnavailableError
from engine.attention.torch_reference import TorchReferenceBackend
from engine.model.config import DtypeName
from tests.support.native_isas import isas_here
from tests.support.step_batches import make_batch

REFERENCE = TorchReferenceBackend()
TOLERANCE: dict[DtypeName, float] = {"float32": 1e-5, "bfloat16": 2e-2}
DTYPES = ["float32", "bfloat16"]
BLOCK_SIZE = 8
NUM_BLOCKS = 40
MIXED = [(0, 7), (20, 1), (13, 65), (0, 1), (40, 1)]


@pytest.fixture(scope="module", params=isas_here())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def native() -> NativeCpuBackend:
    try:
        return NativeCpuBackend(2)
    except KernelsUnavailableError as error:
        pytest.skip(str(error))


def mixed_batch(selected: list[int] | None = None, vocab_size: int = 30) -> StepBatch:
    return make_batch(
        MIXED,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        vocab_size=vocab_size,
        draw=random.Random(1),
        selected=selected,
    )


def run(backend: NativeCpuBackend | TorchReferenceBackend, batch: StepBatch, body: Callable[[Backend], None]) -> None:
    backend.compile(lambda: body(backend)).run(batch)


def randn(generator: torch.Generator, *shape: int, dtype: DtypeName = "float32", scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=generator) * scale).to(TORCH_DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 16, 100, 576])
def test_embed_select_and_place_rows(isa: str, dtype: DtypeName, size: int) -> None:
    generator = torch.Generator().manual_seed(2)
    table = randn(generator, 30, size, dtype=dtype)
    batch = mixed_batch(selected=[0, 2, 4])
    for backend in (NativeCpuBackend(1, isa), NativeCpuBackend(3, isa)):
        residual, selected = torch.full((100, size), 7.0), torch.full((4, size), 7.0)
        placed = torch.full((100, size + 2), 7.0)

        def body(
            backend: Backend,
            residual: torch.Tensor = residual,
            selected: torch.Tensor = selected,
            placed: torch.Tensor = placed,
        ) -> None:
            backend.embed(table, 1.5, residual)
            backend.select_rows(residual, selected)
            backend.place_rows(selected, placed[:, 1:-1])

        run(backend, batch, body)
        assert torch.equal(placed[batch.rows_R, 1:-1], residual[batch.rows_R])
        placed[batch.rows_R, 1:-1] = 7.0
        assert bool((placed == 7.0).all()), "nothing beside the rows is touched"
        assert torch.equal(residual[: batch.num_tokens], table[batch.ids_T].float() * 1.5)
        assert bool((residual[batch.num_tokens :] == 7.0).all()), "rows beyond the step are untouched"
        assert torch.equal(selected[:3], residual[batch.rows_R])
        assert bool((selected[3:] == 7.0).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 16, 100, 576])
@pytest.mark.parametrize("terms", ["residual", "x", "normed x"])
def test_add_norm_matches_reference(isa: str, dtype: DtypeName, size: int, terms: str) -> None:
    generator = torch.Generator().manual_seed(9)
    x = randn(generator, 70, size, dtype=dtype) if "x" in terms else None
    x_norm = torch.rand(size, generator=generator) if "normed" in terms else None
    norm, residual = torch.rand(size, generator=generator), randn(generator, 70, size)
    expected_residual = residual.clone()
    found, expected = (torch.empty(70, size, dtype=TORCH_DTYPES[dtype]) for _ in range(2))
    REFERENCE.add_norm(x, x_norm, expected_residual, norm, 1e-5, expected, Rows.ALL)
    NativeCpuBackend(2, isa).add_norm(x, x_norm, residual, norm, 1e-5, found, Rows.ALL)
    torch.testing.assert_close(residual, expected_residual, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 16, 100, 1536])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("num_rows", [5, 40])
def test_gated_linear_matches_reference(
    isa: str, dtype: DtypeName, size: int, activation: Activation, num_rows: int
) -> None:
    """Gates between -30 and 30 or so, and a few that are far from it."""
    generator = torch.Generator().manual_seed(10)
    x = randn(generator, num_rows, 20, dtype=dtype, scale=3)
    weight = randn(generator, 2 * size, 20, dtype=dtype, scale=0.7)
    bias = randn(generator, 2 * size)
    bias[0], bias[1], bias[2] = 200.0, -200.0, float("nan")
    for used_bias in (bias, None):
        found, expected = (torch.empty(num_rows, size, dtype=x.dtype) for _ in range(2))
        REFERENCE.gated_linear(x, weight, used_bias, activation, expected, Rows.ALL)
        NativeCpuBackend(2, isa).gated_linear(x, weight, used_bias, activation, found, Rows.ALL)
        tolerance = 10 * TOLERANCE[dtype]  # of gates, that others of about ten are multiplied with
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=TOLERANCE[dtype], equal_nan=True)


@pytest.mark.parametrize("size", [1, 3, 16, 1000, 1024, 5003])
def test_argmax_is_the_first_of_the_largest(isa: str, size: int) -> None:
    generator = torch.Generator().manual_seed(11)
    # Few different values: ties everywhere.
    logits = torch.randint(-5, 5, (60, size), generator=generator).float()
    logits[1] = float("-inf")
    logits[2, -1] = float("inf")
    logits[3, size // 2] = float("nan")
    logits[4] = float("nan")
    logits[5, 0] = float("nan")
    logits[6] = -1e30
    for num_threads in (1, 3):
        ids, values = NativeCpuBackend(num_threads, isa).argmax(logits)
        expected_ids, expected_values = REFERENCE.argmax(logits)
        assert ids == expected_ids
        torch.testing.assert_close(torch.tensor(values), torch.tensor(expected_values), equal_nan=True, atol=0, rtol=0)


class SmallDecoder:
    """Two layers of every operation, over buffers for 80 tokens; every call makes the same numbers."""

    def __init__(self, dtype: DtypeName) -> None:
        generator = torch.Generator().manual_seed(12)
        heads, kv_heads, head_dim, hidden, mlp, vocab = 6, 2, 16, 48, 72, 30
        width = (heads + 2 * kv_heads) * head_dim
        self.layout = KVLayout(
            num_blocks=NUM_BLOCKS,
            num_layers=2,
            num_kv_heads=kv_heads,
            block_size=BLOCK_SIZE,
            head_dim=head_dim,
            dtype=dtype,
        )
        self.cache = KVCache.allocate(self.layout)
        self.cache.pool_BLKCSD.copy_(torch.randn(self.layout.shape_BLKCSD, generator=generator))
        self.embedding = randn(generator, vocab, hidden, dtype=dtype)
        self.qkv_weight = randn(generator, width, hidden, dtype=dtype, scale=0.1)
        self.qkv_bias = randn(generator, width)
        self.out_weight = randn(generator, hidden, heads * head_dim, dtype=dtype, scale=0.1)
        self.gate_up_weight = randn(generator, 2 * mlp, hidden, dtype=dtype, scale=0.1)
        self.down_weight = randn(generator, hidden, mlp, dtype=dtype, scale=0.1)
        self.norm, self.head_norm = torch.rand(hidden, generator=generator), torch.rand(head_dim, generator=generator)
        self.cos_sin = torch.randn(100, head_dim, generator=generator)
        self.residual, self.selected = torch.zeros(80, hidden), torch.zeros(5, hidden)
        self.normed, self.x, self.qkv, self.attended, self.activated = (
            torch.zeros(80, size, dtype=TORCH_DTYPES[dtype]) for size in (hidden, hidden, width, heads * head_dim, mlp)
        )
        self.logits = torch.zeros(5, vocab)
        self.events: list[object] = []

    def body(self, backend: Backend) -> None:
        backend.embed(self.embedding, 2.0, self.residual)
        backend.add_norm(None, None, self.residual, self.norm, 1e-5, self.normed, Rows.TOKENS)
        for layer in range(2):
            layer_BKCSD = self.cache.layer_BKCSD(layer)
            backend.linear(self.normed, self.qkv_weight, self.qkv_bias, self.qkv, Rows.TOKENS)
            backend.rotary_write(self.qkv, self.cos_sin, self.head_norm, None, 1e-5, layer_BKCSD)
            backend.layer_written(layer)
            if layer == 1:
                backend.stop_without_rows()
            backend.attend(self.qkv, layer_BKCSD, 0.25, 30 * layer, self.attended)
            backend.linear(self.attended, self.out_weight, None, self.x, Rows.TOKENS)
            backend.add_norm(self.x, self.norm, self.residual, self.norm, 1e-5, self.normed, Rows.TOKENS)
            backend.call(lambda batch: self.events.append(("call", batch.num_tokens)))
            backend.gated_linear(self.normed, self.gate_up_weight, None, "silu", self.activated, Rows.TOKENS)
            backend.linear(self.activated, self.down_weight, None, self.x, Rows.TOKENS)
            backend.add_norm(self.x, None, self.residual, self.norm, 1e-5, self.normed, Rows.TOKENS)
        backend.select_rows(self.residual, self.selected)
        backend.add_norm(None, None, self.selected, self.norm, 1e-5, self.normed, Rows.SELECTED)
        backend.linear(self.normed, self.embedding, None, self.logits, Rows.SELECTED)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_eager_and_reference_agree(isa: str, dtype: DtypeName) -> None:
    """Recorded equals eager bit for bit on any number of threads, cut at layers or not; the reference is close."""
    batch = mixed_batch()
    reference = SmallDecoder(dtype)
    run(REFERENCE, batch, reference.body)
    eager = SmallDecoder(dtype)
    backend = NativeCpuBackend(1, isa)
    # What a `call` runs is run at once, on the step's batch. Marks have no meaning there.
    body = _WithoutMarks(backend)
    backend.compile(lambda: backend.call(lambda _: eager.body(body))).run(batch)
    tolerance = 1e-4 if dtype == "float32" else 0.1
    torch.testing.assert_close(eager.logits, reference.logits, atol=tolerance, rtol=tolerance)
    for num_threads in (1, 2, 5):
        recorded = SmallDecoder(dtype)
        backend = NativeCpuBackend(num_threads, isa)
        step = backend.compile(lambda backend=backend, recorded=recorded: recorded.body(backend))
        for hook in (None, lambda layer, recorded=recorded: recorded.events.append(layer)):
            recorded.logits.zero_()
            recorded.events.clear()
            step.run(batch, hook)
            assert torch.equal(recorded.logits, eager.logits)
            assert torch.equal(recorded.cache.pool_BLKCSD, eager.cache.pool_BLKCSD)
            call = ("call", batch.num_tokens)
            assert recorded.events == ([0, call, 1, call] if hook else [call, call])


class _WithoutMarks:
    """A backend's operations without `call`, `layer_written` and `stop_without_rows`."""

    def __init__(self, backend: NativeCpuBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name in ("call", "layer_written", "stop_without_rows"):
            return lambda *_: None
        return getattr(self._backend, name)


def test_without_rows_a_step_ends_at_its_mark(native: NativeCpuBackend) -> None:
    decoder = SmallDecoder("float32")
    step = native.compile(lambda: decoder.body(native))
    step.run(mixed_batch(selected=[]), decoder.events.append)
    assert decoder.events == [0, ("call", 75), 1]
    assert bool((decoder.logits == 0).all())
    pool = decoder.cache.pool_BLKCSD.clone()
    step.run(mixed_batch())
    assert bool((decoder.logits != 0).any())
    assert torch.equal(decoder.cache.pool_BLKCSD, pool), "keys and values were complete"


def test_a_recording_runs_steps_of_any_size_and_keeps_what_it_needs(native: NativeCpuBackend) -> None:
    decoder = SmallDecoder("bfloat16")
    step = native.compile(functools.partial(decoder.body, native))
    embedding = weakref.ref(decoder.embedding)
    whole = mixed_batch()
    step.run(whole)
    logits, expected = decoder.logits, decoder.logits.clone()
    del decoder
    gc.collect()
    assert embedding() is not None
    small = make_batch([(3, 1)], block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, vocab_size=30, draw=random.Random(4))
    step.run(small)
    assert not torch.equal(logits[0], expected[0]) and torch.equal(logits[1:], expected[1:])


def test_a_step_that_is_too_large_is_refused(native: NativeCpuBackend) -> None:
    decoder = SmallDecoder("float32")
    step = native.compile(lambda: decoder.body(native))
    draw = random.Random(5)
    large = make_batch([(0, 81)], block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, vocab_size=30, draw=draw)
    with pytest.raises(AssertionError, match="tokens"):
        step.run(large)
    many = make_batch([(0, 1)] * 6, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, vocab_size=30, draw=draw)
    with pytest.raises(AssertionError, match="rows"):
        step.run(many)


def test_many_short_steps_on_many_threads(native: NativeCpuBackend) -> None:
    """More threads than processors, thousands of hand-overs, backends that come and go: the numbers stay."""
    batch = mixed_batch()
    expected = SmallDecoder("float32")
    run(native, batch, expected.body)
    for _ in range(5):
        backend = NativeCpuBackend(4)
        decoder = SmallDecoder("float32")
        step = backend.compile(lambda decoder=decoder, backend=backend: decoder.body(backend))
        for _ in range(50):
            step.run(batch)
            assert torch.equal(decoder.logits, expected.logits)
        del backend, step


def test_operations_check_their_tensors(native: NativeCpuBackend) -> None:
    wide, narrow = torch.zeros(4, 6), torch.zeros(4, 5)
    with pytest.raises(AssertionError):
        native.gated_linear(narrow, torch.zeros(6, 5), None, "silu", wide, Rows.ALL)
    with pytest.raises(AssertionError):
        native.linear(wide, torch.zeros(5, 6).bfloat16(), None, narrow, Rows.ALL)
    with pytest.raises(AssertionError):
        native.add_norm(None, None, wide, torch.zeros(6).bfloat16(), 1e-5, wide, Rows.ALL)
    with pytest.raises(AssertionError):
        native.compile(lambda: native.gated_linear(narrow, torch.zeros(12, 5), None, "silu", wide, Rows.ALL))


def test_unknown_isa_and_threads_are_refused(isa: str) -> None:
    with pytest.raises(ValueError, match="isa 'mmx'"):
        NativeCpuBackend(1, "mmx")
    with pytest.raises(ValueError, match="num_threads"):
        NativeCpuBackend(0, isa)
