"""What the coordinator serves: streams of fronts and workers (Coordinator), and questions of operators (Admin)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from baton.v1 import admin_pb2, admin_pb2_grpc, control_pb2, control_pb2_grpc
from cluster.core.commands import Command, WorkerRefused
from cluster.core.config import ClusterConfig
from cluster.core.drain_orders import DrainOrder
from cluster.core.ids import FrontId, WorkerId
from cluster.core.messages import FrontHello, FrontMessage, Resubmit, Submit, WorkerHello
from cluster.core.views import DrainView
from cluster.live.admin import drain_order, flip_order, incarnation_of, leases_response, status_response
from cluster.live.driver import Driver, FrontStream, WorkerStream
from cluster.live.reachability import why_unreachable
from cluster.live.worker_reaper import WorkerReaper
from cluster.wire.codec import check_body, decode_front, decode_worker, encode_command
from cluster.wire.mirror import WireError

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
EnvelopeT = TypeVar("EnvelopeT")
MessageT = TypeVar("MessageT")

HELLO_TIMEOUT_S: Final = 10.0
"""A peer that opens a stream and does not say who it is within this time is cut off."""


class ControlService(control_pb2_grpc.CoordinatorServicer):
    """One stream a front and one a worker; each has a task that reads, while the call itself writes."""

    def __init__(self, driver: Driver, reaper: WorkerReaper, epoch: int) -> None:
        self._driver = driver
        self._reaper = reaper
        self._epoch = epoch

    async def ConnectFront(
        self, request_iterator: AsyncIterator[control_pb2.FrontEnvelope], context: Context
    ) -> AsyncIterator[control_pb2.ToFrontEnvelope]:
        await context.send_initial_metadata(())
        first = await _first(request_iterator, context)
        hello = await _decoded(decode_front, first, context)
        if not isinstance(hello, FrontHello):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be front_hello")
        stream: FrontStream = FrontStream()
        self._driver.front_joined(hello.front, stream)
        self._driver.front_said(hello.front, hello, None)
        reader = asyncio.create_task(self._read_front(hello.front, request_iterator, stream))
        stream.cancel = lambda: _soon(reader.cancel, lambda: self._driver.front_left(hello.front, stream))
        try:
            async for message in stream.messages():
                yield message
        finally:
            reader.cancel()
            self._driver.front_left(hello.front, stream)

    async def _read_front(
        self, front: FrontId, requests: AsyncIterator[control_pb2.FrontEnvelope], stream: FrontStream
    ) -> None:
        try:
            async for envelope in requests:
                self._driver.front_said(front, *_message_and_body(envelope))
        except WireError as error:
            logger.warning("front %s sent a malformed message: %s", front, error)
        except grpc.aio.AbortError as error:
            logger.info("front %s: %s", front, error)
        finally:
            stream.close()

    async def ConnectWorker(
        self, request_iterator: AsyncIterator[control_pb2.WorkerEnvelope], context: Context
    ) -> AsyncIterator[control_pb2.Command]:
        await context.send_initial_metadata(())
        first = await _first(request_iterator, context)
        hello = await _decoded(decode_worker, first, context)
        if not isinstance(hello, WorkerHello):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be worker_hello")
        worker = hello.ref.worker
        unreachable = await why_unreachable(hello.ref.token_address, context.peer())
        if unreachable is not None:
            logger.warning("worker %s is refused: %s", worker, unreachable)
            yield self._refusal(worker, unreachable)
            return
        stream: WorkerStream = WorkerStream()
        self._reaper.adopt(worker, hello.host, hello.pid)
        self._driver.worker_joined(worker, stream)
        self._driver.worker_said(worker, hello)
        reader = asyncio.create_task(self._read_worker(worker, request_iterator, stream))
        stream.cancel = lambda: _soon(
            reader.cancel, lambda: self._driver.worker_left(worker, stream, _why_left(stream))
        )
        try:
            async for command in stream.messages():
                yield command
        finally:
            reader.cancel()
            self._driver.worker_left(worker, stream, _why_left(stream))
            self._reaper.release(worker)

    async def _read_worker(
        self, worker: WorkerId, requests: AsyncIterator[control_pb2.WorkerEnvelope], stream: WorkerStream
    ) -> None:
        try:
            async for envelope in requests:
                message = decode_worker(envelope)
                if isinstance(message, WorkerHello):
                    raise WireError("worker_hello comes once")
                self._driver.worker_said(worker, message)
        except WireError as error:
            logger.warning("worker %s sent a malformed message: %s", worker, error)
        except grpc.aio.AbortError as error:
            logger.info("worker %s: %s", worker, error)
        finally:
            stream.close()

    def _refusal(self, worker: WorkerId, reason: str) -> control_pb2.Command:
        return encode_command(Command(epoch=self._epoch, worker=worker, body=WorkerRefused(reason=reason)))


class AdminService(admin_pb2_grpc.AdminServicer):
    """What runs where, and who holds what, as ClusterState sees it."""

    def __init__(self, driver: Driver, config: ClusterConfig, metrics_address: str) -> None:
        self._driver = driver
        self._config = config
        self._metrics_address = metrics_address
        self._started_ns = driver.now_ns()

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Context) -> admin_pb2.GetStatusResponse:
        now_ns = self._driver.now_ns()
        view = self._driver.state.status(now_ns)
        return status_response(self._config, view, now_ns - self._started_ns, self._metrics_address)

    async def GetLeases(self, request: admin_pb2.GetLeasesRequest, context: Context) -> admin_pb2.GetLeasesResponse:
        return leases_response(self._driver.state.leases(self._driver.now_ns()))

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        view = await self._begin(drain_order(request), request.force, context)
        return admin_pb2.DrainResponse(incarnation=incarnation_of(view))

    async def Flip(self, request: admin_pb2.FlipRequest, context: Context) -> admin_pb2.FlipResponse:
        view = await self._begin(flip_order(request), request.force, context)
        return admin_pb2.FlipResponse(incarnation=incarnation_of(view), pool=view.order.pool)

    async def _begin(self, order: DrainOrder, force: bool, context: Context) -> DrainView:
        """Aborts the call where the order is refused."""
        refusal = self._driver.drain(order, force=force)
        if refusal is not None:
            unknown, refused = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION
            await context.abort(unknown if refusal.is_unknown else refused, refusal.reason)
        drains = self._driver.state.status(self._driver.now_ns()).drains
        return next(view for view in drains if view.order.worker == order.worker)


async def _first(requests: AsyncIterator[EnvelopeT], context: Context) -> EnvelopeT:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            return await anext(requests)
    except StopAsyncIteration:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the stream ended before its first message")
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no first message within {HELLO_TIMEOUT_S:g} s")
    raise AssertionError("abort returned")


async def _decoded(decode: Callable[[EnvelopeT], MessageT], envelope: EnvelopeT, context: Context) -> MessageT:
    try:
        return decode(envelope)
    except WireError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    raise AssertionError("abort returned")


def _soon(*calls: Callable[[], object]) -> None:
    """Once the driver, in whose midst this is called, has done what it is at.

    A call whose peer does not read cannot be ended from here: its writer waits until the connection breaks. For the
    state machine the peer is gone all the same.
    """
    for call in calls:
        asyncio.get_running_loop().call_soon(call)


def _why_left(stream: WorkerStream) -> str:
    return "it did not take its commands" if stream.has_overflowed else "its control stream ended"


def _message_and_body(envelope: control_pb2.FrontEnvelope) -> tuple[FrontMessage, bytes | None]:
    """Of every message but the first. Raises WireError also where one that needs a body comes without it."""
    message = decode_front(envelope)
    if isinstance(message, FrontHello):
        raise WireError("front_hello comes once")
    if not isinstance(message, Submit | Resubmit):
        return message, None
    if not envelope.HasField("body"):
        raise WireError(f"{type(message).__name__} lacks its body")
    # A worker that cannot read a body ends, and so would the next one: better this front's stream than theirs.
    check_body(envelope.body)
    return message, envelope.body
