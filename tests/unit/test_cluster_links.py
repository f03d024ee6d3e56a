"""Links between workers as the coordinator knows them: what is slow beside what, and who is told how often."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from cluster.core.effects import WarnOfLink
from cluster.core.ids import Role, WorkerId
from cluster.core.limits import SLOW_LINK_FRACTION
from cluster.core.links import Link, LinkTable
from cluster.core.messages import (
    Heartbeat,
)
from cluster.core.reports import LinkReport
from cluster.core.state import ClusterState
from cluster.live.driver import Driver
from tests.support.coordinator import D0, D1, P0, P1, Bench, make_config, make_hello, make_load

GB = 1_000_000_000


def report(peer: WorkerId, bandwidth_bytes_per_s: float, transport: str = "shm") -> LinkReport:
    return LinkReport(peer=peer, transport=transport, bandwidth_bytes_per_s=int(bandwidth_bytes_per_s))


def slow(link: Link) -> tuple[WorkerId, WorkerId]:
    assert link.is_slow and link.bandwidth_bytes_per_s < SLOW_LINK_FRACTION * link.median_bytes_per_s
    return link.writer, link.peer


def test_a_link_far_below_its_pools_median_is_returned_once() -> None:
    table = LinkTable()
    assert table.report(P0, "p", [("d", report(D0, 8 * GB)), ("d", report(D1, 9 * GB))]) == []
    links = [("d", report(D0, 8 * GB)), ("d", report(D1, 1.9 * GB, "nixl"))]
    assert [slow(link) for link in table.report(P1, "p", links)] == [(P1, D1)]
    assert table.report(P1, "p", links) == []
    assert [(link.writer, link.peer, link.is_slow) for link in table.all()] == [
        (P0, D0, False),
        (P0, D1, False),
        (P1, D0, False),
        (P1, D1, True),
    ]
    assert table.all()[3].median_bytes_per_s == 8 * GB
    assert str(table.all()[3]) == (
        "p1#1 pushes to d1#1 over nixl at 1.90 GB/s; the median between their pools is 8.00 GB/s"
    )
    table.check_invariants()


def test_a_quarter_of_the_median_is_not_slow_yet() -> None:
    table = LinkTable()
    table.report(P0, "p", [("d", report(D0, 8 * GB)), ("d", report(D1, 8 * GB))])
    assert table.report(P1, "p", [("d", report(D0, 2 * GB))]) == []
    assert [slow(link) for link in table.report(P1, "p", [("d", report(D0, 2 * GB - 1))])] == [(P1, D0)]


def test_the_bandwidth_of_a_link_that_is_not_there_is_what_its_pools_have() -> None:
    table = LinkTable()
    assert table.bandwidth_bytes_per_s(P0, D0, ("p", "d")) == 0
    table.report(P0, "p", [("d", report(D0, 8 * GB)), ("d", report(D1, 2 * GB))])
    assert table.bandwidth_bytes_per_s(P0, D1, ("p", "d")) == 2 * GB
    assert table.bandwidth_bytes_per_s(P1, D1, ("p", "d")) == 5 * GB
    assert table.bandwidth_bytes_per_s(P1, D1, ("p", "e")) == 0


def test_the_first_link_turns_out_slow_when_others_come() -> None:
    table = LinkTable()
    assert table.report(P0, "p", [("d", report(D0, GB))]) == []
    assert not table.all()[0].is_slow
    assert [slow(link) for link in table.report(P1, "p", [("d", report(D0, 9 * GB))])] == [(P0, D0)]


def test_pools_are_compared_with_themselves_alone() -> None:
    table = LinkTable()
    table.report(P0, "near", [("d", report(D0, 9 * GB)), ("d", report(D1, 9 * GB))])
    assert table.report(P1, "far", [("d", report(D0, GB))]) == []
    assert table.report(P1, "far", [("d", report(D0, GB)), ("e", report(D1, 0.1 * GB))]) == []


def test_a_link_that_was_made_anew_is_judged_anew() -> None:
    table = LinkTable()
    table.report(P0, "p", [("d", report(D0, 8 * GB)), ("d", report(D1, 8 * GB))])
    assert len(table.report(P1, "p", [("d", report(D0, GB))])) == 1
    assert table.report(P1, "p", [("d", report(D0, 7 * GB))]) == []
    assert len(table.report(P1, "p", [("d", report(D0, GB))])) == 1
    table.forget(P1)
    table.forget(P1)
    assert table.writers() == [P0] and len(table) == 2
    assert table.report(P0, "p", []) == []
    assert len(table) == 0 and table.all() == ()
    table.check_invariants()


@pytest.mark.parametrize("seed", range(20))
def test_the_table_agrees_with_itself_whatever_is_reported(seed: int) -> None:
    rng = random.Random(seed)
    table = LinkTable()
    peers = [WorkerId(f"d{i}", 1) for i in range(4)]
    wanted: dict[WorkerId, dict[WorkerId, int]] = {}
    for _ in range(60):
        writer = WorkerId(f"p{rng.randrange(4)}", 1)
        if rng.random() < 0.2:
            table.forget(writer)
            wanted.pop(writer, None)
        else:
            links = {peer: rng.choice([1, 5, 5, 6]) * GB for peer in peers if rng.random() < 0.6}
            table.report(writer, "p", [("d", report(peer, value)) for peer, value in links.items()])
            wanted[writer] = links
        table.check_invariants()
        found = {(link.writer, link.peer): link.bandwidth_bytes_per_s for link in table.all()}
        assert found == {(writer, peer): v for writer, links in wanted.items() for peer, v in links.items()}
        ordered = sorted(found.values())
        if ordered:
            middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2
            assert {link.median_bytes_per_s for link in table.all()} == {middle}


def beat(bench: Bench, writer: WorkerId, **links: float) -> list[str]:
    """A heartbeat that tells of links by the peer's name; returns what is warned of."""
    reports = tuple(report(WorkerId(name, 1), value * GB) for name, value in links.items())
    effects = bench.worker_says(writer, Heartbeat(load=make_load(100), links=reports))
    return [str(effect.link) for effect in effects if isinstance(effect, WarnOfLink)]


