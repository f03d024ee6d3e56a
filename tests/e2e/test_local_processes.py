"""A cluster of plain processes leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cluster.core.errors import StartupError
from cluster.live.config_file import parse_cluster_text
from cluster.live.environment import read_environment
from cluster.live.local_processes import local_cluster
from tests.e2e.conftest import wait_until

CLUSTER_FILE = """\
version: 1
model: {preset: smollm2-135m-instruct, dtype: bfloat16, max_model_tokens: 512}
pools:
  - {name: p, role: prefill, kv_memory: 16MiB}
  - {name: d, role: decode, kv_memory: 32MiB}
front: {port: PORT}
disaggregation: {local_prefill: never, stay: never}
"""
CALLER = f"""\
import os, time
from pathlib import Path
from cluster.live.config_file import parse_cluster_text
from cluster.live.environment import read_environment
from cluster.live.local_processes import local_cluster

config = parse_cluster_text({CLUSTER_FILE.replace("PORT", "0")!r}, "test", Path()).config
with local_cluster(config, read_environment(os.environ)) as cluster:
    print(*[process.pid for process in cluster.processes()], flush=True)
    time.sleep(600)
"""
GONE_TIMEOUT_S = 10.0


def test_no_process_outlives_a_caller_that_is_killed(tmp_path: Path) -> None:
    # Nobody is left to remove the folder with the logs: it goes with the test's own.
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), "TMPDIR": str(tmp_path)}
    caller = subprocess.Popen([sys.executable, "-c", CALLER], stdout=subprocess.PIPE, text=True, env=environment)
    assert caller.stdout is not None
    with caller:
        processes = [psutil.Process(int(pid)) for pid in caller.stdout.readline().split()]
        assert len(processes) == 4
        caller.kill()
    psutil.wait_procs(processes, timeout=GONE_TIMEOUT_S)
    alive = [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert alive == []


def test_a_part_that_cannot_start_is_named_and_the_others_are_ended() -> None:
    folders = set(Path("/tmp").glob("baton-local-*"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = CLUSTER_FILE.replace("PORT", str(taken.getsockname()[1]))
        config = parse_cluster_text(text, "test", Path()).config
        with (
            pytest.raises(StartupError, match=r"front-0 ended with status 1: .*in use"),
            local_cluster(config, read_environment(os.environ)),
        ):
            pytest.fail("it must not serve")
    wait_until(lambda: not _children(), GONE_TIMEOUT_S, "no child is left")
    assert set(Path("/tmp").glob("baton-local-*")) <= folders


def _children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "cluster" in " ".join(child.cmdline())]
