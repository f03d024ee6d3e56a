"""A cluster of plain processes on this machine, without Ray: for tests, benchmarks and debugging.

    with local_cluster(config, environment) as cluster:
        ... cluster.address ...

Whatever happens inside, nothing is left behind: the processes carry the run's id and are ended by it, and should even
the caller be killed, the kernel ends them with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cluster.agent.exit_status import AGAIN, EXIT_AGAIN
from cluster.core.config import ClusterConfig
from cluster.core.errors import StartupError
from cluster.live.config_file import parse_cluster_text, render_cluster_config
from cluster.live.environment import Environment
from cluster.live.plan import COORDINATOR_NAME, ClusterPlan, FrontPlan, WorkerPlan, make_plan
from cluster.live.preflight import check_model
from cluster.live.ray_head import python_path
from cluster.live.readiness import wait_until_ready
from cluster.live.run_processes import RUN_ID_VARIABLE, end_run_processes

START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 5.0
POLL_S: Final = 0.02
KEEP_POLL_S: Final = 0.1
READY: Final = "ready "
LOG_LINES: Final = 15


@dataclass(slots=True)
class LocalProcess:
    """One process of the cluster. `address` is set once it serves."""

    name: str
    popen: subprocess.Popen[bytes]
    stdout_path: Path
    stderr_path: Path
    address: str = ""

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self.popen.kill()
        self.popen.wait()

    def terminate(self) -> int:
        """SIGTERM; returns the exit status, after a SIGKILL if it takes longer than the limit."""
        self.popen.terminate()
        try:
            return self.popen.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.popen.returncode

    def pause(self) -> None:
        """Does nothing to one that has ended."""
        self.popen.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Does nothing to one that has ended, as one does that was given up in its pause."""
        self.popen.send_signal(signal.SIGCONT)

    def log(self) -> str:
        """What it has written to stderr."""
        return self.stderr_path.read_text(encoding="utf-8", errors="replace")

    def next_pool(self) -> str:
        """That its next life joins, of a worker that ended to be started again."""
        last = self.stdout_path.read_text(encoding="utf-8").splitlines()[-1]
        assert last.startswith(AGAIN), f"{self.name} said {last!r}"
        return last.removeprefix(AGAIN)

    def poll_ready(self) -> bool:
        """Whether it serves. Raises StartupError if it has ended instead."""
        if not self.address:
            said = self.stdout_path.read_text(encoding="utf-8", errors="replace")
            if said.endswith("\n"):
                self.address = said.splitlines()[0].removeprefix(READY)
        if self.address:
            return True
        if not self.is_alive:
            last = " | ".join(self.log().splitlines()[-LOG_LINES:])
            raise StartupError(f"{self.name} ended with status {self.popen.returncode}: {last}")
        return False


