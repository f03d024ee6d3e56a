"""The matrix product with AMX, compiled with its instructions emulated: few machines have them.

Axes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.attention.build import COMMON_FLAGS, SOURCE_DIR, X86_UNITS
from engine.attention.native_library import KernelsUnavailableError, load_kernels, supported_isas
from engine.attention.native_structs import BFLOAT16, FLOAT32, LinearStruct
from tests.support.products import SHAPES, check_against_float64, randn

# Runs a product's items last to first: their order must not matter.
ENTRY_POINT = r"""
#include <cstdlib>

#include "kernels_amx.h"

extern "C" BATON_EXPORT int64_t run_linear(const BatonLinear* args, int32_t num_threads) {
  using namespace baton::amx;
  const size_t size_bytes = (linear_bf16_scratch_size_bytes(*args, num_threads) + 63) / 64 * 64;
  void* scratch = std::aligned_alloc(64, size_bytes);
  const int64_t num_items = linear_bf16_num_items(*args, num_threads);
  for (int64_t item = num_items - 1; item >= 0; --item) linear_bf16_item(*args, num_threads, item, scratch);
  std::free(scratch);
  return num_items;
}
"""


@pytest.fixture(scope="module")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    try:
        supported = supported_isas(load_kernels())
    except KernelsUnavailableError as error:
        pytest.skip(str(error))
    if "avx512_bf16" not in supported:
        pytest.skip("the rest of the kernel needs avx512_bf16, which this machine has not")
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("amx")
    entry_point, library = folder / "entry_point.cpp", folder / "emulation.so"
    entry_point.write_text(ENTRY_POINT)
    flags = [*COMMON_FLAGS, *X86_UNITS["kernels_amx.cpp"], "-DBATON_HAVE_X86", "-DBATON_AMX_EMULATED"]
    sources = [str(entry_point), str(Path(SOURCE_DIR) / "kernels_amx.cpp")]
    subprocess.run(["g++", *flags, "-shared", f"-I{SOURCE_DIR}", *sources, "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.run_linear.argtypes = (ctypes.POINTER(LinearStruct), ctypes.c_int32)
    loaded.run_linear.restype = ctypes.c_int64
    yield loaded


def product(
    emulation: ctypes.CDLL,
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    num_threads: int = 1,
) -> torch.Tensor:
    out_NO = torch.full((len(x_NI), len(weight_OI)), float("nan"), dtype=out_dtype)
    num_rows = ctypes.c_int32(len(x_NI))
    args = LinearStruct(
        num_rows=ctypes.addressof(num_rows),
        x=x_NI.data_ptr(),
        weight=weight_OI.data_ptr(),
        bias=None if bias_O is None else bias_O.data_ptr(),
        out=out_NO.data_ptr(),
        x_stride=x_NI.stride(0),
        out_stride=out_NO.stride(0),
        num_inputs=weight_OI.shape[1],
        num_outputs=weight_OI.shape[0],
        dtype=BFLOAT16,
        out_dtype=FLOAT32 if out_dtype == torch.float32 else BFLOAT16,
    )
    num_items = emulation.run_linear(args, num_threads)
    assert (num_items == 0) == (len(x_NI) == 0)
    return out_NO


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(emulation: ctypes.CDLL, out_dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    num_rows, num_inputs, num_outputs = shape
    generator = torch.Generator().manual_seed(1)
    x = randn(generator, num_rows, num_inputs, dtype=torch.bfloat16)
    weight = randn(generator, num_outputs, num_inputs, dtype=torch.bfloat16)
    bias = randn(generator, num_outputs, dtype=torch.float32)
    for used_bias, num_threads in [(bias, 1), (None, 3)]:
        found = product(emulation, x, weight, used_bias, out_dtype, num_threads)
        check_against_float64(found, x, weight, used_bias)


def test_does_not_depend_on_the_other_rows(emulation: ctypes.CDLL) -> None:
    draw = random.Random(2)
    generator = torch.Generator().manual_seed(3)
    for num_inputs in (32, 77, 1056):
        x = randn(generator, 90, num_inputs, dtype=torch.bfloat16)
        weight = randn(generator, draw.randint(1, 100), num_inputs, dtype=torch.bfloat16)
        alone = torch.cat([product(emulation, x[i : i + 1], weight) for i in range(len(x))])
        for num_rows in (2, 15, 16, 17, 31, 32, 33, 48, 49, 64, 80, 90):
            first = draw.randint(0, 90 - num_rows)
            together = product(emulation, x[first : first + num_rows], weight, num_threads=draw.randint(1, 4))
            assert torch.equal(together, alone[first : first + num_rows]), (num_rows, num_inputs)


def test_what_is_not_finite_stays_where_it_is(emulation: ctypes.CDLL) -> None:
    """Also where rows are filled up with zeros: infinity times zero would be NaN."""
    generator = torch.Generator().manual_seed(4)
    weight = randn(generator, 37, 41, dtype=torch.bfloat16)
    x = randn(generator, 38, 41, dtype=torch.bfloat16)
    weight[3, 0] = weight[36, 40] = float("inf")
    x[5, 40] = float("nan")
    found = product(emulation, x, weight)
    assert bool(found[5].isnan().all())
    others = [row for row in range(38) if row != 5]
    finite = [output for output in range(37) if output not in (3, 36)]
    assert bool(found[others][:, finite].isfinite().all())
    assert bool(found[others][:, [3, 36]].isinf().all())


def test_no_rows(emulation: ctypes.CDLL) -> None:
    weight = torch.ones(5, 8, dtype=torch.bfloat16)
    assert product(emulation, torch.empty(0, 8, dtype=torch.bfloat16), weight).shape == (0, 5)
