"""What a backend on a device must compute, as cases for its tests: each operation, and a decoder layer of them all.

They serve a real GPU and, in its place, the host alike; the reference computes on the host. Axes as in
`engine.attention.base`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.attention.base import Activation, Backend, Rows
from engine.attention.batch import StepBatch
from engine.attention.torch_reference import TorchReferenceBackend
from tests.support.step_batches import make_batch

BLOCK_SIZE = 8
NUM_BLOCKS = 120
SCRATCH_BLOCK = NUM_BLOCKS
MAX_BLOCKS_PER_SEQUENCE = 16
VOCAB_SIZE = 50
HIDDEN, INTERMEDIATE = 96, 80
EPS = 1e-5
NUM_ROWS = 16
"""Rows of the buffers: more than any step here has tokens."""

MIXED = ((0, 7), (20, 1), (13, 5), (0, 1), (40, 1))
DECODING = ((20, 1), (3, 1), (0, 1), (40, 1), (15, 1))

STEPS: tuple[tuple[tuple[tuple[int, int], ...], list[int] | None], ...] = (
    (MIXED, None),
    (DECODING, None),
    (MIXED[::-1], [1]),
    (DECODING[:2], None),
    (DECODING, [0, 3]),
    (MIXED, []),
)
"""Spans, and the sequences whose logits are wanted. The second, fourth and fifth are worth recording."""

Tensors = dict[str, torch.Tensor]
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Of differences, relative to a tensor's largest element: a backend may round between the parts of an operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Of a decoder layer; `has_norms` means those of heads and of blocks' outputs."""

    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    window: int = 0
    scale: float = 0.125
    activation: Activation = "silu"
    has_norms: bool = False
    has_biases: bool = False

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


LAYER_SHAPES = (
    LayerShape(),
    LayerShape(window=9, has_norms=True, activation="gelu_tanh"),
    LayerShape(num_heads=7, num_kv_heads=1, window=1),
    LayerShape(num_heads=2, num_kv_heads=2, head_dim=128, has_biases=True),
    LayerShape(num_heads=4, num_kv_heads=1, head_dim=256, has_norms=True, scale=0.05),
)


def spans_batch(spans: tuple[tuple[int, int], ...], seed: int = 0, selected: list[int] | None = None) -> StepBatch:
    return make_batch(
        spans,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        vocab_size=VOCAB_SIZE,
        draw=random.Random(seed),
        selected=selected,
    )


