"""What must hold during a history and what must be left after it: nothing."""

from __future__ import annotations

from cluster.core.ids import Outcome, WorkerId
from cluster.sim.client import Violation
from cluster.sim.fabric import Landing
from cluster.sim.scenario import PoisonKind
from cluster.sim.world import World
from engine.core.block_pool import BlockState

WRITABLE = (BlockState.RESERVED, BlockState.QUARANTINED)


def watch_landings(world: World) -> None:
    """From now on every one-sided write is judged as it lands: only a block that is still granted may be written, and
    only in the layers that its message names."""

    def judge(landing: Landing) -> None:
        sender, receiver, grant = landing.sender, landing.receiver, landing.grant
        worker = WorkerId(receiver.name, receiver.incarnation)
        node = next(node for node in world.all_workers if node.worker == worker)
        pool = node.state.pool
        state, generation = pool.state(grant.block_id), pool.generation(grant.block_id)
        world.num_late_copies += state is BlockState.QUARANTINED
        world.num_partial_copies += len(landing.layers) < node.memory.num_layers
        if state not in WRITABLE or generation != grant.generation:
            raise Violation(
                f"a write of {sender.name}#{sender.incarnation} lands in block {grant.block_id} of {worker}, which is "
                f"{state.name.lower()} at generation {generation}, but was granted at {grant.generation}"
            )
        place = node.memory.layout.layers_slice(grant.block_id, landing.layers)
        if (landing.copy.target_bytes, landing.copy.size_bytes) != place:
            raise Violation(
                f"a write of {sender.name}#{sender.incarnation} to {landing.layers} of block {grant.block_id} of "
                f"{worker} lands elsewhere: {landing.copy}"
            )

    world.fabric.observe_landing = judge


def check_outcomes(world: World) -> None:
    """Each request exactly one end; without faults none that only a fault explains.

    A poison request may end in any way, and one that stops engines may take all places for longer than others wait.
    """
    excused = bool(world.scenario.faults)
    poisons = [request.poison for request in world.scenario.requests if request.poison is not None]
    takes_places = any(poison.kind is PoisonKind.STUCK for poison in poisons)
    for client in world.clients:
        name = client.request.request_id
        if not client.has_ended:
            raise Violation(f"{name} never ended")
        if excused or client.request.poison is not None:
            continue
        if takes_places and client.outcome is Outcome.WORKER_LOST:
            continue
        if client.is_unavailable or client.outcome in (Outcome.WORKER_LOST, Outcome.TRANSFER_FAILED, Outcome.INTERNAL):
            raise Violation(f"{name} ended as {client.outcome} ({client.reason}) although nothing was wrong")


def leftovers(world: World) -> list[str]:
    """What is still kept anywhere, in words; empty once everything is over."""
    found = [f"{node.front} still has {node.num_live} requests" for node in world.fronts if node.num_live]
    found += _registry_leftovers(world) + _untold_blocks(world) + _drain_leftovers(world)
    for node in world.all_workers:
        if not node.process.alive:
            continue
        if node.state.num_token_records():
            found.append(f"{node.worker} has {node.state.num_token_records()} token records")
        if node.state.num_early_watches():
            found.append(f"{node.worker} has {node.state.num_early_watches()} watches of attempts that never came")
        # A supervisor that was told to start none any more does not look for a twin either.
        if node is not world.worker(node.worker.name) and node.worker.name not in world.retired:
            found.append(f"{node.worker} runs beside its successor")
    return found + held(world)


def held(world: World) -> list[str]:
    """Blocks, legs, leases, requests and bodies, wherever they are."""
    return _coordinator_leftovers(world) + _worker_leftovers(world)


def _coordinator_leftovers(world: World) -> list[str]:
    node = world.coordinator
    state, now_ns = node.state, node.process.now_ns()
    found = [f"the coordinator keeps the body of {request_id}" for request_id in node.bodies]
    found += [f"the coordinator has request {view.request_id} ({view.phase})" for view in state.requests(now_ns)]
    found += [
        f"the coordinator's ledger has {view.side} lease {view.lease_id:x} of {view.attempt} at {view.holder}"
        for view in state.leases(now_ns)
    ]
    registered = [worker for pool in state.status(now_ns).pools for worker in pool.workers]
    return found + [
        f"the coordinator counts {view.num_legs} legs at {view.worker}" for view in registered if view.num_legs
    ]


def _registry_leftovers(world: World) -> list[str]:
    """Names whose life that runs the coordinator does not know."""
    status = world.coordinator.state.status(world.coordinator.process.now_ns())
    lives = {view.worker for pool in status.pools for view in pool.workers}
    running = [(name, world.worker(name)) for name in world.scenario.worker_names]
    return [
        f"no life of {name} that runs is registered"
        for name, life in running
        if (name not in world.retired or life is not None) and (life is None or life.worker not in lives)
    ]


def _drain_leftovers(world: World) -> list[str]:
    """Orders that have not been carried out. Of a worker that is not started again the coordinator may have missed the
    last word; then it waits for a next life that does not come."""
    drains = world.coordinator.state.status(world.coordinator.process.now_ns()).drains
    return [
        f"{view.order.worker} is still being drained, waiting for {view.waits_for}"
        for view in drains
        if view.life is not None or view.order.worker not in world.retired
    ]


def _untold_blocks(world: World) -> list[str]:
    """Workers whose findable blocks the coordinator counts wrongly."""
    status = world.coordinator.state.status(world.coordinator.process.now_ns())
    known = {worker.worker: worker.num_known_blocks for pool in status.pools for worker in pool.workers}
    return [
        f"{node.worker} can find {node.state.pool.num_findable} blocks, the coordinator knows of {known[node.worker]}"
        for node in world.all_workers
        if node.process.alive and node.worker in known and known[node.worker] != node.state.pool.num_findable
    ]


def _worker_leftovers(world: World) -> list[str]:
    found: list[str] = []
    for node in world.all_workers:
        if not node.process.alive:
            continue
        counts = node.state.pool.counts()
        kept = {
            "active blocks": counts.active,
            "reserved blocks": counts.reserved,
            "quarantined blocks": counts.quarantined,
            "legs": node.state.num_legs(),
        }
        found += [f"{node.worker} has {count} {what}" for what, count in kept.items() if count]
    return found
