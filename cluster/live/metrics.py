"""What the coordinator's Prometheus page says of its cluster."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from cluster.core.limits import MS_PER_S
from cluster.core.views import RoutesView
from cluster.live.driver import Driver


class CoordinatorMetrics:
    """Must be called where the state is changed, on the event loop's thread."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def measure(self) -> Iterator[Metric]:
        yield from measure_routes(self._driver.state.status(self._driver.now_ns()).routes)


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
