"""The measurements: every side in turn, round by round, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engine_peers.outputs import Sample
from benchmarks.engine_peers.prompts import PromptSource
from benchmarks.engine_peers.sides import BATON, READER, TRANSFORMERS, Setting, engine_sides
from benchmarks.engine_peers.threads import ThreadUse, check_placement
from benchmarks.engine_peers.worker_process import Worker

START_PROMPT_TOKENS = 16
NUM_READS = 7
"""Passes of the read loop a round."""
SMALLEST_CHUNK = 192
"""Tokens that every engine prefills in a step at least, beside the tokens of the sequences that decode."""
MAX_JUDGED_TOKENS = 8192
"""Of a group's prompts, so that judging takes no longer than measuring."""
MAX_TRANSFORMERS_PREFILL_S = 240.0
"""Of a decode measure's prompts. Where a processor has no bfloat16 instructions, it would take hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How often everything is repeated. Steps of a decode point are spread over its rounds."""

    decode_rounds: int
    decode_steps: int
    long_decode_rounds: int
    long_decode_steps: int
    prefill_rounds: int
    start_rounds: int


@dataclass(slots=True, kw_only=True)
class Samples:
    """What was measured.

    Attributes:
        seconds: by measure, then by side: of each round, and there of each step where a round has many.
        products_per_s: of the plain loop, once a prefill round.
        long_kv_bytes: what the KV of LONG_STEP has more than that of SHORT_STEP.
        threads: those that computed.
        left_out: why transformers took no part, by measure.
    """

    seconds: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    answers: list[Sample] = field(default_factory=list)
    products_per_s: list[float] = field(default_factory=list)
    long_kv_bytes: int = 0
    threads: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, measure: str, side: str, seconds: Any) -> None:
        self.seconds.setdefault(measure, {}).setdefault(side, []).append(seconds)


def decode_name(batch: int, context: int) -> str:
    return f"decode, batch {batch}, {context:,}-token contexts"


def prefill_name(num_tokens: int) -> str:
    return f"prefill, {num_tokens:,} tokens"


OUTSIDE, LONG_STEP, SHORT_STEP, START = "outside kernels", "step, long contexts", "step, short contexts", "start"
KERNELS, WHOLE = "kernels", "whole"


