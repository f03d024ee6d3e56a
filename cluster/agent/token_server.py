"""The token plane's server side: one stream a front, one TokenBatch a step and front."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from baton.v1 import tokens_pb2, tokens_pb2_grpc
from cluster.agent import events as ev
from cluster.core.ids import FrontId, WorkerId
from cluster.core.token_messages import StreamHello, TokenBatch, TokenRun
from cluster.wire.codec import decode_token_request, encode_batch
from cluster.wire.mirror import WireError

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
"""A peer that opens a stream and does not say who it is within this time is cut off."""

Runs = tuple[TokenRun, ...]

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[tokens_pb2.TokenEnvelope, tokens_pb2.TokenBatch]


class _FrontStream:
    """Batches on their way to one front. WorkerState bounds their number; None ends the stream."""

    def __init__(self) -> None:
        self.batches: asyncio.Queue[Runs | None] = asyncio.Queue()
        self.is_refused = False


class TokenService(tokens_pb2_grpc.TokensServicer):
    """Posts what fronts ask for, and writes what WorkerState has for them."""

    def __init__(self, worker: WorkerId, post: Callable[[ev.Event], None]) -> None:
        self._worker = worker
        self._post = post
        self._streams: dict[FrontId, _FrontStream] = {}

    def send(self, front: FrontId, runs: Runs) -> None:
        """Hands a batch to the front's stream; RunsWritten is posted once flow control has let it through."""
        stream = self._streams.get(front)
        if stream is not None:
            stream.batches.put_nowait(runs)

    def refuse(self, front: FrontId) -> None:
        """The stream that this front has just opened is one too many."""
        self._streams.pop(front).is_refused = True

    def close(self) -> None:
        for stream in self._streams.values():
            stream.batches.put_nowait(None)

    async def Stream(
        self, request_iterator: AsyncIterator[tokens_pb2.TokenEnvelope], context: _Context
    ) -> AsyncIterator[tokens_pb2.TokenBatch]:
        front = await self._hello(request_iterator, context)
        stream = _FrontStream()
        older = self._streams.get(front)
        self._streams[front] = stream
        if older is not None:
            older.batches.put_nowait(None)
        self._post(ev.FrontConnected(front=front))
        if stream.is_refused:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._worker} serves too many fronts already")
        reader = asyncio.create_task(self._read(front, stream, request_iterator))
        try:
            await context.send_initial_metadata(())  # tells the front that it is heard
            while (runs := await stream.batches.get()) is not None:
                # Control comes back here when the batch has been taken by the transport below.
                yield encode_batch(TokenBatch(worker=self._worker, runs=runs))
                if self._streams.get(front) is stream:
                    self._post(ev.RunsWritten(front=front))
        finally:
            reader.cancel()
            if self._streams.get(front) is stream:
                del self._streams[front]
                self._post(ev.FrontDisconnected(front=front))

    async def _hello(self, requests: AsyncIterator[tokens_pb2.TokenEnvelope], context: _Context) -> FrontId:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = decode_token_request(await anext(requests))
        except (StopAsyncIteration, TimeoutError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the stream did not begin with stream_hello")
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not isinstance(hello, StreamHello):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be stream_hello")
        return hello.front

    async def _read(
        self, front: FrontId, stream: _FrontStream, requests: AsyncIterator[tokens_pb2.TokenEnvelope]
    ) -> None:
        try:
            async for envelope in requests:
                request = decode_token_request(envelope)
                if isinstance(request, StreamHello):
                    raise WireError("stream_hello comes once")
                if self._streams.get(front) is not stream:
                    return
                self._post(ev.TokenRequestReceived(front=front, request=request))
        except WireError as error:
            logger.warning("front %s sent a malformed message: %s", front, error)
        except grpc.aio.AbortError as error:
            logger.info("front %s: %s", front, error)
        finally:
            stream.batches.put_nowait(None)
