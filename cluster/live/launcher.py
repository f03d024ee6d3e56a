"""Starts a cluster on Ray and stops it. Whatever fails in between, or whoever is killed, can be cleaned up after.

The order of things makes that so: the record is written before the first process is started and removed after the
last one has ended, and it names what those processes carry.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import psutil

from cluster.core.errors import StartupError, UnreachableError
from cluster.live.cluster_record import ClusterRecord, ClusterRecords
from cluster.live.config_file import ClusterFile
from cluster.live.environment import Environment
from cluster.live.plan import journal_dir_of, make_plan
from cluster.live.preflight import (
    ModelFacts,
    check_cores,
    check_journal,
    check_memory,
    check_model,
    check_ports,
    check_transport,
)
from cluster.live.ray_head import access_variables, make_temp_dir, remove_temp_dir, start_ray
from cluster.live.readiness import wait_until_ready
from cluster.live.run_processes import end_run_processes, find_run_processes, is_alive, own_start_time_s

LAUNCHER_END_TIMEOUT_S: Final = 20.0
"""How long a launcher that is told to end has to take down what it started."""

Progress = Callable[[str], None]


def start_cluster(file: ClusterFile, environment: Environment, progress: Progress) -> ClusterRecord:
    """Brings the cluster up and leaves it running. If that fails in any way, nothing of it stays.

    Raises:
        ConfigError: the file asks for what cannot be; nothing was started.
        StartupError: something did not start, or a cluster of that name runs already.
        UnreachableError: the Ray that is to be joined does not answer.
    """
    facts = check_model(file, environment.models_dir)
    records = ClusterRecords(environment.clusters_dir)
    _make_way(file.config.name, records, environment, progress)
    if environment.ray_address is None:
        check_cores(file)
        check_transport(file)
        check_memory(file, facts)
        check_ports(file)
        check_journal(file, journal_dir_of(file.config, environment.journals_dir))
    record = _first_record(file, environment)
    try:
        records.create(record)
    except FileExistsError as error:
        remove_temp_dir(record.ray_temp_dir)
        raise StartupError(f"cluster {record.name} is being started by another process") from error
    try:
        return _bring_up(record, file, facts, records, environment, progress)
    except BaseException:
        with uninterrupted():
            stop_cluster(record.name, environment, progress)
        raise


def stop_cluster(name: str, environment: Environment, progress: Progress) -> bool:
    """Ends everything of the cluster, also after a crash of any part of it; False if there is no such cluster.

    Raises LeftoverError where a process cannot be ended.
    """
    records = ClusterRecords(environment.clusters_dir)
    record = records.read(name)
    if record is None:
        return False
    _end_launcher(record)
    record = records.read(name) or record
    if record.ray_owned:
        num_ended = end_run_processes(record.run_id, record.ray_temp_dir)
        if num_ended:
            progress(f"ended {num_ended} processes of cluster {name}")
        remove_temp_dir(record.ray_temp_dir)
    elif record.ray_address:
        _stop_on_shared_ray(record, progress)
    records.remove(name)
    return True


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C and SIGTERM off: taking down must not be left half-way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _make_way(name: str, records: ClusterRecords, environment: Environment, progress: Progress) -> None:
    """Refuses if the cluster runs; clears away what a crashed one has left."""
    record = records.read(name)
    if record is None:
        return
    if _is_there(record):
        state = f"running at {record.address}" if record.address else "being started"
        raise StartupError(f"cluster {name} is already {state}, or part of it is; stop it with `baton down {name}`")
    progress(f"cleaning up after cluster {name}, which has crashed")
    stop_cluster(name, environment, progress)


def _is_there(record: ClusterRecord) -> bool:
    """Whether any part of the cluster runs on this machine. On a Ray that is not its own, that is taken as given."""
    if record.phase == "starting" and is_alive(record.launcher_pid, record.launcher_started_s):
        return True
    return not record.ray_owned or bool(find_run_processes(record.run_id, record.ray_temp_dir))


def _first_record(file: ClusterFile, environment: Environment) -> ClusterRecord:
    owned = environment.ray_address is None
    return ClusterRecord(
        name=file.config.name,
        run_id=uuid.uuid4().hex,
        phase="starting",
        launcher_pid=os.getpid(),
        launcher_started_s=own_start_time_s(),
        ray_owned=owned,
        ray_temp_dir=make_temp_dir() if owned else "",
        ray_address=environment.ray_address or "",
        config_path=file.source,
        journal_dir=str(journal_dir_of(file.config, environment.journals_dir) or ""),
    )


def _bring_up(
    record: ClusterRecord,
    file: ClusterFile,
    facts: ModelFacts,
    records: ClusterRecords,
    environment: Environment,
    progress: Progress,
) -> ClusterRecord:
    started_s = time.monotonic()
    if record.ray_owned:
        record = dataclasses.replace(record, ray_address=_start_own_ray(record, file, environment, progress))
        records.update(record)
    from cluster.live import ray_cluster

    try:
        ray_cluster.connect(record.ray_address, record.ray_namespace)
        plan = make_plan(file, facts, host=ray_cluster.host_for_peers(), journals_dir=environment.journals_dir)
        progress(f"starting {len(plan.workers)} workers with {plan.model_dir.name}")
        cluster = ray_cluster.start_actors(plan, record.ray_namespace)
        ray_cluster.wait_until_serving(cluster, progress)
        wait_until_ready(plan.fronts[0].address, plan)
        ray_cluster.supervise(cluster)
    finally:
        ray_cluster.disconnect()
    record = dataclasses.replace(
        record, phase="serving", address=plan.fronts[0].address, coordinator_address=plan.coordinator_address
    )
    records.update(record)
    progress(f"serving after {time.monotonic() - started_s:.1f} s")
    return record


def _start_own_ray(record: ClusterRecord, file: ClusterFile, environment: Environment, progress: Progress) -> str:
    progress("starting Ray")
    started_s = time.monotonic()
    # For Ray's library in this process, which takes it from there.
    os.environ.update(access_variables(record.ray_temp_dir))
    threads = sum(pool.replicas * pool.threads for pool in file.config.pools)
    with _ray_imported_meanwhile():
        address = start_ray(
            run_id=record.run_id,
            temp_dir=record.ray_temp_dir,
            # Ray's count of CPUs is what placement is reckoned with; more threads than cores is the user's choice.
            num_cpus=max(threads, os.cpu_count() or 1),
            variables=environment.variables,
        )
    progress(f"Ray runs at {address} ({time.monotonic() - started_s:.1f} s)")
    return address


@contextmanager
def _ray_imported_meanwhile() -> Iterator[None]:
    """Imports Ray while its processes start: both take their time."""

    def load() -> None:
        from cluster.live import ray_cluster

        assert ray_cluster is not None

    thread = threading.Thread(target=load, name="import-ray")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _end_launcher(record: ClusterRecord) -> None:
    """A launcher that is still at work would go on starting things: it ends first, and cleans up while it can."""
    if record.phase != "starting" or record.launcher_pid == os.getpid():
        return
    if not is_alive(record.launcher_pid, record.launcher_started_s):
        return
    try:
        launcher = psutil.Process(record.launcher_pid)
        launcher.terminate()
        launcher.wait(LAUNCHER_END_TIMEOUT_S)
    except psutil.NoSuchProcess:
        return
    except psutil.TimeoutExpired:
        launcher.kill()


def _stop_on_shared_ray(record: ClusterRecord, progress: Progress) -> None:
    from cluster.live import ray_cluster

    try:
        ray_cluster.connect(record.ray_address, record.ray_namespace)
    except UnreachableError as error:
        # Actors do not outlive their Ray.
        progress(f"{error}; taking it for gone")
        return
    try:
        ray_cluster.stop_actors(ray_cluster.actor_names(record.ray_namespace), record.ray_namespace)
    finally:
        ray_cluster.disconnect()
