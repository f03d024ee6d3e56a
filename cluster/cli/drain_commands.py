"""`baton drain` and `baton flip` as the command line knows them."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from cluster.cli.errors import FAILED, INTERRUPTED, INVALID, NOT_FOUND, TRY_LATER, exit_codes, reports_errors
from cluster.cli.shared_options import AddressOption, JsonOption
from cluster.core.drain_orders import AfterDrain
from cluster.live.environment import read_environment

WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER", help="The worker's name, as `baton status` shows it.")]
MigrateOption = Annotated[
    bool, typer.Option("--migrate", help="Running answers go on elsewhere at once. Default: they end on the worker.")
]
DeadlineOption = Annotated[
    float | None,
    typer.Option("--deadline", metavar="S", help="After so many seconds whatever is left goes on elsewhere."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Also if it is the last worker of its role.")]
CODES = exit_codes(
    {
        FAILED: "the drain was given up, or the worker's next life did not come",
        INVALID: "wrong usage, or the worker may not go; nothing was changed",
        NOT_FOUND: "no cluster is running, it cannot be reached, or it has no such worker",
        TRY_LATER: "the cluster did not answer in time",
        INTERRUPTED: "interrupted by Ctrl-C; the drain goes on",
    }
)


def register(app: typer.Typer) -> None:
    """Adds both commands."""
    app.command(short_help="Rid a worker of its work in order, then end or restart it.", epilog=CODES)(drain)
    app.command(short_help="Make a prefill worker a decode worker, or the reverse.", epilog=CODES)(flip)


@reports_errors
def drain(
    worker: WorkerArgument,
    migrate: MigrateOption = False,
    deadline_s: DeadlineOption = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="A fresh life of the worker takes its place. Default: none does.")
    ] = False,
    force: ForceOption = False,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a worker out of service without losing a token.

    It gets nothing new. Prompts it reads and pushes end, and so do running answers, or they go on elsewhere (--migrate,
    or from 5 s before the deadline on) with no token lost, repeated or changed. When nobody needs it any more and its
    leases have ended, it ends and is not replaced. What it still waits for is shown meanwhile; Ctrl-C leaves the drain
    going, and the same command again joins it.

    \b
    Examples:
      baton drain decode-1
      baton drain decode-1 --migrate --deadline 30
      baton drain prefill-0 --restart               a fresh process, such as after a change of the machine
    """
    _run(worker, AfterDrain.RESTART if restart else AfterDrain.STOP, migrate, deadline_s, force, address, as_json)


@reports_errors
def flip(
    worker: WorkerArgument,
    migrate: MigrateOption = False,
    deadline_s: DeadlineOption = None,
    pool: Annotated[
        str, typer.Option("--pool", metavar="NAME", help="The pool to join, where several have the other role.")
    ] = "",
    force: ForceOption = False,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change a worker's role: drain it, then start it anew in a pool of the other role.

    It keeps its name, machine, cores and size of KV pool, and takes over the step sizes of the pool that it joins. What
    it had cached is lost. Refused where it would leave a role without a worker, unless forced.

    \b
    Examples:
      baton flip prefill-1
      baton flip decode-2 --migrate --deadline 30
    """
    _run(worker, AfterDrain.FLIP, migrate, deadline_s, force, address, as_json, pool)


def _run(
    worker: str,
    then: AfterDrain,
    migrate: bool,
    deadline_s: float | None,
    force: bool,
    address: str | None,
    as_json: bool,
    pool: str = "",
) -> None:
    from cluster.cli.drain import DrainOptions, run_drain

    options = DrainOptions(
        worker=worker,
        then=then,
        migrate=migrate,
        deadline_s=deadline_s,
        force=force,
        as_json=as_json,
        pool=pool,
    )
    run_drain(options, read_environment(os.environ), address)
