"""Three times more than a cluster can do: what is served stays good, and what is refused is refused at once.

Requests of three tenants arrive by a Poisson process. First the rate is raised in steps, to find the peak of goodput:
requests a second whose times to the first token and per output token both keep a limit. Then three times that peak
comes in for two minutes. The cluster is the simulator's: 2 prefill and 2 decode workers, the state machines of
coordinator, workers and fronts on virtual time. With `--live`, real processes serve the demo model instead.

Memory is counted at intervals, and compared between the end of the overload and its first quarter: of the simulated
coordinator its whole state (with a smaller table of remembered attempts, so that it is full by then), of real processes
what is resident of coordinator and front.
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, Final
from unittest.mock import patch

import grpc.aio

from benchmarks.report import Report, arguments, at_least, at_most, finish
from benchmarks.serving import Client as ServingClient
from benchmarks.serving import cluster_config, percentile, serving_cluster
from cluster.core.ids import Outcome
from cluster.live.local_processes import ClusterHandle
from cluster.sim.client import Client
from cluster.sim.engine_model import VOCABULARY_SIZE, StepCost
from cluster.sim.kernel import MILLISECOND_NS, SECOND_NS
from cluster.sim.scenario import Request, Scenario
from cluster.sim.trace import Trace
from cluster.sim.world import World
from cluster.wire.channels import REFUSAL_CAUSE_TRAILER
from engine.core.planning import StepBuilder
from engine.core.sampling import SamplingParams
from engine.core.sequence import Sequence

OVERLOAD: Final = 3.0
OVERLOAD_S, QUICK_OVERLOAD_S = 120.0, 20.0
SEARCH_S, QUICK_SEARCH_S = 40.0, 10.0
WARM_UP_SHARE: Final = 0.25
"""Of each run's time, the first part, in which requests are not counted."""
MIN_GOODPUT_RATIO: Final = 0.9
MAX_REFUSAL_MS: Final = 50.0
MAX_MEMORY_GROWTH: Final = 1.1
TENANTS: Final = {"large": 0.6, "middle": 0.3, "small": 0.1}
"""And their shares of the requests."""
NUM_MEMORY_SAMPLES: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a good request keeps."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """One request as its client saw it. Times are from its arrival; `tpot_ms` is None for fewer than two tokens."""

    tenant: str
    arrival_s: float
    outcome: Outcome
    ended_ms: float
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    refusal: str = ""

    def is_good(self, limits: Limits) -> bool:
        if self.outcome not in (Outcome.STOP, Outcome.LENGTH) or self.ttft_ms is None:
            return False
        return self.ttft_ms <= limits.ttft_ms and (self.tpot_ms is None or self.tpot_ms <= limits.tpot_ms)


@dataclass(slots=True, kw_only=True)
class Run:
    """One load. `memory_bytes` was counted at equal intervals."""

    rate: float
    duration_s: float
    ended: list[Ended] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    num_preemptions: int = 0

    def counted(self) -> list[Ended]:
        return [one for one in self.ended if one.arrival_s >= self.duration_s * WARM_UP_SHARE]

    def goodput(self, limits: Limits, tenant: str | None = None) -> float:
        good = [one for one in self.counted() if one.is_good(limits) and tenant in (None, one.tenant)]
        return len(good) / (self.duration_s * (1 - WARM_UP_SHARE))

    def refusals_ms(self) -> list[float]:
        return [one.ended_ms for one in self.counted() if one.outcome is Outcome.REJECTED_OVERLOAD]

    def memory_growth(self) -> float:
        first = self.memory_bytes[: max(1, int(len(self.memory_bytes) * WARM_UP_SHARE))]
        return self.memory_bytes[-1] / first[-1]

    def summary(self, limits: Limits) -> dict[str, Any]:
        counted = self.counted()
        served = [one for one in counted if one.ttft_ms is not None]
        ttft_ms = [one.ttft_ms for one in served if one.ttft_ms is not None] or [0.0]
        tpot_ms = [one.tpot_ms for one in served if one.tpot_ms is not None] or [0.0]
        refusals_ms = self.refusals_ms() or [0.0]
        return {
            "rate_per_s": round(self.rate, 2),
            "goodput_per_s": round(self.goodput(limits), 2),
            "goodput_per_s_by_tenant": {name: round(self.goodput(limits, name), 2) for name in TENANTS},
            "num_requests": len(counted),
            "outcomes": dict(Counter(one.outcome.value for one in counted)),
            "refusals": dict(Counter(one.refusal for one in counted if one.refusal)),
            "num_preemptions": self.num_preemptions,
            "ttft_ms": _spread(ttft_ms),
            "tpot_ms": _spread(tpot_ms),
            "refused_after_ms": _spread(refusals_ms),
        }


Measure = Callable[[float, float, int], Run]
"""Runs a rate (requests a second) for a time in seconds, by a seed."""


# ---- the simulator's cluster ----------------------------------------------------------------------------------

SIM_LIMITS: Final = Limits(ttft_ms=500.0, tpot_ms=40.0)
SIM_RATES: Final = (20.0, 30.0, 40.0, 50.0, 60.0, 80.0)
SIM_COST: Final = StepCost(base_ns=10 * MILLISECOND_NS, token_ns=MILLISECOND_NS // 4, context_ns=1_000)
SIM_BLOCKS: Final = 600
SIM_MAX_TOKENS: Final = 256
"""Asked for; answers end by themselves after 64 on average."""
REMEMBERED_ATTEMPTS: Final = 500


def simulate(rate: float, duration_s: float, seed: int) -> Run:
    scenario = Scenario(
        seed=seed,
        num_prefill=2,
        num_decode=2,
        block_size=16,
        num_blocks=SIM_BLOCKS,
        num_layers=1,
        max_model_tokens=512,
        max_step_tokens=160,
        prefill_chunk_tokens=128,
        max_running=32,
        checksums=False,
        queue_limit=256,
        queue_timeout_s=10.0,
        heartbeat_timeout_s=5.0,
        link_ns_per_byte=50,
        cost=SIM_COST,
        slo_ttft_ms=int(SIM_LIMITS.ttft_ms),
        requests=_requests(rate, duration_s, seed),
    )
    run = Run(rate=rate, duration_s=duration_s)
    preempt = StepBuilder._preempt

    def count_preemption(self: StepBuilder, victim: Sequence) -> None:
        run.num_preemptions += 1
        preempt(self, victim)

    with (
        patch("cluster.core.requests.MAX_REMEMBERED_ATTEMPTS", REMEMBERED_ATTEMPTS),
        patch.object(StepBuilder, "_preempt", count_preemption),
    ):
        world = World(scenario, trace=Trace(), check_every=10**9, max_events=10**9)
        for sample in range(1, NUM_MEMORY_SAMPLES + 1):
            world.kernel.run_until(SECOND_NS + int(duration_s * SECOND_NS * sample / NUM_MEMORY_SAMPLES))
            run.memory_bytes.append(len(pickle.dumps(world.coordinator.state)))
        while not all(client.has_ended for client in world.clients):
            world.kernel.run_until(world.kernel.now_ns + SECOND_NS)
    run.ended = [_ended(client) for client in world.clients]
    return run


def _requests(rate: float, duration_s: float, seed: int) -> tuple[Request, ...]:
    draw = random.Random(seed)
    requests = []
    arrival_s = draw.expovariate(rate)
    while arrival_s < duration_s:
        prompt = tuple(draw.randrange(3, VOCABULARY_SIZE) for _ in range(draw.randint(48, 144)))
        requests.append(
            Request(
                request_id=f"r{len(requests)}",
                front=0,
                arrival_ns=SECOND_NS + int(arrival_s * SECOND_NS),
                prompt_ids=prompt,
                sampling=SamplingParams(max_tokens=SIM_MAX_TOKENS, temperature=1.0, seed=len(requests)),
                tenant=_tenant(draw),
            )
        )
        arrival_s += draw.expovariate(rate)
    return tuple(requests)


def _tenant(draw: random.Random) -> str:
    return draw.choices(tuple(TENANTS), tuple(TENANTS.values()))[0]


def _ended(client: Client) -> Ended:
    request, first_ns = client.request, client.first_token_ns
    assert client.outcome is not None and client.ended_ns is not None
    tpot_ms = None
    if first_ns is not None and client.num_tokens > 1:
        tpot_ms = (client.ended_ns - first_ns) / MILLISECOND_NS / (client.num_tokens - 1)
    return Ended(
        tenant=request.tenant,
        arrival_s=(request.arrival_ns - SECOND_NS) / SECOND_NS,
        outcome=client.outcome,
        ended_ms=(client.ended_ns - request.arrival_ns) / MILLISECOND_NS,
        ttft_ms=None if first_ns is None else (first_ns - request.arrival_ns) / MILLISECOND_NS,
        tpot_ms=tpot_ms,
        refusal="" if client.refusal is None else client.refusal.value,
    )


# ---- real processes -------------------------------------------------------------------------------------------

LIVE_PROMPT_TOKENS, LIVE_OUTPUT_TOKENS = (64, 192), (8, 48)
LIVE_RATES: Final = (0.5, 0.75, 1.0, 1.5, 2.0)
"""Of what one prefill worker could read alone."""
TTFT_FACTOR, TPOT_FACTOR = 10.0, 4.0
"""Limits are so many times what an unloaded cluster takes."""
NUM_UNLOADED: Final = 8
VOCABULARY: Final = range(100, 40_000)


@contextmanager
def live_cluster(**sections: Any) -> Iterator[ClusterHandle]:
    pools = [
        {"name": "prefill", "role": "prefill", "kv_memory": "256MiB"},
        {"name": "decode", "role": "decode", "kv_memory": "512MiB", "max_running": 16},
    ]
    config = cluster_config(pools, model={"max_model_tokens": 512}, **sections)
    with serving_cluster(config) as cluster:
        yield cluster


async def measure_unloaded(address: str) -> tuple[Limits, float]:
    """The limits, and the rate at which one prompt after the other could be read."""
    draw = random.Random(0)
    ended = []
    async with ServingClient(address) as client:
        for number in range(NUM_UNLOADED + 2):
            one = await _ask(client, draw, time.monotonic(), time.monotonic())
            if number >= 2:  # the first ones find cold workers
                ended.append(one)
    ttft_ms = median(one.ttft_ms or 0.0 for one in ended)
    tpot_ms = median(one.tpot_ms or 0.0 for one in ended)
    return Limits(ttft_ms=TTFT_FACTOR * ttft_ms, tpot_ms=TPOT_FACTOR * tpot_ms), 1000 / ttft_ms


async def drive(cluster: ClusterHandle, rate: float, duration_s: float, seed: int) -> Run:
    """An open loop: requests come when they come, whatever has become of those before."""
    draw, run = random.Random(seed), Run(rate=rate, duration_s=duration_s)
    tasks: list[asyncio.Task[Ended]] = []
    async with ServingClient(cluster.address) as client:
        started_s = time.monotonic()
        due_s = sample_s = 0.0
        while due_s < duration_s:
            await asyncio.sleep(max(0.0, started_s + due_s - time.monotonic()))
            tasks.append(asyncio.create_task(_ask(client, draw, started_s, time.monotonic())))
            if due_s >= sample_s:
                run.memory_bytes.append(_resident_bytes(cluster))
                sample_s += duration_s / NUM_MEMORY_SAMPLES
            due_s += draw.expovariate(rate)
        run.ended = list(await asyncio.gather(*tasks))
    return run


async def _ask(client: ServingClient, draw: random.Random, started_s: float, sent_s: float) -> Ended:
    prompt = [draw.choice(VOCABULARY) for _ in range(draw.randint(*LIVE_PROMPT_TOKENS))]
    tenant, num_tokens = _tenant(draw), draw.randint(*LIVE_OUTPUT_TOKENS)
    outcome, refusal, ttft_ms, tpot_ms = Outcome.LENGTH, "", None, None
    try:
        trace = await client.generate(prompt, tenant=tenant, max_tokens=num_tokens, ignore_eos=True)
    except grpc.aio.AioRpcError as error:
        trailers = dict(error.trailing_metadata() or ())
        is_refused = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        outcome = Outcome.REJECTED_OVERLOAD if is_refused else Outcome.INTERNAL
        refusal = str(trailers.get(REFUSAL_CAUSE_TRAILER, error.code().name))
    else:
        ttft_ms = trace.ttft_s * 1e3
        tpot_ms = (trace.arrivals_s[-1] - trace.arrivals_s[0]) * 1e3 / max(1, num_tokens - 1)
    return Ended(
        tenant=tenant,
        arrival_s=sent_s - started_s,
        outcome=outcome,
        ended_ms=(time.monotonic() - sent_s) * 1e3,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        refusal=refusal,
    )


def _resident_bytes(cluster: ClusterHandle) -> int:
    """Of the coordinator and the fronts: where requests come through and wait."""
    processes = [*cluster.fronts.values(), *([] if cluster.coordinator is None else [cluster.coordinator])]
    pages = [int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) for process in processes]
    return sum(pages) * resource.getpagesize()


# ---- the question ---------------------------------------------------------------------------------------------


def evaluate(
    report: Report, measure: Measure, limits: Limits, rates: tuple[float, ...], search_s: float, overload_s: float
) -> None:
    """Searches the peak, then looks at three times as much."""
    search = [measure(rate, search_s, number) for number, rate in enumerate(rates)]
    peak = max(run.goodput(limits) for run in search)
    overload = measure(OVERLOAD * peak, overload_s, len(rates))
    refusals_ms = overload.refusals_ms()
    report.results += [
        at_least("goodput at 3 x capacity / its peak", overload.goodput(limits) / peak, MIN_GOODPUT_RATIO, "1"),
        at_most("p99 of the time to a refusal", percentile(refusals_ms or [0.0], 0.99), MAX_REFUSAL_MS, "ms"),
        at_most("memory at the end / after a quarter", overload.memory_growth(), MAX_MEMORY_GROWTH, "1"),
    ]
    report.details |= {
        "limits": {"ttft_ms": limits.ttft_ms, "tpot_ms": limits.tpot_ms},
        "peak_goodput_per_s": round(peak, 2),
        "search": [run.summary(limits) for run in search],
        "overload": overload.summary(limits),
        "overload_memory_bytes": overload.memory_bytes,
    }


def _spread(values: list[float]) -> dict[str, float]:
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {
        "mean": round(mean(values), 2),
        **{name: round(percentile(values, share), 2) for name, share in shares.items()},
        "max": round(max(values), 2),
    }


def parse() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.add_argument("--live", action="store_true", help="real processes with the demo model, not the simulator")
    return parser.parse_args()


def _drive(cluster: ClusterHandle, rate: float, duration_s: float, seed: int) -> Run:
    return asyncio.run(drive(cluster, rate, duration_s, seed))


def main() -> None:
    args = parse()
    report = Report("overload")
    search_s, overload_s = (QUICK_SEARCH_S, QUICK_OVERLOAD_S) if args.quick else (SEARCH_S, OVERLOAD_S)
    if args.live:
        with live_cluster() as cluster:
            limits, rate = asyncio.run(measure_unloaded(cluster.address))
        with live_cluster(slo={"ttft_ms": int(limits.ttft_ms)}) as cluster:
            rates = tuple(share * rate for share in LIVE_RATES)
            evaluate(report, partial(_drive, cluster), limits, rates, search_s, overload_s)
    else:
        evaluate(report, simulate, SIM_LIMITS, SIM_RATES, search_s, overload_s)
    finish(report, args)


if __name__ == "__main__":
    main()
