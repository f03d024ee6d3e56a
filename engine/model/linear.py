"""Matrix products with constant weights.

oneDNN can lay a weight out for its kernels once, ahead of time. For the few rows of a decode step that halves the
time, which is the reading of the weights; in float32 on AMD machines it also beats the BLAS that torch uses. Where
torch has no oneDNN for the dtype, the product is torch's own. Axes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch


class Linear:
    """y = x W^T for a constant weight.

    In float32 a packed product's row does not depend on the other rows. oneDNN has another kernel for one row alone,
    which sums in another order: seeded tokens would then depend on whether a request runs alone. Two rows take as long.
    """

    __slots__ = ("_is_packed", "_runs_single_rows", "_weight")

    def __init__(self, weight_OI: torch.Tensor) -> None:
        self._is_packed = can_pack(weight_OI.dtype)
        self._runs_single_rows = weight_OI.dtype != torch.float32
        # No batch size is given, so the layout has to serve them all.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None) if self._is_packed else weight_OI

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        """Returns a new contiguous tensor [N, O]."""
        if self._is_packed:
            rows_NI = x_NI if len(x_NI) != 1 or self._runs_single_rows else x_NI.expand(2, -1)
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows_NI, self._weight, None, "none", [], "")
            return product[: len(x_NI)]
        return torch.nn.functional.linear(x_NI, self._weight)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN has packed products in `dtype`; bfloat16 needs AVX-512."""
    is_available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not is_available or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def padded_num_rows(num_rows: int) -> int:
    """The number of rows to compute for `num_rows`.

    oneDNN compiles a kernel for each number of rows it meets, which takes some 10 ms for a model's five shapes; so
    only few numbers are used. Up to 8 rows, where steps are most frequent, it is exact; then the steps grow.
    """
    if num_rows <= 8:
        return num_rows
    granularity = 4 if num_rows <= 32 else 8 if num_rows <= 64 else 16
    return -(-num_rows // granularity) * granularity
