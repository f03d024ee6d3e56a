"""A request's body: what the engine needs to run it and the coordinator must not look into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Sibling:
    """Another answer to the same prompt: its number, and what of it an earlier attempt delivered."""

    choice: int
    delivered_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBody:
    """Prompt, parameters, and the output a client already has.

    Of several answers one leads: its input (the prompt and its delivered ids) is computed first, and the others share
    what they have in common with it. Answers that have ended are not named any more.

    Attributes:
        prompt_ids: at least one token id.
        choice: number of the answer that leads. Of no other one has less been delivered.
        delivered_ids: its output tokens (positions 0..k-1) that an earlier attempt delivered; replayed as input.
        siblings: the other answers.
        adapter, cache_salt: part of the block hash's extra key.
        priority: higher runs first.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    choice: int = 0
    delivered_ids: tuple[int, ...] = ()
    siblings: tuple[Sibling, ...] = ()
    adapter: str = ""
    cache_salt: str = ""
    priority: int = 0

    @property
    def choices(self) -> tuple[int, ...]:
        """All answers, the leading one first."""
        return (self.choice, *(sibling.choice for sibling in self.siblings))

    @property
    def twins(self) -> tuple[Sibling, ...]:
        """The siblings that draw their next token from the leading answer's logits."""
        return twins_of(self.siblings, self.delivered_ids)

    @property
    def num_input_tokens(self) -> int:
        """Tokens that are computed before the first one is drawn."""
        return len(self.prompt_ids) + len(self.delivered_ids)

    @property
    def num_scores(self) -> int:
        """Prompt tokens whose log-probabilities are wanted: all but the first, or none."""
        return 0 if self.sampling.prompt_logprobs is None else len(self.prompt_ids) - 1


def twins_of(siblings: tuple[Sibling, ...], delivered_ids: Sequence[int]) -> tuple[Sibling, ...]:
    """Those of which exactly this has been delivered."""
    return tuple(sibling for sibling in siblings if sibling.delivered_ids == tuple(delivered_ids))
