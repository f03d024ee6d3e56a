"""How fast the engine's matrix products are, beside what memory gives and beside torch.

One core, thread CPU time, all sides interleaved. "Model" is one pass over all matrices of a small model, 270 MB in
bfloat16, so that each comes from memory as it does in a decode step; reading is torch's sum over the same bytes.
"Cached" is one matrix again and again, beside oneDNN on weights that it has laid out for itself. The engine does
without that: a tied output head would have to be held twice, and a row would depend on its company.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.report import Report, arguments, at_least, finish
from engine.attention.base import Rows
from engine.attention.batch import StepBatch
from engine.attention.cpu import NativeCpuBackend

LAYER_SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
NUM_LAYERS = 30
HEAD_SHAPE = (49152, 576)
MODEL_ROWS = (1, 2, 4, 8, 16, 32, 64)
CACHED_ROWS = (1, 8, 32, 128, 512, 2048)
NUM_ROUNDS = 15
NUM_QUICK_ROUNDS = 3
MAX_READING_BOUND_ROWS = 8
MIN_READING_SHARE = 0.85
MIN_TORCH_RATIO = 1.0
MIN_PACKED_RATIO = 0.92
MIN_COMPUTE_BOUND_ROWS = 128
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix, its input rows, and where the result goes. Axes: N rows, I inputs, O outputs."""

    x_NI: torch.Tensor
    weight_OI: torch.Tensor
    out_NO: torch.Tensor


def make_product(weight_OI: torch.Tensor, num_rows: int, generator: torch.Generator) -> Product:
    x_NI = torch.randn(num_rows, weight_OI.shape[1], generator=generator).to(weight_OI.dtype)
    return Product(x_NI, weight_OI, torch.empty(num_rows, len(weight_OI), dtype=weight_OI.dtype))


def make_weights(dtype: torch.dtype, generator: torch.Generator) -> list[torch.Tensor]:
    shapes = LAYER_SHAPES * NUM_LAYERS + [HEAD_SHAPE]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def times_s(sides: Sequence[Callable[[], object]], num_rounds: int) -> list[float]:
    """The median time of each side over interleaved rounds, after one that warms up."""
    samples: list[list[float]] = [[] for _ in sides]
    for round_number in range(num_rounds + 1):
        for side, side_samples in zip(sides, samples, strict=True):
            start_s = time.thread_time()
            side()
            if round_number > 0:
                side_samples.append(time.thread_time() - start_s)
    return [sorted(side_samples)[len(side_samples) // 2] for side_samples in samples]


def step_of_rows(num_rows: int) -> StepBatch:
    """A step of so many tokens, for operations that ask for no more than that."""
    nothing = torch.zeros(0, dtype=torch.int32)
    numbers = torch.arange(num_rows)
    return StepBatch(
        ids_T=numbers,
        positions_T=numbers,
        slots_T=numbers,
        query_starts_S1=torch.zeros(1, dtype=torch.int32),
        context_starts_S=nothing,
        table_starts_S=nothing,
        block_tables=nothing,
        rows_R=torch.zeros(0, dtype=torch.int64),
    )


def native(backend: NativeCpuBackend, products: list[Product]) -> Callable[[], None]:
    def body() -> None:
        for product in products:
            backend.linear(product.x_NI, product.weight_OI, None, product.out_NO, Rows.TOKENS)

    step = backend.compile(body)
    batch = step_of_rows(len(products[0].x_NI))
    return lambda: step.run(batch)


def plain_torch(products: list[Product]) -> Callable[[], None]:
    def run() -> None:
        for product in products:
            torch.nn.functional.linear(product.x_NI, product.weight_OI)

    return run


def packed_torch(product: Product) -> Callable[[], None]:
    packed = torch.ops.mkldnn._reorder_linear_weight(product.weight_OI, None)
    return lambda: torch.ops.mkldnn._linear_pointwise(product.x_NI, packed, None, "none", [], "")


def reading(weights: list[torch.Tensor]) -> Callable[[], None]:
    words = [weight.view(torch.int64) for weight in weights]

    def run() -> None:
        for matrix in words:
            matrix.sum()

    return run


def measure_model(report: Report, backend: NativeCpuBackend, dtype_name: str, num_rounds: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = make_weights(DTYPES[dtype_name], generator)
    num_products = sum(weight.numel() for weight in weights)
    figures = {}
    for num_rows in MODEL_ROWS:
        products = [make_product(weight, num_rows, generator) for weight in weights]
        sides = [native(backend, products), plain_torch(products), reading(weights)]
        native_s, torch_s, reading_s = times_s(sides, num_rounds)
        name = f"{dtype_name}, model, {num_rows} rows"
        report.results.append(at_least(f"{name}: speed / torch", torch_s / native_s, MIN_TORCH_RATIO, "1"))
        if num_rows <= MAX_READING_BOUND_ROWS:
            share = reading_s / native_s
            report.results.append(at_least(f"{name}: speed / reading the weights", share, MIN_READING_SHARE, "1"))
        figures[num_rows] = {
            "gmac_per_s": num_products * num_rows / native_s / 1e9,
            "torch_gmac_per_s": num_products * num_rows / torch_s / 1e9,
            "reading_ms": reading_s * 1e3,
            "ms": native_s * 1e3,
        }
    report.details[f"model_{dtype_name}"] = figures


def measure_cached(report: Report, backend: NativeCpuBackend, dtype_name: str, num_rounds: int) -> None:
    generator = torch.Generator().manual_seed(2)
    figures: dict[str, dict[int, dict[str, float]]] = {}
    for num_outputs, num_inputs in LAYER_SHAPES:
        weight = torch.randn(num_outputs, num_inputs, generator=generator).to(DTYPES[dtype_name])
        of_shape = figures.setdefault(f"{num_outputs}x{num_inputs}", {})
        for num_rows in CACHED_ROWS:
            product = make_product(weight, num_rows, generator)
            sides = [native(backend, [product]), plain_torch([product]), packed_torch(product)]
            native_s, torch_s, packed_s = times_s(sides, 2 * num_rounds)
            giga = num_rows * num_outputs * num_inputs / 1e9
            of_shape[num_rows] = {
                "gmac_per_s": giga / native_s,
                "torch_gmac_per_s": giga / torch_s,
                "packed_gmac_per_s": giga / packed_s,
            }
    for num_rows in CACHED_ROWS:
        ratios = [
            of_shape[num_rows]["gmac_per_s"] / of_shape[num_rows]["packed_gmac_per_s"] for of_shape in figures.values()
        ]
        if num_rows >= MIN_COMPUTE_BOUND_ROWS:
            measure = f"{dtype_name}, cached, {num_rows} rows: speed / oneDNN packed, mean"
            report.results.append(at_least(measure, sum(ratios) / len(ratios), MIN_PACKED_RATIO, "1"))
    report.details[f"cached_{dtype_name}"] = figures


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    backend = NativeCpuBackend(1)
    report = Report("linear_kernels", details={"isa": backend.isa})
    num_rounds = NUM_QUICK_ROUNDS if args.quick else NUM_ROUNDS
    with torch.inference_mode():
        for dtype_name in DTYPES:
            measure_model(report, backend, dtype_name, num_rounds)
            measure_cached(report, backend, dtype_name, num_rounds)
    finish(report, args)


if __name__ == "__main__":
    main()
