"""What a request costs its tenant, and what it is expected to need.

A request's cost is what it reads and what it is expected to write. Its tenant's quota pays when it is admitted, and its
turn is charged when it is placed; both are put right once its answers' length is known. One that comes back into the
queue was not served, so its turn is given back.
"""

from __future__ import annotations

from cluster.core.ids import Outcome
from cluster.core.messages import BLOCK_HASH_BYTES
from cluster.core.parts import Parts
from cluster.core.requests import Phase, Request
from cluster.core.tenants import Tenant
from cluster.policy.placement import Demand, demand_of


def cut_chain(parts: Parts, block_hashes: bytes, num_read_tokens: int) -> bytes:
    """Of the packed hashes those of blocks that can be found in a cache: the last token read is always computed."""
    return block_hashes[: (num_read_tokens - 1) // parts.config.kv.block_size * BLOCK_HASH_BYTES]


def expected_output(parts: Parts, tenant: Tenant, num_read_tokens: int, num_tokens_left: int) -> int:
    """Tokens that an answer should still have."""
    longest = parts.workers.max_model_tokens
    num_room_tokens = num_tokens_left if longest is None else longest - num_read_tokens
    return max(1, min(tenant.output.num_tokens, num_tokens_left, num_room_tokens))


def demand_for(parts: Parts, request: Request) -> Demand:
    """Of its next attempt, or the one it has."""
    num_left = request.max_tokens - request.num_delivered
    tenant = parts.tenants.of(request.tenant)
    return demand_of(
        request.num_read_tokens,
        num_left,
        parts.config.kv.block_size,
        num_expected=expected_output(parts, tenant, request.num_read_tokens, num_left),
        num_choices=request.num_choices,
        num_unshared=request.num_unshared,
    )


def open_account(parts: Parts, now_ns: int, request: Request) -> None:
    """The request is new."""
    tenant = parts.tenants.of(request.tenant)
    parts.tenants.begin(tenant)
    tenant.take(now_ns, request.cost_tokens)


def take_account_over(parts: Parts, now_ns: int, request: Request) -> None:
    """An earlier life of the coordinator admitted and placed it. What was left of its tenant's quota then is not known:
    it makes no debt."""
    tenant = parts.tenants.of(request.tenant)
    parts.tenants.begin(tenant)
    if tenant.bucket is not None:
        tenant.bucket.take_what_is_there(now_ns, request.cost_tokens)
    charge(parts, request)


def charge(parts: Parts, request: Request) -> None:
    assert not request.is_charged
    request.is_charged = True
    parts.queue.correct(request.tenant, request.cost_tokens, parts.tenants.of(request.tenant).weight)


def uncharge(parts: Parts, request: Request) -> None:
    """It goes back into the queue."""
    if request.is_charged:
        request.is_charged = False
        parts.queue.correct(request.tenant, -request.cost_tokens, parts.tenants.of(request.tenant).weight)


def settle(parts: Parts, now_ns: int, request: Request, outcome: Outcome, num_output_tokens: int) -> None:
    """Its client has all of its answers."""
    if outcome not in (Outcome.STOP, Outcome.LENGTH):
        return
    tenant = parts.tenants.of(request.tenant)
    num_more_tokens = request.num_prompt_tokens + num_output_tokens - request.cost_tokens
    tenant.take(now_ns, num_more_tokens)
    if request.is_charged:
        parts.queue.correct(tenant.name, num_more_tokens, tenant.weight)
    tenant.count(request.num_prompt_tokens, num_output_tokens)
    if not request.num_failures:  # after a failure it is not known how many tokens each answer has
        parts.tenants.learn(tenant, num_output_tokens / request.num_choices)


def close_account(parts: Parts, now_ns: int, request: Request) -> None:
    """The request is over. What has never been placed has cost nothing."""
    tenant = parts.tenants.of(request.tenant)
    if request.phase is Phase.QUEUED and not request.num_failures:
        tenant.take(now_ns, -request.cost_tokens)
    parts.tenants.end(tenant)
