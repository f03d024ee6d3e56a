"""Starts a Ray of its own for one cluster, on this machine, through Ray's command line.

Settings go to that Ray alone, by flags and by the environment of the one subprocess. Stopping is ending its processes
(cluster.live.run_processes): `ray stop` would end every Ray of the machine.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cluster.core.errors import StartupError
from cluster.live.plan import free_ports
from cluster.live.run_processes import RUN_ID_VARIABLE

RAY_START_TIMEOUT_S: Final = 60.0
OBJECT_STORE_BYTES: Final = 80 * 10**6
"""Close to the least that Ray accepts: nothing of Baton's goes through the object store."""
TEMP_PREFIX: Final = "baton-ray-"
MAX_TEMP_DIR_CHARS: Final = 40
"""Ray puts unix sockets some 65 characters below, and their paths may have 107."""
ADDRESS_FILE: Final = "ray_current_cluster"
TOKEN_FILE: Final = "token"
TOKEN_BYTES: Final = 32
OUTPUT_LINES: Final = 5


def make_temp_dir() -> str:
    """A folder for one Ray; in /tmp where the usual place has too long a name for its sockets."""
    base = tempfile.gettempdir()
    if len(base) + len(TEMP_PREFIX) + 9 > MAX_TEMP_DIR_CHARS:
        base = "/tmp"
    return tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=base)


def remove_temp_dir(temp_dir: str) -> None:
    """Removes a folder that make_temp_dir made, and no other, whatever a damaged record says."""
    if temp_dir and Path(temp_dir).name.startswith(TEMP_PREFIX):
        shutil.rmtree(temp_dir, ignore_errors=True)


def start_ray(*, run_id: str, temp_dir: str, num_cpus: int, variables: Mapping[str, str]) -> str:
    """Starts a head node and returns its address (host:port).

    Args:
        variables: the environment to hand on.

    Raises: StartupError with the end of what Ray said.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *_flags(temp_dir, num_cpus)]
    _make_token(temp_dir)
    environment = {**variables, **_variables(run_id), **access_variables(temp_dir)}
    try:
        # A session of its own, so that a Ctrl-C at the terminal does not reach Ray's processes.
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RAY_START_TIMEOUT_S,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StartupError(f"Ray did not start within {RAY_START_TIMEOUT_S:g} s") from error
    address_file = Path(temp_dir) / ADDRESS_FILE
    if done.returncode != 0 or not address_file.is_file():
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-OUTPUT_LINES:]
        raise StartupError("Ray did not start: " + " | ".join(line.strip() for line in said))
    return address_file.read_text(encoding="utf-8").strip()


def access_variables(temp_dir: str) -> dict[str, str]:
    """What a process must have in its environment, before it imports Ray, to be let in to the Ray of that folder.

    Ray's ports are open to the network, whatever address it is given, and whoever is let in may run anything.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(Path(temp_dir) / TOKEN_FILE)}


def _make_token(temp_dir: str) -> None:
    """A secret that only this user can read."""
    descriptor = os.open(Path(temp_dir) / TOKEN_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(TOKEN_BYTES))


def _flags(temp_dir: str, num_cpus: int) -> list[str]:
    client_port, dashboard_port = free_ports(2)
    return [
        "--port=0",
        f"--num-cpus={num_cpus}",
        f"--temp-dir={temp_dir}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--include-dashboard=false",
        "--include-log-monitor=false",
        "--no-monitor",
        "--disable-usage-stats",
        # Ports that are fixed by default would collide with another Ray of this machine.
        f"--ray-client-server-port={client_port}",
        f"--dashboard-port={dashboard_port}",
        "--dashboard-agent-listen-port=0",
        "--dashboard-agent-grpc-port=0",
        "--log-style=record",
        "--log-color=false",
    ]


def _variables(run_id: str) -> dict[str, str]:
    return {
        RUN_ID_VARIABLE: run_id,
        # Ray runs its workers at niceness 15 by default; they are what this machine is for.
        "RAY_worker_niceness": "0",
        # Another Ray named here would be joined instead.
        "RAY_ADDRESS": "",
        "PYTHONPATH": python_path(),
        # Python's output is read line by line, when something goes wrong.
        "PYTHONUNBUFFERED": "1",
    }


def python_path() -> str:
    """The search path of this process, so that what it starts finds the same packages."""
    return ":".join(str(Path(entry).resolve()) for entry in sys.path if Path(entry).is_dir())
