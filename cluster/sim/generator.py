"""Draws a scenario from a seed: every kind of load and fault, in any mixture."""

from __future__ import annotations

import dataclasses
import random
from itertools import takewhile

from cluster.core.disaggregation import DisaggregationConfig
from cluster.core.tenant_config import NamedTenant, QuotaConfig, TenantConfig, TenantsConfig
from cluster.sim.engine_model import VOCABULARY_SIZE, StepCost
from cluster.sim.fabric import Family
from cluster.sim.kernel import MILLISECOND_NS, SECOND_NS
from cluster.sim.scenario import Fault, FaultKind, Poison, PoisonKind, Request, Scenario
from engine.core.lower_tiers import HELD_SHARE
from engine.core.sampling import SamplingParams
from kv_transfer.protocol.sampling import Checksums

MAX_ARRIVAL_NS = 500 * MILLISECOND_NS
MAX_FAULT_DELAY_NS = 400 * MILLISECOND_NS
MAX_FAULT_NS = 6 * SECOND_NS
MIN_FAULT_NS = 2 * MILLISECOND_NS
DATA_FAULTS = (
    "lose_notice",
    "delay_notice",
    "repeat_notice",
    "corrupt",
    "skip_data",
    "fail_write",
    "slow_write",
    "cut",
)
FREQUENT_FAULTS = (FaultKind.DATA, FaultKind.DATA, FaultKind.PAUSE, FaultKind.PAUSE, FaultKind.CRASH)
NEEDS_CHECKSUMS = ("corrupt", "skip_data")

TENANTS = ("", "a", "b")
LARGE_EVERY = 50
"""One history in so many is of a large cluster; the others are small, where faults meet more often."""
LIMITED_EVERY = 8
"""Histories in which the cluster has a limit on the time to a first token, and as many with quotas."""
LIMITED_TENANTS = TenantsConfig(
    named=(NamedTenant(name="a", config=TenantConfig(weight=2.0)),),
    others=TenantConfig(quota=QuotaConfig(tokens_per_s=200, burst_tokens=100)),
)


