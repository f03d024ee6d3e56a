"""Routed experts: each token's MLP is the weighted sum of the few experts that a router chooses for it.

Axes: N rows (tokens, or the wanted ones of the last layer), E hidden size, F an expert's intermediate size, G experts,
U experts a token, M rows that one expert is chosen for.
"""

from __future__ import annotations

import torch

from engine.attention.base import Activation, Backend, Rows
from engine.model.families import ExpertsConfig
from engine.model.weights import ExpertsWeights


def run_experts(
    backend: Backend,
    config: ExpertsConfig,
    activation: Activation,
    weights: ExpertsWeights,
    x_NE: torch.Tensor,
    out_NE: torch.Tensor,
) -> None:
    """Write the experts' sum for each row of x to out. Not part of a recorded sequence: the choice is the data's.

    Rows are batched by expert, and summed in float32 in the order of the experts' numbers, so that a row's sum does
    not depend on the other rows.
    """
    scores_NG = torch.empty(len(x_NE), config.num_experts, device=x_NE.device)
    backend.linear(x_NE, weights.router_GE, None, scores_NG, Rows.ALL)
    shares_NU, chosen_NU = scores_NG.softmax(dim=-1).topk(config.num_per_token, dim=-1)
    if config.normalises:
        shares_NU = shares_NU / shares_NU.sum(dim=-1, keepdim=True)
    sum_NE = torch.zeros(out_NE.shape, device=out_NE.device)
    for expert in sorted(set(chosen_NU.flatten().tolist())):
        rows_M, ranks_M = (chosen_NU == expert).nonzero(as_tuple=True)
        x_ME = x_NE[rows_M]
        activated_MF = x_ME.new_empty(len(rows_M), config.intermediate_size)
        down_ME = torch.empty(x_ME.shape, device=x_ME.device)
        backend.gated_linear(x_ME, weights.gate_up_GXE[expert], None, activation, activated_MF, Rows.ALL)
        backend.linear(activated_MF, weights.down_GEF[expert], None, down_ME, Rows.ALL)
        sum_NE.index_add_(0, rows_M, down_ME * shares_NU[rows_M, ranks_M].unsqueeze(1))
    out_NE.copy_(sum_NE)
