"""What a finished step means for the sequences in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.core.step import ScoredToken, SequenceKey

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmittedToken:
    """A token for the client.

    Attributes:
        position: index in the sequence's output, forced tokens included.
        logprob, top: as the runner reported them, if they were asked for.
        finish_reason: set on the sequence's last token. The scheduler has then forgotten the sequence, except for a
            PREFILL_ONLY one, whose blocks stay held until `take_blocks` or `abort`.
    """

    key: SequenceKey
    position: int
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgress:
    """A prefill chunk was computed.

    Attributes:
        num_computed_tokens: tokens whose KV lies in the blocks now. Blocks 0 .. num_computed_tokens // block_size - 1
            are final, and so is a partly filled last one once num_computed_tokens == num_total_tokens.
        num_total_tokens: tokens to compute before the first token is drawn.
        block_table: blocks that hold the computed tokens, in token order; the receiver's own copy.
        num_cached_tokens: tokens that the prefix cache had when the sequence first ran.
    """

    key: SequenceKey
    num_computed_tokens: int
    num_total_tokens: int
    block_table: list[int]
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPrompt:
    """Log-probabilities of prompt tokens `position`, `position + 1`, ...; each position is reported once."""

    key: SequenceKey
    position: int
    tokens: list[ScoredToken]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSequence:
    """The step had no usable result for this sequence alone. The scheduler has forgotten it, and its siblings that had
    not started."""

    key: SequenceKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """Everything that a step brought, in the plan's order. `preempted` also names what planning it pushed out."""

    scored: list[ScoredPrompt] = field(default_factory=list)
    emitted: list[EmittedToken] = field(default_factory=list)
    progress: list[PrefillProgress] = field(default_factory=list)
    preempted: list[SequenceKey] = field(default_factory=list)
    failed: list[FailedSequence] = field(default_factory=list)
