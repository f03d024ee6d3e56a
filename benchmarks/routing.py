"""What placement by prefixes and predicted costs is worth, on a trace of real conversations in the simulator.

Replays Mooncake's conversation trace (its 512-token blocks as 16 tokens, all lengths by the same factor; arrivals
spread by seed inside the 3 seconds to which the trace rounds them) through 8 prefill and 8 decode workers: the state
machines of coordinator, workers and fronts on virtual time, with `coordinator.fetch_prefixes`. Against the same with
prefill and decode taken in turn, and with placement as it is but for the prefix map, both of which know of nothing to
fetch. The hit rate is compared with what one LRU cache as large as all prefill workers' would give. Beside the waits
stands what they would be if that one cache were everybody's and the first free worker took the next prompt: no
placement in order of arrival does much better, and most of it is the reading itself.

The trace is not part of the repository: it is looked for in benchmarks/data, or where `--trace` says. Without it the
benchmark says so and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import heapreplace
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

from benchmarks.report import Report, arguments, at_least, at_most, finish
from benchmarks.serving import percentile
from cluster.core.handlers import placing
from cluster.core.ids import Role, WorkerId
from cluster.policy.placement import Candidates, Demand, Placement, Wait, place
from cluster.sim.engine_model import VOCABULARY_SIZE, StepCost
from cluster.sim.kernel import MILLISECOND_NS, SECOND_NS
from cluster.sim.scenario import SIM_REQUEST_LIMITS, Request, Scenario
from cluster.sim.trace import Trace
from cluster.sim.world import World
from engine.core.sampling import SamplingParams
from kv_transfer.protocol.sampling import Checksums

TRACE = Path(__file__).parent / "data" / "conversation_trace.jsonl"
NUM_WORKERS = 8
"""Of either role."""
TRACE_BLOCK_TOKENS, BLOCK_TOKENS = 512, 16
SHRINK = TRACE_BLOCK_TOKENS // BLOCK_TOKENS
NUM_BLOCKS = 2_000
"""Of each worker's pool: a million tokens before shrinking."""
PREFILL_TOKENS_PER_S = 6_000
"""Of one worker, before shrinking. At 41,000 a second, the trace's mean, eight are busy for 85% of the time without a
prefix cache."""
COST = StepCost(base_ns=4 * MILLISECOND_NS, token_ns=SHRINK * SECOND_NS // PREFILL_TOKENS_PER_S, context_ns=4_000)
CHUNK_TOKENS = 64
LINK_NS_PER_BYTE = 13_000
"""Of the simulated KV, 8 bytes a token. So a block of the trace takes 1.7 ms over a link, and 85 ms to compute. That is
what 168 MB take at 100 GB/s: a model of 80 layers with 8 KV heads of 128 16-bit numbers, eight links of 100 Gbit/s."""
ARRIVAL_ROUNDING_MS = 3_000
WARM_UP_SHARE = 0.1
"""Of the requests, the first; they find empty caches and are not counted in the times."""
DRAIN_NS = 600 * SECOND_NS
NUM_QUICK_REQUESTS = 600
MAX_EVENTS = 100_000_000

MIN_SHARE_OF_SHARED_CACHE = 0.9
MIN_SPEED_UP = 1.5
MAX_LOAD = 1.3

Policy = Callable[[Demand, Candidates, Mapping[WorkerId, int], "str | None"], "Placement | Wait"]


class InTurn:
    """Round-robin: each role's workers take turns; one without room or with too long a backlog is passed over."""

    def __init__(self) -> None:
        self._last = dict.fromkeys(Role, -1)

    def __call__(
        self, demand: Demand, candidates: Candidates, excluded: Mapping[WorkerId, int], why_local: str | None = None
    ) -> Placement | Wait:
        blind = replace(candidates, num_held_blocks={})
        decision: Placement | Wait = Wait(reason="nobody is there")
        for prefill, decode in product(self._turns(Role.PREFILL, blind), self._turns(Role.DECODE, blind)):
            one = replace(blind, prefill=(blind.prefill[prefill],), decode=(blind.decode[decode],))
            decision = place(demand, one, excluded, why_local)
            if isinstance(decision, Placement):
                self._last = {Role.PREFILL: prefill, Role.DECODE: decode}
                break
        return decision

    def _turns(self, role: Role, candidates: Candidates) -> list[int]:
        number = len(candidates.prefill if role is Role.PREFILL else candidates.decode)
        return [(self._last[role] + 1 + index) % number for index in range(number)]


def least_loaded(
    demand: Demand, candidates: Candidates, excluded: Mapping[WorkerId, int], why_local: str | None = None
) -> Placement | Wait:
    """By predicted costs alone, as if nobody held anything."""
    return place(demand, replace(candidates, num_held_blocks={}), excluded, why_local)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one replay. `ttft_s` of the requests after the warm-up; `loads` are busy times relative to the role's mean."""

    ttft_s: list[float]
    hit_rate: float
    loads: dict[str, float]
    num_unanswered: int


def read_requests(path: Path, seed: int, limit: int | None) -> list[Request]:
    """In order of arrival."""
    draw = random.Random(seed)
    requests = []
    with path.open(encoding="utf-8") as lines:
        for index, line in enumerate(lines):
            if index == limit:
                break
            requests.append(_request(index, json.loads(line), draw))
    return sorted(requests, key=lambda request: request.arrival_ns)


def _request(index: int, row: dict[str, Any], draw: random.Random) -> Request:
    arrival_ms = row["timestamp"] + draw.random() * ARRIVAL_ROUNDING_MS
    prompt = [token for block in row["hash_ids"] for token in _block_tokens(block)]
    num_tokens = max(1, row["input_length"] // SHRINK)
    sampling = SamplingParams(max_tokens=max(1, row["output_length"] // SHRINK), ignore_eos=True)
    return Request(
        request_id=f"r{index}",
        front=0,
        arrival_ns=SECOND_NS + int(arrival_ms * MILLISECOND_NS),
        prompt_ids=tuple(prompt[:num_tokens]),
        sampling=sampling,
    )


def _block_tokens(block: int) -> list[int]:
    """As different from another block's as their numbers are."""
    draw = random.Random(block)
    return [draw.randrange(VOCABULARY_SIZE) for _ in range(BLOCK_TOKENS)]


def replay(requests: list[Request], policy: Policy, seed: int, *, fetch_prefixes: bool) -> Outcome:
    """The whole trace through a fresh cluster that places by `policy`."""
    longest = max(len(request.prompt_ids) + request.sampling.max_tokens for request in requests)
    scenario = Scenario(
        seed=seed,
        num_prefill=NUM_WORKERS,
        num_decode=NUM_WORKERS,
        block_size=BLOCK_TOKENS,
        num_blocks=NUM_BLOCKS,
        num_layers=1,
        max_model_tokens=longest + 1,
        max_step_tokens=2 * CHUNK_TOKENS,
        prefill_chunk_tokens=CHUNK_TOKENS,
        max_running=64,
        checksums=Checksums.OFF,
        queue_limit=len(requests),
        queue_timeout_s=DRAIN_NS / SECOND_NS,
        heartbeat_timeout_s=10.0,
        link_ns_per_byte=LINK_NS_PER_BYTE,
        fetch_prefixes=fetch_prefixes,
        cost=COST,
        request_limits=SIM_REQUEST_LIMITS,
        requests=tuple(requests),
    )
    with patch.object(placing, "place", policy):
        world = World(scenario, trace=Trace(), check_every=10**9, max_events=MAX_EVENTS)
        _run(world, requests[-1].arrival_ns)
    return _outcome(world)


def _run(world: World, last_arrival_ns: int) -> None:
    """Until all are answered, or it is long past that."""
    world.kernel.run_until(last_arrival_ns)
    while not all(client.has_ended for client in world.clients) and world.kernel.now_ns < last_arrival_ns + DRAIN_NS:
        world.kernel.run_until(world.kernel.now_ns + SECOND_NS)


def _outcome(world: World) -> Outcome:
    counted = world.clients[int(len(world.clients) * WARM_UP_SHARE) :]
    ttft_s = [
        (client.first_token_ns - client.request.arrival_ns) / SECOND_NS
        for client in counted
        if client.first_token_ns is not None
    ]
    readers = [node.state.load() for node in world.all_workers if node.worker.name in world.scenario.prefill_names]
    loads: dict[str, float] = {}
    for names in (world.scenario.prefill_names, world.scenario.decode_names):
        busy_ns = {node.worker.name: node.busy_ns for node in world.all_workers if node.worker.name in names}
        loads |= {name: value / mean(busy_ns.values()) for name, value in busy_ns.items()}
    return Outcome(
        ttft_s=ttft_s,
        hit_rate=sum(load.prefix_hit_tokens for load in readers) / sum(load.prefix_query_tokens for load in readers),
        loads=loads,
        num_unanswered=len(counted) - len(ttft_s),
    )


def shared_cache_misses(requests: Iterable[Request], num_blocks: int) -> list[int]:
    """Tokens of each prompt that one LRU cache would not have, each prompt being stored before the next one comes."""
    cache: OrderedDict[tuple[int, tuple[int, ...]], None] = OrderedDict()
    misses = []
    for request in requests:
        prompt = request.prompt_ids
        names, parent = [], 0
        for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            name = parent, prompt[start : start + BLOCK_TOKENS]
            parent = hash(name)
            names.append(name)
        matchable = names[: (len(prompt) - 1) // BLOCK_TOKENS]
        num_hits = next((index for index, name in enumerate(matchable) if name not in cache), len(matchable))
        misses.append(len(prompt) - num_hits * BLOCK_TOKENS)
        for name in reversed(names):  # the last block is the first to go
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return misses


def one_queue_ttft_s(requests: Iterable[Request], misses: Iterable[int]) -> list[float]:
    """If the first free worker took the next request and computed only so many tokens of each."""
    free_ns = [0] * NUM_WORKERS
    ttft_s = []
    for request, num_tokens in zip(requests, misses, strict=True):
        num_steps = -(-num_tokens // CHUNK_TOKENS)
        start_ns = max(request.arrival_ns, free_ns[0])
        end_ns = start_ns + num_tokens * COST.token_ns + num_steps * COST.base_ns
        heapreplace(free_ns, end_ns)
        ttft_s.append((end_ns - request.arrival_ns) / SECOND_NS)
    return ttft_s


def evaluate(report: Report, requests: list[Request], seed: int) -> None:
    misses = shared_cache_misses(requests, NUM_WORKERS * NUM_BLOCKS)
    shared = 1 - sum(misses) / sum(len(request.prompt_ids) for request in requests)
    one_queue_s = one_queue_ttft_s(requests, misses)[int(len(requests) * WARM_UP_SHARE) :]
    policies: dict[str, Policy] = {"baton": place, "round-robin": InTurn(), "least-loaded": least_loaded}
    outcomes = {
        name: replay(requests, policy, seed, fetch_prefixes=name == "baton") for name, policy in policies.items()
    }
    baton = outcomes["baton"]
    p90_s = {name: percentile(outcome.ttft_s, 0.9) for name, outcome in outcomes.items()}
    report.results += [
        at_least("prefix hit rate / one shared LRU cache's", baton.hit_rate / shared, MIN_SHARE_OF_SHARED_CACHE, "1"),
        at_least("p90 TTFT, round-robin's / Baton's", p90_s["round-robin"] / p90_s["baton"], MIN_SPEED_UP, "1"),
        at_least("p90 TTFT, least-loaded's / Baton's", p90_s["least-loaded"] / p90_s["baton"], MIN_SPEED_UP, "1"),
        at_most("load of the busiest worker / the mean of its role", max(baton.loads.values()), MAX_LOAD, "1"),
    ]
    report.details |= {
        "num_requests": len(requests),
        "shared_lru_hit_rate": shared,
        "one_queue_and_cache_ttft_s_p90": percentile(one_queue_s, 0.9),
        "policies": {
            name: {
                "hit_rate": outcome.hit_rate,
                "ttft_s_median": median(outcome.ttft_s),
                "ttft_s_p90": p90_s[name],
                "num_unanswered": outcome.num_unanswered,
                "loads": {worker: round(load, 3) for worker, load in outcome.loads.items()},
            }
            for name, outcome in outcomes.items()
        },
    }


def parse() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.add_argument("--trace", type=Path, metavar="FILE", default=TRACE, help="Mooncake's conversation_trace.jsonl")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parse()
    report = Report("routing", details={"seed": args.seed})
    if not args.trace.is_file():
        report.details["skipped"] = f"there is no {args.trace}"
    else:
        requests = read_requests(args.trace, args.seed, NUM_QUICK_REQUESTS if args.quick else None)
        evaluate(report, requests, args.seed)
    finish(report, args)


if __name__ == "__main__":
    main()
