"""Which cluster a command talks to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from cluster.cli.errors import INVALID, NOT_FOUND, fail
from cluster.live.cluster_record import ClusterRecord, ClusterRecords
from cluster.live.environment import Environment
from cluster.live.reachability import split_address
from cluster.live.run_processes import is_alive


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`address`: of a front. `cluster`: the name under which a cluster was started here that serves there, if any."""

    address: str
    cluster: str | None


def find_target(option: str | None, environment: Environment) -> Target:
    """`--address`, else BATON_ADDRESS, else the only cluster that was started from this account.

    Raises CommandError.
    """
    records = ClusterRecords(environment.clusters_dir).all()
    serving = [record for record in records if record.address]
    named = option or environment.baton_address
    if named is not None:
        if split_address(named) == (None, None):
            source = "--address" if option else "BATON_ADDRESS"
            fail(f"{source} {named!r} is not HOST:PORT", INVALID)
        return Target(address=named, cluster=next((r.name for r in serving if r.address == named), None))
    if not serving:
        _fail_without_address(records)
    if len(serving) > 1:
        names = ", ".join(f"{record.name} at {record.address}" for record in serving)
        fail(f"several clusters are running here ({names}); choose one with --address", INVALID)
    return Target(address=serving[0].address, cluster=serving[0].name)


def _fail_without_address(starting: list[ClusterRecord]) -> NoReturn:
    """Says how to get a cluster, or what has become of those whose start was recorded."""
    if not starting:
        fail("no cluster is running here; start one with `baton up -f FILE`, or name one with --address", NOT_FOUND)
    fail("; ".join(_state_of_start(record) for record in starting), NOT_FOUND)


def _state_of_start(record: ClusterRecord) -> str:
    if is_alive(record.launcher_pid, record.launcher_started_s):
        return f"cluster {record.name} is being started; it can be used once its `baton up` has printed the address"
    return f"the start of cluster {record.name} was cut short; `baton down {record.name}` clears it away"
