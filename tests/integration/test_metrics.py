"""A worker's Prometheus page: served over plain HTTP, true, and found by way of the cluster's status."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.v1 import admin_pb2, admin_pb2_grpc
from cluster.core.ids import Outcome, Role
from cluster.wire.channels import PortInUseError, make_channel
from cluster.wire.metrics_server import MAX_CONNECTIONS, MAX_REQUEST_BYTES, MetricsServer
from tests.support.engine_model import write_tiny_model
from tests.support.plain_cluster import PlainCluster, greedy
from tests.support.soak import TIERS_OF_PROCESSES

DEADLINE_S = 60.0
Samples = dict[tuple[str, str], float]
"""By metric and state (empty where it has none)."""


def read_samples(address: str) -> list[Sample]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=DEADLINE_S) as page:
        assert page.headers["Content-Type"].startswith("text/plain")
        text = page.read().decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def read_page(address: str) -> Samples:
    return {(sample.name, sample.labels.get("state", "")): sample.value for sample in read_samples(address)}


def serving(talk: Callable[[str], None]) -> None:
    """Serves a page with one number that rises, and talks to it from another thread."""

    async def main() -> None:
        server, count = MetricsServer(), iter(range(10_000))

        def measure() -> list[Metric]:
            return [GaugeMetricFamily("baton_pages", "Asked for so far.", value=next(count))]

        await server.start(measure)
        try:
            await asyncio.to_thread(talk, server.address)
        finally:
            await server.close()

    asyncio.run(main())


def exchange(address: str, request: bytes) -> bytes:
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def is_cut_off(address: str, request: bytes) -> bool:
    """Whether nothing is answered: the connection is closed, perhaps with a part of the request still on its way."""
    try:
        return exchange(address, request) == b""
    except ConnectionError:
        return True


def test_every_page_is_measured_anew() -> None:
    def talk(address: str) -> None:
        assert [read_page(address)[("baton_pages", "")] for _ in range(3)] == [0, 1, 2]

    serving(talk)


def test_what_is_no_page_is_answered_as_http_does() -> None:
    def talk(address: str) -> None:
        for path, status in (("/other", 404), ("/metrics/x", 404)):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(f"http://{address}{path}", timeout=DEADLINE_S)
            assert caught.value.code == status
        assert exchange(address, b"POST /metrics HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 405 ")
        assert exchange(address, b"rubbish\r\n\r\n").startswith(b"HTTP/1.1 400 ")
        assert exchange(address, b"GET /metrics?name=x HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 OK\r\n")
        head = exchange(address, b"HEAD /metrics HTTP/1.1\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ") and head.endswith(b"\r\n\r\n")
        accept = b"Accept: application/openmetrics-text; version=1.0.0\r\n"
        page = exchange(address, b"GET /metrics HTTP/1.1\r\n" + accept + b"\r\n")
        assert b"Content-Type: application/openmetrics-text" in page and page.endswith(b"# EOF\n")

    serving(talk)


def test_nobody_can_hold_it_up() -> None:
    """Requests without an end, of any size, more connections than it takes: the next page is served all the same."""

    def talk(address: str) -> None:
        assert is_cut_off(address, b"GET /metrics HTTP/1.1\r\n")
        assert is_cut_off(address, b"GET /" + b"x" * 4 * MAX_REQUEST_BYTES)
        host, port = address.split(":")
        idle = [socket.create_connection((host, int(port)), timeout=DEADLINE_S) for _ in range(MAX_CONNECTIONS)]
        assert is_cut_off(address, b"GET /metrics HTTP/1.1\r\n\r\n")
        for connection in idle[1:]:
            connection.close()
        while is_cut_off(address, b"GET /metrics HTTP/1.1\r\n\r\n"):
            pass  # until it has noticed that they are gone
        read_page(address)
        # The one that still says nothing is cut off when the server closes.

    serving(talk)


def test_a_port_in_use_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"metrics on 127.0.0.1:{port}: .*in use"):
            MetricsServer(port=port)


def test_workers_count_what_the_prefix_cache_saves(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", max_position_embeddings=256)

    async def main() -> None:
        async with PlainCluster(tmp_path / "model", tmp_path) as cluster:
            for role, name in ((Role.PREFILL, "p0"), (Role.DECODE, "d0")):
                await (await cluster.start_worker(role, name, "--kv-blocks", "40")).ready()
            prompt = [3 + 7 * index % 90 for index in range(40)]
            for index in range(3):
                answer = await cluster.answer(f"r{index}", greedy(prompt, 10))
                assert answer.outcome is Outcome.LENGTH, answer.reason
            status = await _settled_status(cluster, num_query_tokens=3 * 40)
            await _check_links(cluster, status)
            for name, worker in status.items():
                page = await asyncio.to_thread(read_page, worker.metrics_address)
                # The second and the third time two of two and a half blocks are there. 16 tokens are a block.
                assert page[("baton_prefix_cache_query_tokens_total", "")] == 120
                assert page[("baton_prefix_cache_hit_tokens_total", "")] == 64
                assert (worker.prefix_cache.query_tokens, worker.prefix_cache.hit_tokens) == (120, 64)
                # Decode has filled a third block with the answer's first tokens.
                num_blocks = {"p0": 2, "d0": 3}[name]
                assert page[("baton_prefix_cache_blocks", "")] == worker.prefix_cache.num_blocks == num_blocks
                assert page[("baton_prefix_cache_stored_blocks_total", "")] == num_blocks
                assert page[("baton_prefix_cache_evicted_blocks_total", "")] == 0
                assert page[("baton_kv_blocks", "cached")] == num_blocks
                assert page[("baton_kv_blocks", "free")] == 40 - num_blocks
                assert page[("baton_steps_total", "")] >= 3
                assert page[("baton_sequences", "running")] == page[("baton_sequences", "waiting")] == 0

    asyncio.run(main())


@pytest.mark.skipif(not TIERS_OF_PROCESSES, reason="takes seconds; the unit tests look at each part (make soak-tiers)")
def test_what_is_evicted_comes_back_from_host_memory_and_after_a_restart_from_files(tmp_path: Path) -> None:
    """Pools of ten blocks and prompts of six: each pushes the last one's blocks out, and finds its own again."""
    write_tiny_model(tmp_path / "model", max_position_embeddings=128)
    options = ("--kv-blocks", "10", "--host-cache-blocks", "64", "--transport", "shm")
    files = ("--disk-cache-blocks", "64", "--disk-cache-dir", str(tmp_path / "files"))
    prompts = [[3 + (step * index + step) % 90 for index in range(97)] for step in (7, 11, 13)]

    async def main() -> None:
        async with PlainCluster(tmp_path / "model", tmp_path) as cluster:
            prefill = await cluster.start_worker(Role.PREFILL, "p0", *options, *files)
            decode = await cluster.start_worker(Role.DECODE, "d0", *options)
            for worker in (prefill, decode):
                await worker.ready()
            answers = []
            for index in range(6):
                answer = await cluster.answer(f"r{index}", greedy(prompts[index % 3], 10))
                assert answer.outcome is Outcome.LENGTH, answer.reason
                answers.append(answer.tokens)
                # So that none is left out: all that is in host memory is written.
                await _wait_for_tiers(cluster, "p0", lambda tiers: tiers["blocks/disk"] == tiers["blocks/host"])
            assert answers[:3] == answers[3:] and len({tuple(each) for each in answers}) == 3
            # Each block's worth is hit once, wherever it lay.
            for name in ("p0", "d0"):
                tiers = await _wait_for_tiers(cluster, name, lambda tiers: tiers["query"] == 6 * 97)
                assert tiers["hits/pool"] + tiers["hits/host"] == 3 * 96 and tiers["hits/host"] >= 2 * 96
                assert tiers["loaded"] > 0 and tiers["spilled"] > 0 and tiers["blocks/host"] >= 12
            await prefill.stop()
            prefill = await cluster.start_worker(Role.PREFILL, "p0", *options, *files)
            await prefill.ready()
            answer = await cluster.answer("again", greedy(prompts[0], 10))
            assert answer.tokens == answers[0]
            tiers = await _wait_for_tiers(cluster, "p0", lambda tiers: tiers.get("read", 0) > 0)
            assert tiers["bad"] == 0

    asyncio.run(main())


