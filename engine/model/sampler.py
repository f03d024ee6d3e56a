"""Draws the next tokens of a step from its logits.

A row's token depends on that row alone: on its logits, its request's parameters and history, and its named random
number (`engine.model.philox`), never on the rest of the batch. Where several answers to a prompt begin, each draws from
the same row with a number of its own. Order of what is applied to a row, where asked for:

1. logit_bias is added;
2. repetition penalty (tokens of prompt and output), then frequency and presence penalties (tokens of the output);
3. before `min_tokens` tokens were emitted, end-of-sequence and stop tokens are masked;
4. greedy rows take the largest logit, the lowest id on a tie; other rows are divided by the temperature, then
   min_p, top_k and top_p each drop tokens from what the one before left (top_p of the renormalised rest), and the
   token is found by inverting the cumulative distribution, summed in float64 in the order of token ids.

Log-probabilities are those of the model: the log-softmax of the logits as they came, before any of this. So are those
of prompt tokens.

Axes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.core.sampling import SamplingParams
from engine.core.step import SampledToken, ScoredToken, SequenceStep
from engine.model.philox import uniform

_Float32 = npt.NDArray[np.float32]
Argmax = Callable[[torch.Tensor], tuple[list[int], list[float]]]

LEAST_REPETITION_PENALTY = 1e-30
"""Smaller ones do the same, but logits divided by them would not fit float32: an infinity fails the request."""

Drawn = tuple[SampledToken, ...] | None
"""What a row gave: a token for its choice and each of its twins. None where its largest logit is NaN or infinite:
the model's weights, or the sequence's KV, are damaged."""


class Sampler:
    """Stateless.

    Args:
        eos_token_ids: the model's end-of-sequence ids.
        argmax: `engine.attention.base.Backend.argmax`.
    """

    def __init__(self, eos_token_ids: Sequence[int], argmax: Argmax) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._argmax = argmax

    def sample(self, logits_RV: torch.Tensor, steps: Sequence[SequenceStep]) -> list[Drawn]:
        """Tokens for each row of float32 `logits_RV`, which belongs to `steps` of the same index: one for its choice,
        then one for each of its twins.

        `logits_RV` is used as working space and holds nothing useful afterwards.
        """
        if all(map(is_greedy_only, steps)):
            return [
                None if token_id is None else (SampledToken(token_id=token_id),) * (1 + len(step.twins))
                for token_id, step in zip(self._greedy(logits_RV), steps, strict=True)
            ]
        logprobs = {
            row: torch.log_softmax(logits_RV[row], dim=-1)
            for row, step in enumerate(steps)
            if step.sampling.logprobs is not None
        }
        for row, step in enumerate(steps):
            self._adjust(logits_RV[row], step)
        return [
            None if token_ids is None else _with_logprobs(token_ids, logprobs.get(row), steps[row].sampling.logprobs)
            for row, token_ids in enumerate(self._choose(logits_RV, steps))
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
            penalty = max(params.repetition_penalty, LEAST_REPETITION_PENALTY)
            logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if (params.frequency_penalty or params.presence_penalty) and step.output_ids:
            emitted, counts = np.unique(np.array(step.output_ids, dtype=np.int64), return_counts=True)
            penalties = params.frequency_penalty * counts + params.presence_penalty
            logits_V[torch.from_numpy(emitted)] -= torch.from_numpy(penalties.astype(np.float32))
        if step.position < params.min_tokens:
            banned = [i for i in (*self._eos_token_ids, *params.stop_token_ids) if 0 <= i < len(logits_V)]
            logits_V[banned] = float("-inf")

    def _choose(self, logits_RV: torch.Tensor, steps: Sequence[SequenceStep]) -> list[list[int] | None]:
        chosen: list[list[int] | None] = []
        # Drawn row by row, not all at once: a row's weights and sums then stay in the cache.
        for greedy, logits_V, step in zip(self._greedy(logits_RV), logits_RV.numpy(), steps, strict=True):
            if greedy is None:
                chosen.append(None)
            elif step.sampling.is_greedy:
                chosen.append([greedy] * (1 + len(step.twins)))
            else:
                chosen.append(_draw(logits_V, step))
        return chosen

    def _greedy(self, logits_RV: torch.Tensor) -> list[int | None]:
        """The likeliest token of each row, None where that is not finite."""
        greedy_R, top_R = self._argmax(logits_RV)
        return [greedy if math.isfinite(top) else None for greedy, top in zip(greedy_R, top_R, strict=True)]


def is_greedy_only(step: SequenceStep) -> bool:
    """Whether the largest logit, as the model gave it, is all that the step asks for."""
    params = step.sampling
    return (
        params.temperature == 0.0
        and params.logprobs is None
        and params.repetition_penalty == 1.0
        and not params.logit_bias
        and not params.frequency_penalty
        and not params.presence_penalty
        and not step.scored_ids
        and step.position >= params.min_tokens
    )


def score(logits_RV: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[ScoredToken] | None:
    """Log-probability of each given token in its row of float32 `logits_RV`, and the `num_top` likeliest of the row.

    None if one of them is not finite.
    """
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    given = logprobs_RV[torch.arange(len(token_ids)), torch.tensor(token_ids)].tolist()
    if not all(map(math.isfinite, given)):
        return None
    tops = _top(logprobs_RV, num_top)
    return [
        ScoredToken(token_id=token_id, logprob=logprob, top=top)
        for token_id, logprob, top in zip(token_ids, given, tops, strict=True)
    ]


def _draw(logits_V: _Float32, step: SequenceStep) -> list[int]:
    """The tokens at which the cumulative distribution passes the row's random numbers, one number a choice."""
    params = step.sampling
    # A temperature too small for float32 would be 0 and give 0 / 0 for the most likely token.
    temperature = max(np.float32(params.temperature), np.finfo(np.float32).tiny)
    with np.errstate(over="ignore", under="ignore"):
        weights_V = np.exp((logits_V - logits_V.max()) / temperature)  # 1 for the most likely token
    _filter(weights_V, params)
    sums_V = weights_V.cumsum(dtype=np.float64)
    total = float(sums_V[-1])
    numbers = [
        uniform(seed=params.seed, choice=choice, position=step.position) for choice in (step.key.choice, *step.twins)
    ]
    # A target that rounds up to the total would pass the end: one step less finds the last token with a weight.
    targets = [min(number * total, math.nextafter(total, 0.0)) for number in numbers]
    return [int(np.searchsorted(sums_V, target, side="right")) for target in targets]


