"""Tenants: what each may have, what it has had, and how long its answers tend to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cluster.core.ids import RefusalCause
from cluster.core.output_estimate import OutputEstimate
from cluster.core.tenant_config import TenantConfig, TenantsConfig
from cluster.core.token_bucket import TokenBucket

MAX_IDLE_TENANTS: Final = 1024
"""Tenants without a request that are remembered though the cluster file does not name them; of the others, those that
have been idle for longest are forgotten, and with them how much of their quota is used up."""


@dataclass(slots=True, kw_only=True)
class Tenant:
    """One tenant.

    Attributes:
        bucket: its quota, None where it has none.
        output: of its answers.
        num_live: requests that have been admitted and have not ended.
        num_ended: that ended with an answer. num_refused: whatever the cause.
        num_prompt_tokens, num_output_tokens: of those that ended with an answer.
    """

    name: str
    config: TenantConfig
    bucket: TokenBucket | None
    output: OutputEstimate
    num_live: int = 0
    num_ended: int = 0
    num_refused: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def weight(self) -> float:
        return self.config.weight

    def count(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """A request has ended with its answers."""
        self.num_ended += 1
        self.num_prompt_tokens += num_prompt_tokens
        self.num_output_tokens += num_output_tokens

    def take(self, now_ns: int, num_tokens: int) -> None:
        """From its quota; negative numbers give back."""
        if self.bucket is not None:
            self.bucket.take(now_ns, num_tokens)


class TenantTable:
    """By name. Those that the cluster file names are there from the beginning, others from their first request on.

    `refusals` counts all refused requests by cause; `usual_output` is of the answers of all tenants.
    """

    def __init__(self, config: TenantsConfig) -> None:
        self._others_config = config.others
        self.usual_output = OutputEstimate()
        self.refusals: dict[RefusalCause, int] = dict.fromkeys(RefusalCause, 0)
        self._named = {tenant.name: self._make(tenant.name, tenant.config) for tenant in config.named}
        self._others: dict[str, Tenant] = {}
        self._idle: dict[str, None] = {}
        """Of the others, those without a request, the longest idle first."""

    def of(self, name: str) -> Tenant:
        tenant = self._named.get(name) or self._others.get(name)
        if tenant is None:
            tenant = self._others[name] = self._make(name, self._others_config)
            self._rest(tenant)
        return tenant

    def get(self, name: str) -> Tenant | None:
        """None where nothing is remembered of it."""
        return self._named.get(name) or self._others.get(name)

    def begin(self, tenant: Tenant) -> None:
        """A request of it is admitted, or taken over from an earlier life of the coordinator."""
        tenant.num_live += 1
        self._idle.pop(tenant.name, None)

    def end(self, tenant: Tenant) -> None:
        """One of its requests is over."""
        assert tenant.num_live > 0
        tenant.num_live -= 1
        if not tenant.num_live and tenant.name not in self._named:
            self._rest(tenant)

    def refuse(self, tenant: Tenant, cause: RefusalCause) -> None:
        tenant.num_refused += 1
        self.refusals[cause] += 1

    def learn(self, tenant: Tenant, num_output_tokens: float) -> None:
        """An answer of so many tokens has ended by itself."""
        for output in (tenant.output, self.usual_output):
            output.learn(num_output_tokens)

    def all(self) -> list[Tenant]:
        """Those of the cluster file in its order, then the others: with requests first, then the latest idle ones."""
        live = [tenant for tenant in self._others.values() if tenant.num_live]
        return [*self._named.values(), *live, *(self._others[name] for name in reversed(self._idle))]

    def check_invariants(self) -> None:
        assert not self._named.keys() & self._others.keys()
        assert set(self._idle) == {name for name, tenant in self._others.items() if not tenant.num_live}
        assert len(self._idle) <= MAX_IDLE_TENANTS
        for tenant in self.all():
            tenant.output.check_invariants()
            if tenant.bucket is not None:
                tenant.bucket.check_invariants()
        assert sum(self.refusals.values()) >= sum(tenant.num_refused for tenant in self.all())

    def _make(self, name: str, config: TenantConfig) -> Tenant:
        quota = config.quota
        bucket = None if quota is None else TokenBucket(quota.tokens_per_s, quota.burst_tokens)
        # A tenant that has not ended anything yet is expected to be like the others.
        output = OutputEstimate(self.usual_output.num_tokens)
        return Tenant(name=name, config=config, bucket=bucket, output=output)

    def _rest(self, tenant: Tenant) -> None:
        self._idle[tenant.name] = None
        if len(self._idle) > MAX_IDLE_TENANTS:
            longest_idle = next(iter(self._idle))
            del self._idle[longest_idle], self._others[longest_idle]
