"""What becomes of a Ray actor whose worker has been drained: it ends for good, or one in another pool replaces it."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

import ray
import ray.exceptions
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.core.drain_orders import AfterDrain, DrainOrder
from cluster.core.ids import WorkerId
from cluster.live.actors import WorkerActor
from cluster.live.plan import ClusterPlan, WorkerPlan
from cluster.live.ray_cluster import actor_options

logger = logging.getLogger(__name__)

NAME_TIMEOUT_S: Final = 30.0
"""How long Ray may take to give a dead actor's name back."""
POLL_S: Final = 0.1
SUPERVISE_TIMEOUT_S: Final = 600.0
"""For the new actor to be there; it answers while it loads its model."""


def retire_actor(worker: WorkerId, order: DrainOrder, plan: ClusterPlan, namespace: str) -> None:
    """Ends the worker's actor, whichever life is in it, and starts the next one if the order says so. Takes seconds."""
    try:
        ray.kill(ray.get_actor(worker.name, namespace=namespace), no_restart=True)
    except ValueError:
        logger.info("worker %s: Ray has no actor of it any more", worker)
    if order.then is AfterDrain.FLIP:
        _start_flipped(worker.name, order.pool, plan, namespace)


def _start_flipped(name: str, pool_name: str, plan: ClusterPlan, namespace: str) -> None:
    worker = plan.worker_in_pool(name, pool_name)
    index = next(i for i, other in enumerate(plan.workers) if other.name == name)
    group = ray.util.get_placement_group(namespace)
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    options = actor_options(name, num_cpus=worker.pool.threads, num_gpus=worker.num_gpus, strategy=strategy)
    actor = _create(plan, worker, {**options, "namespace": namespace})
    ray.get(actor.supervise.remote(), timeout=SUPERVISE_TIMEOUT_S)


def _create(plan: ClusterPlan, worker: WorkerPlan, options: dict[str, Any]) -> Any:
    give_up_s = time.monotonic() + NAME_TIMEOUT_S
    while True:
        try:
            return ray.remote(WorkerActor).options(**options).remote(plan, worker)
        except ValueError:
            # The name is still taken by the actor that was killed.
            if time.monotonic() > give_up_s:
                raise
            time.sleep(POLL_S)
