"""One sequence: what it was asked for, how far it has come, and the blocks it holds."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from enum import Enum

from engine.core.block_hash import ROOT_HASH, block_hash
from engine.core.outcome import FinishReason
from engine.core.request import Sibling, twins_of
from engine.core.sampling import SamplingParams
from engine.core.step import SequenceKey


class SequenceMode(Enum):
    """What this worker does of a sequence."""

    LOCAL = "local"
    """Reads the prompt and writes the answer."""
    PREFILL_ONLY = "prefill_only"
    """Reads the prompt and draws one token for each answer. The blocks are then held until the push has taken them."""
    DECODE = "decode"
    """Writes the answer; the prompt's KV was pushed here."""


class SequencePhase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"
    """Prefill is done; the blocks wait for `take_blocks`."""
    GONE = "gone"
    """Finished or aborted. If a step that uses it is still running, that step's end releases its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """What is asked of the scheduler.

    Attributes:
        prompt_ids: at least one token id.
        extra_key: what the KV depends on besides tokens (block_hash.extra_key). Sequences share blocks only under
            the same key.
        forced_output_ids: output that the client already has, positions 0..k-1. It is run as input, and the next
            token drawn is at position k.
        siblings: other answers to the prompt. They become sequences of their own once this one's input is computed,
            and share its blocks as far as their inputs agree. Those whose delivered ids are the forced ones, the
            twins, draw their first token from this one's logits. With PREFILL_ONLY all are twins, and that is all
            they do.
        priority: higher runs first.
    """

    key: SequenceKey
    prompt_ids: list[int]
    sampling: SamplingParams
    mode: SequenceMode
    extra_key: bytes
    forced_output_ids: list[int] = field(default_factory=list)
    siblings: tuple[Sibling, ...] = ()
    priority: int = 0


class Sequence:
    """The scheduler's record of one sequence. Only the scheduler changes it.

    Attributes:
        order: sorts sequences by who is served first: higher priority, then earlier arrival, then lower choice.
        siblings: answers that wait for this sequence's input to be computed.
        output_ids: forced and drawn tokens.
        stop_ids: tokens that end the sequence.
        max_output_tokens: positions there can be, forced ones included.
        max_kv_tokens: most tokens whose KV this worker will ever need; a last token's KV is never computed.
        block_table: blocks held, in token order; no more than the computed and planned tokens need.
        num_computed: tokens whose KV lies in the blocks.
        num_to_prefill: tokens to compute before a token is drawn (prompt and, after a preemption, output).
        num_indexed_blocks: leading blocks of the table that were offered to the prefix index.
        num_cached_tokens: tokens found in the prefix cache when it first ran; None before.
        num_to_score: prompt tokens after the first whose log-probabilities are wanted of this sequence.
        num_scored: how many of them have been computed.
        is_held_back: it waits for what is being brought to the prefix cache, and is not to be admitted before.
        is_shielded: it was preempted and has drawn nothing since, so it must not be preempted again.
        last_step_id: the last step it was part of.
    """

    __slots__ = (
        "_block_hashes",
        "_extra_key",
        "block_table",
        "is_held_back",
        "is_shielded",
        "key",
        "last_step_id",
        "max_kv_tokens",
        "max_output_tokens",
        "mode",
        "num_cached_tokens",
        "num_computed",
        "num_indexed_blocks",
        "num_scored",
        "num_to_prefill",
        "num_to_score",
        "order",
        "output_ids",
        "phase",
        "prompt_ids",
        "sampling",
        "siblings",
        "stop_ids",
    )

    def __init__(
        self, spec: SequenceSpec, *, arrival: int, max_model_tokens: int, eos_token_ids: frozenset[int]
    ) -> None:
        self.key = spec.key
        self.mode = spec.mode
        self.sampling = spec.sampling
        self.prompt_ids = list(spec.prompt_ids)
        self.output_ids = list(spec.forced_output_ids)
        self.order = (-spec.priority, arrival, spec.key.choice)
        self.siblings = spec.siblings
        self.stop_ids = frozenset(spec.sampling.stop_token_ids)
        if not spec.sampling.ignore_eos:
            self.stop_ids |= eos_token_ids
        self.max_output_tokens = min(spec.sampling.max_tokens, max_model_tokens - len(self.prompt_ids))
        self.num_to_prefill = self.num_tokens
        self.max_kv_tokens = self.num_tokens
        if spec.mode is not SequenceMode.PREFILL_ONLY:
            self.max_kv_tokens = len(self.prompt_ids) + self.max_output_tokens - 1
        self.phase = SequencePhase.WAITING
        self.block_table: list[int] = []
        self.num_computed = 0
        self.num_indexed_blocks = 0
        self.num_cached_tokens: int | None = None
        is_scored = spec.sampling.prompt_logprobs is not None and spec.mode is not SequenceMode.DECODE
        self.num_to_score = len(self.prompt_ids) - 1 if is_scored else 0
        self.num_scored = 0
        self.is_held_back = False
        self.is_shielded = False
        self.last_step_id = -1
        self._extra_key = spec.extra_key
        self._block_hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.num_to_prefill

    @property
    def is_scoring(self) -> bool:
        return self.num_scored < self.num_to_score

    @property
    def num_matchable_tokens(self) -> int:
        """Leading tokens that may be taken from the prefix cache, which has no logits.

        At least one token is left to draw from; a prompt token can be scored only if the one before it is computed.
        """
        return self.num_scored if self.is_scoring else self.num_tokens - 1

    @property
    def twins(self) -> tuple[Sibling, ...]:
        """The siblings that draw their first token from this sequence's logits."""
        return twins_of(self.siblings, self.output_ids) if self.siblings else ()

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions start .. end - 1 of prompt and output together."""
        num_prompt_tokens = len(self.prompt_ids)
        if start >= num_prompt_tokens:
            return self.output_ids[start - num_prompt_tokens : end - num_prompt_tokens]
        if end <= num_prompt_tokens:
            return self.prompt_ids[start:end]
        return self.prompt_ids[start:] + self.output_ids[: end - num_prompt_tokens]

    def block_hashes(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Hashes of the first `num_blocks` blocks, which must be full. Each is computed once."""
        hashes = self._block_hashes
        for index in range(len(hashes), num_blocks):
            parent = hashes[-1] if hashes else ROOT_HASH
            token_ids = self.tokens(index * block_size, (index + 1) * block_size)
            hashes.append(block_hash(parent, token_ids, self._extra_key))
        return hashes[:num_blocks]

    def num_missing_blocks(self, num_ahead: int, block_size: int) -> int:
        """Blocks to add to the table before `num_ahead` more tokens than are known now can have been computed."""
        num_kv_tokens = min(self.num_tokens + num_ahead, self.max_kv_tokens)
        return max(0, num_blocks_for(num_kv_tokens, block_size) - len(self.block_table))

    def finish_reason(self, position: int, token_id: int) -> FinishReason | None:
        """Whether this token at `position`, the newest one, ends the answer: "stop", "length" or None."""
        if position >= self.sampling.min_tokens and token_id in self.stop_ids:
            return "stop"
        return "length" if position + 1 >= self.max_output_tokens else None

    def fork(self, sibling: Sibling, block_size: int) -> Sequence:
        """The sibling as a sequence, which names this one's blocks as far as the two inputs agree.

        This sequence's input is computed. The caller adds a use to the blocks, and gives a twin its first token.
        """
        other = copy(self)
        other.key = replace(self.key, choice=sibling.choice)
        other.order = (*self.order[:2], sibling.choice)
        other.siblings = ()
        other.output_ids = list(sibling.delivered_ids)
        is_twin = other.output_ids == self.output_ids
        num_shared_tokens = len(self.prompt_ids) + _num_equal(self.output_ids, other.output_ids)
        if not is_twin:
            num_shared_tokens = min(num_shared_tokens, other.num_tokens - 1)  # it draws from logits of its own
        num_shared_blocks = num_shared_tokens // block_size
        other.block_table = self.block_table[:num_shared_blocks]
        other._block_hashes = self._block_hashes[:num_shared_blocks]
        other.num_computed = num_shared_blocks * block_size
        other.num_indexed_blocks = num_shared_blocks
        other.num_to_prefill = other.num_tokens + is_twin
        other.num_cached_tokens = 0
        other.is_shielded = False
        other.last_step_id = -1
        return other

    def restart(self) -> None:
        """After a preemption: everything known so far is to be computed again, here."""
        self.mode = SequenceMode.LOCAL
        self.phase = SequencePhase.WAITING
        self.block_table = []
        self.num_computed = 0
        self.num_indexed_blocks = 0
        self.num_to_prefill = self.num_tokens
        self.is_shielded = True


class SequenceQueue:
    """Sequences in serving order. Insertion and removal are a binary search and a shift of pointers."""

    __slots__ = ("_sequences",)

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self._sequences[index]

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._sequences, sequence.order, key=_order)
        assert self._sequences[index] is sequence, f"{sequence.key} is not queued"
        del self._sequences[index]


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens, the last one perhaps in part."""
    return -(-num_tokens // block_size)


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order


def _num_equal(left: list[int], right: list[int]) -> int:
    """Length of the beginning that both have."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))
