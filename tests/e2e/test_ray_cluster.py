"""A cluster on Ray, as an operator sees it: through `baton` alone. Whatever happens, nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.live.cluster_record import ClusterRecord, ClusterRecords
from cluster.live.environment import read_environment
from cluster.live.ray_head import access_variables
from cluster.live.run_processes import find_run_processes
from tests.e2e.conftest import wait_until
from tests.support.soak import ALL_RAY

COMMAND_TIMEOUT_S = 180.0
RESTART_TIMEOUT_S = 90.0
STRANGER_TIMEOUT_S = 8.0
RESTARTED_BY_THEN_S = 5.0
"""A worker that Ray starts again after all says so within."""
CLUSTER_FILE = """\
version: 1
name: {name}
model: {{path: {model}, dtype: bfloat16, max_model_tokens: 512}}
pools:
  - {{name: p, role: prefill, kv_memory: 16MiB}}
  - {{name: d, role: decode, kv_memory: 32MiB}}
front: {{port: {port}}}
disaggregation: {{local_prefill: never, stay: never}}  # which way requests take must not depend on measurements
"""

ONLY_IN_SOAK = pytest.mark.skipif(not ALL_RAY, reason="the other signal at this moment (make soak)")
pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Operator:
    """Someone at a terminal, with a cache of their own."""

    home: Path
    model: Path

    @property
    def records(self) -> ClusterRecords:
        return ClusterRecords(self.home / "baton" / "clusters")

    @property
    def variables(self) -> dict[str, str]:
        ours = {"XDG_CACHE_HOME": str(self.home), "PYTHONPATH": ":".join(sys.path)}
        return {**os.environ, **ours, "BATON_ADDRESS": "", "RAY_ADDRESS": ""}

    def file(self, name: str, port: int = 0, model: Path | None = None) -> Path:
        path = self.home / f"{name}.yaml"
        path.write_text(CLUSTER_FILE.format(name=name, model=model or self.model, port=port))
        return path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.variables,
            start_new_session=True,
        )

    def baton(self, *arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=COMMAND_TIMEOUT_S)
        said = subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)
        assert said.returncode == expect, f"baton {' '.join(arguments)}: {said.returncode}\n{stdout}\n{stderr}"
        assert "Traceback" not in stderr
        return said

    def json(self, *arguments: str) -> Any:
        return json.loads(self.baton(*arguments, "--json").stdout)

    def record(self, name: str) -> ClusterRecord:
        record = self.records.read(name)
        assert record is not None
        return record

    def processes(self) -> list[psutil.Process]:
        """Everything that was started from this terminal and still runs."""
        found = []
        for process in psutil.process_iter():
            try:
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get("XDG_CACHE_HOME") == str(self.home):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    model = read_environment(os.environ).models_dir / "SmolLM2-135M-Instruct"
    shared_memory = set(os.listdir("/dev/shm"))
    operator = Operator(tmp_path, model)
    try:
        yield operator
        assert operator.processes() == []
        assert operator.records.all() == []
        assert set(os.listdir("/dev/shm")) <= shared_memory
    finally:
        for process in operator.processes():
            process.kill()


def processes_of(record: ClusterRecord) -> list[psutil.Process]:
    return find_run_processes(record.run_id, record.ray_temp_dir)


def nothing_left_of(record: ClusterRecord) -> None:
    assert processes_of(record) == []
    assert not Path(record.ray_temp_dir).exists()


def workers(operator: Operator) -> dict[str, dict[str, Any]]:
    return {worker["name"]: worker for pool in operator.json("status")["pools"] for worker in pool["workers"]}


def answers(operator: Operator) -> dict[str, Any]:
    told: dict[str, Any] = operator.json(
        "generate", "--chat", "What is the capital of France? Answer briefly.", "-n", "12"
    )
    assert "Paris" in told["text"] and told["outcome"] == "stop"
    return told


def ray_lets_in(record: ClusterRecord, variables: dict[str, str]) -> bool:
    """Whether a process of somebody else's on this machine may use the cluster's Ray."""
    program = f"import ray; ray.init(address={record.ray_address!r}, log_to_driver=False); print(len(ray.nodes()))"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        stdout, _ = process.communicate(timeout=STRANGER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        # It goes on trying for minutes.
        process.kill()
        stdout, _ = process.communicate()
    return stdout.strip() == b"1"


def test_the_life_of_a_cluster(operator: Operator) -> None:
    path = operator.file("life")
    up = operator.baton("up", "-f", str(path))
    record = operator.record("life")
    assert up.stdout.strip() == record.address
    assert "d-0 serves" in up.stderr

    told = answers(operator)
    assert told["workers"] == {"prefill": "p-0", "decode": "d-0"}
    assert told["kv"]["transport"] == "shm" and told["kv"]["bytes"] > 0
    assert all(value is not None for value in told["timeline_ms"].values())
    streamed = operator.baton("generate", "--prompt", "One, two, three,", "-n", "8")
    assert streamed.stdout.strip() and "p-0 -> d-0" in streamed.stderr
    assert operator.json("leases") == {"leases": []}

    again = operator.baton("up", "-f", str(path), expect=1)
    assert f"already running at {record.address}" in again.stderr
    assert not ray_lets_in(record, {"RAY_AUTH_MODE": "disabled"})
    assert ray_lets_in(record, access_variables(record.ray_temp_dir))

    before = workers(operator)
    assert {name: worker["state"] for name, worker in before.items()} == {"p-0": "ready", "d-0": "ready"}
    os.kill(before["d-0"]["pid"], signal.SIGKILL)
    os.kill(before["p-0"]["pid"], signal.SIGSTOP)  # a hung one is given up, ended and started anew
    wait_until(
        lambda: (
            all(worker["incarnation"] > before[name]["incarnation"] for name, worker in workers(operator).items())
            and len(workers(operator)) == 2
        ),
        RESTART_TIMEOUT_S,
        "both workers start anew",
    )
    answers(operator)

    down = operator.baton("down")
    assert "cluster life is down" in down.stderr
    nothing_left_of(record)
    assert "no cluster" in operator.baton("status", expect=3).stderr


@pytest.mark.skipif(not ALL_RAY, reason="takes a minute; test_drain.py has it without Ray (make soak)")
def test_workers_are_drained_and_flipped(operator: Operator) -> None:
    """Ray starts none after one that was drained, and the next one of a flipped worker in its new pool."""
    operator.baton("up", "-f", str(operator.file("drains")))
    refused = operator.baton("flip", "p-0", expect=2)
    assert "p-0 is the last prefill worker" in refused.stderr and "--force" in refused.stderr
    unknown = operator.baton("drain", "d-7", expect=3)
    assert "worker 'd-7' is not registered; there is: d-0, p-0" in unknown.stderr

    flipped = operator.json("flip", "p-0", "--force")
    assert (flipped["pool"], flipped["state"]) == ("d", "ready")
    assert flipped["incarnation"] > flipped["drained_incarnation"]
    assert answers(operator)["workers"]["prefill"] is None

    os.kill(workers(operator)["p-0"]["pid"], signal.SIGKILL)
    wait_until(
        lambda: workers(operator)["p-0"]["incarnation"] > flipped["incarnation"], RESTART_TIMEOUT_S, "it starts anew"
    )
    assert workers(operator)["p-0"]["role"] == "decode", "a flipped worker stays what it is"

    restarted = operator.baton("drain", "d-0", "--restart", "--migrate")
    assert "d-0 is drained, and its next life" in restarted.stdout
    assert operator.json("flip", "p-0")["pool"] == "p"
    assert answers(operator)["workers"] == {"prefill": "p-0", "decode": "d-0"}

    assert "p-0 is drained and gone" in operator.baton("drain", "p-0", "--force", "--deadline", "5").stdout
    time.sleep(RESTARTED_BY_THEN_S)
    assert workers(operator)["p-0"]["state"] == "drained"
    assert answers(operator)["workers"]["prefill"] is None
    operator.baton("down")


def test_a_crashed_cluster_is_cleared_away(operator: Operator) -> None:
    path = operator.file("crash")
    operator.baton("up", "-f", str(path))
    first = operator.record("crash")
    for name in ("raylet", "ray::FrontActor"):
        victims = [process for process in processes_of(first) if process.name() == name]
        assert victims, f"no {name}"
        for victim in victims:
            victim.kill()
    operator.baton("status", expect=3)
    assert "or part of it is" in operator.baton("up", "-f", str(path), expect=1).stderr
    for process in processes_of(first):
        process.kill()

    up = operator.baton("up", "-f", str(path))
    assert "cleaning up after cluster crash" in up.stderr
    nothing_left_of(first)
    second = operator.record("crash")
    next(process for process in processes_of(second) if process.name() == "gcs_server").kill()
    operator.baton("down", "crash")
    nothing_left_of(second)


@pytest.mark.parametrize(
    ("moment", "delay_s", "number"),
    [
        ("Ray runs at", 0.1, signal.SIGINT),
        ("starting 2 workers", 0.5, signal.SIGTERM),
        pytest.param("Ray runs at", 0.1, signal.SIGTERM, marks=ONLY_IN_SOAK),
        pytest.param("starting 2 workers", 0.5, signal.SIGINT, marks=ONLY_IN_SOAK),
    ],
)
def test_an_interrupted_start_leaves_nothing(
    operator: Operator, moment: str, delay_s: float, number: signal.Signals
) -> None:
    """While Ray's library connects, which brings signal handlers of its own, and while the workers start."""
    process = operator.start("up", "-f", str(operator.file("cut")))
    assert process.stderr is not None
    while moment not in (line := process.stderr.readline()):
        assert line, "the start ended by itself"
    record = operator.record("cut")
    time.sleep(delay_s)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=COMMAND_TIMEOUT_S)
    assert process.returncode == 130, stderr
    assert "interrupted" in stderr and "Traceback" not in stderr
    nothing_left_of(record)


