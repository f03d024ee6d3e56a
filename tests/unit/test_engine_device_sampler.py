"""The sampler for devices gives what the sampler for the host gives, for any mixture of parameters in a batch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.torch_reference import TorchReferenceBackend
from engine.core.sampling import SamplingParams
from engine.core.step import SequenceStep
from engine.model import device_sampler
from engine.model.device_sampler import DeviceSampler
from engine.model.philox import uniform, uniforms
from engine.model.sampler import Sampler
from tests.support.engine_model import make_step
from tests.support.sampling_cases import EOS, random_logits, random_steps

HOST = Sampler([EOS], TorchReferenceBackend().argmax)
DEVICE = DeviceSampler([EOS])


def step(request_id: str = "r", position: int = 0, **sampling: Any) -> SequenceStep:
    return make_step([0], 0, [0], sampling=SamplingParams(**sampling), request_id=request_id, position=position)


@pytest.fixture
def one_exponential(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both samplers use torch's: the only operation in which they may differ, since numpy has its own."""
    monkeypatch.setattr(np, "exp", lambda array: torch.from_numpy(array).exp().numpy())


@pytest.mark.usefixtures("one_exponential")
@pytest.mark.parametrize("vocab_size", [30, 997, 20_011])
@pytest.mark.parametrize("seed", range(4))
def test_every_token_and_logprob_is_the_same(seed: int, vocab_size: int) -> None:
    num_rows = 150 if vocab_size < 1000 else 30
    steps = random_steps(random.Random(seed), num_rows, vocab_size)
    logits = random_logits(seed, num_rows, vocab_size)
    drawn = DEVICE.sample(logits.clone(), steps)
    assert drawn == HOST.sample(logits.clone(), steps)
    assert [len(tokens) for tokens in drawn] == [1 + len(each.twins) for each in steps]


@pytest.mark.parametrize("sampler", [DEVICE, HOST])
def test_likeliest_tokens_are_the_lowest_ids_among_equals(sampler: DeviceSampler | Sampler) -> None:
    logits = torch.zeros(2, 5000)
    logits[0, 4000] = 1.0
    (first,), (second,) = sampler.sample(logits, [step(logprobs=3), step(logprobs=1)])
    assert [token_id for token_id, _ in first.top] == [4000, 0, 1]
    assert [token_id for token_id, _ in second.top] == [0]


def test_tokens_are_the_same_with_the_exponentials_as_they_are() -> None:
    """A number that falls within some 1e-7 of a border between two tokens may go either way."""
    num_different = 0
    for seed in range(10, 20):
        steps = random_steps(random.Random(seed), 300, 500)
        logits = random_logits(seed, len(steps), 500)
        pairs = zip(DEVICE.sample(logits.clone(), steps), HOST.sample(logits.clone(), steps), strict=True)
        num_different += sum(
            ours.token_id != theirs.token_id for of_row in pairs for ours, theirs in zip(*of_row, strict=True)
        )
    assert num_different <= 2


def test_a_row_does_not_depend_on_the_batch() -> None:
    steps = random_steps(random.Random(5), 200, 400)
    logits = random_logits(5, len(steps), 400)
    together = DEVICE.sample(logits.clone(), steps)
    alone = [DEVICE.sample(logits[row : row + 1].clone(), [steps[row]])[0] for row in range(len(steps))]
    assert together == alone


def test_more_rows_than_are_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = random_steps(random.Random(6), 40, 100)
    logits = random_logits(6, len(steps), 100)
    expected = DEVICE.sample(logits.clone(), steps)
    monkeypatch.setattr(device_sampler, "_MAX_DRAWN_ROWS", 7)
    assert DEVICE.sample(logits.clone(), steps) == expected


def test_greedy_rows_take_the_lowest_id_on_a_tie_and_nothing_is_drawn() -> None:
    logits = torch.zeros(3, 20_000)
    logits[0, 15_000] = logits[0, 19_999] = 1.0
    logits[2, 7] = logits[2, 8] = 1.0
    assert [token.token_id for (token,) in DEVICE.sample(logits, [step(), step(), step()])] == [15_000, 0, 7]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_gives_nothing_and_the_others_what_they_would(
    value: float, temperature: float
) -> None:
    logits = torch.randn(3, 10)
    steps = [step(name, position=4, temperature=temperature, top_p=0.5, logprobs=1) for name in "abc"]
    expected = DEVICE.sample(logits.clone(), steps)
    logits[1] = value
    assert DEVICE.sample(logits, steps) == [expected[0], None, expected[2]]


def test_a_row_with_every_token_forbidden_is_refused() -> None:
    logits = torch.zeros(1, 3)
    assert DEVICE.sample(logits, [step(min_tokens=1, stop_token_ids=(0, 1), temperature=1.0)]) == [None]


def test_random_numbers_of_many_tokens_are_those_of_each() -> None:
    draw = random.Random(1)
    seeds = [0, 2**64 - 1, *(draw.randrange(2**64) for _ in range(200))]
    choices = [0, 127, *(draw.randrange(2**20) for _ in range(200))]
    positions = [0, 2**32 - 1, *(draw.randrange(2**31) for _ in range(200))]
    expected = [
        uniform(seed=seed, choice=choice, position=position)
        for seed, choice, position in zip(seeds, choices, positions, strict=True)
    ]
    assert uniforms(seeds=seeds, choices=choices, positions=positions).tolist() == expected
