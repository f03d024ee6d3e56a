"""The coordinator's views as operators get them."""

from __future__ import annotations

from pathlib import Path

from baton.v1 import admin_pb2
from cluster.cli.status import status_json, status_text
from cluster.core.config import ClusterConfig, ModelConfig, PoolConfig
from cluster.core.ids import RefusalCause, Role, WorkerId
from cluster.core.links import Link
from cluster.core.messages import BlockCounts, WorkerLoad
from cluster.core.views import AdmissionView, ClusterView, PoolView, QuotaView, TenantView, WorkerView
from cluster.live.admin import status_response
from cluster.live.config_file import ClusterFile
from cluster.live.plan import make_plan
from cluster.live.preflight import ModelFacts

CONFIG = ClusterConfig(
    name="c",
    model=ModelConfig(path="m"),
    pools=(
        PoolConfig(name="p", role=Role.PREFILL, replicas=2),
        PoolConfig(name="d", role=Role.DECODE, replicas=11),
    ),
)


SLOW_LINK = Link(
    writer=WorkerId("p-0", 17),
    peer=WorkerId("d-3", 4),
    transport="ucx",
    bandwidth_bytes_per_s=100,
    median_bytes_per_s=500,
)
ADMISSION = AdmissionView(
    queue_limit=5,
    num_queued_tokens=70,
    slo_ttft_ms=None,
    refusals=((RefusalCause.QUOTA, 3), (RefusalCause.TOO_MANY, 1)),
    tenants=(
        TenantView(
            name="a",
            weight=2.0,
            num_queued=1,
            num_running=2,
            num_ended=30,
            num_refused=4,
            num_prompt_tokens=600,
            num_output_tokens=90,
            expected_output_tokens=5,
            quota=QuotaView(tokens_per_s=10, burst_tokens=100, level_tokens=-7),
        ),
    ),
)


def worker_view(name: str, pool: str, role: Role) -> WorkerView:
    return WorkerView(
        worker=WorkerId(name, 17),
        pool=pool,
        role=role,
        state="ready",
        host="h",
        pid=4711,
        model="tiny",
        engine="native",
        token_address="h:1",
        transports=("shm",),
        metrics_address="h:2",
        silent_ms=3,
        num_legs=0,
        num_known_blocks=6,
        load=WorkerLoad(
            num_running=1,
            num_waiting=2,
            blocks=BlockCounts(total=9, free=9, active=0, cached=0, reserved=0, quarantined=0),
            prefix_query_tokens=40,
            prefix_hit_tokens=32,
        ),
    )


def status(*, prefill: tuple[WorkerView, ...] = (), decode: tuple[WorkerView, ...] = ()) -> admin_pb2.GetStatusResponse:
    view = ClusterView(
        name="c",
        epoch=1,
        pools=(
            PoolView(name="p", role=Role.PREFILL, num_replicas=2, workers=prefill),
            PoolView(name="d", role=Role.DECODE, num_replicas=11, workers=decode),
        ),
        fronts=(),
        num_requests=0,
        num_queued=0,
        num_running=0,
        num_leases=0,
        links=(SLOW_LINK,),
        admission=ADMISSION,
    )
    return status_response(CONFIG, view, uptime_ns=0)


def test_a_worker_that_is_not_registered_is_down() -> None:
    lost, ready = status(prefill=(worker_view("p-1", "p", Role.PREFILL),)).pools[0].workers
    assert lost == admin_pb2.WorkerStatus(name="p-0", role="prefill", state="down")
    assert (ready.name, ready.state, ready.incarnation, ready.pid) == ("p-1", "ready", 17, 4711)
    assert ready.prefix_cache == admin_pb2.PrefixCacheStatus(num_blocks=6, query_tokens=40, hit_tokens=32)
    assert ready.metrics_address == "h:2"
    assert ready.engine == "native"


def test_links_are_told_with_what_makes_them_slow() -> None:
    assert list(status().links) == [
        admin_pb2.LinkStatus(
            writer="p-0#17",
            peer="d-3#4",
            transport="ucx",
            bandwidth_bytes_per_s=100,
            median_bytes_per_s=500,
            is_slow=True,
        )
    ]


def test_the_queue_refusals_and_tenants_are_told() -> None:
    told = status_json(status())["admission"]
    assert told["refusals"] == {"quota": 3, "too_many": 1} and told["queue_limit"] == 5
    assert told["slo_ttft_ms"] is None
    assert told["tenants"][0]["quota"] == {"tokens_per_s": 10, "burst_tokens": 100, "level_tokens": -7}
    text = status_text(status())
    assert "queue: 0 of 5 requests, 70 tokens to read; refused: 3 quota, 1 too_many" in text
    assert text.splitlines()[-1].split() == ["a", "2", "2", "1", "30", "4", "600", "90", "5", "-7"]


def test_workers_are_told_in_the_order_of_their_numbers() -> None:
    decode = status(decode=(worker_view("d-10", "d", Role.DECODE),)).pools[1].workers
    assert [worker.name for worker in decode] == [f"d-{i}" for i in range(11)]
    assert [worker.state for worker in decode] == ["down"] * 10 + ["ready"]


def test_a_worker_under_a_name_of_its_own_is_told_too() -> None:
    told = status(prefill=(worker_view("by-hand", "p", Role.PREFILL),)).pools[0].workers
    assert [(worker.name, worker.state) for worker in told] == [("p-0", "down"), ("p-1", "down"), ("by-hand", "ready")]


def test_the_plan_gives_workers_the_names_that_status_expects(tmp_path: Path) -> None:
    file = ClusterFile(config=CONFIG, source="c.yaml", folder=tmp_path, lines={})
    facts = ModelFacts(directory=tmp_path, weights_bytes=1, block_bytes=1024, max_model_tokens=64)
    planned = [worker.name for worker in make_plan(file, facts).workers]
    assert planned == [worker.name for pool in status().pools for worker in pool.workers]
