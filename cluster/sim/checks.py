"""What must hold during a history and what must be left after it: nothing."""

from __future__ import annotations

from cluster.core.ids import Outcome, WorkerId
from cluster.sim.client import Violation
from cluster.sim.world import World
from engine.core.block_pool import BlockState
from kv_transfer.protocol.messages import BlockGrant
from kv_transfer.transport.base import PeerId

WRITABLE = (BlockState.RESERVED, BlockState.QUARANTINED)


def watch_landings(world: World) -> None:
    """From now on every one-sided write is judged as it lands: only a block that is still granted may be written."""

    def judge(sender: PeerId, receiver: PeerId, grant: BlockGrant) -> None:
        worker = WorkerId(receiver.name, receiver.incarnation)
        pool = next(node for node in world.all_workers if node.worker == worker).state.pool
        state, generation = pool.state(grant.block_id), pool.generation(grant.block_id)
        if state not in WRITABLE or generation != grant.generation:
            raise Violation(
                f"a write of {sender.name}#{sender.incarnation} lands in block {grant.block_id} of {worker}, which is "
                f"{state.name.lower()} at generation {generation}, but was granted at {grant.generation}"
            )

    world.fabric.observe_landing = judge


def check_outcomes(world: World) -> None:
    """Each request exactly one end; without faults none that only a fault explains."""
    excused = bool(world.scenario.faults)
    for client in world.clients:
        name = client.request.request_id
        if not client.has_ended:
            raise Violation(f"{name} never ended")
        if excused:
            continue
        if client.is_unavailable or client.outcome in (Outcome.WORKER_LOST, Outcome.TRANSFER_FAILED, Outcome.INTERNAL):
            raise Violation(f"{name} ended as {client.outcome} ({client.reason}) although nothing was wrong")


def leftovers(world: World) -> list[str]:
    """What is still held anywhere, in words; empty once everything is over."""
    found = [f"{node.front} still has {node.num_live} requests" for node in world.fronts if node.num_live]
    return found + _coordinator_leftovers(world) + _worker_leftovers(world)


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
    found += [f"the coordinator counts {view.num_legs} legs at {view.worker}" for view in registered if view.num_legs]
    lives = {view.worker for view in registered}
    for name in world.scenario.worker_names:
        life = world.worker(name)
        if life is None or life.worker not in lives:
            found.append(f"no life of {name} that runs is registered")
    return found


def _worker_leftovers(world: World) -> list[str]:
    found: list[str] = []
    for node in world.all_workers:
        if not node.process.alive:
            continue
        if node is not world.worker(node.worker.name):
            found.append(f"{node.worker} runs beside its successor")
        counts = node.state.pool.counts()
        held = {
            "active blocks": counts.active,
            "reserved blocks": counts.reserved,
            "quarantined blocks": counts.quarantined,
            "legs": node.state.num_legs(),
            "token records": node.state.num_token_records(),
        }
        found += [f"{node.worker} has {count} {what}" for what, count in held.items() if count]
    return found
