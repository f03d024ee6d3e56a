"""`baton drain` and `baton flip`: gives the order, and shows what the worker still waits for until it is gone."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Final

from baton.v1 import admin_pb2
from cluster.cli.address import find_target
from cluster.cli.errors import FAILED, INVALID, TRY_LATER, CommandError, errors_as_json, fail
from cluster.cli.progress import say
from cluster.cli.requests import Client
from cluster.core.config import MAX_SECONDS
from cluster.core.drain_orders import AfterDrain
from cluster.core.limits import MS_PER_S
from cluster.live.environment import Environment

POLL_S: Final = 0.25
SILENCE_TIMEOUT_S: Final = 60.0
"""So long the coordinator may be away meanwhile."""
NEXT_LIFE_TIMEOUT_S: Final = 300.0
"""And so long the worker's next life may take to load its model and to register."""
_ENDED: Final = ("down", "drained")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOptions:
    """As given on the command line. `deadline_s`: None for as long as it takes. `pool`: of a flip."""

    worker: str
    then: AfterDrain
    migrate: bool
    deadline_s: float | None
    force: bool
    as_json: bool
    pool: str = ""


def run_drain(options: DrainOptions, environment: Environment, address: str | None) -> None:
    """Returns when the worker is gone, or its next life is there.

    Raises CommandError. After KeyboardInterrupt the drain goes on.
    """
    with errors_as_json(options.as_json), Client(find_target(address, environment)) as client:
        if options.deadline_s is not None and not 0 < options.deadline_s <= MAX_SECONDS:
            fail(f"--deadline: {options.deadline_s:g} is not above 0 and at most {MAX_SECONDS:.0f} seconds", INVALID)
        client.connect()
        started_s = time.monotonic()
        incarnation = _order(client, options)
        try:
            pool, worker = _follow(client, options, incarnation)
        except KeyboardInterrupt:
            say(f"the drain of {options.worker} goes on; `baton status` shows it")
            raise
    took_s = time.monotonic() - started_s
    if options.as_json:
        found = {"worker": worker.name, "pool": pool, "state": worker.state, "incarnation": worker.incarnation or None}
        print(json.dumps({**found, "drained_incarnation": incarnation, "took_s": round(took_s, 3)}))
    else:
        print(f"{_outcome(options, pool, worker)} after {took_s:.1f} s")


def _order(client: Client, options: DrainOptions) -> int:
    """Returns the life that is drained."""
    deadline_ms = None if options.deadline_s is None else max(1, round(options.deadline_s * MS_PER_S))
    if options.then is AfterDrain.FLIP:
        flip = admin_pb2.FlipRequest(
            worker=options.worker,
            migrate=options.migrate,
            deadline_ms=deadline_ms,
            force=options.force,
            pool=options.pool,
        )
        return client.flip(flip).incarnation
    drain = admin_pb2.DrainRequest(
        worker=options.worker,
        migrate=options.migrate,
        deadline_ms=deadline_ms,
        restart=options.then is AfterDrain.RESTART,
        force=options.force,
    )
    return client.drain(drain).incarnation


def _follow(client: Client, options: DrainOptions, incarnation: int) -> tuple[str, admin_pb2.WorkerStatus]:
    """Shows each change until the order has been carried out; returns the worker as it then is, and its pool."""
    last_said = ""
    ended_s: float | None = None
    while True:
        pool, worker = _find(_patient_status(client), options.worker)
        has_ended = worker.state in _ENDED or (incarnation and worker.incarnation != incarnation)
        if has_ended and options.then is AfterDrain.STOP:
            return pool, worker
        if has_ended and worker.state == "ready":
            return pool, worker
        if not has_ended and not worker.HasField("drain"):
            fail(f"{options.worker} is not being drained any more; it is {worker.state}", FAILED)
        if has_ended:
            ended_s = ended_s or time.monotonic()
            if time.monotonic() - ended_s > NEXT_LIFE_TIMEOUT_S:
                fail(f"{options.worker} was drained and has not come back in {NEXT_LIFE_TIMEOUT_S:g} s", FAILED)
        said = f"waiting for {worker.drain.waits_for}" if worker.HasField("drain") else "waiting for its next life"
        if said != last_said:
            say(f"{options.worker}: {said}")
        last_said = said
        time.sleep(POLL_S)


def _patient_status(client: Client) -> admin_pb2.GetStatusResponse:
    """Also across a restart of the coordinator, which a drain outlasts."""
    give_up_s = time.monotonic() + SILENCE_TIMEOUT_S
    while True:
        try:
            return client.status()
        except CommandError as error:
            if time.monotonic() > give_up_s:
                raise CommandError(f"{error}; the drain may go on all the same", TRY_LATER) from error
        time.sleep(POLL_S)


def _find(status: admin_pb2.GetStatusResponse, name: str) -> tuple[str, admin_pb2.WorkerStatus]:
    """The worker and its pool. One of a name that is not in the cluster file is not listed once it is gone."""
    for pool in status.pools:
        for worker in pool.workers:
            if worker.name == name:
                return pool.name, worker
    return "", admin_pb2.WorkerStatus(name=name, state="drained")


def _outcome(options: DrainOptions, pool: str, worker: admin_pb2.WorkerStatus) -> str:
    match options.then:
        case AfterDrain.STOP:
            return f"{worker.name} is drained and gone"
        case AfterDrain.RESTART:
            return f"{worker.name} is drained, and its next life {worker.incarnation} serves"
        case AfterDrain.FLIP:
            return f"{worker.name} is a {worker.role} worker of pool {pool} now"
