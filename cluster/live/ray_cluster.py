"""Brings a cluster's actors up on a running Ray, watches them start, and takes them down again.

The only module besides the actors' own that imports Ray, which takes half a second: import it late.
"""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import ray
import ray.exceptions
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.core.errors import StartupError, UnreachableError
from cluster.live.actors import CoordinatorActor, FrontActor, WorkerActor
from cluster.live.hosted_loop import Phase, ProgramReport
from cluster.live.plan import COORDINATOR_NAME, ClusterPlan, WorkerPlan
from cluster.live.reachability import split_address
from cluster.wire.channels import LOOPBACK

CONNECT_TIMEOUT_S: Final = 5.0
PLACEMENT_TIMEOUT_S: Final = 30.0
START_TIMEOUT_S: Final = 600.0
"""For all parts to serve; loading a large model takes minutes."""
REPORT_TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.1
FOREVER: Final = -1
ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

Progress = Callable[[str], None]
Actors = dict[str, Any]
"""Handles by name."""


def connect(address: str, namespace: str) -> None:
    """Raises UnreachableError. Must be called on the main thread; whatever it raises, `disconnect` follows."""
    _check_reachable(address)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    # Ray installs handlers of its own, in Python and below, which would end the caller without its clean-up, and a
    # process that is interrupted while Ray is half there crashes at its end. So signals wait until it is there, and
    # Ray's threads, which inherit the mask, never take them.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        ray.init(
            address=address,
            namespace=namespace,
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.CRITICAL,
        )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise UnreachableError(f"no Ray answers at {address}: {' '.join(str(error).split())}") from error
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes. An address such as `auto` has no port, and is looked up at once."""
    host, port = split_address(address)
    if host is None or port is None:
        return
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise UnreachableError(f"no Ray answers at {address}: {error.strerror or error}") from error


def disconnect() -> None:
    """Before Ray itself is ended: its library would look for it for a minute. Without a connection it does nothing."""
    ray.shutdown()


def host_for_peers() -> str:
    """The address of this machine for all other parts: loopback where Ray has no other machine."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    if sum(node["Alive"] for node in nodes) == 1:
        return LOOPBACK
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def start_actors(plan: ClusterPlan, namespace: str) -> Actors:
    """Creates the actors, all at once; they start in parallel. Coordinator and fronts run on this machine.

    Raises StartupError where Ray has not enough CPUs or GPUs.
    """
    actors: Actors = {}
    # Ray warns that removing the placement group ends the actors in it for good, which is what it is removed for.
    logging.getLogger("ray.actor").setLevel(logging.ERROR)
    bundles = [_bundle(worker) for worker in plan.workers]
    group = placement_group(bundles, strategy="PACK", name=namespace, lifetime="detached")
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    coordinator = actor_options(COORDINATOR_NAME, num_cpus=0, strategy=here)
    actors[COORDINATOR_NAME] = ray.remote(CoordinatorActor).options(**coordinator).remote(plan, namespace)
    for front in plan.fronts:
        options = actor_options(front.name, num_cpus=0, strategy=here)
        actors[front.name] = ray.remote(FrontActor).options(**options).remote(plan, front)
    for i, worker in enumerate(plan.workers):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
        options = actor_options(worker.name, num_cpus=worker.pool.threads, num_gpus=worker.num_gpus, strategy=strategy)
        actors[worker.name] = ray.remote(WorkerActor).options(**options).remote(plan, worker)
    if not group.wait(PLACEMENT_TIMEOUT_S):
        total = ray.cluster_resources()  # type: ignore[no-untyped-call]
        num_gpus = sum(worker.num_gpus for worker in plan.workers)
        raise StartupError(
            f"Ray cannot place the workers: they need {plan.num_cpus} CPUs and {num_gpus} GPUs, one worker on one "
            f"machine, and Ray has {total.get('CPU', 0.0):g} and {total.get('GPU', 0.0):g} in all"
        )
    return actors


def wait_until_serving(actors: Actors, progress: Progress) -> None:
    """Returns when every actor serves; raises StartupError with what the first that cannot says."""
    waiting = dict(actors)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while waiting:
        for name, report in _reports(waiting).items():
            if report.phase is Phase.SERVING:
                del waiting[name]
                progress(f"{name} serves at {report.address}")
            elif report.phase is not Phase.STARTING:
                raise StartupError(f"{name} did not start: {report.error or 'it ended'}")
        if time.monotonic() > deadline_s:
            raise StartupError(f"{', '.join(waiting)} did not start within {START_TIMEOUT_S:g} s")
        time.sleep(POLL_S)


def supervise(actors: Actors) -> None:
    """From now on an actor whose program ends is started anew."""
    ray.get([actor.supervise.remote() for actor in actors.values()], timeout=REPORT_TIMEOUT_S)


def stop_actors(names: list[str], namespace: str) -> None:
    """Kills the actors and gives their placement back; those that are gone already are passed over."""
    for name in names:
        try:
            ray.kill(ray.get_actor(name, namespace=namespace), no_restart=True)
        except ValueError:
            continue
    try:
        group = ray.util.get_placement_group(namespace)
    except ValueError:
        return
    remove_placement_group(group)


def actor_names(namespace: str) -> list[str]:
    """Names of the live named actors of the namespace."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in found if actor["namespace"] == namespace)


def _bundle(worker: WorkerPlan) -> dict[str, float]:
    """What Ray reserves for the worker on one machine."""
    cpus = {"CPU": float(worker.pool.threads)}
    return {**cpus, "GPU": float(worker.num_gpus)} if worker.num_gpus else cpus


def actor_options(name: str, *, num_cpus: float, num_gpus: int = 0, strategy: object) -> dict[str, Any]:
    """Of an actor that outlives whoever creates it, and is started again for as long as nobody kills it for good."""
    return {
        "name": name,
        "lifetime": "detached",
        "max_restarts": FOREVER,
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "scheduling_strategy": strategy,
    }


def _reports(actors: Actors) -> dict[str, ProgramReport]:
    """What each says, asked of all at once. An actor that is being started anew has none yet."""
    calls = {name: actor.report.remote() for name, actor in actors.items()}
    reports = {}
    for name, call in calls.items():
        try:
            reports[name] = ray.get(call, timeout=REPORT_TIMEOUT_S)
        except ray.exceptions.ActorUnavailableError:
            continue
        except ray.exceptions.GetTimeoutError:
            continue
        except ray.exceptions.RayActorError as error:
            first_line = str(error).strip().splitlines()[-1]
            raise StartupError(f"{name} did not start: {first_line}") from error
    return reports
