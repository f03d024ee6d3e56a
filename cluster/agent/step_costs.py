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


class StepCosts:
    """Medians over the last NUM_SAMPLES steps of each kind; 0 while unmeasured."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._num_decode_steps = 0
        self._num_prefill_steps = 0
        self._decode_ns: deque[int] = deque(maxlen=NUM_SAMPLES)
        self._prefill_token_ns: deque[float] = deque(maxlen=NUM_SAMPLES)

    def add(self, plan: StepPlan, duration_ns: int) -> None:
        self.num_steps += 1
        num_decoding = sum(len(sequence.token_ids) == 1 for sequence in plan.sequences)
        num_prefill_tokens = plan.num_tokens - num_decoding
        if num_prefill_tokens == 0:
            self._num_decode_steps += 1
            if self._num_decode_steps > NUM_WARM_UP_STEPS:
                self._decode_ns.append(duration_ns)
        elif num_prefill_tokens >= MIN_PREFILL_TOKENS:
            self._num_prefill_steps += 1
            if self._num_prefill_steps > NUM_WARM_UP_STEPS:
                decode_ns = int(median(self._decode_ns)) if num_decoding and self._decode_ns else 0
                self._prefill_token_ns.append(max(0, duration_ns - decode_ns) / num_prefill_tokens)

    @property
    def prefill_token_ms(self) -> float:
        return median(self._prefill_token_ns) / NS_PER_MS if self._prefill_token_ns else 0.0

    @property
    def decode_step_ms(self) -> float:
        return median(self._decode_ns) / NS_PER_MS if self._decode_ns else 0.0
