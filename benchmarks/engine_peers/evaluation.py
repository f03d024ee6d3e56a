"""From samples to results: each measure's figures of all sides, and the ratio or share that has a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.engine_peers.figures import Figure, figure, ratios, round_medians
from benchmarks.engine_peers.measuring import (
    KERNELS,
    LONG_STEP,
    OUTSIDE,
    SHORT_STEP,
    START,
    WHOLE,
    Samples,
    decode_name,
    prefill_name,
)
from benchmarks.engine_peers.outputs import NEAR_TIE, Sample, divergences, verdict
from benchmarks.engine_peers.plotting import Bar
from benchmarks.engine_peers.sides import BATON, READER, TRANSFORMERS, VLLM
from benchmarks.report import Report, Result, at_least, at_most

DECODE_TARGETS = {(1, 256): 1.3, (8, 256): 1.5, (32, 256): 1.5, (8, 4096): 1.5}
PREFILL_TARGETS = {128: 1.3, 512: 1.3, 2048: 1.3}
MIN_WEIGHTS_SHARE = 0.65
MIN_ATTENTION_SHARE = 0.70
MAX_OUTSIDE_SHARE = 0.05
MAX_START_RATIO = 1 / 3
CONTROL = "control: farthest token if a block of the prompt had been lost"
CONTROL_TOKENS = 16
CONTROL_MAX_PROMPT_TOKENS = 512
"""In a long prompt a block more or less may not matter."""
NUM_CONTROLS = 8
ENGINES = (BATON, VLLM, TRANSFORMERS)

Judge = Callable[..., list[float]]


class Evaluation:
    """Adds the samples of each setting (a number of cores) to a report, and remembers what is drawn and judged."""

    def __init__(self, *, weights_bytes: int, prefill_products: Mapping[int, int]) -> None:
        """`prefill_products`: what a prompt costs at least, by its tokens."""
        self.ratios: list[Bar] = []
        self.shares: list[Bar] = []
        self.answers: list[Sample] = []
        self._weights_bytes = weights_bytes
        self._prefill_products = prefill_products

    def add(self, setting: str, samples: Samples, report: Report) -> None:
        self.answers += samples.answers
        for (batch, context), target in DECODE_TARGETS.items():
            measure = decode_name(batch, context)
            times_s = {
                side: round_medians(rounds) for side, rounds in samples.seconds[measure].items() if side != READER
            }
            self._speed(setting, measure, times_s, batch, target, report)
        for num_tokens, target in PREFILL_TARGETS.items():
            measure = prefill_name(num_tokens)
            self._speed(setting, measure, samples.seconds[measure], num_tokens, target, report)
            if all(samples.products_per_s):
                self._arithmetic(setting, num_tokens, samples, report)
        self._start(setting, samples.seconds[START], report)
        self._weights(setting, samples.seconds[decode_name(1, 256)], report)
        self._attention(setting, samples, report)
        self._outside(setting, samples.seconds[OUTSIDE], report)
        report.details[setting] = {
            "round_ms": {
                measure: {side: _round_ms(rounds) for side, rounds in by_side.items()}
                for measure, by_side in samples.seconds.items()
            },
            "long_kv_bytes": samples.long_kv_bytes,
            "threads": samples.threads,
            "transformers_left_out": samples.left_out,
        }

    def _speed(
        self,
        setting: str,
        measure: str,
        times_s: dict[str, list[float]],
        num_tokens: int,
        target: float,
        report: Report,
    ) -> None:
        """Tokens a second; `times_s` holds seconds for `num_tokens` of them, by side and round."""
        for side in times_s:
            speed = figure([num_tokens / seconds for seconds in times_s[side]])
            report.results.append(_plain(f"{measure}, {setting}: {side}", speed, "tokens/s"))
        over_vllm = figure(ratios(times_s[VLLM], times_s[BATON]))
        report.results.append(at_least(f"{measure}, {setting}: Baton / vLLM", over_vllm.median, target, "1"))
        self.ratios.append(Bar(measure=measure, setting=setting, value=over_vllm, target=target))

    def _arithmetic(self, setting: str, num_tokens: int, samples: Samples, report: Report) -> None:
        """What share of the processor's products the engines use, and what there is to win over vLLM at all."""
        least_s = self._prefill_products[num_tokens] / max(samples.products_per_s)
        measure = prefill_name(num_tokens)
        for side in (BATON, VLLM):
            share = figure([least_s / seconds for seconds in samples.seconds[measure][side]])
            report.results.append(_plain(f"{measure}, {setting}: {side}, share of a plain multiply loop", share, "1"))
        ceiling = figure([seconds / least_s for seconds in samples.seconds[measure][VLLM]])
        report.results.append(_plain(f"{measure}, {setting}: the plain multiply loop / vLLM", ceiling, "1"))

    def _start(self, setting: str, times_s: dict[str, list[float]], report: Report) -> None:
        measure = "start to first token"
        for side in ENGINES:
            report.results.append(_plain(f"{measure}, {setting}: {side}", figure(times_s[side]), "s"))
        over_vllm = figure(ratios(times_s[BATON], times_s[VLLM]))
        name = f"{measure}, {setting}: Baton / vLLM"
        report.results.append(at_most(name, over_vllm.median, MAX_START_RATIO, "1"))
        self.ratios.append(Bar(measure=measure, setting=setting, value=over_vllm, target=MAX_START_RATIO, at_most=True))

    def _weights(self, setting: str, rounds: dict[str, list[Any]], report: Report) -> None:
        """The batch-1 step beside a plain read of the weights in the same round."""
        reads_s = round_medians(rounds[READER])
        share = figure(ratios(reads_s, round_medians(rounds[BATON])))
        self._read_speed(setting, "weights", reads_s, self._weights_bytes, report)
        self._share(setting, "batch-1 decode over a plain read of the weights", share, MIN_WEIGHTS_SHARE, report)

    def _attention(self, setting: str, samples: Samples, report: Report) -> None:
        """Bytes a second of the KV that long contexts have more, over those of a plain read in the same round."""
        long_s = round_medians(samples.seconds[LONG_STEP][BATON])
        short_s = round_medians(samples.seconds[SHORT_STEP][BATON])
        reads_s = round_medians(samples.seconds[LONG_STEP][READER])
        attention_s = [long - short for long, short in zip(long_s, short_s, strict=True)]
        speed = figure([samples.long_kv_bytes / seconds / 1e9 for seconds in attention_s])
        report.results.append(_plain(f"attention's reading of KV, {setting}: Baton", speed, "GB/s"))
        self._read_speed(setting, "as much KV", reads_s, samples.long_kv_bytes, report)
        share = figure(ratios(reads_s, attention_s))
        self._share(setting, "attention over a plain read of its KV", share, MIN_ATTENTION_SHARE, report)

    def _outside(self, setting: str, times_s: dict[str, list[float]], report: Report) -> None:
        inside = ratios(times_s[KERNELS], times_s[WHOLE])
        outside = figure([1 - share for share in inside])
        measure = "a batch-8 decode step outside model kernels"
        report.results.append(at_most(f"{measure}, {setting}", outside.median, MAX_OUTSIDE_SHARE, "1"))
        bar = Bar(measure=measure, setting=setting, value=outside, target=MAX_OUTSIDE_SHARE, at_most=True)
        self.shares.append(bar)

    def _share(self, setting: str, measure: str, share: Figure, target: float, report: Report) -> None:
        report.results.append(at_least(f"{measure}, {setting}", share.median, target, "1"))
        self.shares.append(Bar(measure=measure, setting=setting, value=share, target=target))

    def _read_speed(self, setting: str, what: str, reads_s: list[float], num_bytes: int, report: Report) -> None:
        speed = figure([num_bytes / seconds / 1e9 for seconds in reads_s])
        report.results.append(_plain(f"plain read of {what}, {setting}", speed, "GB/s"))