def layer_tensors(shape: LayerShape, dtype: torch.dtype, seed: int = 0) -> Tensors:
    """Weights, buffers and a pool with its scratch block, all of them random, on the host."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(num_rows: int, num_columns: int, size: float = 1.0) -> torch.Tensor:
        return (torch.randn(num_rows, num_columns, generator=generator) * size).to(dtype)

    def weight(num_outputs: int, num_inputs: int) -> torch.Tensor:
        return matrix(num_outputs, num_inputs, num_inputs**-0.5)

    def vector(size: int, center: float) -> torch.Tensor:
        return center + 0.3 * torch.randn(size, generator=generator)

    angles = torch.outer(
        torch.arange(float(MAX_BLOCKS_PER_SEQUENCE * BLOCK_SIZE)), 0.9 ** torch.arange(shape.head_dim // 2)
    )
    pool_shape = (NUM_BLOCKS + 1, 2, shape.num_kv_heads, 2, BLOCK_SIZE, shape.head_dim)
    return {
        "table": matrix(VOCAB_SIZE, HIDDEN),
        "input_norm": vector(HIDDEN, 1.0),
        "qkv_weight": weight(shape.qkv_size, HIDDEN),
        "qkv_bias": vector(shape.qkv_size, 0.0),
        "q_norm": vector(shape.head_dim, 1.0),
        "k_norm": vector(shape.head_dim, 1.0),
        "output_weight": weight(HIDDEN, shape.query_size),
        "output_norm": vector(HIDDEN, 1.0),
        "mlp_norm": vector(HIDDEN, 1.0),
        "gate_up_weight": weight(2 * INTERMEDIATE, HIDDEN),
        "gate_up_bias": vector(2 * INTERMEDIATE, 0.0),
        "down_weight": weight(HIDDEN, INTERMEDIATE),
        "head": weight(VOCAB_SIZE, HIDDEN),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], dim=-1),
        "pool": torch.randn(pool_shape, generator=generator).to(dtype),
        "residual": torch.randn(NUM_ROWS, HIDDEN, generator=generator),
        "selected_residual": torch.randn(NUM_ROWS, HIDDEN, generator=generator),
        "normed": matrix(NUM_ROWS, HIDDEN),
        "qkv": matrix(NUM_ROWS, shape.qkv_size),
        "attended": matrix(NUM_ROWS, shape.query_size),
        "selected": matrix(NUM_ROWS, shape.query_size),
        "x": matrix(NUM_ROWS, HIDDEN),
        "activated": matrix(NUM_ROWS, INTERMEDIATE),
        "logits": torch.zeros(NUM_ROWS, VOCAB_SIZE),
    }


def run_layer(backend: Backend, shape: LayerShape, t: Tensors) -> None:
    """Every operation of a recorded sequence, from token ids to logits."""
    layer_BKCSD = t["pool"][:, 1]
    backend.embed(t["table"], 1.5, t["residual"])
    backend.add_norm(None, None, t["residual"], t["input_norm"], EPS, t["normed"], Rows.TOKENS)
    backend.linear(t["normed"], t["qkv_weight"], t["qkv_bias"] if shape.has_biases else None, t["qkv"], Rows.TOKENS)
    rotary_write(backend, shape, t)
    backend.layer_written(0)
    backend.stop_without_rows()
    backend.attend(t["qkv"], layer_BKCSD, shape.scale, shape.window, t["attended"])
    backend.select_rows(t["residual"], t["selected_residual"])
    backend.select_rows(t["attended"], t["selected"])
    backend.linear(t["selected"], t["output_weight"], None, t["x"], Rows.SELECTED)
    output_norm = t["output_norm"] if shape.has_norms else None
    residual = t["selected_residual"]
    backend.add_norm(t["x"], output_norm, residual, t["mlp_norm"], EPS, t["normed"], Rows.SELECTED)
    backend.gated_linear(t["normed"], t["gate_up_weight"], None, shape.activation, t["activated"], Rows.SELECTED)
    backend.linear(t["activated"], t["down_weight"], None, t["x"], Rows.SELECTED)
    backend.add_norm(t["x"], None, residual, t["input_norm"], EPS, t["normed"], Rows.SELECTED)
    backend.linear(t["normed"], t["head"], None, t["logits"], Rows.SELECTED)


def rotary_write(backend: Backend, shape: LayerShape, t: Tensors) -> None:
    q_norm, k_norm = (t["q_norm"], t["k_norm"]) if shape.has_norms else (None, None)
    backend.rotary_write(t["qkv"], t["cos_sin"], q_norm, k_norm, EPS, t["pool"][:, 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One call: `run` works on tensors of the default shape, and changes those that `changes` names.

    `spoils_keys`: what it leaves of the keys in "qkv" is its own affair.
    """

    name: str
    run: Callable[[Backend, Tensors], None]
    changes: tuple[str, ...]
    spoils_keys: bool = False


SHAPE = LAYER_SHAPES[0]
OPERATIONS = (
    Operation(name="embed", run=lambda b, t: b.embed(t["table"], 0.3, t["residual"]), changes=("residual",)),
    Operation(name="embed plain", run=lambda b, t: b.embed(t["table"], 1.0, t["residual"]), changes=("residual",)),
    Operation(name="select rows", run=lambda b, t: b.select_rows(t["attended"], t["selected"]), changes=("selected",)),
    Operation(
        name="select rows of float32",
        run=lambda b, t: b.select_rows(t["residual"], t["selected_residual"]),
        changes=("selected_residual",),
    ),
    Operation(name="place rows", run=lambda b, t: b.place_rows(t["selected"], t["attended"]), changes=("attended",)),
    Operation(
        name="norm",
        run=lambda b, t: b.add_norm(None, None, t["residual"], t["mlp_norm"], EPS, t["normed"], Rows.TOKENS),
        changes=("residual", "normed"),
    ),
    Operation(
        name="add and norm",
        run=lambda b, t: b.add_norm(t["x"], None, t["residual"], t["mlp_norm"], EPS, t["normed"], Rows.SELECTED),
        changes=("residual", "normed"),
    ),
    Operation(
        name="norm, add and norm",
        run=lambda b, t: b.add_norm(
            t["x"], t["output_norm"], t["residual"], t["mlp_norm"], EPS, t["normed"], Rows.TOKENS
        ),
        changes=("residual", "normed"),
    ),
    Operation(
        name="product",
        run=lambda b, t: b.linear(t["normed"], t["qkv_weight"], None, t["qkv"], Rows.TOKENS),
        changes=("qkv",),
    ),
    Operation(
        name="product with bias",
        run=lambda b, t: b.linear(t["normed"], t["qkv_weight"], t["qkv_bias"], t["qkv"], Rows.ALL),
        changes=("qkv",),
    ),
    Operation(
        name="product in float32",
        run=lambda b, t: b.linear(t["normed"], t["head"], None, t["logits"], Rows.SELECTED),
        changes=("logits",),
    ),
    Operation(
        name="product in float32 with bias",
        run=lambda b, t: b.linear(t["normed"], t["head"], t["mlp_norm"][:VOCAB_SIZE], t["logits"], Rows.ALL),
        changes=("logits",),
    ),
    Operation(
        name="write without rotation",
        run=lambda b, t: b.rotary_write(t["qkv"], None, None, None, EPS, t["pool"][:, 1]),
        changes=("qkv", "pool"),
    ),
    Operation(
        name="rotate and write",
        run=lambda b, t: rotary_write(b, SHAPE, t),
        changes=("qkv", "pool"),
        spoils_keys=True,
    ),
    Operation(
        name="silu",
        run=lambda b, t: b.gated_linear(t["normed"], t["gate_up_weight"], None, "silu", t["activated"], Rows.TOKENS),
        changes=("activated",),
    ),
    Operation(
        name="gelu",
        run=lambda b, t: b.gated_linear(
            t["normed"], t["gate_up_weight"], t["gate_up_bias"], "gelu_tanh", t["activated"], Rows.SELECTED
        ),
        changes=("activated",),
    ),
    Operation(
        name="activation of nothing",
        run=lambda b, t: b.gated_linear(
            t["normed"][:0], t["gate_up_weight"], None, "silu", t["activated"][:0], Rows.ALL
        ),
        changes=(),
    ),
)


