"""The reference backend: plain torch, written to be obviously right. Slow: it gathers each sequence's KV.

Used where the native kernels cannot be built, and by the tests as what the kernels are compared with. It computes in
float32 and rounds each result once, as the kernels do. Axes as in `engine.attention.base`; N tokens of one sequence
in this step, P positions it can see, G query heads a key/value head.
"""

from __future__ import annotations

import torch

from engine.attention.batch import AttentionBatch

_LOGITS_PIECE = 4096
"""Rows of the output head that are widened to float32 at a time: some 10 MB."""


class TorchReferenceBackend:
    """Implements `AttentionBackend`."""

    name = "torch_reference"

    def rotary_write(
        self, qkv_TX: torch.Tensor, cos_sin_PD: torch.Tensor, layer_BKCSD: torch.Tensor, batch: AttentionBatch
    ) -> None:
        _, num_kv_heads, _, block_size, head_dim = layer_BKCSD.shape
        heads_TYD = qkv_TX.view(len(qkv_TX), -1, head_dim)
        q_THD, k_TKD, v_TKD = torch.split(
            heads_TYD, [heads_TYD.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1
        )
        cos_sin_T1D = cos_sin_PD[batch.positions_T].unsqueeze(1)
        q_THD.copy_(_rotate(q_THD, cos_sin_T1D))
        blocks_T, offsets_T = batch.slots_T // block_size, batch.slots_T % block_size
        layer_BKCSD[blocks_T, :, 0, offsets_T] = _rotate(k_TKD, cos_sin_T1D)
        layer_BKCSD[blocks_T, :, 1, offsets_T] = v_TKD

    def attend(
        self, qkv_TX: torch.Tensor, layer_BKCSD: torch.Tensor, batch: AttentionBatch, out_TX: torch.Tensor
    ) -> None:
        head_dim = layer_BKCSD.shape[-1]
        num_heads = out_TX.shape[1] // head_dim
        q_THD = qkv_TX[:, : num_heads * head_dim].view(-1, num_heads, head_dim)
        out_THD = out_TX.view(-1, num_heads, head_dim)
        for sequence in range(batch.num_sequences):
            begin, end = batch.query_starts_S1[sequence : sequence + 2].tolist()
            context_start = int(batch.context_starts_S[sequence])
            k_PKD, v_PKD = _gather(layer_BKCSD, batch, sequence, context_start + end - begin)
            out_THD[begin:end] = _attend_sequence(q_THD[begin:end], k_PKD, v_PKD, context_start)

    def rms_norm(
        self,
        x_TE: torch.Tensor | None,
        residual_TE: torch.Tensor,
        weight_E: torch.Tensor,
        eps: float,
        out_TE: torch.Tensor,
    ) -> None:
        if x_TE is not None:
            residual_TE.add_(x_TE)
        inverse_T1 = torch.rsqrt(residual_TE.square().mean(dim=-1, keepdim=True) + eps)
        out_TE.copy_(residual_TE * inverse_T1 * weight_E.float())

    def silu_mul(self, gate_up_TX: torch.Tensor, out_TF: torch.Tensor) -> None:
        gate_TF, up_TF = gate_up_TX.float().chunk(2, dim=-1)
        out_TF.copy_(torch.nn.functional.silu(gate_TF) * up_TF)

    def logits(self, x_RE: torch.Tensor, weight_VE: torch.Tensor, out_RV: torch.Tensor) -> None:
        wide_RE = x_RE.float()
        for begin in range(0, len(weight_VE), _LOGITS_PIECE):
            piece = slice(begin, begin + _LOGITS_PIECE)
            out_RV[:, piece] = wide_RE @ weight_VE[piece].float().T


def _rotate(x_TYD: torch.Tensor, cos_sin_T1D: torch.Tensor) -> torch.Tensor:
    cos_T1h, sin_T1h = cos_sin_T1D.chunk(2, dim=-1)
    low_TYh, high_TYh = x_TYD.float().chunk(2, dim=-1)
    rotated = torch.cat([low_TYh * cos_T1h - high_TYh * sin_T1h, high_TYh * cos_T1h + low_TYh * sin_T1h], dim=-1)
    return rotated.to(x_TYD.dtype)


def _gather(
    layer_BKCSD: torch.Tensor, batch: AttentionBatch, sequence: int, context_end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions 0 .. context_end - 1 of one sequence, copied together: [P, K, D] each."""
    block_size = layer_BKCSD.shape[3]
    table_start = int(batch.table_starts_S[sequence])
    num_blocks = (context_end + block_size - 1) // block_size
    blocks = batch.block_tables[table_start : table_start + num_blocks].long()
    kv_CPKD = layer_BKCSD[blocks].permute(2, 0, 3, 1, 4).flatten(1, 2)[:, :context_end]
    return kv_CPKD[0], kv_CPKD[1]


def _attend_sequence(q_NHD: torch.Tensor, k_PKD: torch.Tensor, v_PKD: torch.Tensor, context_start: int) -> torch.Tensor:
    num_tokens, num_heads, head_dim = q_NHD.shape
    num_positions, num_kv_heads, _ = k_PKD.shape
    q_NKGD = q_NHD.float().view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores_KGNP = torch.einsum("nkgd,pkd->kgnp", q_NKGD, k_PKD.float()) * head_dim**-0.5
    query_positions_N1 = torch.arange(context_start, context_start + num_tokens).unsqueeze(1)
    hidden_NP = torch.arange(num_positions) > query_positions_N1
    weights_KGNP = scores_KGNP.masked_fill(hidden_NP, float("-inf")).softmax(dim=-1)
    out_NKGD = torch.einsum("kgnp,pkd->nkgd", weights_KGNP, v_PKD.float())
    return out_NKGD.reshape(num_tokens, num_heads, head_dim).to(q_NHD.dtype)
