"""How long an answer is expected to be: a running estimate from those that have ended."""

from __future__ import annotations

from math import ceil
from typing import Final

UNMEASURED_OUTPUT_TOKENS: Final = 256
"""Expected of an answer while none has ended."""
MEAN_GAIN: Final = 1 / 16
DEVIATION_GAIN: Final = 1 / 8


class OutputEstimate:
    """Running mean and mean deviation, as TCP estimates its round trips (Jacobson, "Congestion Avoidance and Control",
    1988). Their sum is what to keep room for: running answers seldom exceed it together, and one that does is noticed
    by the blocks that its worker reports.
    """

    def __init__(self, first_guess_tokens: float = UNMEASURED_OUTPUT_TOKENS) -> None:
        self.mean_tokens: float = first_guess_tokens
        self._deviation_tokens = 0.0

    @property
    def num_tokens(self) -> int:
        """Of one answer; at least 1."""
        return max(1, ceil(self.mean_tokens + self._deviation_tokens))

    def learn(self, num_tokens: float) -> None:
        """An answer of so many tokens has ended by itself."""
        error = num_tokens - self.mean_tokens
        self.mean_tokens += MEAN_GAIN * error
        self._deviation_tokens += DEVIATION_GAIN * (abs(error) - self._deviation_tokens)

    def check_invariants(self) -> None:
        assert self.mean_tokens >= 0 and self._deviation_tokens >= 0
