"""What passes between the scheduler and the runner: one StepPlan in, one StepResult out."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.sampling import SamplingParams
from engine.core.tiers import BlockCopy


@dataclass(frozen=True, slots=True, order=True)
class SequenceKey:
    """Names one sequence on a worker: one choice of one attempt at one request."""

    request_id: str
    attempt: int
    choice: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStep:
    """One sequence's share of a step: run `token_ids` at positions `start .. start + len(token_ids) - 1`.

    Attributes:
        key: whose sequence it is.
        token_ids: the tokens to run, at least one. Their KV is written through `block_table`.
        start: number of tokens of this sequence whose KV already lies in the pool.
        block_table: block ids in token order, covering at least start + len(token_ids) tokens.
        sample: whether a token is to be drawn from the logits after the last of `token_ids`.
        sampling: the request's parameters.
        position: index in the output of the token that would be drawn (0 is the first emitted token).
        prompt_ids, output_ids: the history that penalties are counted from; read-only views of the
            sequence's own lists, valid during the step only. Empty unless `sample`.
        twins: choices besides the key's own for which a token is drawn from the same logits, at the same position.
        scored_ids: the tokens that follow `token_ids[0]`, `token_ids[1]`, ..., whose log-probabilities are wanted, as
            far as that is so; `sampling.prompt_logprobs` says how many alternatives to each.
    """

    key: SequenceKey
    token_ids: list[int]
    start: int
    block_table: list[int]
    sample: bool
    sampling: SamplingParams
    position: int
    prompt_ids: list[int]
    output_ids: list[int]
    twins: tuple[int, ...] = ()
    scored_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass: first the decoding sequences (one token each), then prefill chunks.

    `copies` are made before it, in their order: they bring cached content into the blocks that it reads, and save what
    lies in those that it writes.
    """

    step_id: int
    sequences: list[SequenceStep]
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """A drawn token. `logprob` and `top` (token id, logprob; most likely first) are set if asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """A given token's log-probability after what came before it, and the likeliest in its place, as of SampledToken."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Answers a plan.

    Attributes:
        tokens: tokens[i] is what plan.sequences[i] drew, for its own choice and then for its twins; () where it did
            not sample.
        scores: by index in the plan, one for each of its `scored_ids`; only of sequences that have any.
        failures: by index in the plan, why a sequence has no usable result; it has no tokens and no scores. Neither
            what the step wrote for it nor what it read can be trusted, while the step's other sequences are sound.
    """

    step_id: int
    tokens: list[tuple[SampledToken, ...]] = field(default_factory=list)
    scores: dict[int, list[ScoredToken]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
