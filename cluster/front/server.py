"""A front's process: the servers that clients talk to, and the streams behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.v1 import admin_pb2_grpc
from cluster.front import admin, inference
from cluster.front.admin import AdminForwarder
from cluster.front.inference import InferenceService
from cluster.front.sessions import Sessions
from cluster.front.settings import FrontSettings, load_model
from cluster.wire.channels import bind, make_server

STOP_GRACE_S = 0.5
"""How long calls may take to end when the front stops."""

SERVICE_NAMES = (inference.SERVICE_NAME, admin.SERVICE_NAME)


async def run_front(
    settings: FrontSettings,
    *,
    on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serves until `stop` is set, or until cancelled.

    Args:
        on_ready: called once with the address (host:port), when clients are served and the coordinator has been
            reached for the first time.

    Raises:
        PortInUseError: the address cannot be listened on.
        FileNotFoundError, ValueError: the model's directory or a setting cannot be used.
    """
    server = make_server()
    port = bind(server, settings.host, settings.port)
    try:
        await _serve(server, f"{settings.host}:{port}", settings, on_ready, stop or asyncio.Event())
    finally:
        await server.stop(None)


async def _serve(
    server: grpc.aio.Server,
    address: str,
    settings: FrontSettings,
    on_ready: Callable[[str], None] | None,
    stop: asyncio.Event,
) -> None:
    model = await asyncio.to_thread(load_model, settings)
    sessions = Sessions(settings.front, settings.coordinator_address, settings.limits)
    sessions.address = address
    service = InferenceService(model, sessions)
    forwarder = AdminForwarder(settings.coordinator_address)
    health_service = health.aio.HealthServicer()  # type: ignore[attr-defined]  # its stubs know the blocking one only
    server.add_generic_rpc_handlers((service.handler(),))
    admin_pb2_grpc.add_AdminServicer_to_server(forwarder, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    reflection.enable_server_reflection([*SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    link = asyncio.create_task(sessions.link.run())
    ready = asyncio.create_task(_announce(sessions, health_service.set, address, on_ready))
    stopping = asyncio.create_task(stop.wait())
    try:
        await server.start()
        done, _ = await asyncio.wait({link, ready, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # link and announcement never end by themselves: this raises what broke them
    finally:
        service.close()
        await health_service.enter_graceful_shutdown()
        await server.stop(STOP_GRACE_S)
        for task in (link, ready, stopping):
            task.cancel()
        await asyncio.gather(link, ready, stopping, return_exceptions=True)
        await sessions.streams.close()
        await forwarder.close()


async def _announce(
    sessions: Sessions,
    set_health: Callable[[str, int], Awaitable[None]],
    address: str,
    on_ready: Callable[[str], None] | None,
) -> None:
    """Keeps the health service up to date: a front serves while it has a coordinator."""

    async def set_all(status: int) -> None:
        for name in ("", *SERVICE_NAMES):
            await set_health(name, status)

    while True:
        await set_all(health_pb2.HealthCheckResponse.NOT_SERVING)
        await sessions.link.welcomed.wait()
        await set_all(health_pb2.HealthCheckResponse.SERVING)
        if on_ready is not None:
            on_ready(address)
            on_ready = None
        await sessions.link.lost.wait()
