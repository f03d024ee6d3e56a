"""Draws the next tokens of a step from its logits.

A row's token depends on that row alone: on its logits, its request's parameters and history, and its named random
number (`engine.model.philox`), never on the rest of the batch. Order of what is applied to a row, where asked for:

1. logit_bias is added;
2. repetition penalty (tokens of prompt and output), then frequency and presence penalties (tokens of the output);
3. before `min_tokens` tokens were emitted, end-of-sequence and stop tokens are masked;
4. greedy rows take the largest logit, the lowest id on a tie; other rows are divided by the temperature, then
   min_p, top_k and top_p each drop tokens from what the one before left (top_p of the renormalised rest), and the
   token is found by inverting the cumulative distribution, summed in float64 in the order of token ids.

Log-probabilities are those of the model: the log-softmax of the logits as they came, before any of this.

Axes: R sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.core.sampling import SamplingParams
from engine.core.step import SampledToken, SequenceStep
from engine.model.philox import uniform

# top_p looks for its set among so many of the most likely tokens before it sorts the whole vocabulary.
_TOP_P_FIRST_LOOK = 512


class NonFiniteLogitsError(ArithmeticError):
    """The model produced NaN or infinity for a sequence: its weights or its KV are damaged."""


class Sampler:
    """Stateless but for the model's end-of-sequence ids."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits_RV: torch.Tensor, steps: Sequence[SequenceStep]) -> list[SampledToken]:
        """One token for each row of float32 `logits_RV`, which belongs to `steps` of the same index.

        `logits_RV` is used as working space and holds nothing useful afterwards.

        Raises NonFiniteLogitsError if a row's largest logit is not finite.
        """
        assert len(logits_RV) == len(steps)
        logprobs = {
            row: torch.log_softmax(logits_RV[row], dim=-1)
            for row, step in enumerate(steps)
            if step.sampling.logprobs is not None
        }
        for row, step in enumerate(steps):
            self._adjust(logits_RV[row], step)
        token_ids = self._choose(logits_RV, steps)
        return [
            _with_logprobs(token_id, logprobs.get(row), steps[row].sampling.logprobs)
            for row, token_id in enumerate(token_ids)
        ]

    def _adjust(self, logits_V: torch.Tensor, step: SequenceStep) -> None:
        """Bias, penalties and masks, in place."""
        params = step.sampling
        if params.logit_bias:
            ids, biases = zip(*params.logit_bias, strict=True)
            logits_V.index_add_(0, torch.tensor(ids), torch.tensor(biases, dtype=logits_V.dtype))
        if params.repetition_penalty != 1.0:
            seen = torch.from_numpy(np.unique(np.array(step.prompt_ids + step.output_ids, dtype=np.int64)))
            values = logits_V[seen]
            penalty = params.repetition_penalty
            logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if (params.frequency_penalty or params.presence_penalty) and step.output_ids:
            emitted, counts = np.unique(np.array(step.output_ids, dtype=np.int64), return_counts=True)
            penalties = params.frequency_penalty * counts + params.presence_penalty
            logits_V[torch.from_numpy(emitted)] -= torch.from_numpy(penalties.astype(np.float32))
        if step.position < params.min_tokens:
            banned = [i for i in (*self._eos_token_ids, *params.stop_token_ids) if i < len(logits_V)]
            logits_V[banned] = float("-inf")

    def _choose(self, logits_RV: torch.Tensor, steps: Sequence[SequenceStep]) -> list[int]:
        top_R, greedy_R = logits_RV.max(dim=-1)  # the first index among equals
        for step, is_finite in zip(steps, top_R.isfinite().tolist(), strict=True):
            if not is_finite:
                raise NonFiniteLogitsError(f"logits of {step.key} at output position {step.position} are not finite")
        token_ids: list[int] = greedy_R.tolist()
        random_rows = [row for row, step in enumerate(steps) if not step.sampling.is_greedy]
        if random_rows:
            chosen = torch.tensor(random_rows)
            weights_RV = _softmax_weights(logits_RV[chosen], top_R[chosen], [steps[row] for row in random_rows])
            drawn = _draw(weights_RV, [steps[row] for row in random_rows])
            for row, token_id in zip(random_rows, drawn, strict=True):
                token_ids[row] = token_id
        return token_ids


