"""Sampling on a GPU against the host's sampler, for any mixture of parameters in a batch."""

from __future__ import annotations

import random

import pytest
import torch

from engine.attention.torch_reference import TorchReferenceBackend
from engine.core.sampling import SamplingParams
from engine.model.device_sampler import DeviceSampler
from engine.model.sampler import Sampler
from tests.support.engine_model import make_step
from tests.support.sampling_cases import EOS, random_logits, random_steps

DEVICE = DeviceSampler([EOS])
HOST = Sampler([EOS], TorchReferenceBackend().argmax)


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(500, 2000), (49_152, 100), (152_000, 70)])
def test_tokens_are_the_hosts(vocab_size: int, num_rows: int) -> None:
    """But for a number that falls within the error of an exponential, some 1e-7, of a border between two tokens."""
    steps = random_steps(random.Random(vocab_size), num_rows, vocab_size)
    logits = random_logits(vocab_size, num_rows, vocab_size)
    ours = [token for tokens in DEVICE.sample(logits.cuda(), steps) for token in tokens]
    theirs = [token for tokens in HOST.sample(logits.clone(), steps) for token in tokens]
    assert sum(a.token_id != b.token_id for a, b in zip(ours, theirs, strict=True)) <= 2
    for a, b in zip(ours, theirs, strict=True):
        assert (a.logprob is None) == (b.logprob is None) and len(a.top) == len(b.top)
        if a.token_id == b.token_id and a.logprob is not None:
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
        assert [value for _, value in a.top] == pytest.approx([value for _, value in b.top], abs=1e-5)


def test_a_row_does_not_depend_on_the_batch() -> None:
    steps = random_steps(random.Random(3), 300, 5000)
    logits = random_logits(3, len(steps), 5000)
    together = DEVICE.sample(logits.cuda(), steps)
    alone = [DEVICE.sample(logits[row : row + 1].cuda(), [steps[row]])[0] for row in range(len(steps))]
    assert [[token.token_id for token in tokens] for tokens in together] == [
        [token.token_id for token in tokens] for tokens in alone
    ]


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    logits = torch.zeros(3, 152_000)
    logits[0, 151_000] = logits[0, 151_999] = 1.0
    logits[2, 7] = logits[2, 100_000] = 1.0
    steps = [make_step([0], 0, [0], sampling=SamplingParams()) for _ in range(3)]
    assert [token.token_id for (token,) in DEVICE.sample(logits.cuda(), steps)] == [151_000, 0, 7]
