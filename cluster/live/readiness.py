"""Whether a cluster serves: asked of its front, as a client would."""

from __future__ import annotations

import time
from typing import Final

import grpc

from baton.v1 import admin_pb2, admin_pb2_grpc
from cluster.core.errors import StartupError
from cluster.live.plan import ClusterPlan
from cluster.wire.channels import make_sync_channel

READY_TIMEOUT_S: Final = 60.0
CALL_TIMEOUT_S: Final = 2.0
POLL_S: Final = 0.05


def wait_until_ready(address: str, plan: ClusterPlan) -> None:
    """Returns when the front reaches the coordinator and every worker is registered. Raises StartupError."""
    wanted = {worker.name for worker in plan.workers}
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    problem = "no answer"
    with make_sync_channel(address) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        while time.monotonic() < deadline_s:
            try:
                status = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
            except grpc.RpcError as error:
                problem = error.details() or error.code().name
            else:
                ready = {worker.name for pool in status.pools for worker in pool.workers if worker.state == "ready"}
                if ready >= wanted:
                    return
                problem = f"waiting for {', '.join(sorted(wanted - ready))}"
            time.sleep(POLL_S)
    raise StartupError(f"the cluster is not ready after {READY_TIMEOUT_S:g} s: {problem}")