def generate(seed: int) -> Scenario:
    """The scenario of a seed."""
    draw = random.Random(f"{seed}/scenario")
    block_size = draw.choice((2, 4, 4, 8))
    max_model_tokens = draw.choice((24, 40, 64))
    least_blocks = -(-max_model_tokens // block_size) + 1
    num_fronts = draw.choice((1, 1, 2))
    num_prefill, num_decode = draw.choice((0, 1, 1, 1, 2, 2)), draw.choice((1, 1, 2, 2, 3))
    if is_large(seed):
        size = random.Random(f"{seed}/size")
        num_prefill, num_decode = size.randint(1, 20), size.randint(2, 30)
    shape = Scenario(
        seed=seed,
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_fronts=num_fronts,
        block_size=block_size,
        num_blocks=int(least_blocks * draw.choice((1.0, 1.3, 2.0, 4.0))),
        max_model_tokens=max_model_tokens,
        max_step_tokens=block_size + draw.choice((8, 16, 32)),
        prefill_chunk_tokens=block_size * draw.choice((1, 2, 4)),
        max_running=draw.choice((2, 4, 8)),
        checksums=draw.choices(tuple(Checksums), (0.2, 0.2, 0.6))[0],
        family=draw.choice((Family.SHARED_MEMORY, Family.REMOTE)),
        num_variants=draw.choice((1, 3)),
        cost=StepCost(base_ns=draw.choice((1, 4, 4, 60)) * MILLISECOND_NS),
        link_ns_per_byte=draw.choice((100, 2_000, 20_000)),
        same_address=draw.random() < 0.5,
        can_kill=draw.random() < 0.6,
        restart_ns=int(draw.choice((0.02, 0.3, 1.5)) * SECOND_NS),
        queue_limit=draw.choice((2, 64, 64)),
        queue_timeout_s=draw.choice((3.0, 10.0)),
        heartbeat_timeout_s=draw.choice((1.0, 3.0)),
        max_attempts=draw.choice((2, 3, 6)),
        slo_ttft_ms=100 if seed % LIMITED_EVERY == 5 else None,
        tenants=LIMITED_TENANTS if seed % LIMITED_EVERY == 6 else TenantsConfig(),
    )
    requests = _requests(draw, shape)
    faults = _faults(draw, shape, requests)
    num_layers = draw.choice((1, 3, 3, 8))
    num_host_blocks = draw.choice((0, 2, least_blocks, 4 * least_blocks))
    # From a source of their own: what else a seed means does not depend on them.
    requests = _poisoned(random.Random(f"{seed}/poison"), requests)
    return dataclasses.replace(
        shape,
        requests=requests,
        faults=faults,
        num_layers=num_layers,
        num_host_blocks=num_host_blocks,
        fetch_prefixes=draw.random() < 0.5,
        num_disk_blocks=draw.choice((0, 3, 8 * least_blocks)) if num_host_blocks >= HELD_SHARE else 0,
        disaggregation=_disaggregation(draw, shape),
    )


def is_large(seed: int) -> bool:
    """Whether the seed's cluster has up to 50 workers, with as many more requests and faults."""
    return seed % LARGE_EVERY == LARGE_EVERY - 1


def _disaggregation(draw: random.Random, shape: Scenario) -> DisaggregationConfig:
    """Short histories measure little, so most that are to mix all ways fix how much decode reads itself."""
    fixed = draw.choice((shape.block_size, shape.max_model_tokens // 3))
    return DisaggregationConfig(max_local_tokens=draw.choice((0, 0, None, fixed)), may_stay=draw.random() < 0.5)


# ---- load -----------------------------------------------------------------------------------------------------


def _requests(draw: random.Random, shape: Scenario) -> tuple[Request, ...]:
    stems = [[draw.randrange(VOCABULARY_SIZE) for _ in range(shape.max_model_tokens)] for _ in range(2)]
    window_ns = draw.choice((1, MAX_ARRIVAL_NS // 5, MAX_ARRIVAL_NS))
    num_requests = draw.choice((1, 2, 3, 4, 6, 8, 16))
    if is_large(shape.seed):
        num_requests += 2 * len(shape.worker_names)
    return tuple(_request(draw, shape, index, stems, draw.randrange(window_ns)) for index in range(num_requests))


def _request(draw: random.Random, shape: Scenario, index: int, stems: list[list[int]], arrival_ns: int) -> Request:
    is_invalid = draw.random() < 0.03
    longest = shape.max_model_tokens - 1
    length = draw.choice((1, 2, shape.block_size, shape.block_size + 1, longest // 2, draw.randint(1, longest)))
    prompt = list(draw.choice(stems)[:length]) if draw.random() < 0.6 else _random_tokens(draw, length)
    if draw.random() < 0.5:
        prompt[-1] = draw.randrange(VOCABULARY_SIZE)
    if is_invalid:
        prompt = _random_tokens(draw, shape.max_model_tokens + draw.randint(0, 3))
    has_deadline, leaves, leaves_late = draw.random() < 0.15, draw.random() < 0.15, draw.random() < 0.1
    return Request(
        request_id=f"r{index}",
        front=draw.randrange(shape.num_fronts),
        arrival_ns=arrival_ns,
        prompt_ids=tuple(prompt),
        sampling=_sampling(draw, shape.max_model_tokens - len(prompt)),
        num_choices=draw.choice((1, 1, 1, 2, 4)),
        deadline_ns=_log_uniform(draw, 5 * MILLISECOND_NS, 5 * SECOND_NS) if has_deadline else None,
        max_latency_ms=draw.choice((5, 50, 2000)) if draw.random() < 0.05 else None,
        leave_ns=_log_uniform(draw, MILLISECOND_NS, SECOND_NS) if leaves else None,
        leave_after_tokens=draw.randint(1, 6) if leaves_late else None,
        stop_pair=(draw.randrange(VOCABULARY_SIZE), draw.randrange(VOCABULARY_SIZE)) if draw.random() < 0.15 else None,
        priority=draw.choice((0, 0, 0, 1, 5)),
        tenant=TENANTS[index % len(TENANTS)],
        cache_salt=draw.choice(("", "", "", "tenant-a")),
        is_invalid=is_invalid,
    )


def _poisoned(draw: random.Random, requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """In some histories one or two of them do harm to whoever computes them."""
    changed = list(requests)
    for _ in range(draw.choice((0, 0, 0, 0, 0, 0, 0, 1, 2))):
        index = draw.randrange(len(changed))
        num_tokens = draw.randint(1, len(changed[index].prompt_ids) + 8)
        kind = draw.choice(tuple(PoisonKind))
        if kind is PoisonKind.NOT_FINITE:
            num_tokens = max(num_tokens, _num_shared_tokens(requests, index) + 1)
        poison = Poison(kind=kind, num_tokens=num_tokens)
        changed[index] = dataclasses.replace(changed[index], poison=poison)
    return tuple(changed)


def _num_shared_tokens(requests: tuple[Request, ...], index: int) -> int:
    """Of the request's prompt, the leading ones that another prompt has as well. What is computed for a text depends on
    that text alone, so what is not finite for one of them would be for the other, and nobody would be served wrong."""
    prompt_ids = requests[index].prompt_ids
    others = [other.prompt_ids for place, other in enumerate(requests) if place != index]
    pairs = [zip(prompt_ids, other, strict=False) for other in others]
    return max((sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], each)) for each in pairs), default=0)


def _sampling(draw: random.Random, room: int) -> SamplingParams:
    max_tokens = max(1, min(draw.choice((1, 2, 3, 6, 10, 16, 40)), room))
    return SamplingParams(
        temperature=draw.choice((0.0, 1.0)),
        presence_penalty=draw.choice((0.0, 0.0, 0.5)),
        seed=draw.randrange(1000),
        max_tokens=max_tokens,
        min_tokens=min(max_tokens, draw.choice((0, 0, 0, 3))),
        stop_token_ids=tuple(_random_tokens(draw, draw.choice((0, 0, 1, 4)))),
        ignore_eos=draw.random() < 0.3,
        prompt_logprobs=draw.choice((None, None, None, 0)),
    )


def _random_tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(VOCABULARY_SIZE) for _ in range(count)]


def _log_uniform(draw: random.Random, low: int, high: int) -> int:
    return int(low * (high / low) ** draw.random())


# ---- faults ---------------------------------------------------------------------------------------------------


def _faults(draw: random.Random, shape: Scenario, requests: tuple[Request, ...]) -> tuple[Fault, ...]:
    """Faults begin soon after some request has arrived: that is when they can do harm."""
    num_faults = draw.choice((0, 1, 2, 2, 3, 4, 6, 10))
    if is_large(shape.seed):
        num_faults += len(shape.worker_names) // 2
    faults = []
    for _ in range(num_faults):
        delay_ns = _log_uniform(draw, MILLISECOND_NS, MAX_FAULT_DELAY_NS)
        faults.append(_fault(draw, shape, draw.choice(requests).arrival_ns + delay_ns))
    return tuple(sorted(faults, key=lambda fault: fault.at_ns))


def _fault(draw: random.Random, shape: Scenario, at_ns: int) -> Fault:
    kind = draw.choice((*FaultKind, *FREQUENT_FAULTS))
    workers, fronts = list(shape.worker_names), list(shape.front_names)
    target, other = draw.choice(workers), ""
    amount, detail = 0.0, ""
    if kind in (FaultKind.CUT, FaultKind.PARTITION, FaultKind.STALL):
        target, other = _pair(draw, shape)
    elif kind in (FaultKind.PAUSE, FaultKind.CLOCK_JUMP):
        target = draw.choice([*workers, *workers, *shape.prefill_names, *fronts, "coordinator"])
    elif kind is FaultKind.CRASH:
        target = draw.choice([*workers, *workers, *fronts, *["coordinator"] * len(workers)])
    elif kind is FaultKind.DATA:
        details = [name for name in DATA_FAULTS if shape.checksums is not Checksums.OFF or name not in NEEDS_CHECKSUMS]
        detail, amount = draw.choice(details), draw.choice((0.1, 0.3, 1.0))
    elif kind is FaultKind.DRAIN:
        detail, amount = draw.choice(("stop", "restart", "flip")), draw.choice((0.0, 0.0, 0.05, 1.0))
    elif kind is FaultKind.SLOW_ENGINE:
        amount = draw.choice((3.0, 20.0))
    elif kind is FaultKind.FAIL_STEPS:
        amount = draw.choice((1, 2, 4))
    return Fault(
        kind=kind,
        at_ns=at_ns,
        duration_ns=_log_uniform(draw, MIN_FAULT_NS, MAX_FAULT_NS),
        target=target,
        other=other,
        amount=amount,
        detail=detail,
        migrate=kind is FaultKind.DRAIN and draw.random() < 0.6,
        force=kind is FaultKind.DRAIN and draw.random() < 0.3,
    )


def _pair(draw: random.Random, shape: Scenario) -> tuple[str, str]:
    worker = draw.choice(shape.worker_names)
    others = ["coordinator", *shape.front_names, *(name for name in shape.worker_names if name != worker)]
    if draw.random() < 0.2:
        return draw.choice(shape.front_names), "coordinator"
    return worker, draw.choice(others)
