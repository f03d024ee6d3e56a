"""What passes between the scheduler and the runner: one StepPlan in, one StepResult out."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.sampling import SamplingParams


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass: first the decoding sequences (one token each), then prefill chunks."""

    step_id: int
    sequences: list[SequenceStep]

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
class StepResult:
    """Answers a plan: `tokens[i]` is what plan.sequences[i] drew, None where it did not sample."""

    step_id: int
    tokens: list[SampledToken | None] = field(default_factory=list)