def _filter(weights_V: _Float32, params: SamplingParams) -> None:
    """Set the weights of dropped tokens to 0, in place. The most likely token always stays.

    numpy's sort and partition of float32 use vector instructions, torch's do not: some ten times the speed.
    """
    if params.min_p > 0.0:
        weights_V[weights_V < params.min_p] = 0.0
    if 0 < params.top_k < len(weights_V):
        border = np.partition(weights_V, len(weights_V) - params.top_k)[len(weights_V) - params.top_k]
        _keep_largest(weights_V, border, params.top_k)
    if params.top_p < 1.0:
        descending_V = np.sort(weights_V)[::-1]
        sums_V = descending_V.cumsum(dtype=np.float64)
        # The first token at which the share of the whole reaches top_p is the last to stay.
        last = min(int(np.searchsorted(sums_V, params.top_p * sums_V[-1])), len(weights_V) - 1)
        _keep_largest(weights_V, descending_V[last], last + 1)


def _keep_largest(weights_V: _Float32, border: np.float32, count: int) -> None:
    """Zero all but the `count` largest, of which `border` is the least; among its equals the lowest ids stay."""
    equal = np.flatnonzero(weights_V == border)
    num_larger = int(np.count_nonzero(weights_V > border))
    weights_V[weights_V < border] = 0.0
    weights_V[equal[count - num_larger :]] = 0.0


def _with_logprobs(
    token_ids: list[int], logprobs_V: torch.Tensor | None, num_top: int | None
) -> tuple[SampledToken, ...]:
    if logprobs_V is None or num_top is None:
        return tuple(SampledToken(token_id=token_id) for token_id in token_ids)
    (top,) = _top(logprobs_V.unsqueeze(0), num_top)
    return tuple(
        SampledToken(token_id=token_id, logprob=float(logprobs_V[token_id]), top=top) for token_id in token_ids
    )


def _top(logprobs_RV: torch.Tensor, num_top: int) -> list[tuple[tuple[int, float], ...]]:
    """The likeliest tokens of each row, most likely first, the lowest id first among equals."""
    return [_top_of_row(row_V, min(num_top, len(row_V))) for row_V in logprobs_RV.numpy()]


def _top_of_row(logprobs_V: _Float32, num_top: int) -> tuple[tuple[int, float], ...]:
    if num_top == 0:
        return ()
    border = np.partition(logprobs_V, len(logprobs_V) - num_top)[len(logprobs_V) - num_top]
    # All that equal the border, since which of them stay is a matter of their ids.
    ids = np.flatnonzero(logprobs_V >= border)
    likeliest = ids[np.argsort(-logprobs_V[ids], kind="stable")][:num_top]
    return tuple(zip(likeliest.tolist(), logprobs_V[likeliest].tolist(), strict=True))
