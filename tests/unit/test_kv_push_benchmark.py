"""The benchmark of wires: what it moves, what it makes of its times, and that it says what it could not measure."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest

from benchmarks.kv_push import judge_load
from benchmarks.kv_wires import wires
from benchmarks.kv_wires.plans import LIMITS, Load, Timing, scattered_writes
from benchmarks.kv_wires.remote import IsCalled, Remote, RemoteFailedError
from benchmarks.kv_wires.rounds import FULL, SAMPLED, Samples
from benchmarks.kv_wires.wires import BARE_UCX, MEMCPY, SHM, UCX
from benchmarks.report import Report

CORES = sorted(os.sched_getaffinity(0))[:1]
LOAD = Load(size_bytes=1000, total_bytes=100_500)


def test_every_piece_goes_from_one_place_to_one_place() -> None:
    load = Load(size_bytes=1000, total_bytes=300_500)
    writes = scattered_writes(load, 1)
    copies = [copy for write in writes for copy in write]
    places = [number * 1000 for number in range(300)]
    assert sorted(copy.source_bytes for copy in copies) == sorted(copy.target_bytes for copy in copies) == places
    assert {copy.size_bytes for copy in copies} == {1000}
    assert max(map(len, writes)) == LIMITS.max_blocks_per_write
    assert writes != scattered_writes(load, 2)
    large = Load(size_bytes=LIMITS.max_write_bytes // 3, total_bytes=LIMITS.max_write_bytes * 2)
    assert list(map(len, scattered_writes(large, 1))) == [3, 3]


def timings(*seconds: float, cpu: float = 1.0) -> list[Timing]:
    return [Timing(seconds=value, cpu_seconds=cpu * value) for value in seconds]


def test_ratios_are_medians_of_rounds() -> None:
    samples = Samples(
        LOAD,
        {
            MEMCPY: timings(1.0, 2.0, 10.0),
            SHM: timings(1.0, 4.0, 11.0, cpu=1.2),
            SHM + SAMPLED: timings(1.0, 2.5, 16.0),
            SHM + FULL: timings(2.0, 4.0, 20.0),
            UCX: timings(1.0, 1.0, 1.0),
            BARE_UCX: timings(0.8, 0.8, 0.8),
        },
    )
    report = Report("x")
    judge_load(report, "load", samples)
    found = {result.measure: (round(result.value, 3), result.holds) for result in report.results}
    assert found == {
        "load, shm: speed / memcpy": (0.909, True),
        "load, shm, sampled checksums: speed / memcpy": (0.8, None),
        "load, shm, full checksums: speed / memcpy": (0.5, None),
        "load, ucx: speed / ucxx library": (0.8, False),
        "load, shm: sender's CPU time / memcpy's": (1.32, False),
        "load, shm, sampled checksums: sender's CPU time / memcpy's": (1.25, None),
        "load, shm, full checksums: sender's CPU time / memcpy's": (2.0, False),
    }


class Broken:
    def __init__(self, is_called: IsCalled) -> None:
        raise ImportError("no such wire")


class Echo:
    def __init__(self, is_called: IsCalled) -> None:
        self._is_called = is_called

    def run_on(self) -> str:
        while not self._is_called():
            pass
        return "ended"

    def fail(self) -> None:
        raise ValueError("told to")

    def close(self) -> None:
        pass


def test_a_wire_that_cannot_be_had_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "ENDS", {UCX: (Broken, Broken)})
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        assert wires.open_wires(CORES, stack, missing) == {}
    assert missing == {UCX: "ImportError: no such wire"}


def test_a_remote_call_is_interrupted_and_its_error_is_told() -> None:
    with Remote(Echo, CORES, "echo") as remote:
        remote.begin("run_on")
        assert remote.interrupt() == "ended"
        with pytest.raises(RemoteFailedError, match="ValueError: told to"):
            remote.call("fail")
