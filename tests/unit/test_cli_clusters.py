"""`baton status`, `leases`, `down`, `up` as far as they go without a cluster; and how a cluster is found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import admin_pb2
from cluster.live.cluster_record import ClusterRecord, ClusterRecords
from cluster.live.run_processes import own_start_time_s
from tests.support.cli_scripted import ScriptedFront, answer, baton, serving

COUNTS = admin_pb2.BlockCounts(total=100, free=60, active=20, cached=10, reserved=8, quarantined=2)
STATUS = admin_pb2.GetStatusResponse(
    cluster="c",
    model="tiny",
    epoch=3,
    num_queued=1,
    num_running=2,
    num_fronts=1,
    uptime_s=61.5,
    pools=[
        admin_pb2.PoolStatus(
            name="p",
            role="prefill",
            wanted_replicas=2,
            workers=[
                admin_pb2.WorkerStatus(
                    name="p-0",
                    role="prefill",
                    state="ready",
                    incarnation=1796048583311,
                    pid=4711,
                    host="h",
                    engine="transformers (GPT2LMHeadModel)",
                    num_running=1,
                    num_waiting=4,
                    blocks=COUNTS,
                    prefix_cache=admin_pb2.PrefixCacheStatus(num_blocks=30, query_tokens=800, hit_tokens=500),
                    metrics_address="h:9400",
                ),
                admin_pb2.WorkerStatus(name="p-1", role="prefill", state="down"),
            ],
        ),
        admin_pb2.PoolStatus(
            name="d",
            role="decode",
            wanted_replicas=1,
            workers=[admin_pb2.WorkerStatus(name="d-0", role="decode", state="down")],
        ),
    ],
    links=[
        admin_pb2.LinkStatus(
            writer="p-0#1",
            peer="d-0#2",
            transport="shm",
            bandwidth_bytes_per_s=9_120_000_000,
            median_bytes_per_s=9_000_000_000,
        ),
        admin_pb2.LinkStatus(
            writer="p-0#1",
            peer="d-1#2",
            transport="nixl",
            bandwidth_bytes_per_s=250_000_000,
            median_bytes_per_s=9_000_000_000,
            is_slow=True,
        ),
    ],
)
LEASES = admin_pb2.GetLeasesResponse(
    leases=[
        admin_pb2.LeaseStatus(
            lease_id=9,
            request_id="r",
            attempt=2,
            worker="d-0#1",
            peer="p-0#1",
            side="reserved",
            num_blocks=3,
            size_bytes=3 * 2**20,
            age_ms=1500,
            remaining_ms=8500,
        )
    ]
)


def front() -> ScriptedFront:
    return ScriptedFront(answer, status=STATUS, leases=LEASES)


def a_record(name: str, address: str = "", *, is_launcher_alive: bool = False) -> ClusterRecord:
    """Without an address, of a start that is not complete."""
    return ClusterRecord(
        name=name,
        run_id=f"run-{name}-of-a-test",
        phase="serving" if address else "starting",
        launcher_pid=os.getpid() if is_launcher_alive else 2**22 + 1,
        launcher_started_s=own_start_time_s() if is_launcher_alive else 0.0,
        ray_owned=True,
        address=address,
    )


def records(home: Path) -> ClusterRecords:
    return ClusterRecords(home / "baton" / "clusters")


def test_status_as_json(tmp_path: Path) -> None:
    with serving(front()) as address:
        said = baton("status", "--json", "-a", address, home=tmp_path)
    assert said.exit_code == 0
    told = json.loads(said.stdout)
    assert {key: told[key] for key in ("cluster", "model", "epoch", "queued", "running", "fronts")} == {
        "cluster": "c",
        "model": "tiny",
        "epoch": 3,
        "queued": 1,
        "running": 2,
        "fronts": 1,
    }
    worker = {
        "name": "p-0",
        "role": "prefill",
        "state": "ready",
        "incarnation": 1796048583311,
        "pid": 4711,
        "host": "h",
        "engine": "transformers (GPT2LMHeadModel)",
        "running": 1,
        "waiting": 4,
        "blocks": {"total": 100, "free": 60, "active": 20, "cached": 10, "reserved": 8, "quarantined": 2},
        "prefix_cache": {"blocks": 30, "query_tokens": 800, "hit_tokens": 500},
        "metrics_address": "h:9400",
    }
    missing = {
        "name": "p-1",
        "role": "prefill",
        "state": "down",
        "incarnation": 0,
        "pid": 0,
        "host": "",
        "engine": "",
        "running": 0,
        "waiting": 0,
        "blocks": dict.fromkeys(worker["blocks"], 0),
        "prefix_cache": {"blocks": 0, "query_tokens": 0, "hit_tokens": 0},
        "metrics_address": "",
    }
    assert told["pools"] == [
        {"name": "p", "role": "prefill", "replicas": 2, "workers": [worker, missing]},
        {"name": "d", "role": "decode", "replicas": 1, "workers": [missing | {"name": "d-0", "role": "decode"}]},
    ]


def test_links_are_a_line_each_and_slow_ones_a_warning(tmp_path: Path) -> None:
    with serving(front()) as address:
        lines = baton("status", "-a", address, home=tmp_path).stdout.splitlines()
        told = json.loads(baton("status", "--json", "-a", address, home=tmp_path).stdout)
    assert [line.split() for line in lines[-4:-1]] == [
        ["PUSHES", "FROM", "TO", "OVER", "GB/S"],
        ["p-0", "d-0", "shm", "9.12"],
        ["p-0", "d-1", "nixl", "0.25"],
    ]
    assert lines[-1] == (
        "warning: p-0 pushes to d-1 over nixl at 0.25 GB/s; the median between their pools is 9.00 GB/s"
    )
    assert told["links"][1] == {
        "writer": "p-0#1",
        "peer": "d-1#2",
        "transport": "nixl",
        "bandwidth_bytes_per_s": 250_000_000,
        "median_bytes_per_s": 9_000_000_000,
        "is_slow": True,
    }


def test_status_for_people(tmp_path: Path) -> None:
    with serving(front()) as address:
        lines = baton("status", "-a", address, home=tmp_path).stdout.splitlines()
    engine = "engine transformers (GPT2LMHeadModel)"
    assert lines[0] == f"cluster c, model tiny, {engine}, up for 61 s, 2 running, 1 queued"
    assert lines[2] == "pool p, role prefill: 1 of 2 workers ready"
    cells = dict(zip(lines[3].split(), lines[4].split(), strict=True))
    assert cells == {
        "WORKER": "p-0",
        "STATE": "ready",
        "INCARNATION": "1796048583311",
        "PID": "4711",
        "HOST": "h",
        "RUN": "1",
        "WAIT": "4",
        "BLOCKS": "100",
        "FREE": "60",
        "ACTIVE": "20",
        "CACHED": "10",
        "RESV": "8",
        "QUAR": "2",
        "HIT%": "62",
    }
    assert lines[5].split() == ["p-1", "down", *["-"] * 12]
    assert lines[7:9] == ["pool d, role decode: 0 of 1 workers ready", lines[3]]
    assert len(lines) == 17 and max(map(len, lines)) <= 100


def test_leases(tmp_path: Path) -> None:
    with serving(front()) as address:
        told = json.loads(baton("leases", "--json", "-a", address, home=tmp_path).stdout)
        table = baton("leases", "-a", address, home=tmp_path).stdout.splitlines()
    assert told == {
        "leases": [
            {
                "lease_id": 9,
                "request_id": "r",
                "attempt": 2,
                "worker": "d-0#1",
                "peer": "p-0#1",
                "side": "reserved",
                "blocks": 3,
                "bytes": 3 * 2**20,
                "age_ms": 1500,
                "remaining_ms": 8500,
            }
        ]
    }
    assert table[1].split() == ["9", "r/2", "reserved", "d-0#1", "p-0#1", "3", "3.0", "MiB", "1.5", "8.5"]


def test_no_leases_is_said(tmp_path: Path) -> None:
    with serving(ScriptedFront(answer)) as address:
        assert baton("leases", "-a", address, home=tmp_path).stdout == "no leases and no quarantined blocks\n"
        assert json.loads(baton("leases", "--json", "-a", address, home=tmp_path).stdout) == {"leases": []}


def test_the_only_cluster_is_found_by_itself(tmp_path: Path) -> None:
    with serving(front()) as address:
        records(tmp_path).create(a_record("one", address))
        assert baton("status", home=tmp_path).exit_code == 0


def test_the_variable_names_a_cluster_and_the_option_comes_first(tmp_path: Path) -> None:
    with serving(front()) as address:
        assert baton("status", home=tmp_path, BATON_ADDRESS=address).exit_code == 0
        assert baton("status", "-a", address, home=tmp_path, BATON_ADDRESS="nonsense").exit_code == 0
        said = baton("status", home=tmp_path, BATON_ADDRESS="nonsense")
    assert said.exit_code == 2 and said.stderr == "baton: BATON_ADDRESS 'nonsense' is not HOST:PORT\n"


def test_several_clusters_are_a_question(tmp_path: Path) -> None:
    for name in ("one", "two"):
        records(tmp_path).create(a_record(name, "127.0.0.1:1"))
    said = baton("status", home=tmp_path)
    assert said.exit_code == 2 and "one at 127.0.0.1:1, two at 127.0.0.1:1" in said.stderr
    assert baton("down", home=tmp_path).exit_code == 2


@pytest.mark.parametrize("command", [["status"], ["leases"], ["generate", "--prompt", "a"]])
def test_without_a_cluster_commands_say_how_to_get_one(tmp_path: Path, command: list[str]) -> None:
    said = baton(*command, home=tmp_path)
    assert said.exit_code == 3 and "baton up -f FILE" in said.stderr and not said.stdout


ASKING = [["status"], ["leases"], ["generate", "--prompt", "a"]]


@pytest.mark.parametrize("command", ASKING)
def test_a_cluster_that_is_being_started_is_not_taken_for_none(tmp_path: Path, command: list[str]) -> None:
    records(tmp_path).create(a_record("new", is_launcher_alive=True))
    said = baton(*command, home=tmp_path)
    assert said.exit_code == 3 and "cluster new is being started" in said.stderr
    assert "no cluster is running" not in said.stderr and "baton down" not in said.stderr


@pytest.mark.parametrize("command", ASKING)
def test_a_start_that_was_cut_short_is_told_with_its_remedy(tmp_path: Path, command: list[str]) -> None:
    records(tmp_path).create(a_record("half"))
    said = baton(*command, home=tmp_path)
    assert said.exit_code == 3
    assert "the start of cluster half was cut short" in said.stderr and "`baton down half`" in said.stderr


@pytest.mark.parametrize("command", ASKING)
def test_a_recorded_cluster_that_does_not_answer_may_have_crashed(tmp_path: Path, command: list[str]) -> None:
    records(tmp_path).create(a_record("mine", "127.0.0.1:1"))
    for found in (baton(*command, home=tmp_path), baton(*command, "-a", "127.0.0.1:1", home=tmp_path)):
        assert found.exit_code == 3 and "no cluster answers at 127.0.0.1:1" in found.stderr
        assert "if cluster mine has crashed" in found.stderr and "`baton down mine`" in found.stderr


@pytest.mark.parametrize("command", ASKING)
@pytest.mark.parametrize("address", [None, "127.0.0.1:1"])
def test_a_cluster_that_cannot_be_reached_is_json_too(tmp_path: Path, command: list[str], address: str | None) -> None:
    said = baton(*command, "--json", *([] if address is None else ["-a", address]), home=tmp_path)
    assert said.exit_code == 3
    assert said.stderr == f"baton: {json.loads(said.stdout)['error']}\n" and list(json.loads(said.stdout)) == ["error"]


@pytest.mark.parametrize(
    ("code", "details", "told"),
    [
        ("UNAVAILABLE", "the coordinator: failed to connect to all addresses; last error: UNKNOWN", "cannot reach its"),
        ("DEADLINE_EXCEEDED", "the coordinator: Deadline Exceeded", "did not answer in time"),
    ],
)
def test_a_coordinator_that_is_away_is_told_in_plain_words(tmp_path: Path, code: str, details: str, told: str) -> None:
    class Alone(ScriptedFront):
        def GetStatus(self, request: Any, context: Any) -> Any:
            context.abort(grpc.StatusCode[code], details)

    with serving(Alone(answer)) as address:
        said = baton("status", "--json", "-a", address, home=tmp_path)
    assert told in said.stderr and address in said.stderr and "Exceeded" not in said.stderr
    assert json.loads(said.stdout) == {"error": said.stderr.removeprefix("baton: ").rstrip("\n")}


@pytest.mark.parametrize("command", [["status"], ["leases"]])
def test_a_dead_address_is_not_reachable(tmp_path: Path, command: list[str]) -> None:
    said = baton(*command, "-a", "127.0.0.1:1", home=tmp_path)
    assert said.exit_code == 3 and said.stderr.startswith("baton: ") and len(said.stderr.splitlines()) == 1


def test_down_without_a_cluster_has_nothing_to_do(tmp_path: Path) -> None:
    assert baton("down", home=tmp_path).exit_code == 0
    said = baton("down", "nosuch", home=tmp_path)
    assert said.exit_code == 3 and "nosuch" in said.stderr


def test_down_clears_the_record_of_a_cluster_that_is_long_gone(tmp_path: Path) -> None:
    records(tmp_path).create(a_record("gone", "127.0.0.1:1"))
    said = baton("down", "gone", home=tmp_path)
    assert said.exit_code == 0 and "cluster gone is down" in said.stderr
    assert records(tmp_path).all() == []


def test_a_damaged_record_is_no_record(tmp_path: Path) -> None:
    folder = tmp_path / "baton" / "clusters"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text("{")
    (folder / "b.json").write_text('{"name": 3}')
    (folder / "c.json").write_text("[]")
    assert baton("status", home=tmp_path).exit_code == 3


def test_up_refuses_a_bad_file_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("version: 1\nmodel: {path: x}\npools:\n  - {name: d, rolle: decode}\n")
    said = baton("up", "-f", str(path), home=tmp_path)
    assert said.exit_code == 2 and f"{path}:4: pools[0].role" in said.stderr
    missing = baton("up", "-f", str(tmp_path / "none.yaml"), home=tmp_path)
    assert missing.exit_code == 2 and "no readable file" in missing.stderr
    assert records(tmp_path).all() == []


def test_up_refuses_a_missing_model(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("version: 1\nmodel: {preset: smollm2-135m-instruct}\npools: [{name: d, role: decode}]\n")
    said = baton("up", "-f", str(path), home=tmp_path)
    assert said.exit_code == 2 and f"{path}:2: model.preset" in said.stderr and "baton model import" in said.stderr


def test_an_unknown_model_cannot_be_imported(tmp_path: Path) -> None:
    said = baton("model", "import", "gpt-9", home=tmp_path)
    assert said.exit_code == 3 and "smollm2-135m-instruct" in said.stderr