TIER_METRICS = {
    "baton_prefix_cache_query_tokens_total": "query",
    "baton_prefix_cache_tier_hit_tokens_total": "hits",
    "baton_prefix_cache_tier_blocks": "blocks",
    "baton_prefix_cache_loaded_bytes_total": "loaded",
    "baton_prefix_cache_spilled_bytes_total": "spilled",
    "baton_prefix_cache_disk_read_bytes_total": "read",
    "baton_prefix_cache_disk_bad_files_total": "bad",
}


async def _wait_for_tiers(
    cluster: PlainCluster, worker: str, condition: Callable[[dict[str, float]], bool]
) -> dict[str, float]:
    """A worker's page, by short name and tier, once it says what is waited for."""
    async with make_channel(cluster.address) as channel, asyncio.timeout(DEADLINE_S):
        admin = admin_pb2_grpc.AdminStub(channel)
        while True:
            status = await admin.GetStatus(admin_pb2.GetStatusRequest())
            addresses = [w.metrics_address for pool in status.pools for w in pool.workers if w.name == worker and w.pid]
            for address in addresses:
                samples = await asyncio.to_thread(read_samples, address)
                tiers = {
                    "/".join((TIER_METRICS[s.name], *([s.labels["tier"]] if "tier" in s.labels else []))): s.value
                    for s in samples
                    if s.name in TIER_METRICS
                }
                if condition(tiers):
                    return tiers
            await asyncio.sleep(0.02)


