"""Random requests to sample for, with every combination of parameters, and logits with and without ties."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from engine.core.sampling import SamplingParams
from engine.core.step import SequenceStep
from tests.support.engine_model import make_step

EOS = 2


def random_params(draw: random.Random, vocab_size: int) -> SamplingParams:
    """Each parameter is left out more often than not, so that many combinations come about."""

    def some(values: Sequence[Any], default: Any) -> Any:
        return draw.choice(values) if draw.random() < 0.35 else default

    ids = draw.sample(range(vocab_size), 4)
    return SamplingParams(
        temperature=draw.choice([0.0, 0.3, 1.0, 1.7]),
        top_k=some([1, 2, 7, vocab_size - 1, vocab_size, 10**6], 0),
        top_p=some([1e-9, 0.1, 0.5, 0.9, 0.999], 1.0),
        min_p=some([0.001, 0.1, 0.5, 1.0], 0.0),
        presence_penalty=some([-2.0, 0.5, 2.0], 0.0),
        frequency_penalty=some([-1.0, 0.3, 2.0], 0.0),
        repetition_penalty=some([1e-40, 0.5, 1.3, 10.0], 1.0),
        seed=draw.randrange(2**64),
        max_tokens=1000,
        min_tokens=some([5, 1000], 0),
        stop_token_ids=some([tuple(ids[:1]), tuple(ids[:3]), (vocab_size + 5,)], ()),
        logprobs=some([0, 1, 5, 20], None),
        logit_bias=tuple((token_id, draw.uniform(-4, 4)) for token_id in some([ids, ids[2:]], [])),
    )


def random_steps(draw: random.Random, num_rows: int, vocab_size: int) -> list[SequenceStep]:
    steps = []
    for row in range(num_rows):
        output = [draw.randrange(vocab_size) for _ in range(draw.choice([0, 1, 30]))]
        prompt = [draw.randrange(vocab_size) for _ in range(20)]
        params = random_params(draw, vocab_size)
        choice = draw.randrange(3)
        steps.append(
            make_step(
                *([0], 0, [0]),
                sampling=params,
                position=len(output),
                choice=choice,
                twins=tuple(range(choice + 1, choice + 1 + draw.choice([0, 0, 1, 3]))),
                request_id=str(row),
                prompt_ids=prompt,
                output_ids=output,
            )
        )
    return steps


def random_logits(seed: int, num_rows: int, vocab_size: int) -> torch.Tensor:
    """float32; every third row has few different values, so that many logits tie."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3.0
    logits[::3] = logits[::3].round()
    return logits
