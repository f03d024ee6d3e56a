"""What the model asks of a backend.

A backend does the work between the matrix products: attention over the block pool, the rotary embedding with the
write into the pool, and the two elementwise operations that are worth fusing; and one product, the output head of
bfloat16 models. Axes as in `engine.attention.batch`; H query heads, K key/value heads, D head dimension, E hidden
size, F intermediate size, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.attention.batch import AttentionBatch


class AttentionBackend(Protocol):
    """One implementation a device or library. Layers are views [B, K, C, S, D] of the pool; dtypes are the pool's."""

    @property
    def name(self) -> str: ...

    def rotary_write(
        self, qkv_TX: torch.Tensor, cos_sin_PD: torch.Tensor, layer_BKCSD: torch.Tensor, batch: AttentionBatch
    ) -> None:
        """Rotate the queries in place, and write rotated keys and values to the pool at the batch's slots.

        qkv_TX is [T, (H + 2K) * D]: queries, keys, values. cos_sin_PD is float32, a row a position: D/2 cosines,
        then D/2 sines.
        """

    def attend(
        self, qkv_TX: torch.Tensor, layer_BKCSD: torch.Tensor, batch: AttentionBatch, out_TX: torch.Tensor
    ) -> None:
        """Causal attention of the (rotated) queries in qkv_TX over the pool, into out_TX [T, H * D].

        The batch's own keys and values must lie in the pool already.
        """

    def rms_norm(
        self,
        x_TE: torch.Tensor | None,
        residual_TE: torch.Tensor,
        weight_E: torch.Tensor,
        eps: float,
        out_TE: torch.Tensor,
    ) -> None:
        """Add x to the residual in place, if given; then out = residual / rms(residual) * weight.

        The residual is float32 whatever the dtype of the others: it is what every layer adds to, and would be rounded
        twice a layer.
        """

    def silu_mul(self, gate_up_TX: torch.Tensor, out_TF: torch.Tensor) -> None:
        """out = silu(gate) * up, where gate_up_TX is [T, 2F]: gate, then up."""

    def logits(self, x_RE: torch.Tensor, weight_VE: torch.Tensor, out_RV: torch.Tensor) -> None:
        """out = x weight^T, summed and returned in float32, where x and weight are bfloat16.

        bfloat16 numbers of about 20 are 1/8 apart: rounded, the largest logits would often tie.
        """