def judge_outputs(answers: list[Sample], judge: Judge, report: Report) -> None:
    """Fills in the samples' margins, and reports how far the sides' tokens lie from the float32 model's own choices."""
    for sample in answers:
        # Most answers agree, and forcing one through the model takes seconds.
        known: dict[tuple[int, ...], list[float]] = {}
        for side, tokens in sample.tokens.items():
            margins = known.get(tuple(tokens))
            if margins is None:
                margins = known[tuple(tokens)] = judge(prompt=sample.prompt, tokens=tokens)
            sample.margins[side] = margins
    report.results.append(at_least(CONTROL, _control(answers, judge), NEAR_TIE, "logits"))
    parted = {peer: divergences(answers, BATON, peer) for peer in (VLLM, TRANSFORMERS)}
    verdicts = {side: verdict(answers, side) for side in ENGINES}
    for side, found in verdicts.items():
        name = f"farthest token from the float32 model's choice: {side}"
        report.results.append(at_most(name, found.worst_margin, NEAR_TIE, "logits"))
    for peer, places in parted.items():
        worst = max((place.margin for place in places), default=0.0)
        name = f"largest difference where Baton and {peer} first part"
        report.results.append(at_most(name, worst, NEAR_TIE, "logits"))
    report.details["outputs"] = {
        "num_answers": len(answers),
        "verdicts": {side: asdict(found) for side, found in verdicts.items()},
        "divergences": {peer: [asdict(place) for place in places] for peer, places in parted.items()},
        "median_first_divergence": {
            peer: median(place.position for place in places) if places else None for peer, places in parted.items()
        },
    }


def _round_ms(rounds: list[Any]) -> list[float]:
    """Milliseconds of each round, of its usual step where it has several."""
    return [round(1e3 * (median(seconds) if isinstance(seconds, list) else seconds), 4) for seconds in rounds]


def _control(answers: list[Sample], judge: Judge) -> float:
    """The worst margin of Baton's tokens if a block in the middle of a prompt had been lost: the check must see it."""
    short = [sample for sample in answers if 4 * CONTROL_TOKENS <= len(sample.prompt) <= CONTROL_MAX_PROMPT_TOKENS]
    worst = 0.0
    for sample in sorted(short, key=lambda sample: len(sample.tokens[BATON]), reverse=True)[:NUM_CONTROLS]:
        middle = len(sample.prompt) // 2
        damaged = sample.prompt[:middle] + sample.prompt[middle + CONTROL_TOKENS :]
        worst = max(worst, *judge(prompt=damaged, tokens=sample.tokens[BATON]))
    return worst


def _plain(measure: str, value: Figure, unit: str) -> Result:
    return Result(measure=measure, value=value.median, unit=unit)
