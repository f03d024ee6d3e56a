"""What the prefix cache has done since the start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.core.tiers import BlockCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCounters:
    """Of the prefix cache, since the start.

    Attributes:
        num_query_tokens: of prompts (with the output they resume after) that were looked up, each one once.
        num_hit_tokens: of these, found in the cache and not computed. num_host_hit_tokens: of these, in the host tier.
        num_stored_blocks, num_evicted_blocks: of the pool, that have become findable, and that were given away again.
        num_spilled_blocks, num_loaded_blocks: copied to the host tier, and back.
    """

    num_query_tokens: int
    num_hit_tokens: int
    num_stored_blocks: int
    num_evicted_blocks: int
    num_host_hit_tokens: int = 0
    num_spilled_blocks: int = 0
    num_loaded_blocks: int = 0


class UseCounts:
    """Counts look-ups, and the copies between tiers that were asked for."""

    __slots__ = ("num_hit_tokens", "num_host_hit_tokens", "num_loaded_blocks", "num_query_tokens", "num_spilled_blocks")

    def __init__(self) -> None:
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.num_host_hit_tokens = 0
        self.num_spilled_blocks = 0
        self.num_loaded_blocks = 0

    def lookup(self, num_query_tokens: int, num_hit_tokens: int, num_host_hit_tokens: int) -> None:
        assert 0 <= num_host_hit_tokens <= num_hit_tokens <= num_query_tokens
        self.num_query_tokens += num_query_tokens
        self.num_hit_tokens += num_hit_tokens
        self.num_host_hit_tokens += num_host_hit_tokens

    def copies(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            self.num_loaded_blocks += copy.is_load
            self.num_spilled_blocks += not copy.is_load
