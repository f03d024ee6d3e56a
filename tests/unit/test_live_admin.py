"""The coordinator's views as operators get them."""

from __future__ import annotations

from pathlib import Path

from baton.v1 import admin_pb2
from cluster.cli.status import status_json, status_text
from cluster.core.config import ClusterConfig, ModelConfig, PoolConfig
from cluster.core.drain_orders import AfterDrain, DrainOrder
from cluster.core.ids import RefusalCause, Role, WorkerId
from cluster.core.links import Link
from cluster.core.messages import BlockCounts, WorkerLoad
from cluster.core.views import AdmissionView, ClusterView, DrainView, PoolView, QuotaView, TenantView, WorkerView
from cluster.live.admin import drain_order, flip_order, status_response
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
    slo_tpot_ms=37.5,
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
    assert told["slo_ttft_ms"] is None and told["slo_tpot_ms"] == 37.5
    assert told["tenants"][0]["quota"] == {"tokens_per_s": 10, "burst_tokens": 100, "level_tokens": -7}
    text = status_text(status())
    assert "queue: 0 of 5 requests, 70 tokens to read; refused: 3 quota, 1 too_many" in text
    assert ["a", "2", "2", "1", "30", "4", "600", "90", "5", "-7"] in [line.split() for line in text.splitlines()]


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


def test_a_flipped_worker_is_told_where_it_is_and_not_where_it_was() -> None:
    told = status(decode=(worker_view("p-1", "d", Role.DECODE),))
    assert [worker.name for worker in told.pools[0].workers] == ["p-0"]
    assert [(worker.name, worker.state) for worker in told.pools[1].workers][-1] == ("p-1", "ready")


def test_drains_are_told_with_the_worker_and_the_drained_as_such() -> None:
    view = ClusterView(
        name="c",
        epoch=1,
        pools=(
            PoolView(name="p", role=Role.PREFILL, num_replicas=2, workers=(worker_view("p-1", "p", Role.PREFILL),)),
            PoolView(name="d", role=Role.DECODE, num_replicas=11, workers=()),
        ),
        fronts=(),
        num_requests=0,
        num_queued=0,
        num_running=0,
        num_leases=0,
        links=(),
        admission=ADMISSION,
        drains=(
            DrainView(
                order=DrainOrder(worker="p-1", then=AfterDrain.FLIP, pool="d"),
                life=WorkerId("p-1", 17),
                waits_for="1 lease",
                remaining_ms=None,
            ),
        ),
        drained=("p-0",),
    )
    drained, draining = status_response(CONFIG, view, uptime_ns=0).pools[0].workers
    assert drained == admin_pb2.WorkerStatus(name="p-0", role="prefill", state="drained")
    assert draining.drain == admin_pb2.DrainStatus(then="flip", pool="d", waits_for="1 lease")


def test_orders_are_what_operators_asked_for() -> None:
    assert drain_order(admin_pb2.DrainRequest(worker="w")) == DrainOrder(worker="w")
    drain = admin_pb2.DrainRequest(worker="w", restart=True, migrate=True, deadline_ms=0)
    assert drain_order(drain) == DrainOrder(worker="w", then=AfterDrain.RESTART, migrate=True, deadline_ms=0)
    flip = admin_pb2.FlipRequest(worker="w", pool="d", deadline_ms=5)
    assert flip_order(flip) == DrainOrder(worker="w", then=AfterDrain.FLIP, pool="d", deadline_ms=5)


def test_a_flipped_worker_keeps_what_its_machine_gives_it(tmp_path: Path) -> None:
    pools = (
        PoolConfig(name="p", role=Role.PREFILL, threads=3, cores=((0, 1, 2),), max_step_tokens=900),
        PoolConfig(name="d", role=Role.DECODE, threads=1, max_step_tokens=300),
    )
    config = ClusterConfig(name="c", model=ModelConfig(path="m"), pools=pools)
    file = ClusterFile(config=config, source="c.yaml", folder=tmp_path, lines={})
    plan = make_plan(file, ModelFacts(directory=tmp_path, weights_bytes=1, block_bytes=1024, max_model_tokens=64))
    before, flipped = plan.workers[0], plan.worker_in_pool("p-0", "d")
    assert (flipped.pool.name, flipped.pool.role, flipped.pool.max_step_tokens) == ("d", Role.DECODE, 300)
    assert (flipped.name, flipped.pool.threads, flipped.cores) == ("p-0", 3, (0, 1, 2))
    assert (flipped.num_blocks, flipped.metrics_port) == (before.num_blocks, before.metrics_port)
