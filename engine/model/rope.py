"""Rotary embedding: the table of cosines and sines, with the variants that Llama checkpoints use."""

from __future__ import annotations

import math

import torch

from engine.model.config import RopeConfig


def cos_sin_table(rope: RopeConfig, num_positions: int, head_dim: int) -> torch.Tensor:
    """float32 [num_positions, head_dim]: a row holds head_dim / 2 cosines, then head_dim / 2 sines.

    A table, not a computation each step: a position's values then do not depend on what else is in the step.
    """
    frequencies = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return torch.cat([frequencies.cos(), frequencies.sin()], dim=-1)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2], radians a position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    return _llama3_frequencies(plain, rope)


def _llama3_frequencies(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, and those between blended linearly (Llama 3.1)."""
    wavelengths = 2 * math.pi / plain
    turns = rope.original_max_position / wavelengths
    smooth = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return plain / rope.factor * (1 - smooth) + plain * smooth
