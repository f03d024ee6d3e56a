"""What the hand-over costs: how much KV is pushed while the prompt is still being computed, and the hand-over gap.

2,048-token prompts in chunks of 256, one after another, through one prefill and one decode worker with a core each.
Every prompt is new, so nothing comes from a prefix cache. The hand-over gap is (time of token 2 - time of token 1) less
the request's own median inter-token gap, as the client sees it.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from statistics import median

from benchmarks.report import Report, arguments, at_least, at_most, finish
from benchmarks.serving import Client, Trace, cluster_config, percentile, serving_cluster

PROMPT_TOKENS = 2048
CHUNK_TOKENS = 256
OUTPUT_TOKENS = 24
NUM_REQUESTS = 100
NUM_QUICK_REQUESTS = 6
VOCABULARY = range(100, 40_000)
MIN_EARLY_SHARE = 0.97
"""Seven chunks of eight, and five groups of layers of the last one's six, are 0.979."""
MAX_GAP_SHARE = 0.02
MAX_P99_GAP_SHARE = 0.05


async def measure(address: str, num_requests: int, seed: int) -> list[Trace]:
    source = random.Random(seed)
    traces = []
    async with Client(address) as client:
        for number in range(num_requests + 1):
            prompt_ids = [source.choice(VOCABULARY) for _ in range(PROMPT_TOKENS)]
            trace = await client.generate(prompt_ids, temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
            if number > 0:  # The first one warms up.
                traces.append(trace)
    return traces


def evaluate(report: Report, traces: list[Trace]) -> None:
    kv = [trace.done.kv for trace in traces if trace.done is not None]
    early = [part.early_bytes / part.bytes for part in kv]
    gap_ms = [(trace.gaps_s[0] - median(trace.gaps_s[1:])) * 1e3 for trace in traces]
    share = [gap / (trace.ttft_s * 1e3) for gap, trace in zip(gap_ms, traces, strict=True)]
    report.results += [
        at_least(
            "share of KV bytes pushed before the last chunk was computed, least", min(early), MIN_EARLY_SHARE, "1"
        ),
        at_most("hand-over gap / TTFT, median", median(share), MAX_GAP_SHARE, "1"),
        at_most("hand-over gap / TTFT, p99", percentile(share, 0.99), MAX_P99_GAP_SHARE, "1"),
    ]
    report.details |= {
        "num_requests": len(traces),
        "kv_bytes": kv[0].bytes,
        "transport": kv[0].transport,
        "ttft_ms_median": median(trace.ttft_s for trace in traces) * 1e3,
        "itl_ms_median": median(median(trace.gaps_s[1:]) for trace in traces) * 1e3,
        "handover_gap_ms_median": median(gap_ms),
        "handover_gap_ms_p99": percentile(gap_ms, 0.99),
        "handover_gap_ms": [round(gap, 2) for gap in gap_ms],
    }


def plot(traces: list[Trace], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    axes.plot([trace.gaps_s[0] * 1e3 for trace in traces], "o", label="first gap (with the hand-over)")
    axes.plot([median(trace.gaps_s[1:]) * 1e3 for trace in traces], ".", label="median of the other gaps")
    axes.set(
        xlabel="request", ylabel="ms", ylim=(0, None), title="What the hand-over adds to the first inter-token gap"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    cores = sorted(os.sched_getaffinity(0))
    pools = [
        {"name": "prefill", "role": "prefill", "kv_memory": "256MiB", "prefill_chunk_tokens": CHUNK_TOKENS},
        {"name": "decode", "role": "decode", "kv_memory": "256MiB"},
    ]
    if len(cores) > 1:
        pools[0]["cores"], pools[1]["cores"] = [[cores[0]]], [[cores[1]]]
    report = Report("push_overlap", details={"cores": cores[:2], "dtype": "bfloat16"})
    with serving_cluster(cluster_config(pools)) as cluster:
        traces = asyncio.run(measure(cluster.address, NUM_QUICK_REQUESTS if args.quick else NUM_REQUESTS, seed=1))
    evaluate(report, traces)
    finish(report, args, lambda path: plot(traces, path))


if __name__ == "__main__":
    main()
