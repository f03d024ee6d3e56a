"""The worker's end of the control stream, against a scripted coordinator on a real port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from baton.v1 import control_pb2, control_pb2_grpc
from cluster.agent import events as ev
from cluster.agent.control_client import ControlClient
from cluster.core.commands import Command, WorkerWelcome
from cluster.core.ids import WorkerId
from cluster.wire.channels import bind, make_server
from cluster.wire.codec import encode_command

WELCOME = Command(epoch=1, worker=WorkerId("d0", 1), body=WorkerWelcome(heartbeat_ms=100))


class _Coordinator(control_pb2_grpc.CoordinatorServicer):
    """Welcomes the worker, then sends a command that says nothing, and waits for the worker to leave."""

    def __init__(self) -> None:
        self.num_streams = 0

    async def ConnectWorker(  # type: ignore[override]
        self, request_iterator: AsyncIterator[control_pb2.WorkerEnvelope], context: object
    ) -> AsyncIterator[control_pb2.Command]:
        self.num_streams += 1
        yield encode_command(WELCOME)
        yield control_pb2.Command(epoch=1)
        async for _ in request_iterator:
            continue


def test_a_malformed_command_ends_the_stream() -> None:
    async def main() -> list[ev.Event]:
        coordinator, server = _Coordinator(), make_server()
        control_pb2_grpc.add_CoordinatorServicer_to_server(coordinator, server)  # type: ignore[no-untyped-call]
        port = bind(server)
        await server.start()
        events: list[ev.Event] = []
        lost = asyncio.Event()

        def post(event: ev.Event) -> None:
            events.append(event)
            if isinstance(event, ev.CoordinatorLost):
                lost.set()

        dialling = asyncio.create_task(ControlClient(f"127.0.0.1:{port}", post).run())
        try:
            async with asyncio.timeout(10):
                await lost.wait()
        finally:
            dialling.cancel()
            await asyncio.wait({dialling})
            await server.stop(0)
        return events

    events = asyncio.run(main())
    assert [type(event) for event in events[:3]] == [ev.CoordinatorConnected, ev.CommandReceived, ev.CoordinatorLost]
    assert isinstance(events[1], ev.CommandReceived) and events[1].command == WELCOME
