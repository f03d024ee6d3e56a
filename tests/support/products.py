"""What tests of matrix products share. Axes: N rows, I inputs, O outputs."""

from __future__ import annotations

import torch

SHAPES = [
    (1, 1, 1),
    (1, 7, 17),
    (2, 33, 15),
    (3, 64, 48),
    (4, 100, 12),
    (5, 31, 31),
    (8, 576, 96),
    (12, 66, 100),
    (13, 32, 257),
    (16, 45, 50),
    (23, 63, 19),
    (29, 2, 5),
    (32, 128, 144),
    (44, 576, 60),
    (45, 17, 49),
    (80, 96, 1),
    (6, 2561, 20),
    (37, 1600, 61),
    (401, 1040, 13),
]
"""(N, I, O): all remainders of squares, tiles, strips, panels and chunks, for vectors of 4, 8 and 16."""


def randn(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def check_against_float64(
    found_NO: torch.Tensor, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
) -> None:
    """Within the bound that holds for float32 sums in any order, plus the rounding of the result to bfloat16."""
    wide_x_NI, wide_weight_OI = x_NI.double(), weight_OI.double()
    exact_NO = wide_x_NI @ wide_weight_OI.T
    magnitude_NO = wide_x_NI.abs() @ wide_weight_OI.abs().T
    if bias_O is not None:
        exact_NO += bias_O
        magnitude_NO += bias_O.abs()
    bound_NO = magnitude_NO * (x_NI.shape[1] + 2) * 2.0**-24
    if found_NO.dtype == torch.bfloat16:
        bound_NO = bound_NO * 1.01 + exact_NO.abs() * 2.0**-8
    error_NO = (found_NO.double() - exact_NO).abs()
    assert bool((error_NO <= bound_NO).all()), f"{float((error_NO / bound_NO).max())} times the bound"