@pytest.mark.bad_day(14)
def test_the_coordinator_warns_once_and_shows_what_there_is() -> None:
    bench = Bench()
    bench.join(P0, P1, D0, D1)
    assert beat(bench, P0, d0=8, d1=9) == []
    (warning,) = beat(bench, P1, d0=1)
    assert warning == "p1#1 pushes to d0#1 over shm at 1.00 GB/s; the median between their pools is 8.00 GB/s"
    assert beat(bench, P1, d0=1) == []
    links = bench.state.status(bench.now_ns).links
    assert [(link.writer, link.peer, link.is_slow) for link in links] == [
        (P0, D0, False),
        (P0, D1, False),
        (P1, D0, True),
    ]


def test_links_of_workers_that_are_lost_or_unknown_are_not_shown() -> None:
    bench = Bench()
    bench.join(P0, D0)
    beat(bench, P0, d0=8, d1=9)
    assert [link.peer for link in bench.state.status(bench.now_ns).links] == [D0]
    bench.join(D1)
    beat(bench, P0, d0=8, d1=9)
    assert [link.peer for link in bench.state.status(bench.now_ns).links] == [D0, D1]
    bench.worker_gone(P0)
    assert bench.state.status(bench.now_ns).links == ()


@pytest.mark.bad_day(14)
def test_the_driver_logs_a_slow_link_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        driver = Driver(ClusterState(make_config(), epoch=3), lambda worker, reason: None)
        for worker, role in ((P0, Role.PREFILL), (P1, Role.PREFILL), (D0, Role.DECODE)):
            driver.worker_said(worker, make_hello(worker, role))
        for _ in range(2):
            for worker, bandwidth in ((P0, 9 * GB), (P1, GB)):
                driver.worker_said(worker, Heartbeat(load=make_load(100), links=(report(D0, bandwidth),)))
        driver.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert [record.message for record in caplog.records] == [
        "slow link: p1#1 pushes to d0#1 over shm at 1.00 GB/s; the median between their pools is 5.00 GB/s"
    ]
