"""Requests that arrive as a Poisson process, with the lengths of a recorded trace."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import mean, median

PROMPT_SCALE = 0.3
"""Of the recorded prompts: whole ones would leave two cores a request every few seconds, and 300 take an hour."""
MAX_PROMPT_MEDIANS = 2
"""Longer prompts are cut to so many times the median. Of those for code more than a tenth is longer than three times
the median, and no server would have their first tokens within three times the usual time, however idle."""
MIN_PROMPT_TOKENS, MIN_OUTPUT_TOKENS = 16, 4
"""A time per output token that is the mean of fewer gaps than this leaves says little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The lengths in `file`, scaled so that `prompt_share` prompt tokens come on one of output."""

    name: str
    file: str
    prompt_share: int


MIXES = (
    Mix(name="prefill-heavy", file="AzureLLMInferenceTrace_code.csv", prompt_share=20),
    Mix(name="balanced", file="AzureLLMInferenceTrace_conv.csv", prompt_share=5),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """`at_s`: seconds after the beginning."""

    at_s: float
    lengths: Lengths


def read_lengths(path: Path, prompt_share: int) -> list[Lengths]:
    """Prompts and answers of each row belong together. But for the longest prompts, both keep the shapes of their
    distributions: each is scaled by one factor for all rows."""
    with path.open(encoding="utf-8", newline="") as lines:
        recorded = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(lines)]
    longest = int(MAX_PROMPT_MEDIANS * median(prompt for prompt, _ in recorded))
    rows = [(min(prompt, longest), output) for prompt, output in recorded]
    prompt_tokens, output_tokens = (mean(column) for column in zip(*rows, strict=True))
    output_scale = PROMPT_SCALE * prompt_tokens / (prompt_share * output_tokens)
    return [
        Lengths(
            num_prompt_tokens=max(MIN_PROMPT_TOKENS, round(num_prompt_tokens * PROMPT_SCALE)),
            num_output_tokens=max(MIN_OUTPUT_TOKENS, round(num_output_tokens * output_scale)),
        )
        for num_prompt_tokens, num_output_tokens in rows
    ]


def poisson_trace(lengths: Sequence[Lengths], count: int, rate: float, seed: int) -> list[Arrival]:
    """`rate` requests a second on average. With the same seed the same requests come in the same order at every rate,
    with the same gaps, stretched: curves over the rate differ by the load alone."""
    source = random.Random(seed)
    drawn = [(source.expovariate(1.0), source.choice(lengths)) for _ in range(count)]
    times_s = accumulate(gap / rate for gap, _ in drawn)
    return [Arrival(at_s=at_s, lengths=chosen) for at_s, (_, chosen) in zip(times_s, drawn, strict=True)]
