"""The sampler: exact choices where they are forced, frequencies where they are drawn, and independence of the batch."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from engine.attention.torch_reference import TorchReferenceBackend
from engine.core.sampling import SamplingParams
from engine.core.step import SampledToken, SequenceStep
from engine.model.philox import philox4x32, uniform
from engine.model.sampler import Sampler
from tests.support.engine_model import make_step

EOS = 2
SAMPLER = Sampler([EOS], TorchReferenceBackend().argmax)


def step(
    position: int = 0,
    choice: int = 0,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    **sampling: Any,
) -> SequenceStep:
    params = SamplingParams(**sampling)
    return make_step(
        [0], 0, [0], sampling=params, position=position, choice=choice, prompt_ids=prompt or [], output_ids=output or []
    )


def sample_one(logits: list[float], which: SequenceStep) -> SampledToken:
    (token,) = SAMPLER.sample(torch.tensor([logits]), [which])[0]
    return token


def frequencies(logits: list[float], num_draws: int = 4000, **sampling: Any) -> dict[int, float]:
    """Shares of the tokens drawn at positions 0 .. num_draws - 1 of one request."""
    steps = [step(position=position, max_tokens=10**6, **sampling) for position in range(num_draws)]
    tokens = SAMPLER.sample(torch.tensor([logits]).repeat(num_draws, 1), steps)
    counts = Counter(token.token_id for (token,) in tokens)
    return {token_id: count / num_draws for token_id, count in counts.items()}


# Vectors published with the Random123 library.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_vectors(counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert philox4x32(counter, key) == expected


def test_uniform_is_uniform_and_depends_on_each_part() -> None:
    numbers = [uniform(seed=2**63 + 5, choice=0, position=position) for position in range(4000)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02
    assert max(Counter(int(number * 16) for number in numbers).values()) < 4000 / 16 * 1.3
    base = {"seed": 1, "choice": 1, "position": 1, "draw": 1}
    changed = [uniform(**{**base, name: value}) for name in base for value in (0, 2)]
    changed.append(uniform(seed=1 + 2**32, choice=1, position=1, draw=1))
    assert len({uniform(**base), *changed}) == 10


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    assert sample_one([0.0, 3.0, 1.0, 3.0], step()).token_id == 1
    wide = torch.zeros(3, 49_152)
    wide[0, 40_000] = wide[0, 40_001] = 1.0
    wide[2, 7] = wide[2, 49_151] = 1.0
    assert [token.token_id for (token,) in SAMPLER.sample(wide, [step(), step(), step()])] == [40_000, 0, 7]


def test_plain_sampling_follows_softmax() -> None:
    logits = [1.0, 0.0, 2.0, -1.0]
    expected = torch.tensor(logits).softmax(0).tolist()
    found = frequencies(logits, temperature=1.0, seed=11)
    for token_id, probability in enumerate(expected):
        assert found[token_id] == pytest.approx(probability, abs=0.025)


def test_temperature_flattens_and_sharpens() -> None:
    logits = [1.0, 0.0]
    for temperature in (0.5, 2.0):
        expected = 1 / (1 + math.exp(-1 / temperature))
        assert frequencies(logits, temperature=temperature)[0] == pytest.approx(expected, abs=0.025)


def test_a_tiny_temperature_is_greedy_without_nan() -> None:
    assert sample_one([1.0, 1.5, 1.4], step(temperature=1e-300)).token_id == 1


def test_top_k() -> None:
    logits = [0.5, 0.4, 0.3, 0.2]
    assert set(frequencies(logits, temperature=1.0, top_k=2)) == {0, 1}
    assert frequencies(logits, temperature=1.0, top_k=1) == {0: 1.0}
    assert set(frequencies(logits, temperature=1.0, top_k=100)) == {0, 1, 2, 3}


def test_top_k_keeps_the_lowest_ids_among_equals() -> None:
    assert set(frequencies([1.0, 2.0, 1.0, 1.0, 1.0], temperature=1.0, top_k=3)) == {0, 1, 2}


def test_top_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert set(frequencies(logits, temperature=1.0, top_p=0.5)) == {0}
    assert set(frequencies(logits, temperature=1.0, top_p=0.51)) == {0, 1}
    assert set(frequencies(logits, temperature=1.0, top_p=0.81)) == {0, 1, 2}
    assert frequencies(logits, temperature=1.0, top_p=1e-9) == {0: 1.0}
    kept = frequencies(logits, temperature=1.0, top_p=0.7)
    assert kept[0] == pytest.approx(0.5 / 0.8, abs=0.025), "the rest is renormalised"


def test_top_p_counts_the_share_of_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    # Of {0, 1} token 0 has 4/7 = 0.571.
    assert set(frequencies(logits, temperature=1.0, top_k=2, top_p=0.57)) == {0}
    assert set(frequencies(logits, temperature=1.0, top_k=2, top_p=0.58)) == {0, 1}


def test_top_p_over_a_flat_vocabulary_keeps_the_lowest_ids() -> None:
    logits = torch.zeros(1, 5000)
    drawn = {
        SAMPLER.sample(logits.clone(), [step(temperature=1.0, top_p=0.5, seed=seed)])[0][0].token_id
        for seed in range(200)
    }
    assert max(drawn) <= 2500
    assert max(drawn) > 1500


def test_min_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert set(frequencies(logits, temperature=1.0, min_p=0.59)) == {0, 1}
    assert set(frequencies(logits, temperature=1.0, min_p=0.61)) == {0}
    assert frequencies(logits, temperature=1.0, min_p=1.0) == {0: 1.0}


def test_a_number_at_the_very_end_takes_the_last_token_with_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = [1.0, 1.0, -1e9]
    monkeypatch.setattr("engine.model.sampler.uniform", lambda **_: 1 - 2**-53)
    assert sample_one(logits, step(temperature=1.0)).token_id == 1
    monkeypatch.setattr("engine.model.sampler.uniform", lambda **_: 0.0)
    assert sample_one(logits, step(temperature=1.0)).token_id == 0
    assert sample_one([-1e9, 1.0], step(temperature=1.0)).token_id == 1


def test_repetition_penalty_counts_prompt_and_output() -> None:
    logits = [2.0, 1.9, -0.1, -0.15]
    assert sample_one(logits, step(prompt=[0, 0], repetition_penalty=1.5)).token_id == 1
    assert sample_one(logits, step(prompt=[0], output=[1], repetition_penalty=10.0)).token_id == 0
    assert sample_one([-0.1, -0.15], step(output=[0], repetition_penalty=2.0)).token_id == 1, "negative: multiplied"
    assert sample_one(logits, step(prompt=[1], repetition_penalty=0.5)).token_id == 1, "below 1 it encourages"


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_a_tiny_repetition_penalty_keeps_logits_finite_and_in_order(temperature: float) -> None:
    """The least that a client can ask for: divided by it, every logit would be infinite, and the step would fail."""
    which = step(repetition_penalty=1e-45, temperature=temperature, prompt=[0, 1, 2])
    assert sample_one([20.0, 21.0, -5.0, 30.0], which).token_id == 1


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    logits = [2.0, 1.0, 0.0]
    assert sample_one(logits, step(prompt=[0] * 9, presence_penalty=2.0, frequency_penalty=2.0)).token_id == 0
    assert sample_one(logits, step(output=[0], presence_penalty=1.5)).token_id == 1
    assert sample_one(logits, step(output=[0], frequency_penalty=0.6)).token_id == 0
    assert sample_one(logits, step(output=[0, 0], frequency_penalty=0.6)).token_id == 1
    assert sample_one(logits, step(output=[0, 0], presence_penalty=1.5)).token_id == 1
    assert sample_one(logits, step(output=[2], presence_penalty=-2.0, frequency_penalty=-0.5)).token_id == 2


def test_logit_bias() -> None:
    assert sample_one([2.0, 1.0, 0.0], step(logit_bias=((2, 5.0), (0, -100.0)))).token_id == 2
    assert sample_one([2.0, 1.0, 0.0], step(logit_bias=((2, 1.5), (2, 1.5)))).token_id == 2, "repeats add up"


def test_min_tokens_masks_eos_and_stop_tokens() -> None:
    logits = [0.0, 1.0, 9.0, 8.0]
    masked: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": (3, 10**6)}
    assert sample_one(logits, step(position=1, **masked)).token_id == 1
    assert sample_one(logits, step(position=2, **masked)).token_id == EOS
    assert sample_one(logits, step(position=1, temperature=1.0, top_k=1, **masked)).token_id == 1
    assert sample_one(logits, step(position=0, min_tokens=1)).token_id == 3


def test_logprobs_are_those_of_the_unmodified_logits() -> None:
    logits = [2.0, 1.0, 0.0, 1.0]
    expected = torch.tensor(logits).log_softmax(0).tolist()
    token = sample_one(logits, step(logprobs=3, logit_bias=((2, 100.0),), temperature=0.7, top_k=1))
    assert token.token_id == 2
    assert token.logprob == pytest.approx(expected[2])
    assert [token_id for token_id, _ in token.top] == [0, 1, 3], "most likely first, then by id"
    assert [value for _, value in token.top] == pytest.approx([expected[0], expected[1], expected[3]])
    assert sample_one(logits, step(logprobs=0)).top == ()
    assert sample_one(logits, step(logprobs=0)).logprob == pytest.approx(expected[0])
    assert sample_one(logits, step()).logprob is None


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Alone, in any order and beside others, a request draws the same tokens and log-probabilities."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(12, 3001, generator=generator) * 3
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9},
        {"temperature": 1.3, "top_p": 0.9, "logprobs": 2},
        {"temperature": 1.0, "top_k": 40, "min_p": 0.01},
        {"temperature": 0.7, "presence_penalty": 1.0, "repetition_penalty": 1.2, "output": [5, 5, 9], "prompt": [1]},
        {"logprobs": 5, "logit_bias": ((3, 4.0),)},
    ]
    steps = [step(position=row, seed=row // 2, choice=row % 2, **kinds[row % 6]) for row in range(12)]
    together = SAMPLER.sample(logits.clone(), steps)
    alone = [SAMPLER.sample(logits[row : row + 1].clone(), [steps[row]])[0] for row in range(12)]
    assert alone == together
    order = [7, 1, 11, 0, 4, 3]
    assert SAMPLER.sample(logits[order].clone(), [steps[row] for row in order]) == [together[row] for row in order]


def test_choices_and_positions_draw_differently() -> None:
    logits = torch.zeros(1, 1000)
    draws = {
        SAMPLER.sample(logits.clone(), [step(temperature=1.0, seed=1, choice=choice, position=position)])[0][0].token_id
        for choice in range(5)
        for position in range(5)
    }
    assert len(draws) > 20


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_gives_nothing_and_the_others_what_they_would(bad: float, temperature: float) -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(3))
    steps = [step(temperature=temperature, seed=row, logprobs=row, top_p=0.9) for row in range(3)]
    expected = SAMPLER.sample(logits.clone(), steps)
    logits[1] = bad
    assert SAMPLER.sample(logits, steps) == [expected[0], None, expected[2]]


def test_single_infinities() -> None:
    for bad in (float("nan"), float("inf")):
        assert SAMPLER.sample(torch.tensor([[1.0, bad, 0.0]]), [step()]) == [None]
    assert sample_one([float("-inf"), 1.0], step(temperature=1.0)).token_id == 1


def test_no_rows() -> None:
    assert SAMPLER.sample(torch.empty(0, 10), []) == []
