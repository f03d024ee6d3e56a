"""The routing benchmark's own parts: what it makes of a trace, the cache it compares with, and a short replay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import routing
from benchmarks.report import Report
from cluster.sim.scenario import Request

BLOCK = routing.TRACE_BLOCK_TOKENS


def requests_of(tmp_path: Path, *rows: tuple[int, int, list[int]]) -> list[Request]:
    """`rows`: when it came in milliseconds, length of its prompt, numbers of its blocks."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": came_ms, "input_length": length, "output_length": 64, "hash_ids": blocks}
        for came_ms, length, blocks in rows
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return routing.read_requests(path, seed=1, limit=None)


def test_equal_blocks_of_the_trace_are_equal_tokens(tmp_path: Path) -> None:
    first, second = requests_of(tmp_path, (0, 3 * BLOCK, [1, 2, 3]), (3000, 2 * BLOCK + 64, [1, 2, 4]))
    assert [len(first.prompt_ids), len(second.prompt_ids)] == [48, 34]
    assert first.prompt_ids[:32] == second.prompt_ids[:32] and first.prompt_ids[32:34] != second.prompt_ids[32:]
    assert first.arrival_ns < second.arrival_ns and first.sampling.max_tokens == 2


def test_one_cache_for_all(tmp_path: Path) -> None:
    rows = [(3000 * index, 3 * BLOCK + 32, [index % 2 * 10, 1, 2, 9]) for index in range(4)]
    requests = requests_of(tmp_path, *rows)
    assert routing.shared_cache_misses(requests, num_blocks=6) == [49, 49, 1, 1]
    assert routing.shared_cache_misses(requests, num_blocks=3) == [49] * 4


def test_one_queue_for_all(tmp_path: Path) -> None:
    """Eight are served at once, the ninth waits for the first of them."""
    requests = requests_of(tmp_path, *((0, BLOCK, [index]) for index in range(9)))
    ttft_s = routing.one_queue_ttft_s(requests, [16] * 9)
    reading_s = (16 * routing.COST.token_ns + routing.COST.base_ns) / 1e9
    came_s = [request.arrival_ns / 1e9 for request in requests]
    assert ttft_s[:8] == pytest.approx([reading_s] * 8)
    assert ttft_s[8] == pytest.approx(max(came_s[0] + 2 * reading_s, came_s[8] + reading_s) - came_s[8])


def test_a_short_replay_under_each_policy(tmp_path: Path) -> None:
    rows = [(3000 * index, 8 * BLOCK, [0, *range(7 * (index % 3) + 1, 7 * (index % 3) + 8)]) for index in range(12)]
    report = Report("routing")
    routing.evaluate(report, requests_of(tmp_path, *rows), seed=1)
    policies = report.details["policies"]
    assert all(policy["num_unanswered"] == 0 for policy in policies.values())
    assert policies["baton"]["hit_rate"] > policies["round-robin"]["hit_rate"]
