"""What long prompts do to running answers: in two pools, and in one process.

Some answers run all the time. In *disturbed* windows prompts of 4,096 tokens keep arriving, one after the other; in
*undisturbed* windows nothing else happens. Windows alternate, so that both sides see the same machine. Counted are the
inter-token gaps of the running answers, as the client sees them, that lie inside a prompt's time from sending to first
token (disturbed) or inside an undisturbed window. The same is done with one worker that reads the prompts itself.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import Report, Result, arguments, at_least, at_most, finish
from benchmarks.serving import Client, Trace, cluster_config, percentile, serving_cluster

PROMPT_TOKENS = 4096
NUM_ANSWERS = 2
ANSWER_PROMPT_TOKENS = 64
ANSWER_TOKENS = 1500
MIN_GAPS = 1000
QUICK_GAPS = 120
PROMPTS_A_WINDOW = 2
MAX_RISE = 1.25
VOCABULARY = range(100, 40_000)
MAX_WINDOWS = 200


@dataclass(slots=True)
class Side:
    """Gaps in milliseconds, and how long the prompts took to their first token."""

    undisturbed_ms: list[float] = field(default_factory=list)
    disturbed_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)

    def rise(self, share: float) -> float:
        return percentile(self.disturbed_ms, share) / percentile(self.undisturbed_ms, share)

    def summary(self) -> dict[str, Any]:
        kinds = {"undisturbed": self.undisturbed_ms, "disturbed": self.disturbed_ms}
        return {
            **{
                f"{kind}_ms": {
                    "num_gaps": len(gaps),
                    **{name: round(percentile(gaps, p), 2) for name, p in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
                    "max": round(max(gaps), 2),
                }
                for kind, gaps in kinds.items()
            },
            "prompt_ttft_ms_median": round(percentile(self.ttft_ms, 0.5), 1),
        }


class RunningAnswers:
    """Keeps NUM_ANSWERS answers running; a finished one is followed by the next."""

    def __init__(self, client: Client, source: random.Random) -> None:
        self._client = client
        self._source = source
        self.traces: list[Trace] = []
        self._tasks = [asyncio.create_task(self._answer()) for _ in range(NUM_ANSWERS)]

    async def _answer(self) -> None:
        while True:
            trace = Trace(sent_s=time.monotonic())
            self.traces.append(trace)
            prompt_ids = [self._source.choice(VOCABULARY) for _ in range(ANSWER_PROMPT_TOKENS)]
            await self._client.generate(prompt_ids, trace=trace, max_tokens=ANSWER_TOKENS, ignore_eos=True)

    def gaps_ms(self, start_s: float, end_s: float) -> list[float]:
        """Gaps that begin and end in the window; not the first, which is the hand-over's."""
        return [
            (after - before) * 1e3
            for trace in self.traces
            for before, after in zip(trace.arrivals_s[1:], trace.arrivals_s[2:], strict=False)
            if before >= start_s and after <= end_s
        ]

    async def wait_until_running(self) -> None:
        while sum(len(trace.arrivals_s) > 5 for trace in self.traces) < NUM_ANSWERS:
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task


async def measure(address: str, num_gaps: int, seed: int) -> Side:
    """Alternates windows until there are enough gaps on both sides."""
    source = random.Random(seed)
    side = Side()
    async with Client(address) as client:
        answers = RunningAnswers(client, source)
        await answers.wait_until_running()
        for window in range(MAX_WINDOWS):
            lengths_s = []
            for _ in range(PROMPTS_A_WINDOW):
                prompt_ids = [source.choice(VOCABULARY) for _ in range(PROMPT_TOKENS)]
                trace = await client.generate(prompt_ids, max_tokens=1)
                if window == 0:  # The first window warms up.
                    continue
                lengths_s.append(trace.ttft_s)
                side.ttft_ms.append(trace.ttft_s * 1e3)
                side.disturbed_ms += answers.gaps_ms(trace.sent_s, trace.arrivals_s[0])
            start_s = time.monotonic()
            await asyncio.sleep(sum(lengths_s) + 0.2)
            if window > 0:
                side.undisturbed_ms += answers.gaps_ms(start_s, time.monotonic())
            if min(len(side.disturbed_ms), len(side.undisturbed_ms)) >= num_gaps:
                break
        await answers.stop()
    return side


def plot(sides: dict[str, Side], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, side in sides.items():
        for kind, gaps in (("undisturbed", side.undisturbed_ms), ("with long prompts", side.disturbed_ms)):
            ordered = sorted(gaps)
            shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
            axes.plot(ordered, shares, "-" if kind == "undisturbed" else "--", label=f"{name}, {kind}")
    axes.set(
        xlabel="inter-token gap (ms)",
        ylabel="share of gaps",
        xscale="log",
        title="Running answers beside 4,096-token prompts",
    )
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    num_gaps = QUICK_GAPS if args.quick else MIN_GAPS
    cores = sorted(os.sched_getaffinity(0))
    prefill = {"name": "prefill", "role": "prefill", "kv_memory": "384MiB"}
    decode = {"name": "decode", "role": "decode", "kv_memory": "384MiB"}
    if len(cores) > 1:
        prefill["cores"], decode["cores"] = [[cores[0]]], [[cores[1]]]  # type: ignore[assignment]
    layouts = {"two pools": [prefill, decode], "one process": [decode]}
    sides = {}
    for name, pools in layouts.items():
        with serving_cluster(cluster_config(pools)) as cluster:
            # The stall needs few gaps to be seen, and each of them takes long.
            sides[name] = asyncio.run(measure(cluster.address, num_gaps if name == "two pools" else QUICK_GAPS, seed=2))
    apart, single = sides["two pools"], sides["one process"]
    report = Report("decode_undisturbed", details={name: side.summary() for name, side in sides.items()})
    report.details["settings"] = {"cores": cores[:2], "num_answers": NUM_ANSWERS, "prompt_tokens": PROMPT_TOKENS}
    report.results += [
        at_most("two pools: p99 gap beside long prompts / p99 gap without", apart.rise(0.99), MAX_RISE, "1"),
        at_least("two pools: gaps inside prefill windows", len(apart.disturbed_ms), num_gaps, "gaps"),
        Result(measure="one process: p99 gap beside long prompts / without", value=single.rise(0.99), unit="1"),
        Result(measure="one process: p50 gap beside long prompts / without", value=single.rise(0.5), unit="1"),
    ]
    finish(report, args, lambda path: plot(sides, path))


if __name__ == "__main__":
    main()
