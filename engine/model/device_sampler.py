"""Draws the next tokens of a step where the logits are: the rules of `engine.model.sampler`, over all rows at once.

The same operations in the same order and dtypes, with the same random numbers. On the host the tokens differ from that
sampler's only where a number falls within the error of an exponential, since numpy's and torch's differ in the last bit
of float32 now and then. A GPU also adds the float64 sums in an order of its own, which moves their last bits. Of the
tokens that are reported as likeliest, the lowest ids come first among equals, and stay.

Nothing waits for the device but the transfer of what was drawn. Not yet run on a GPU.

Axes: R sampled rows, C choices of a row, D rows of these that draw at random, V vocabulary, N edits of single logits,
L rows whose log-probabilities are wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.core.sampling import SamplingParams
from engine.core.step import SampledToken, SequenceStep
from engine.model.philox import uniforms
from engine.model.sampler import LEAST_REPETITION_PENALTY, Drawn

_Int64 = npt.NDArray[np.int64]

_MAX_DRAWN_ROWS = 64
"""Rows that are drawn together: sorted, with sums in float64, 64 of a vocabulary of 152,000 take some 300 MB."""


class DeviceSampler:
    """Stateless. See `Sampler`, whose place it takes where the logits are not in host memory."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits_RV: torch.Tensor, steps: Sequence[SequenceStep]) -> list[Drawn]:
        """Tokens for each row of contiguous float32 `logits_RV`, which belongs to `steps` of the same index: one for
        its choice, then one for each of its twins.

        `logits_RV` is used as working space and holds nothing useful afterwards.
        """
        assert len(logits_RV) == len(steps)
        wanted = [row for row, step in enumerate(steps) if step.sampling.logprobs is not None]
        logprobs_LV = logits_RV[wanted].log_softmax(dim=-1) if wanted else None
        self._adjust(logits_RV, steps)
        num_choices = 1 + max((len(step.twins) for step in steps), default=0)
        largest_R, greedy_R = logits_RV.max(dim=-1)  # the first index among equals
        tokens_RC = greedy_R.unsqueeze(1).repeat(1, num_choices)
        drawing = [row for row, step in enumerate(steps) if not step.sampling.is_greedy]
        for begin in range(0, len(drawing), _MAX_DRAWN_ROWS):
            rows = drawing[begin : begin + _MAX_DRAWN_ROWS]
            rows_D = _on(logits_RV.device, np.array(rows))
            drawn_DC = _draw(logits_RV[rows_D], largest_R[rows_D], [steps[row] for row in rows], num_choices)
            tokens_RC[rows_D] = drawn_DC
        *tokens_CR, are_finite = torch.cat([tokens_RC.T, largest_R.isfinite().long().unsqueeze(0)]).tolist()
        sampled = [
            [SampledToken(token_id=token) for token in tokens[: 1 + len(step.twins)]]
            for step, tokens in zip(steps, zip(*tokens_CR, strict=True), strict=True)
        ]
        if logprobs_LV is not None:
            _with_logprobs(sampled, wanted, logprobs_LV, steps)
        return [tuple(tokens) if is_finite else None for tokens, is_finite in zip(sampled, are_finite, strict=True)]

    def _adjust(self, logits_RV: torch.Tensor, steps: Sequence[SequenceStep]) -> None:
        """Bias, penalties and masks, in place; each kind for all rows before the next."""
        device, vocab_size = logits_RV.device, logits_RV.shape[1]
        flat_N = logits_RV.view(-1)
        biases = _Edits(vocab_size)
        repetitions = _Edits(vocab_size)
        penalties = _Edits(vocab_size)
        bans = _Edits(vocab_size)
        for row, step in enumerate(steps):
            params = step.sampling
            if params.logit_bias:
                ids, values = zip(*params.logit_bias, strict=True)
                biases.add(row, np.array(ids), values)
            if params.repetition_penalty != 1.0:
                seen = np.unique(np.array(step.prompt_ids + step.output_ids, dtype=np.int64))
                repetitions.add(row, seen, [max(params.repetition_penalty, LEAST_REPETITION_PENALTY)] * len(seen))
            if (params.frequency_penalty or params.presence_penalty) and step.output_ids:
                emitted, counts = np.unique(np.array(step.output_ids, dtype=np.int64), return_counts=True)
                penalties.add(row, emitted, params.frequency_penalty * counts + params.presence_penalty)
            if step.position < params.min_tokens:
                banned = [i for i in (*self._eos_token_ids, *params.stop_token_ids) if 0 <= i < vocab_size]
                bans.add(row, np.array(banned, dtype=np.int64), [-np.inf] * len(banned))
        if biases:
            flat_N.index_add_(0, *biases.tensors(device))
        if repetitions:
            places_N, factors_N = repetitions.tensors(device)
            values_N = flat_N[places_N]
            flat_N[places_N] = torch.where(values_N > 0, values_N / factors_N, values_N * factors_N)
        if penalties:
            flat_N.index_add_(0, *penalties.tensors(device), alpha=-1)
        if bans:
            places_N, infinities_N = bans.tensors(device)
            flat_N[places_N] = infinities_N


class _Edits:
    """Numbers for single logits of many rows, collected on the host and brought to the device together."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._places: list[_Int64] = []
        self._values: list[Iterable[float]] = []

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, row: int, token_ids: _Int64, values: Iterable[float]) -> None:
        if len(token_ids):
            self._places.append(row * self._vocab_size + token_ids)
            self._values.append(values)

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Places in the flattened logits, int64, and values, float32."""
        values = np.concatenate([np.array(values, dtype=np.float32) for values in self._values])
        return _on(device, np.concatenate(self._places)), _on(device, values)


