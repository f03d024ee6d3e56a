"""When a request is not pushed from prefill to decode although both are there: the cluster file's words on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cluster.core.config_reader import Section
from cluster.core.tenant_config import MAX_TPOT_MS, MIN_TPOT_MS

MAX_LOCAL_TOKENS: Final = 2**20
_AUTO: Final = "auto"
_NEVER: Final = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationConfig:
    """Which requests take another way than a push.

    Attributes:
        max_local_tokens: decode reads prompts itself of which no more are uncached there. None leaves it to the
            measured break-even, 0 forbids it (where no push is possible, decode still reads).
        may_stay: whether a prefill worker that idles may write answers while decode is the bottleneck.
        max_tpot_ms: what a token of the running answers may take while decode reads beside them; by default the
            cluster's limit for all answers. None: a named multiple of what it takes without.
    """

    max_local_tokens: int | None = None
    may_stay: bool = True
    max_tpot_ms: float | None = None


ALWAYS_PUSHED: Final = DisaggregationConfig(max_local_tokens=0, may_stay=False)


def parse_disaggregation(section: Section, slo_tpot_ms: float | None) -> DisaggregationConfig:
    """Raises ConfigError."""
    local = section.integer_or_choice(
        "local_prefill", (_AUTO, _NEVER), default=_AUTO, minimum=1, maximum=MAX_LOCAL_TOKENS
    )
    config = DisaggregationConfig(
        max_local_tokens=local if isinstance(local, int) else {_AUTO: None, _NEVER: 0}[local],
        may_stay=section.choice("stay", (_AUTO, _NEVER), default=_AUTO) == _AUTO,
        max_tpot_ms=section.optional_number("max_tpot_ms", minimum=MIN_TPOT_MS, maximum=MAX_TPOT_MS) or slo_tpot_ms,
    )
    section.finish()
    return config


def disaggregation_section(config: DisaggregationConfig) -> dict[str, object]:
    """The section of a cluster file that reads as this."""
    local = _AUTO if config.max_local_tokens is None else config.max_local_tokens or _NEVER
    section: dict[str, object] = {"local_prefill": local, "stay": _AUTO if config.may_stay else _NEVER}
    return section if config.max_tpot_ms is None else {**section, "max_tpot_ms": config.max_tpot_ms}
