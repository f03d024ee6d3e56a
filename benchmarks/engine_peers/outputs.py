"""Whether two engines that round differently gave the same output: each token must be a near-argmax.

Greedy tokens of engines that sum in another order part at the first near-tie, and from there on are answers to
different texts. So each side's tokens are forced through the model in float32, and for each token it is asked how far
its logit lies below the largest: within rounding for a right engine, several units for one that lost or mixed up KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NEAR_TIE = 0.3
"""Logits. Those of the demo model are of a size at which bfloat16 counts in steps of an eighth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the sides answered to one prompt. Margins are filled in by the judge."""

    measure: str
    prompt: list[int]
    tokens: Mapping[str, list[int]]
    margins: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """About one side.

    Attributes:
        num_tokens: that were judged.
        num_off: of these, not the float32 model's own choice.
        worst_margin: the largest distance of a token below the float32 model's own choice.
    """

    num_tokens: int
    num_off: int
    worst_margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where two sides part: the position, and the distance between their tokens for the float32 model."""

    measure: str
    position: int
    margin: float


def verdict(samples: Sequence[Sample], side: str) -> Verdict:
    """Raises ValueError if the side has answered nothing."""
    margins = [margin for sample in samples for margin in sample.margins.get(side, ())]
    if not margins:
        raise ValueError(f"no answers of {side}")
    return Verdict(num_tokens=len(margins), num_off=sum(margin > 0 for margin in margins), worst_margin=max(margins))


def divergences(samples: Sequence[Sample], side: str, other: str) -> list[Divergence]:
    """The first place where each pair of answers differs, if there are two and they differ within the shorter one."""
    found = []
    for sample in samples:
        if not {side, other} <= sample.tokens.keys():
            continue
        pairs = enumerate(zip(sample.tokens[side], sample.tokens[other], strict=False))
        position = next((position for position, (mine, theirs) in pairs if mine != theirs), None)
        if position is not None:
            # Up to here both have read the same text, so that their margins are on one scale.
            margin = abs(sample.margins[side][position] - sample.margins[other][position])
            found.append(Divergence(measure=sample.measure, position=position, margin=margin))
    return found