@dataclass(slots=True)
class ClusterHandle:
    """A cluster of plain processes that serves.

    Attributes:
        folder: of its logs, removed at the end.
        address: of the first front. coordinator_address: of the coordinator.
    """

    plan: ClusterPlan
    folder: Path
    variables: Mapping[str, str]
    coordinator: LocalProcess | None = None
    workers: dict[str, LocalProcess] = field(default_factory=dict)
    fronts: dict[str, LocalProcess] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return self.plan.fronts[0].address

    @property
    def coordinator_address(self) -> str:
        return self.plan.coordinator_address

    def processes(self) -> list[LocalProcess]:
        first = [] if self.coordinator is None else [self.coordinator]
        return [*first, *self.workers.values(), *self.fronts.values()]

    def start_coordinator(self) -> LocalProcess:
        """The first or, after the end of the last, the next life."""
        plan = self.plan
        arguments = ["cluster.live.coordinator", "-f", str(self.folder / "cluster.yaml")]
        arguments += [f"--host={plan.host}", f"--port={plan.coordinator_port}"]
        if plan.journal_dir is not None:
            arguments.append(f"--journal={plan.journal_dir}")
        self.coordinator = self._spawn(COORDINATOR_NAME, arguments)
        return self.coordinator

    def start_front(self, name: str) -> LocalProcess:
        front = next(front for front in self.plan.fronts if front.name == name)
        self.fronts[name] = self._spawn(name, _front_arguments(self.plan, front))
        return self.fronts[name]

    def start_worker(self, name: str, pool_name: str | None = None) -> LocalProcess:
        """`pool_name`: where it is not the one that the cluster file has it in."""
        worker = next(worker for worker in self.plan.workers if worker.name == name)
        if pool_name is not None:
            worker = self.plan.worker_in_pool(name, pool_name)
        self.workers[name] = self._spawn(name, _worker_arguments(self.plan, worker))
        return self.workers[name]

    def keep_drained(self, stopped: threading.Event) -> None:
        """Until `stopped`: starts workers again that were drained to be. (Nobody starts one that has crashed.)"""
        while not stopped.wait(KEEP_POLL_S):
            for name, process in tuple(self.workers.items()):
                if process.popen.poll() == EXIT_AGAIN:
                    self.start_worker(name, process.next_pool())

    def wait_until_ready(self) -> None:
        """Until all processes serve and all workers are registered. Raises StartupError."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for process in self.processes():
            while not process.poll_ready():
                if time.monotonic() > deadline_s:
                    raise StartupError(f"{process.name} does not serve after {START_TIMEOUT_S:g} s")
                time.sleep(POLL_S)
        wait_until_ready(self.address, self.plan)

    def _spawn(self, name: str, arguments: list[str]) -> LocalProcess:
        life = sum(1 for _ in self.folder.glob(f"{name}.*.err"))
        stdout_path, stderr_path = (self.folder / f"{name}.{life}.{kind}" for kind in ("out", "err"))
        with stdout_path.open("wb") as stdout, stderr_path.open("wb") as stderr:
            popen = subprocess.Popen(
                [sys.executable, "-m", "cluster.live.with_parent", str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=dict(self.variables),
                # A Ctrl-C at the terminal is for the caller, who ends them.
                start_new_session=True,
            )
        return LocalProcess(name, popen, stdout_path, stderr_path)


@contextmanager
def local_cluster(config: ClusterConfig, environment: Environment) -> Iterator[ClusterHandle]:
    """Starts all processes, waits until they serve, and ends them on leaving.

    Relative model paths start at the current folder.

    Raises:
        ConfigError: the model is missing or does not fit. StartupError: with the log's end of what did not start.
    """
    text = render_cluster_config(config)
    file = parse_cluster_text(text, "cluster.yaml", folder=Path.cwd())
    plan = make_plan(file, check_model(file, environment.models_dir))
    folder = Path(tempfile.mkdtemp(prefix="baton-local-"))
    run_id = uuid.uuid4().hex
    variables = {**environment.variables, RUN_ID_VARIABLE: run_id, "PYTHONPATH": python_path()}
    handle = ClusterHandle(plan, folder, variables)
    stopped = threading.Event()
    keeper = threading.Thread(target=handle.keep_drained, args=(stopped,), name="keeper", daemon=True)
    try:
        (folder / "cluster.yaml").write_text(text, encoding="utf-8")
        handle.start_coordinator()
        for worker in plan.workers:
            handle.start_worker(worker.name)
        for front in plan.fronts:
            handle.start_front(front.name)
        handle.wait_until_ready()
        keeper.start()
        yield handle
    finally:
        stopped.set()
        if keeper.is_alive():
            keeper.join()
        end_run_processes(run_id)
        for process in handle.processes():
            process.popen.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _worker_arguments(plan: ClusterPlan, worker: WorkerPlan) -> list[str]:
    pool, model = worker.pool, plan.config.model
    options: dict[str, object] = {
        "coordinator": plan.coordinator_address,
        "model": plan.model_dir,
        "kv-blocks": worker.num_blocks,
        "host-cache-blocks": worker.num_host_blocks,
        "disk-cache-blocks": worker.num_disk_blocks,
        "name": worker.name,
        "pool": pool.name,
        "dtype": model.dtype,
        "block-size": plan.config.kv.block_size,
        "max-model-tokens": plan.max_model_tokens,
        "device": pool.device,
        "threads": pool.threads,
        "host": plan.host,
        "max-step-tokens": pool.max_step_tokens,
        "prefill-chunk-tokens": pool.prefill_chunk_tokens,
        "max-running": pool.max_running,
        "transport": plan.config.transport.kind,
        "checksums": plan.config.transport.checksum,
        "metrics-host": plan.config.metrics.host,
        "metrics-port": worker.metrics_port,
    }
    if model.revision:
        options["revision"] = model.revision
    if pool.disk_cache_directory is not None:
        options["disk-cache-dir"] = pool.disk_cache_directory
    if worker.cores is not None:
        options["cores"] = ",".join(str(core) for core in worker.cores)
    return [f"{pool.role.value}_worker", *_long_options(options)]


def _front_arguments(plan: ClusterPlan, front: FrontPlan) -> list[str]:
    options: dict[str, object] = {
        "coordinator": plan.coordinator_address,
        "model": plan.model_dir,
        "name": front.name,
        "host": front.host,
        "port": front.port,
        "dtype": plan.config.model.dtype,
        "max-model-tokens": plan.max_model_tokens,
        "block-size": plan.config.kv.block_size,
    }
    if plan.config.model.revision:
        options["revision"] = plan.config.model.revision
    return ["cluster.front", *_long_options(options)]


def _long_options(options: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]
