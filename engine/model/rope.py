"""Rotary embedding: the table of cosines and sines, with the ways to stretch it that checkpoints use.

Each follows what transformers computes, operation by operation in float32, so that tokens agree.
"""

from __future__ import annotations

import math

import torch

from engine.model.rope_config import RopeConfig


def cos_sin_table(rope: RopeConfig, num_positions: int, head_dim: int) -> torch.Tensor:
    """float32 [num_positions, head_dim]: a row holds head_dim / 2 cosines, then head_dim / 2 sines.

    A table, not a computation each step: a position's values then do not depend on what else is in the step.
    """
    frequencies = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return torch.cat([frequencies.cos(), frequencies.sin()], dim=-1) * rope.attention_factor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2], radians a position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3_frequencies(plain, rope)
        case "yarn":
            return _yarn_frequencies(plain, rope, head_dim)


def _llama3_frequencies(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, and those between blended linearly (Llama 3.1)."""
    wavelengths = 2 * math.pi / plain
    turns = rope.original_max_position / wavelengths
    smooth = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return plain / rope.factor * (1 - smooth) + plain * smooth


def _yarn_frequencies(plain: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Frequencies below the first index are kept, above the second divided by `factor`, between them blended."""
    first, last = (_index_that_turns(turns, rope, head_dim) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a step, where the ramp would divide by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _index_that_turns(turns: float, rope: RopeConfig, head_dim: int) -> float:
    """The index, not rounded, of the frequency that turns so many times within the trained context."""
    wavelength = rope.original_max_position / (turns * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))