class Measuring:
    """The workers of one number of cores, and the measurements made with them."""

    def __init__(
        self, engines: Mapping[str, Worker], reader: Worker, prompts: PromptSource, cores: Sequence[int], effort: Effort
    ) -> None:
        self.samples = Samples()
        self._engines = engines
        self._reader = reader
        self._prompts = prompts
        self._cores = cores
        self._effort = effort
        self._num_plan_tokens: dict[str, int] = {}
        self._transformers_tokens_per_s: float | None = None

    def prefill(self, num_tokens: int) -> None:
        """One prompt after the other, each new, each put to all sides in turn. The first warms up."""
        measure = prefill_name(num_tokens)
        for number in range(1 + self._effort.prefill_rounds):
            prompt = self._prompts.draw(num_tokens)
            tokens = {}
            for name, worker in self._engines.items():
                answer = worker.call("prefill", prompt=prompt)
                tokens[name] = answer["tokens"]
                if number > 0:
                    self.samples.add(measure, name, answer["seconds"])
            if number > 0:
                self.samples.products_per_s.append(self._reader.call("multiply"))
            self.samples.answers.append(Sample(measure=measure, prompt=prompt, tokens=tokens))
        self._transformers_tokens_per_s = num_tokens / min(self.samples.seconds[measure][TRANSFORMERS])
        _say(measure)

    def decode(self, batch: int, context: int, *, rounds: int, steps: int, read_bytes: int = 0) -> None:
        """Steps of `batch` sequences whose length is `context` on average over the measurement."""
        measure = decode_name(batch, context)
        prompts = self._prompts.draw_many(batch, context - rounds * steps // 2)
        max_tokens = _max_tokens(batch, context, rounds * steps)
        engines = self._taking_part(measure, batch * context)
        before = {name: _threads(worker) for name, worker in engines.items()}
        for worker in engines.values():
            worker.call("open", prompts=prompts, max_tokens=max_tokens)
        for _ in range(rounds):
            for name, worker in engines.items():
                self.samples.add(measure, name, worker.call("steps", count=steps))
            if read_bytes:
                self.samples.add(measure, READER, self._reader.call("read", size_bytes=read_bytes, count=NUM_READS))
        for name, worker in engines.items():
            busy = check_placement(before[name], _threads(worker), self._cores)
            self.samples.threads[f"{name}: {measure}"] = [
                {"name": use.name, "cores": use.cores, "cpu_s": use.cpu_s} for use in busy
            ]
        self._num_plan_tokens[measure] = self._engines[BATON].call("keep_plan", name=measure)
        self._close(measure, prompts, engines)
        _say(measure)

    def _taking_part(self, measure: str, num_tokens: int) -> Mapping[str, Worker]:
        """All, or all but transformers where it would prefill so many tokens for too long: no target is about it."""
        assert self._transformers_tokens_per_s is not None, "prefill is measured first"
        prefill_s = num_tokens / self._transformers_tokens_per_s
        if prefill_s <= MAX_TRANSFORMERS_PREFILL_S:
            return self._engines
        self.samples.left_out[measure] = f"its prefill of {num_tokens:,} tokens would take {prefill_s:.0f} s"
        return {name: worker for name, worker in self._engines.items() if name != TRANSFORMERS}

    def outside_kernels(self, batch: int, context: int, *, rounds: int, steps: int) -> None:
        """Baton's steps, and the part of each that its kernels take."""
        worker = self._engines[BATON]
        prompts = self._prompts.draw_many(batch, context - rounds * steps // 2)
        worker.call("open", prompts=prompts, max_tokens=_max_tokens(batch, context, rounds * steps))
        for _ in range(rounds):
            for step in worker.call("clocked_steps", count=steps):
                self.samples.add(OUTSIDE, WHOLE, step["seconds"])
                self.samples.add(OUTSIDE, KERNELS, step["kernel_seconds"])
        worker.call("close")
        _say(OUTSIDE)

    def attention(self, long_plan: str, short_plan: str, *, rounds: int, steps: int, token_bytes: int) -> None:
        """What a step takes longer for long contexts, beside a plain read of as many bytes as their KV has more."""
        read_bytes = (self._num_plan_tokens[long_plan] - self._num_plan_tokens[short_plan]) * token_bytes
        self.samples.long_kv_bytes = read_bytes
        for _ in range(rounds):
            for measure, plan in ((LONG_STEP, long_plan), (SHORT_STEP, short_plan)):
                times_s = self._engines[BATON].call("replay", name=plan, count=steps)
                self.samples.add(measure, BATON, times_s)
            self.samples.add(LONG_STEP, READER, self._reader.call("read", size_bytes=read_bytes, count=NUM_READS))
        _say("attention")

    def check_cache_off(self) -> None:
        num_hits = self._engines[BATON].call("num_cache_hits")
        assert num_hits == 0, f"{num_hits} tokens came from Baton's prefix cache"

    def _close(self, measure: str, prompts: list[list[int]], engines: Mapping[str, Worker]) -> None:
        tokens = {name: worker.call("close") for name, worker in engines.items()}
        for index, prompt in enumerate(prompts[: max(1, MAX_JUDGED_TOKENS // len(prompts[0]))]):
            answers = {name: sequences[index] for name, sequences in tokens.items()}
            self.samples.answers.append(Sample(measure=measure, prompt=prompt, tokens=answers))


def measure_starts(
    setting: Setting, cores: Sequence[int], prompts: PromptSource, samples: Samples, rounds: int
) -> None:
    """From the start of a process to its first token. All files have been read before, all caches are warm."""
    for _ in range(rounds):
        prompt = prompts.draw(START_PROMPT_TOKENS)
        for name, side in engine_sides(setting, cores).items():
            with Worker(side, cores, setting.log_dir / f"{name}-start.log") as worker:
                worker.read_answer()
                worker.call("prefill", prompt=prompt)
                samples.add(START, name, worker.age_s)
    _say(START)


def _max_tokens(batch: int, context: int, num_steps: int) -> int:
    """More than will be drawn: a sequence already draws tokens while others of its group are being prefilled."""
    return 2 * num_steps + batch * context // SMALLEST_CHUNK + 64


def _threads(worker: Worker) -> list[ThreadUse]:
    return [ThreadUse(**use) for use in worker.call("threads")]


def _say(measure: str) -> None:
    print(f"measured: {measure}", file=sys.stderr, flush=True)
