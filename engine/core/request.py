"""A request's body: what the engine needs to run it and the coordinator must not look into."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBody:
    """Prompt, parameters, and the output a client already has.

    Attributes:
        prompt_ids: at least one token id.
        delivered_ids: output tokens (positions 0..k-1, choice 0) that an earlier attempt delivered; replayed as input.
        adapter, cache_salt: part of the block hash's extra key.
        priority: higher runs first.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    delivered_ids: tuple[int, ...] = ()
    adapter: str = ""
    cache_salt: str = ""
    priority: int = 0
