"""Which way requests take, as operators see it: `baton status`, its JSON, and the coordinator's Prometheus page."""

from __future__ import annotations

from dataclasses import replace

from baton.v1 import admin_pb2
from cluster.cli.status import status_json, status_text
from cluster.core.config import ClusterConfig
from cluster.core.ids import Role, Route
from cluster.core.routes import FewPushes
from cluster.core.state import ClusterState
from cluster.core.views import RoutesView
from cluster.live.admin import status_response
from cluster.live.metrics import measure_routes
from cluster.policy.break_even import HandOver
from cluster.policy.decision import Cause
from tests.support.coordinator import make_config

ROUTES = RoutesView(
    counts=((Route.LOCAL, Cause.BREAK_EVEN, 190), (Route.PUSHED, Cause.RULE, 12)),
    num_recent=200,
    pushed_share=0.05,
    few=FewPushes(num_pushed=10, num_recent=200, causes=((Cause.BREAK_EVEN, 190),)),
    local_up_to_tokens=33,
    hand_over=HandOver(reserve_ms=2.0, take_over_ms=5.0),
)


def response(config: ClusterConfig, routes: RoutesView) -> admin_pb2.GetStatusResponse:
    view = ClusterState(config, epoch=1).status(0)
    return status_response(config, replace(view, routes=routes), uptime_ns=0, metrics_address="h:1")


def test_status_tells_how_many_took_which_way_and_what_decides_it_now() -> None:
    status = response(make_config(), ROUTES)
    text = status_text(status)
    assert "requests: 190 local (break_even), 12 pushed; of the last 200, 5% pushed" in text
    assert "a prompt of up to 33 uncached tokens would be read by decode now" in text
    assert "warning: of the last 200 requests 10 were pushed from prefill to decode" in text
    as_json = status_json(status)
    assert as_json["metrics_address"] == "h:1"
    assert as_json["routes"] | {"warning": None} == {
        "counts": [
            {"route": "local", "cause": "break_even", "count": 190},
            {"route": "pushed", "cause": "rule", "count": 12},
        ],
        "recent": 200,
        "pushed_share": 0.05000000074505806,
        "local_up_to_tokens": 33,
        "reserve_ms": 2.0,
        "take_over_ms": 5.0,
        "warning": None,
    }


def test_before_the_first_request_and_without_prefill_there_is_less_to_say() -> None:
    text = status_text(response(make_config(), RoutesView()))
    assert "requests: none yet\nevery prompt that is cached nowhere would be pushed now" in text
    config = make_config(with_prefill=False)
    assert all(pool.role is Role.DECODE for pool in config.pools)
    assert status_json(response(config, ROUTES))["routes"] is None
    assert "requests" not in status_text(response(config, ROUTES))


def test_the_page_has_the_share_and_what_it_comes_of() -> None:
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in measure_routes(ROUTES)
        for sample in metric.samples
    }
    assert samples == {
        ("baton_placements_total", "local", "break_even"): 190,
        ("baton_placements_total", "pushed", "rule"): 12,
        ("baton_pushed_share",): 0.05,
        ("baton_pushed_share_is_low",): 1,
        ("baton_local_prefill_tokens",): 33,
        ("baton_hand_over_seconds", "reserve"): 0.002,
        ("baton_hand_over_seconds", "take_over"): 0.005,
    }
    assert not any(sample.samples for sample in measure_routes(RoutesView()) if sample.name == "baton_pushed_share")