def test_a_start_that_was_killed_is_cleared_away_by_down(operator: Operator) -> None:
    process = operator.start("up", "-f", str(operator.file("killed")))
    assert process.stderr is not None
    while "Ray runs" not in (line := process.stderr.readline()):
        assert line, "the start ended by itself"
    process.kill()
    process.communicate()
    record = operator.record("killed")
    operator.baton("down")
    nothing_left_of(record)


def test_a_worker_that_cannot_start_says_why_and_takes_the_start_down(operator: Operator, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for part in operator.model.iterdir():
        if part.suffix != ".safetensors":
            (broken / part.name).symlink_to(part)
    weights = operator.model / "model.safetensors"
    with weights.open("rb") as whole:
        header = whole.read(8)
        header += whole.read(int.from_bytes(header, "little"))
    file = operator.file("broken", model=broken)
    (broken / weights.name).write_bytes(header)
    said = operator.baton("up", "-f", str(file), expect=2)
    assert "truncated?" in said.stderr and "ray" not in said.stderr.lower()
    # What only the weights' own bytes tell: no number of them is one.
    (broken / weights.name).write_bytes(header + b"\xff" * (weights.stat().st_size - len(header)))
    said = operator.baton("up", "-f", str(file), expect=1)
    assert "did not start" in said.stderr and "holds NaN or infinity" in said.stderr


def test_the_demo_shows_everything_and_leaves_nothing(operator: Operator) -> None:
    (operator.home / "baton").mkdir()
    (operator.home / "baton" / "models").symlink_to(operator.model.parent)
    said = operator.baton("demo")
    assert "The capital of France is Paris." in said.stdout
    lines = said.stdout.splitlines()
    for part in ("QUEUED", "RESERVED", "PREFILL", "PUSH", "FIRST TOKEN", "DECODE"):
        assert any(line.startswith("REQUEST") and f"{part} MS" in line for line in lines)
    served = [line for line in lines if "prefill-0  decode-0" in line and " shm " in line]
    assert len(served) == 4


def test_a_port_in_use_is_refused_before_anything_starts(operator: Operator) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = operator.baton("up", "-f", str(operator.file("port", port=port)), expect=2)
    assert "front.port" in said.stderr and "in use" in said.stderr
    assert "starting" not in said.stderr


def test_a_pool_that_the_machine_cannot_hold_is_refused_with_what_fits(operator: Operator) -> None:
    path = operator.file("big")
    path.write_text(path.read_text().replace("16MiB", "512GiB"))
    said = operator.baton("up", "-f", str(path), expect=2)
    assert "this machine has available" in said.stderr and "would fit" in said.stderr
    assert "starting" not in said.stderr
