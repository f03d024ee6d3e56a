"""Sampling parameters: what a request may ask of the sampler, checked once, where the request enters.

The numeric work lives in `engine.model.sampler`; this module is pure so that the front, the scheduler and
the simulator share one definition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
SEED_LIMIT = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn from the logits.

    Attributes:
        temperature: 0 is greedy (argmax, lowest token id on a tie); otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p; 1 keeps all.
        min_p: drop tokens less likely than min_p times the most likely one; 0 keeps all.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens already emitted, once, and
            once per occurrence (emitted tokens only, not the prompt). Range -2..2.
        repetition_penalty: logits of tokens seen in prompt or output are divided (if positive) or
            multiplied (if negative) by it; 1 is off.
        seed: key of the counter-based draws, 0 <= seed < 2**64. The front draws one if the client gives none.
        max_tokens: emit at most so many tokens, >= 1.
        min_tokens: end-of-sequence and stop tokens cannot be drawn before so many tokens were emitted.
        stop_token_ids: emitting one of these ends the sequence with `stop` (besides the model's own EOS ids).
        ignore_eos: the model's EOS ids do not end the sequence.
        logprobs: number of top alternatives whose log-probabilities are reported with each token; None
            reports none, 0 reports the sampled token's only.
        prompt_logprobs: the same for each prompt token but the first, given the prompt before it.
        logit_bias: (token id, bias) pairs added to the logits before everything else.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError naming the field that is out of range."""
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if not 0 <= self.seed < SEED_LIMIT:
            raise ValueError(f"seed must be between 0 and 2**64 - 1, got {self.seed}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise ValueError(f"{name} must be between 0 and {MAX_LOGPROBS}, got {count}")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids holds {len(self.stop_token_ids)} ids, at most {MAX_STOP_TOKEN_IDS} allowed"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias holds {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS} allowed")
        for token_id, bias in self.logit_bias:
            _check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _check_range(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    inside = math.isfinite(value) and (low < value if low_open else low <= value) and value <= high
    if not inside:
        bracket = "(" if low_open else "["
        raise ValueError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value}")
