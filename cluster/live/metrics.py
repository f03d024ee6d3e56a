"""What the coordinator's Prometheus page says of its cluster."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from cluster.core.ids import Role
from cluster.core.limits import MS_PER_S
from cluster.core.views import PressureView, RoutesView
from cluster.live.driver import Driver


class CoordinatorMetrics:
    """Must be called where the state is changed, on the event loop's thread."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def measure(self) -> Iterator[Metric]:
        status = self._driver.state.status(self._driver.now_ns())
        yield from measure_routes(status.routes)
        yield from measure_pressure(status.pressure)
        yield CounterMetricFamily(
            "baton_poison_requests", "Requests ended for what they did to their workers.", value=status.num_poison
        )


def measure_pressure(pressure: PressureView) -> Iterator[Metric]:
    """How near the pools are to their limits."""
    ratios = GaugeMetricFamily(
        "baton_pressure_ratio",
        "Mean over workers, by the most with which they are given more: what prefill has to read, what decode holds; "
        "and the share of prefill's blocks that are held until decode has taken their KV over (push).",
        labels=("part",),
    )
    for part in ("prefill", "decode", "push"):
        ratios.add_metric((part,), getattr(pressure, part))
    yield ratios
    limits = GaugeMetricFamily("baton_pool_limits", "1 for the role that limits the cluster.", labels=("role",))
    for role in Role:
        limits.add_metric((role.value,), pressure.limiting is role)
    yield limits


def measure_routes(routes: RoutesView) -> Iterator[Metric]:
    """Which ways requests take. Prometheus's `_total` is added to the counter's name."""
    counts = CounterMetricFamily(
        "baton_placements",
        "Attempts that have started: pushed to decode, read by decode itself (local), or stayed on prefill; and why.",
        labels=("route", "cause"),
    )
    for route, cause, number in routes.counts:
        counts.add_metric((route.value, cause.value), number)
    yield counts
    share = GaugeMetricFamily("baton_pushed_share", "Of the last placements, the share that was pushed to decode.")
    if routes.pushed_share is not None:
        share.add_metric((), routes.pushed_share)
    yield share
    yield GaugeMetricFamily(
        "baton_pushed_share_is_low",
        "1 while hardly anything is pushed although both pools are whole.",
        value=routes.few is not None,
    )
    yield GaugeMetricFamily(
        "baton_local_prefill_tokens",
        "The longest prompt, cached nowhere, that decode would read itself if it came now.",
        value=routes.local_up_to_tokens,
    )
    hand_over = GaugeMetricFamily(
        "baton_hand_over_seconds", "Median of what a push costs besides reading, by part.", labels=("part",)
    )
    hand_over.add_metric(("reserve",), routes.hand_over.reserve_ms / MS_PER_S)
    hand_over.add_metric(("take_over",), routes.hand_over.take_over_ms / MS_PER_S)
    yield hand_over
