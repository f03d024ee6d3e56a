"""A worker's memory stays flat, however many short requests have passed through it (BATON_SHORT_REQUESTS)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from cluster.agent.state import WorkerState
from cluster.core.ids import Role, WorkerId
from tests.support.engine_model import write_tiny_model
from tests.support.plain_cluster import ROOT
from tests.support.short_requests import NUM_BLOCKS, container_sizes
from tests.support.soak import NUM_SHORT_REQUESTS
from tests.support.worker_pair import worker_config

MAX_CONTAINER_SIZE = 128
"""Twice the pool's blocks, and some slack for heaps that are tidied at 64 entries."""
MAX_OBJECT_GROWTH = 100
MAX_RSS_GROWTH_BYTES = 2**20
"""In the second half; the first one warms up, as allocators do."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory)
    command = [sys.executable, "-m", "tests.support.short_requests", str(directory), str(NUM_SHORT_REQUESTS)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads(done.stdout)
    assert content["readings"][-1]["num_requests"] == NUM_SHORT_REQUESTS
    return content


def test_everything_that_could_leave_something_behind_has_happened(report: dict[str, Any]) -> None:
    for what in ("cancelled", "preempted", "evicted_blocks", "hit_tokens", "block_events"):
        assert report[f"num_{what}"] > 0, what


def test_memory_stays_flat(report: dict[str, Any]) -> None:
    _, middle, *_, last = report["readings"]
    assert last["num_objects"] - middle["num_objects"] <= MAX_OBJECT_GROWTH
    assert last["rss_bytes"] - middle["rss_bytes"] <= MAX_RSS_GROWTH_BYTES


def test_whatever_a_worker_keeps_is_empty_at_rest_or_bounded(report: dict[str, Any]) -> None:
    for reading in report["readings"]:
        assert not any(reading["held"].values()), reading["held"]
        assert 0 < reading["num_indexed_blocks"] <= NUM_BLOCKS
        assert reading["num_pending_changes"] <= 2 * NUM_BLOCKS
        sizes = reading["sizes"]
        large = {path: size for path, size in sizes.items() if size > MAX_CONTAINER_SIZE}
        assert not large, f"after {reading['num_requests']} requests"
        for part in ("scheduler._sequences", "legs._legs", "outbox._records"):
            found = [size for path, size in sizes.items() if path.endswith(part)]
            assert found and not any(found), part


def test_a_leak_would_be_seen() -> None:
    """The walk reaches whatever hangs on the parts of a worker."""
    state = WorkerState(worker_config(WorkerId("d", 1), Role.DECODE), 0)
    state._stepper.leak = ["of a request"] * 1000  # type: ignore[attr-defined]
    state._control._legs.leak = dict.fromkeys(range(1001), "of another")  # type: ignore[attr-defined]
    assert sorted(dict(container_sizes({"state": state})).values())[-2:] == [1000, 1001]