def on_device(tensors: Tensors, device: torch.device) -> Tensors:
    """Copies."""
    return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}


def reference_run(batch: StepBatch, tensors: Tensors, body: Callable[[Backend, Tensors], None]) -> Tensors:
    """What the reference makes of copies of the tensors."""
    result = on_device(tensors, torch.device("cpu"))
    reference = TorchReferenceBackend()
    reference.run(lambda: body(reference, result), batch)
    return result


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    """`dtype` is what the numbers were computed in; the tensors may be float32."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if not actual.numel():
        return
    difference = (actual.cpu().float() - expected.float()).abs().max().item()
    scale = max(1.0, expected.float().abs().max().item())
    assert difference <= TOLERANCES[dtype] * scale, f"{name} is off by {difference}, of {scale}"


def assert_untouched(actual: torch.Tensor, expected: torch.Tensor, before: torch.Tensor, name: str) -> None:
    """Runs along the last axis that the reference left alone have kept every bit."""
    untouched = (expected == before).all(dim=-1)
    assert torch.equal(actual.cpu()[untouched], before[untouched]), name


def check_layer(tensors: Tensors, batch: StepBatch, shape: LayerShape, before: Tensors) -> None:
    """Logits and pool after a step of `run_layer` against the reference's, from the same state before it."""
    expected = reference_run(batch, before, lambda backend, t: run_layer(backend, shape, t))
    count, dtype = batch.num_selected, before["table"].dtype
    assert_close(tensors["logits"][:count], expected["logits"][:count], dtype, "logits")
    pool, expected_pool = tensors["pool"][:NUM_BLOCKS], expected["pool"][:NUM_BLOCKS]
    assert_close(pool, expected_pool, dtype, "pool")
    assert_untouched(pool, expected_pool, before["pool"][:NUM_BLOCKS], "pool")


def written_slots(pool_BLKCSD: torch.Tensor, before: float) -> set[int]:
    """Slots of a pool that was filled with one number, where another stands now."""
    is_written_BS = (pool_BLKCSD != before).any(dim=-1).any(dim=3).any(dim=2).any(dim=1)
    return set(is_written_BS.flatten().nonzero().flatten().tolist())


def assert_operation(operation: Operation, before: Tensors, expected: Tensors, actual: Tensors) -> None:
    """The same numbers as the reference, and not a bit changed that the operation does not own."""
    dtype = before["table"].dtype
    if operation.spoils_keys:
        before, expected, actual = (_without_keys(tensors) for tensors in (before, expected, actual))
    for name, tensor in actual.items():
        if name in operation.changes:
            assert_close(tensor, expected[name], dtype, name)
            assert_untouched(tensor, expected[name], before[name], name)
        else:
            assert torch.equal(tensor.cpu(), before[name]), name


def _without_keys(tensors: Tensors) -> Tensors:
    queries, _, values = tensors["qkv"].split([SHAPE.query_size, *[SHAPE.num_kv_heads * SHAPE.head_dim] * 2], dim=1)
    return {**tensors, "qkv": torch.cat([queries, values], dim=1)}