def _draw(
    logits_DV: torch.Tensor, largest_D: torch.Tensor, steps: Sequence[SequenceStep], num_choices: int
) -> torch.Tensor:
    """The tokens [D, C] at which the cumulative distributions pass the rows' random numbers, one number a choice.

    Rows with fewer choices than `num_choices` repeat their first. `logits_DV` is spoilt.
    """
    device = logits_DV.device
    params = [step.sampling for step in steps]
    # A temperature too small for float32 would be 0 and give 0 / 0 for the most likely token.
    tiny = np.finfo(np.float32).tiny
    temperatures = np.maximum(np.array([each.temperature for each in params], dtype=np.float32), tiny)
    temperatures_D1 = _on(device, temperatures).unsqueeze(1)
    weights_DV = logits_DV.sub_(largest_D.unsqueeze(1)).div_(temperatures_D1).exp_()  # 1 for the most likely token
    _filter(weights_DV, params)
    sums_DV = weights_DV.cumsum(dim=-1, dtype=torch.float64)
    totals_D1 = sums_DV[:, -1:]
    choices = [(step.key.choice, *step.twins) for step in steps]
    padded = [(*each, *each[:1] * (num_choices - len(each))) for each in choices]
    numbers = uniforms(
        seeds=[each.seed for each in params for _ in range(num_choices)],
        choices=[choice for each in padded for choice in each],
        positions=[step.position for step in steps for _ in range(num_choices)],
    ).reshape(len(steps), num_choices)
    # A target that rounds up to the total would pass the end: one step less finds the last token with a weight.
    below_totals_D1 = torch.nextafter(totals_D1, torch.zeros_like(totals_D1))
    targets_DC = torch.minimum(_on(device, numbers) * totals_D1, below_totals_D1)
    tokens_DC = torch.searchsorted(sums_DV, targets_DC, right=True)
    # Sums of a row that is not finite lead anywhere; the host refuses what it gives.
    return tokens_DC.clamp_(max=weights_DV.shape[1] - 1)


def _filter(weights_DV: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Set the weights of dropped tokens to 0, in place. The most likely token always stays."""
    device, vocab_size = weights_DV.device, weights_DV.shape[1]
    min_ps = np.array([each.min_p for each in params], dtype=np.float32)
    if min_ps.any():
        weights_DV.masked_fill_(weights_DV < _on(device, min_ps).unsqueeze(1), 0.0)
    top_ks = np.array([each.top_k if 0 < each.top_k < vocab_size else vocab_size for each in params])
    top_ps = np.array([each.top_p for each in params], dtype=np.float64)
    has_top_k, has_top_p = bool((top_ks < vocab_size).any()), bool((top_ps < 1.0).any())
    if not has_top_k and not has_top_p:
        return
    descending_DV = weights_DV.sort(dim=-1, descending=True).values
    if has_top_k:
        top_ks_D1 = _on(device, top_ks).unsqueeze(1)
        _keep_largest(weights_DV, descending_DV, top_ks_D1)
        descending_DV.masked_fill_(torch.arange(vocab_size, device=device) >= top_ks_D1, 0.0)
    if has_top_p:
        top_ps_D1 = _on(device, top_ps).unsqueeze(1)
        sums_DV = descending_DV.cumsum(dim=-1, dtype=torch.float64)
        # The first token at which the share of the whole reaches top_p is the last to stay.
        counts_D1 = torch.searchsorted(sums_DV, top_ps_D1 * sums_DV[:, -1:]).add_(1).clamp_(max=vocab_size)
        _keep_largest(weights_DV, descending_DV, counts_D1.masked_fill_(top_ps_D1 >= 1.0, vocab_size))


def _keep_largest(weights_DV: torch.Tensor, descending_DV: torch.Tensor, counts_D1: torch.Tensor) -> None:
    """Zero all but each row's `count` largest; among those equal to the least that stays, the lowest ids stay."""
    borders_D1 = descending_DV.gather(1, counts_D1 - 1)
    num_equal_kept_D1 = counts_D1 - (weights_DV > borders_D1).sum(dim=-1, keepdim=True)
    is_equal_DV = weights_DV == borders_D1
    is_late_DV = is_equal_DV & (is_equal_DV.cumsum(dim=-1, dtype=torch.int32) > num_equal_kept_D1)
    weights_DV.masked_fill_((weights_DV < borders_D1) | is_late_DV, 0.0)


def _with_logprobs(
    sampled: list[list[SampledToken]], rows: Sequence[int], logprobs_LV: torch.Tensor, steps: Sequence[SequenceStep]
) -> None:
    """Replace the tokens of `rows` by such with log-probabilities."""
    places = [(place, row, choice) for place, row in enumerate(rows) for choice in range(len(sampled[row]))]
    places_N = _on(logprobs_LV.device, np.array([place for place, _, _ in places]))
    drawn_N = _on(logprobs_LV.device, np.array([sampled[row][choice].token_id for _, row, choice in places]))
    drawn = logprobs_LV[places_N, drawn_N].tolist()
    counts = [steps[row].sampling.logprobs or 0 for row in rows]
    # Not topk, which among equals takes any: another one in another batch.
    values_LV, ids_LV = logprobs_LV.sort(dim=-1, descending=True, stable=True)
    values, ids = values_LV[:, : max(counts)].tolist(), ids_LV[:, : max(counts)].tolist()
    for (place, row, choice), logprob in zip(places, drawn, strict=True):
        count = counts[place]
        top = tuple(zip(ids[place][:count], values[place][:count], strict=True))
        sampled[row][choice] = SampledToken(token_id=sampled[row][choice].token_id, logprob=logprob, top=top)


def _on(device: torch.device, array: npt.NDArray[np.generic]) -> torch.Tensor:
    """A copy on the device, which the host does not wait for."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