def _softmax_weights(logits_RV: torch.Tensor, top_R: torch.Tensor, steps: Sequence[SequenceStep]) -> torch.Tensor:
    """Unnormalised probabilities, 1 for the most likely token, 0 for those that the filters drop."""
    temperatures_R1 = torch.tensor([[step.sampling.temperature] for step in steps], dtype=torch.float32)
    # A temperature too small for float32 would be 0 and give 0 / 0 for the most likely token.
    temperatures_R1.clamp_(min=torch.finfo(torch.float32).tiny)
    weights_RV = ((logits_RV - top_R.unsqueeze(1)) / temperatures_R1).exp()
    for weights_V, step in zip(weights_RV, steps, strict=True):
        _filter(weights_V, step.sampling)
    return weights_RV


def _filter(weights_V: torch.Tensor, params: SamplingParams) -> None:
    """Set the weights of dropped tokens to 0, in place. The most likely token always stays."""
    if params.min_p > 0.0:
        weights_V[weights_V < params.min_p] = 0.0
    if 0 < params.top_k < len(weights_V):
        _keep_largest(weights_V, params.top_k)
    if params.top_p < 1.0:
        _keep_largest(weights_V, _nucleus_size(weights_V, params.top_p))


def _nucleus_size(weights_V: torch.Tensor, top_p: float) -> int:
    """How many of the most likely tokens it takes for their share of the whole to reach `top_p`."""
    wanted = top_p * float(weights_V.sum(dtype=torch.float64))
    size = min(_TOP_P_FIRST_LOOK, len(weights_V))
    sums = weights_V.topk(size).values.cumsum(0, dtype=torch.float64)
    if float(sums[-1]) < wanted:
        sums = weights_V.sort(descending=True).values.cumsum(0, dtype=torch.float64)
    return min(int(torch.searchsorted(sums, wanted)) + 1, len(weights_V))


def _keep_largest(weights_V: torch.Tensor, count: int) -> None:
    """Zero all but the `count` largest; among equals at the border the lowest ids stay."""
    border = weights_V.topk(count).values[-1]
    equal = (weights_V == border).nonzero().flatten()
    num_larger = int((weights_V > border).sum())
    weights_V[weights_V < border] = 0.0
    weights_V[equal[count - num_larger :]] = 0.0


def _draw(weights_RV: torch.Tensor, steps: Sequence[SequenceStep]) -> list[int]:
    """Inverse of the cumulative distribution at each row's random number."""
    sums_RV = weights_RV.cumsum(dim=-1, dtype=torch.float64)
    numbers_R1 = torch.tensor(
        [[uniform(seed=step.sampling.seed, choice=step.key.choice, position=step.position)] for step in steps],
        dtype=torch.float64,
    )
    totals_R1 = sums_RV[:, -1:]
    # The first token whose sum exceeds the target. A target that rounds up to the total would find none, hence the
    # step down: the token is then the last with a weight.
    targets_R1 = torch.minimum(numbers_R1 * totals_R1, torch.nextafter(totals_R1, torch.zeros_like(totals_R1)))
    token_ids: list[int] = torch.searchsorted(sums_RV, targets_R1, right=True).flatten().tolist()
    return token_ids


def _with_logprobs(token_id: int, logprobs_V: torch.Tensor | None, num_top: int | None) -> SampledToken:
    if logprobs_V is None or num_top is None:
        return SampledToken(token_id=token_id)
    values, ids = logprobs_V.topk(num_top)
    top = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return SampledToken(token_id=token_id, logprob=float(logprobs_V[token_id]), top=tuple(top))
