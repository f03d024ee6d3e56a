"""The output head: float32 logits from the last hidden state, whatever the model's dtype.

Axes: R rows whose logits are wanted, P the same padded (`padded_num_rows`), E hidden size, V vocabulary.
"""

from __future__ import annotations

import torch

from engine.attention.base import AttentionBackend
from engine.model.linear import Linear, padded_num_rows


class OutputHead:
    """logits = x W^T for the constant weight [V, E], which may be the embedding itself.

    A packed product of oneDNN returns its inputs' dtype, so it serves float32 only. In bfloat16 the backend reads the
    weight where it lies: nothing is rounded, and a tied head needs no memory of its own.
    """

    __slots__ = ("_packed", "_weight_VE")

    def __init__(self, weight_VE: torch.Tensor) -> None:
        self._packed = Linear(weight_VE) if weight_VE.dtype == torch.float32 else None
        self._weight_VE = weight_VE if self._packed is None else None

    def __call__(self, x_RE: torch.Tensor, backend: AttentionBackend) -> torch.Tensor:
        """Returns a new float32 tensor [R, V]."""
        num_rows = len(x_RE)
        if self._packed is not None:
            padding = padded_num_rows(num_rows) - num_rows
            return self._packed(torch.nn.functional.pad(x_RE, (0, 0, 0, padding)))[:num_rows]
        assert self._weight_VE is not None
        logits_RV = torch.empty(num_rows, len(self._weight_VE))
        backend.logits(x_RE, self._weight_VE, logits_RV)
        return logits_RV
