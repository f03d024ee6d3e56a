"""The matrix product against float64, and that an output's bits depend on its two rows alone.

Every instruction set that the machine has; all three combinations of dtypes. Axes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from engine.attention.base import Rows
from engine.attention.cpu import NativeCpuBackend
from tests.support.native_isas import isas_here
from tests.support.products import SHAPES, check_against_float64, randn

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Dtypes:
    operands: torch.dtype
    out: torch.dtype


DTYPES = [Dtypes(FLOAT32, FLOAT32), Dtypes(BFLOAT16, FLOAT32), Dtypes(BFLOAT16, BFLOAT16)]
both_operand_dtypes = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)


@pytest.fixture(scope="module", params=isas_here())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def product(
    backend: NativeCpuBackend,
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    out_dtype: torch.dtype = FLOAT32,
) -> torch.Tensor:
    out_NO = torch.full((len(x_NI), len(weight_OI)), NAN, dtype=out_dtype)
    backend.linear(x_NI, weight_OI, bias_O, out_NO, Rows.ALL)
    return out_NO


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(isa: str, dtypes: Dtypes, shape: tuple[int, int, int]) -> None:
    num_rows, num_inputs, num_outputs = shape
    generator = torch.Generator().manual_seed(1)
    x = randn(generator, num_rows, num_inputs, dtype=dtypes.operands)
    weight = randn(generator, num_outputs, num_inputs, dtype=dtypes.operands)
    bias = randn(generator, num_outputs, dtype=FLOAT32)
    for num_threads in (1, 3):
        backend = NativeCpuBackend(num_threads, isa)
        for used_bias in (bias, None):
            found = product(backend, x, weight, used_bias, dtypes.out)
            check_against_float64(found, x, weight, used_bias)


@both_operand_dtypes
def test_does_not_depend_on_the_other_rows(isa: str, dtype: torch.dtype) -> None:
    """Random shapes, every number of rows up to some panels: the same bits as each row gives alone."""
    draw = random.Random(2)
    generator = torch.Generator().manual_seed(3)
    alone_backend = NativeCpuBackend(1, isa)
    for num_threads in (1, 4):
        backend = NativeCpuBackend(num_threads, isa)
        for _ in range(6):
            num_inputs = draw.choice([draw.randint(1, 80), 16 * draw.randint(1, 40), draw.randint(1000, 1400)])
            num_outputs = draw.randint(1, 160)
            x = randn(generator, 100, num_inputs, dtype=dtype)
            weight = randn(generator, num_outputs, num_inputs, dtype=dtype)
            alone = torch.cat([product(alone_backend, x[i : i + 1], weight) for i in range(len(x))])
            for num_rows in [*range(1, 36), *draw.sample(range(36, 100), 6)]:
                first = draw.randint(0, 100 - num_rows)
                together = product(backend, x[first : first + num_rows], weight)
                assert torch.equal(together, alone[first : first + num_rows]), (num_rows, num_inputs, num_outputs)


def gated_product(
    backend: NativeCpuBackend, x_NI: torch.Tensor, weight_XI: torch.Tensor, bias_X: torch.Tensor | None
) -> torch.Tensor:
    out_NF = torch.full((len(x_NI), len(weight_XI) // 2), NAN)
    backend.gated_linear(x_NI, weight_XI, bias_X, "silu", out_NF, Rows.ALL)
    return out_NF


@both_operand_dtypes
def test_gated_rows_do_not_depend_on_the_others_nor_on_pieces(isa: str, dtype: torch.dtype) -> None:
    """Every number of outputs: all remainders of strips and tiles, whose gates lie apart from what they gate."""
    draw = random.Random(10)
    generator = torch.Generator().manual_seed(11)
    alone_backend = NativeCpuBackend(1, isa)
    for num_threads in (1, 4):
        backend = NativeCpuBackend(num_threads, isa)
        for num_inputs, num_outputs in [(50, 7), (64, 48), (1100, 61), (32, draw.randint(100, 500))]:
            x = randn(generator, 100, num_inputs, dtype=dtype)
            weight = randn(generator, 2 * num_outputs, num_inputs, dtype=dtype)
            bias = draw.choice([None, randn(generator, 2 * num_outputs, dtype=FLOAT32)])
            alone = torch.cat([gated_product(alone_backend, x[i : i + 1], weight, bias) for i in range(len(x))])
            for num_rows in (2, 9, 12, 13, 17, 32, 33, 63, 65, 100):
                first = draw.randint(0, 100 - num_rows)
                together = gated_product(backend, x[first : first + num_rows], weight, bias)
                assert torch.equal(together, alone[first : first + num_rows]), (num_rows, num_inputs, num_outputs)


@both_operand_dtypes
def test_does_not_depend_on_the_block_of_rows(isa: str, dtype: torch.dtype) -> None:
    """So many rows that they are computed in several blocks."""
    generator = torch.Generator().manual_seed(4)
    x = randn(generator, 500, 1024, dtype=dtype)
    weight = randn(generator, 70, 1024, dtype=dtype)
    together = product(NativeCpuBackend(2, isa), x, weight)
    backend = NativeCpuBackend(1, isa)
    for row in (0, 31, 190, 191, 192, 255, 256, 384, 498, 499):
        assert torch.equal(product(backend, x[row : row + 1], weight)[0], together[row])


@both_operand_dtypes
def test_does_not_depend_on_the_other_outputs(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = randn(generator, 130, 96, dtype=dtype)
    backend = NativeCpuBackend(1, isa)
    for num_rows in (1, 9, 40):
        x = randn(generator, num_rows, 96, dtype=dtype)
        whole = product(backend, x, weight)
        for begin, end in [(0, 1), (1, 14), (13, 130), (64, 112)]:
            assert torch.equal(product(backend, x, weight[begin:end]), whole[:, begin:end])


def test_bfloat16_outputs_are_the_float32_ones_rounded_once(isa: str) -> None:
    generator = torch.Generator().manual_seed(6)
    weight = randn(generator, 75, 90, dtype=BFLOAT16)
    bias = randn(generator, 75, dtype=FLOAT32)
    backend = NativeCpuBackend(1, isa)
    for num_rows in (1, 7, 16, 50):
        x = randn(generator, num_rows, 90, dtype=BFLOAT16)
        wide = product(backend, x, weight, bias)
        assert torch.equal(product(backend, x, weight, bias, BFLOAT16), wide.bfloat16())


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 14, 40])
def test_rows_apart_and_nothing_beyond_them(isa: str, dtypes: Dtypes, num_rows: int) -> None:
    """Rows of x and of the output with a stride; what lies around the three arrays is neither used nor written."""
    generator = torch.Generator().manual_seed(7)
    for num_inputs, num_outputs in [(45, 21), (64, 64), (7, 3)]:
        wide_x = torch.full((num_rows + 2, num_inputs + 5), NAN, dtype=dtypes.operands)
        padded_weight = torch.full((num_outputs + 2, num_inputs), NAN, dtype=dtypes.operands)
        padded_bias = torch.full((num_outputs + 2,), NAN)
        x, weight, bias = wide_x[1:-1, 2:-3], padded_weight[1:-1], padded_bias[1:-1]
        x.copy_(randn(generator, num_rows, num_inputs, dtype=dtypes.operands))
        weight.copy_(randn(generator, num_outputs, num_inputs, dtype=dtypes.operands))
        bias.copy_(randn(generator, num_outputs, dtype=FLOAT32))
        wide_out = torch.full((num_rows + 2, num_outputs + 7), 7.0, dtype=dtypes.out)
        out = wide_out[1:-1, 3:-4]
        NativeCpuBackend(2, isa).linear(x, weight, bias, out, Rows.ALL)
        check_against_float64(out, x, weight, bias)
        out.fill_(7.0)
        assert bool((wide_out == 7.0).all())


@both_operand_dtypes
def test_rows_that_are_not_finite_touch_no_other(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(8)
    weight = randn(generator, 40, 70, dtype=dtype)
    backend = NativeCpuBackend(1, isa)
    for num_rows in (6, 15, 38):
        x = randn(generator, num_rows, 70, dtype=dtype)
        before = product(backend, x, weight)
        x[2, 69], x[4, 0] = NAN, float("inf")
        after = product(backend, x, weight)
        assert bool(after[2].isnan().all()) and not bool(after[4].isfinite().any())
        whole = [row for row in range(num_rows) if row not in (2, 4)]
        assert torch.equal(after[whole], before[whole])


@both_operand_dtypes
def test_weights_that_are_not_finite_touch_no_other_output(isa: str, dtype: torch.dtype) -> None:
    """Also where rows are filled up with zeros: infinity times zero would be NaN."""
    generator = torch.Generator().manual_seed(9)
    weight = randn(generator, 37, 41, dtype=dtype)
    weight[3, 0] = weight[36, 40] = float("inf")
    backend = NativeCpuBackend(1, isa)
    for num_rows in (2, 15, 38):
        found = product(backend, randn(generator, num_rows, 41, dtype=dtype), weight)
        finite = [output for output in range(37) if output not in (3, 36)]
        assert bool(found[:, finite].isfinite().all()) and not bool(found[:, [3, 36]].isfinite().any())
        assert not bool(found.isnan().any())


def test_no_rows(isa: str) -> None:
    out = product(NativeCpuBackend(2, isa), torch.empty(0, 8), torch.ones(5, 8))
    assert out.shape == (0, 5)
