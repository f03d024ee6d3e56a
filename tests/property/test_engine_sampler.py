"""The sampler against its rules, written once more: plainly, in float64, one token after the other."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.attention.torch_reference import TorchReferenceBackend
from engine.core.sampling import SamplingParams
from engine.model.philox import uniform
from engine.model.sampler import Sampler, score
from tests.support.engine_model import make_step

VOCABULARY_SIZE = 60
EOS = (3, 8)
NEGLIGIBLE = 1e-5
"""What float32 may make of a probability."""

ids = st.integers(0, VOCABULARY_SIZE - 1)
histories = st.lists(ids, max_size=12)
parameters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 0, 1, 5, 59, 500]),
        "top_p": st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
        "min_p": st.sampled_from([0.0, 0.0, 0.02, 0.4]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.7, -1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.5]),
        "min_tokens": st.integers(0, 16),
        "stop_token_ids": st.lists(ids, max_size=4).map(tuple),
        "logprobs": st.sampled_from([None, 0, 3, 20]),
        "logit_bias": st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 4.0, 100.0]), max_size=4).map(
            lambda biases: tuple(sorted(biases.items()))
        ),
        "seed": st.integers(0, 2**64 - 1),
    }
)


def log_softmax(logits: list[float]) -> list[float]:
    largest = max(logits)
    total = math.log(sum(math.exp(logit - largest) for logit in logits))
    return [logit - largest - total for logit in logits]


def probabilities(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """Of each token, after everything that was asked for, in the documented order."""
    values = list(logits)
    for token_id, bias in params.logit_bias:
        values[token_id] += bias
    for token_id in sorted({*prompt, *output}):
        divides = values[token_id] > 0
        values[token_id] *= 1 / params.repetition_penalty if divides else params.repetition_penalty
    for token_id, count in Counter(output).items():
        values[token_id] -= params.presence_penalty + count * params.frequency_penalty
    if len(output) < params.min_tokens:
        for token_id in (*EOS, *params.stop_token_ids):
            values[token_id] = -math.inf
    if params.temperature == 0:
        likeliest = values.index(max(values))
        return [float(token_id == likeliest) for token_id in range(len(values))]
    largest = max(values)
    weights = [math.exp((value - largest) / params.temperature) for value in values]
    weights = [weight if weight >= params.min_p else 0.0 for weight in weights]
    order = sorted(range(len(weights)), key=lambda token_id: (-weights[token_id], token_id))
    if params.top_k:
        order = order[: params.top_k]
    kept, reached, whole = [], 0.0, sum(weights[token_id] for token_id in order)
    for token_id in order:
        kept.append(token_id)
        reached += weights[token_id]
        if reached >= params.top_p * whole:
            break
    total = sum(weights[token_id] for token_id in kept)
    return [weights[token_id] / total if token_id in kept else 0.0 for token_id in range(len(weights))]


def assert_drawn(token_id: int, number: float, shares: list[float]) -> None:
    """The token is the one in whose stretch of the cumulative distribution the random number falls."""
    before = sum(shares[:token_id])
    assert shares[token_id] > 0, f"{token_id} was dropped"
    assert before - NEGLIGIBLE <= number <= before + shares[token_id] + NEGLIGIBLE, f"{number} is not in {token_id}"


@settings(max_examples=400, deadline=None)
@given(
    values=parameters,
    prompt=histories,
    output=histories,
    noise=st.integers(0, 2**32 - 1),
    choice=st.integers(0, 15),
    twins=st.lists(st.integers(0, 15), max_size=3),
)
@example(
    values={"temperature": 1.0, "min_tokens": 1, "stop_token_ids": (5,)},
    prompt=[],
    output=[],
    noise=0,
    choice=0,
    twins=[1, 2],
)
def test_every_rule(
    values: dict[str, Any], prompt: list[int], output: list[int], noise: int, choice: int, twins: list[int]
) -> None:
    params = SamplingParams(max_tokens=100, **values)
    logits = np.random.default_rng(noise).normal(0, 3, VOCABULARY_SIZE).astype(np.float32)
    step = make_step(
        [0],
        0,
        [0],
        sampling=params,
        choice=choice,
        twins=twins,
        position=len(output),
        prompt_ids=prompt,
        output_ids=output,
    )
    tokens = Sampler(EOS, TorchReferenceBackend().argmax).sample(torch.from_numpy(logits[None].copy()), [step])[0]
    shares = probabilities(logits.tolist(), params, prompt, output)
    raw = log_softmax(logits.tolist())
    assert len(tokens) == 1 + len(twins)
    for token, of_choice in zip(tokens, (choice, *twins), strict=True):
        assert_drawn(token.token_id, uniform(seed=params.seed, choice=of_choice, position=len(output)), shares)
        if params.logprobs is None:
            assert token.logprob is None and token.top == ()
            continue
        assert token.logprob == pytest.approx(raw[token.token_id], abs=NEGLIGIBLE), "of the model, before all rules"
        assert_likeliest(token.top, raw, params.logprobs)


def assert_likeliest(top: tuple[tuple[int, float], ...], raw: list[float], count: int) -> None:
    expected = sorted(range(len(raw)), key=lambda token_id: -raw[token_id])[:count]
    assert [token_id for token_id, _ in top] == expected
    assert [logprob for _, logprob in top] == pytest.approx([raw[token_id] for token_id in expected], abs=NEGLIGIBLE)


@given(noise=st.integers(0, 2**32 - 1), given_ids=st.lists(ids, min_size=1, max_size=8), num_top=st.integers(0, 20))
def test_given_tokens_are_scored_by_the_models_own_distribution(noise: int, given_ids: list[int], num_top: int) -> None:
    logits = np.random.default_rng(noise).normal(0, 3, (len(given_ids), VOCABULARY_SIZE)).astype(np.float32)
    scored = score(torch.from_numpy(logits), given_ids, num_top)
    assert [token.token_id for token in scored] == given_ids
    for token, row in zip(scored, logits.tolist(), strict=True):
        raw = log_softmax(row)
        assert token.logprob == pytest.approx(raw[token.token_id], abs=NEGLIGIBLE)
        assert_likeliest(token.top, raw, num_top)
