"""Which cluster a command talks to."""

from __future__ import annotations

from cluster.cli.errors import INVALID, NOT_FOUND, fail
from cluster.live.cluster_record import ClusterRecords
from cluster.live.environment import Environment
from cluster.live.reachability import split_address


def find_address(option: str | None, environment: Environment) -> str:
    """`--address`, else BATON_ADDRESS, else the only cluster that was started from this account.

    Raises CommandError.
    """
    named = option or environment.baton_address
    if named is not None:
        if split_address(named) == (None, None):
            source = "--address" if option else "BATON_ADDRESS"
            fail(f"{source} {named!r} is not HOST:PORT", INVALID)
        return named
    serving = [record for record in ClusterRecords(environment.clusters_dir).all() if record.address]
    if not serving:
        fail("no cluster is running here; start one with `baton up -f FILE`, or name one with --address", NOT_FOUND)
    if len(serving) > 1:
        names = ", ".join(f"{record.name} at {record.address}" for record in serving)
        fail(f"several clusters are running here ({names}); choose one with --address", INVALID)
    return serving[0].address
