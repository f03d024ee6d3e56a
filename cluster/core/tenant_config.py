"""Tenants and the service level in the cluster file: who gets which share, and limits on tokens' times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from cluster.core.config_reader import Section

MAX_NAMED_TENANTS: Final = 1000
MAX_TENANT_CHARACTERS: Final = 128
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
MAX_QUOTA_TOKENS: Final = 10**12
DEFAULT_BURST_S: Final = 10
"""Where the file gives a rate and no burst: so many seconds of it."""
MIN_TTFT_MS, MAX_TTFT_MS = 1, 3_600_000
MIN_TPOT_MS, MAX_TPOT_MS = 0.01, 60_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaConfig:
    """A token bucket. Tokens are a request's own: those of its prompt and of its answers, cached or not."""

    tokens_per_s: int
    burst_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """What a tenant may have.

    Attributes:
        weight: its share where several wait: twice the weight, twice the tokens.
        quota: None: as much as there is.
    """

    weight: float = 1.0
    quota: QuotaConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTenant:
    name: str
    config: TenantConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantsConfig:
    """`others`: what each tenant has that is not named, the one with the empty name included."""

    named: tuple[NamedTenant, ...] = ()
    others: TenantConfig = field(default_factory=TenantConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig:
    """What admitted requests are to keep.

    Attributes:
        ttft_ms: a request whose first token cannot come within this is refused. None: nobody is, for that.
        tpot_ms: no worker is given so many answers that a token of them would take longer; a request waits until one
            of them has a place. None: as many as fit.
    """

    ttft_ms: int | None = None
    tpot_ms: float | None = None


def parse_slo(section: Section) -> SloConfig:
    slo = SloConfig(
        ttft_ms=section.optional_integer("ttft_ms", minimum=MIN_TTFT_MS, maximum=MAX_TTFT_MS),
        tpot_ms=section.optional_number("tpot_ms", minimum=MIN_TPOT_MS, maximum=MAX_TPOT_MS),
    )
    section.finish()
    return slo


def parse_tenants(root: Section) -> TenantsConfig:
    """Reads `tenants`, a list, and `default_tenant`, which is for all that are not in it."""
    sections = root.optional_sections("tenants")
    if len(sections) > MAX_NAMED_TENANTS:
        root.refuse("tenants", f"{len(sections)} tenants", f"at most {MAX_NAMED_TENANTS}")
    named: dict[str, NamedTenant] = {}
    for section in sections:
        name = section.text(
            "name", pattern=rf"(?s).{{1,{MAX_TENANT_CHARACTERS}}}", expected=f"1 to {MAX_TENANT_CHARACTERS} characters"
        )
        if name in named:
            section.refuse("name", f"{name!r} a second time", "a name of its own for every tenant")
        named[name] = NamedTenant(name=name, config=_parse_tenant(section))
    return TenantsConfig(named=tuple(named.values()), others=_parse_tenant(root.section("default_tenant")))


def _parse_tenant(section: Section) -> TenantConfig:
    weight = section.number("weight", default=1.0, minimum=MIN_WEIGHT, maximum=MAX_WEIGHT)
    rate = section.optional_integer("tokens_per_s", minimum=1, maximum=MAX_QUOTA_TOKENS)
    burst = section.optional_integer("burst_tokens", minimum=1, maximum=MAX_QUOTA_TOKENS)
    section.finish()
    if rate is None:
        if burst is not None:
            section.refuse("burst_tokens", f"{burst} without tokens_per_s", "both, or neither")
        return TenantConfig(weight=weight)
    return TenantConfig(
        weight=weight,
        quota=QuotaConfig(tokens_per_s=rate, burst_tokens=rate * DEFAULT_BURST_S if burst is None else burst),
    )
