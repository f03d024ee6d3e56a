"""`baton up`, `down`, `status` and `leases`."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import FrameType

from cluster.cli.address import find_target
from cluster.cli.errors import INVALID, NOT_FOUND, errors_as_json, fail
from cluster.cli.progress import say
from cluster.live.cluster_record import ClusterRecords
from cluster.live.config_file import read_cluster_file
from cluster.live.environment import Environment
from cluster.live.launcher import start_cluster, stop_cluster


def up(path: Path, environment: Environment) -> None:
    file = read_cluster_file(path)
    interrupt_on_sigterm()
    record = start_cluster(file, environment, say)
    print(record.address, flush=True)


def down(name: str | None, environment: Environment) -> None:
    if name is None:
        names = [record.name for record in ClusterRecords(environment.clusters_dir).all()]
        if len(names) > 1:
            fail(f"several clusters are running here; name one of: {', '.join(names)}", INVALID)
        if not names:
            say("no cluster is running here")
            return
        name = names[0]
    if not stop_cluster(name, environment, say):
        fail(f"no cluster {name!r} was started here", NOT_FOUND)
    say(f"cluster {name} is down")


def show_status(environment: Environment, address: str | None, as_json: bool) -> None:
    from cluster.cli.requests import Client
    from cluster.cli.status import status_json, status_text

    with errors_as_json(as_json), Client(find_target(address, environment)) as client:
        client.connect()
        status = client.status()
    print(json.dumps(status_json(status), indent=2) if as_json else status_text(status))


def show_leases(environment: Environment, address: str | None, as_json: bool) -> None:
    from cluster.cli.requests import Client
    from cluster.cli.status import leases_json, leases_text

    with errors_as_json(as_json), Client(find_target(address, environment)) as client:
        client.connect()
        leases = client.leases()
    print(json.dumps(leases_json(leases), indent=2) if as_json else leases_text(leases))


def interrupt_on_sigterm() -> None:
    """A command that has started something cleans up after SIGTERM as it does after Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