async def _check_links(cluster: PlainCluster, workers: dict[str, admin_pb2.WorkerStatus]) -> None:
    """What the prefill worker measured is on its page, and shown by the coordinator once a heartbeat has told it."""
    samples: dict[str, list[Sample]] = {}
    for name, worker in workers.items():
        page = await asyncio.to_thread(read_samples, worker.metrics_address)
        samples[name] = [s for s in page if s.name == "baton_kv_link_bandwidth_bytes_per_second"]
    assert samples["d0"] == [], "it only receives"
    (sample,) = samples["p0"]
    labels = {"worker": "p0", "pool": "prefill", "role": "prefill", "peer": "d0", "transport": "shm"}
    assert sample.labels == labels and sample.value > 0
    async with make_channel(cluster.address) as channel, asyncio.timeout(DEADLINE_S):
        admin = admin_pb2_grpc.AdminStub(channel)
        while not (links := (await admin.GetStatus(admin_pb2.GetStatusRequest())).links):
            await asyncio.sleep(0.05)
    (link,) = links
    assert link.writer == f"p0#{workers['p0'].incarnation}" and link.peer == f"d0#{workers['d0'].incarnation}"
    assert link.transport == "shm" and not link.is_slow
    assert link.bandwidth_bytes_per_s == link.median_bytes_per_s == sample.value


async def _settled_status(cluster: PlainCluster, *, num_query_tokens: int) -> dict[str, admin_pb2.WorkerStatus]:
    """The workers by name, once heartbeats and block events have told of everything."""
    async with make_channel(cluster.address) as channel, asyncio.timeout(DEADLINE_S):
        admin = admin_pb2_grpc.AdminStub(channel)
        while True:
            status = await admin.GetStatus(admin_pb2.GetStatusRequest())
            workers = {worker.name: worker for pool in status.pools for worker in pool.workers if worker.pid}
            caches = [worker.prefix_cache for worker in workers.values()]
            if len(caches) == 2 and all(
                cache.query_tokens == num_query_tokens and cache.num_blocks == worker.blocks.cached
                for cache, worker in zip(caches, workers.values(), strict=True)
            ):
                return workers
            await asyncio.sleep(0.05)
