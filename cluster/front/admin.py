"""The Admin service as every front offers it: the coordinator answers."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc.aio

from baton.v1 import admin_pb2, admin_pb2_grpc
from cluster.wire.channels import make_channel

SERVICE_NAME = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
TIMEOUT_S = 5.0
Context = grpc.aio.ServicerContext[Any, Any]
ResponseT = TypeVar("ResponseT")


class AdminForwarder(admin_pb2_grpc.AdminServicer):
    """Hands every call on, and the coordinator's error back."""

    def __init__(self, coordinator_address: str) -> None:
        self._channel = make_channel(coordinator_address)
        self._coordinator = admin_pb2_grpc.AdminStub(self._channel)

    async def close(self) -> None:
        await self._channel.close(None)

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Context) -> admin_pb2.GetStatusResponse:
        return await _answer(self._coordinator.GetStatus(request, timeout=TIMEOUT_S), context)

    async def GetLeases(self, request: admin_pb2.GetLeasesRequest, context: Context) -> admin_pb2.GetLeasesResponse:
        return await _answer(self._coordinator.GetLeases(request, timeout=TIMEOUT_S), context)

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        return await _answer(self._coordinator.Drain(request, timeout=TIMEOUT_S), context)

    async def Flip(self, request: admin_pb2.FlipRequest, context: Context) -> admin_pb2.FlipResponse:
        return await _answer(self._coordinator.Flip(request, timeout=TIMEOUT_S), context)


async def _answer(call: Awaitable[ResponseT], context: Context) -> ResponseT:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        await context.abort(error.code(), f"the coordinator: {error.details()}")
    raise AssertionError("abort returned")
