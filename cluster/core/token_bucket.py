"""A token bucket: a rate, and how far above it a burst may go (Turner 1986; RFC 2697 has the usual form)."""

from __future__ import annotations

from cluster.core.limits import NS_PER_MS, NS_PER_S

_NANO = NS_PER_S
"""The level is counted in thousand-millionths of a token: at so many tokens a second, a nanosecond brings just one."""


class TokenBucket:
    """Full in the beginning, and never fuller than `burst_tokens`.

    What is taken may turn out more or less than was thought, so the level may be corrected later, and may fall below
    zero: a debt that is paid off at the rate before anything more is given. Something larger than a whole burst is
    given to a full bucket, and leaves such a debt.
    """

    def __init__(self, tokens_per_s: int, burst_tokens: int) -> None:
        assert tokens_per_s > 0 and burst_tokens > 0
        self.tokens_per_s = tokens_per_s
        self.burst_tokens = burst_tokens
        self._level_nano = burst_tokens * _NANO
        self._filled_ns = 0

    def level_tokens(self, now_ns: int) -> int:
        """Whole tokens that are there; below zero while there is a debt."""
        self._fill(now_ns)
        return self._level_nano // _NANO

    def wait_ms(self, now_ns: int, num_tokens: int) -> int:
        """Until so many may be taken: 0 if they may be now."""
        self._fill(now_ns)
        missing_nano = min(num_tokens, self.burst_tokens) * _NANO - self._level_nano
        if missing_nano <= 0:
            return 0
        missing_ns = -(-missing_nano // self.tokens_per_s)
        return -(-missing_ns // NS_PER_MS)

    def take(self, now_ns: int, num_tokens: int) -> None:
        """Negative numbers give back."""
        self._fill(now_ns)
        self._level_nano = min(self._level_nano - num_tokens * _NANO, self.burst_tokens * _NANO)

    def take_what_is_there(self, now_ns: int, num_tokens: int) -> None:
        """As `take`, but makes no debt."""
        self.take(now_ns, max(0, min(num_tokens, self.level_tokens(now_ns))))

    def check_invariants(self) -> None:
        assert self._level_nano <= self.burst_tokens * _NANO

    def _fill(self, now_ns: int) -> None:
        elapsed_ns = max(0, now_ns - self._filled_ns)
        self._level_nano = min(self._level_nano + elapsed_ns * self.tokens_per_s, self.burst_tokens * _NANO)
        self._filled_ns = max(self._filled_ns, now_ns)
