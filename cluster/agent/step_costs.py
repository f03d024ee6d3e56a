"""What steps cost on this worker, measured: running medians that placement predicts from."""

from __future__ import annotations

from collections import deque
from statistics import median

from cluster.core.limits import NS_PER_MS
from engine.core.step import StepPlan

NUM_WARM_UP_STEPS = 3
"""First steps of each kind that are not counted: they touch cold weights and build kernels."""
NUM_SAMPLES = 33
MIN_PREFILL_TOKENS = 16
"""Shorter chunks say more about the step's fixed cost than about a token's."""
FIT_WEIGHT = 1 / 256
"""Of the newest step in the fit of a decode step's duration to the context it reads: machines do not change quickly."""
MIN_SPREAD = 0.1
"""Contexts that differ by a smaller part of their mean say little of what a token of context costs."""
MAX_CHUNK_AGE_STEPS = 4096
"""What a prompt token adds to a step that writes is unknown again after so many steps without one: what was measured in
a bad moment must not keep prompts away for good."""
MAX_OUTLIER = 2
"""A step counts in the fit as at most so many times the median: something else had the machine."""


class ContextCost:
    """How much longer a decode step takes for each token of context: a line fitted by least squares, older steps
    fading, and the less steep the less the contexts have differed."""

    def __init__(self) -> None:
        self._num_tokens = 0.0
        self._duration_ns = 0.0
        self._variance = 0.0
        self._covariance = 0.0
        self._num_steps = 0

    def add(self, num_context_tokens: int, duration_ns: int) -> None:
        self._num_steps += 1
        weight = max(FIT_WEIGHT, 1 / self._num_steps)
        more_tokens, longer_ns = num_context_tokens - self._num_tokens, duration_ns - self._duration_ns
        self._num_tokens += weight * more_tokens
        self._duration_ns += weight * longer_ns
        self._variance = (1 - weight) * (self._variance + weight * more_tokens**2)
        self._covariance = (1 - weight) * (self._covariance + weight * more_tokens * longer_ns)

    @property
    def token_ns(self) -> float:
        """0 while unknown; never so much that a step without context would cost less than nothing."""
        if not self._variance:
            return 0.0
        fitted = self._covariance / (self._variance + (MIN_SPREAD * self._num_tokens) ** 2)
        return min(max(0.0, fitted), self._duration_ns / self._num_tokens)


class StepCosts:
    """Medians over the last NUM_SAMPLES steps of each kind; 0 while unmeasured."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._num_decode_steps = 0
        self._num_prefill_steps = 0
        self._decode_ns: deque[int] = deque(maxlen=NUM_SAMPLES)
        self._decode_context: deque[int] = deque(maxlen=NUM_SAMPLES)
        self._prefill_token_ns: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._chunk_token_ns: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._last_chunk_step = 0
        self._reading_ns = 0
        self._context_cost = ContextCost()

    def add(self, plan: StepPlan, duration_ns: int) -> None:
        self.num_steps += 1
        if plan.copies:
            return  # what these took says nothing of computing
        num_decoding = sum(len(sequence.token_ids) == 1 for sequence in plan.sequences)
        num_prefill_tokens = plan.num_tokens - num_decoding
        if num_prefill_tokens:
            self._reading_ns += duration_ns
        if num_prefill_tokens == 0:
            self._num_decode_steps += 1
            if self._num_decode_steps > NUM_WARM_UP_STEPS:
                num_context_tokens = sum(sequence.start + 1 for sequence in plan.sequences)
                self._decode_ns.append(duration_ns)
                self._decode_context.append(num_context_tokens)
                self._context_cost.add(num_context_tokens, min(duration_ns, int(MAX_OUTLIER * median(self._decode_ns))))
        elif num_prefill_tokens >= MIN_PREFILL_TOKENS:
            self._num_prefill_steps += 1
            if self._num_prefill_steps > NUM_WARM_UP_STEPS:
                decode_ns = int(median(self._decode_ns)) if num_decoding and self._decode_ns else 0
                self._prefill_token_ns.append(max(0, duration_ns - decode_ns) / num_prefill_tokens)
                if self._decode_ns:
                    without_ns = decode_ns or self.decode_base_ms * NS_PER_MS
                    self._chunk_token_ns.append(max(0.0, duration_ns - without_ns) / num_prefill_tokens)
                    self._last_chunk_step = self.num_steps

    @property
    def prefill_token_ms(self) -> float:
        return median(self._prefill_token_ns) / NS_PER_MS if self._prefill_token_ns else 0.0

    @property
    def chunk_token_ms(self) -> float:
        """What each prompt token adds to a step that writes answers as well. One that only reads has the same fixed
        part: it reads the same weights."""
        is_fresh = self._chunk_token_ns and self.num_steps - self._last_chunk_step <= MAX_CHUNK_AGE_STEPS
        return median(self._chunk_token_ns) / NS_PER_MS if is_fresh else 0.0

    @property
    def reading_ms(self) -> int:
        """What all steps that read prompts have taken."""
        return self._reading_ns // NS_PER_MS

    @property
    def decode_step_ms(self) -> float:
        return median(self._decode_ns) / NS_PER_MS if self._decode_ns else 0.0

    @property
    def context_token_ms(self) -> float:
        """What each token of context adds to a decode step."""
        return self._context_cost.token_ns / NS_PER_MS

    @property
    def decode_base_ms(self) -> float:
        """The rest of it. The slope changes slowly; this follows the last steps, so that a straggler shows at once."""
        context = median(self._decode_context) if self._decode_context else 0.0
        return max(0.0, self.decode_step_ms - context * self.context_token_ms)
