"""Token streams to workers: one for each life of a worker, opened when first needed, dialled again while needed."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import grpc.aio

from baton.v1 import tokens_pb2, tokens_pb2_grpc
from cluster.core.ids import AttemptId, FrontId, WorkerId
from cluster.core.messages import WorkerRef
from cluster.core.token_messages import Forget, StreamHello, TokenBatch, Watch
from cluster.wire.channels import make_channel
from cluster.wire.codec import decode_batch, encode_token_request
from cluster.wire.mirror import WireError
from cluster.wire.stream_outbox import StreamOutbox

CONNECT_TIMEOUT_S = 2.0
RECONNECT_DELAY_S = 0.2
MAX_IDLE_REDIALS = 5
"""A stream that nobody needs is dialled again so many times, then given up until it is needed."""

logger = logging.getLogger(__name__)


class StreamsListener(Protocol):
    """Who uses the streams. All methods are called on the event loop and must not wait."""

    def is_watching(self, worker: WorkerId) -> bool:
        """Whether tokens of that worker are waited for."""

    def worker_restored(self, worker: WorkerId) -> None: ...

    def worker_lost(self, worker: WorkerId, reason: str) -> None: ...

    def tokens_came(self, batch: TokenBatch) -> None: ...


class WorkerStreams:
    """All token streams of one front. What comes on them, and whether they are up, is told to the listener."""

    def __init__(self, front: FrontId, listener: StreamsListener) -> None:
        self._front = front
        self._listener = listener
        self._streams: dict[WorkerId, _WorkerStream] = {}

    def watch(self, ref: WorkerRef, watch: Watch) -> str | None:
        """Sends the watch, or opens the stream, which is reported as restored. Returns why it is known to be down."""
        stream = self._streams.get(ref.worker)
        if stream is None:
            stream = self._streams[ref.worker] = _WorkerStream(self._front, ref, self._listener)
            stream.task = asyncio.create_task(self._keep(ref.worker, stream))
        elif stream.outbox is not None:
            stream.outbox.send(encode_token_request(watch))
        return stream.down_reason

    def forget(self, worker: WorkerId, attempt: AttemptId, choice: int | None) -> None:
        stream = self._streams.get(worker)
        if stream is not None and stream.outbox is not None:
            stream.outbox.send(encode_token_request(Forget(attempt=attempt, choice=choice)))

    async def _keep(self, worker: WorkerId, stream: _WorkerStream) -> None:
        reason = "it is not needed any more"
        try:
            await stream.run()
        except Exception:
            # A bug in the handling of what it sent. Requests that wait for it learn of it as of any lost stream.
            reason = "it could not be served"
            logger.exception("the token stream to %s failed", worker)
        finally:
            del self._streams[worker]
        self._listener.worker_lost(worker, reason)

    async def close(self) -> None:
        tasks = [stream.task for stream in self._streams.values() if stream.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _WorkerStream:
    """`outbox` is set while the stream is open; `down_reason` from a failure until the next success."""

    def __init__(self, front: FrontId, ref: WorkerRef, listener: StreamsListener) -> None:
        self._front = front
        self._ref = ref
        self._listener = listener
        self.outbox: StreamOutbox[tokens_pb2.TokenEnvelope] | None = None
        self.down_reason: str | None = None
        self.task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        worker = self._ref.worker
        num_idle_redials = 0
        async with make_channel(self._ref.token_address) as channel:
            while num_idle_redials <= MAX_IDLE_REDIALS:
                self.down_reason = await self._run_stream(channel)
                logger.info("the token stream to %s is down: %s", worker, self.down_reason)
                self._listener.worker_lost(worker, self.down_reason)
                await asyncio.sleep(RECONNECT_DELAY_S)
                num_idle_redials = 0 if self._listener.is_watching(worker) else num_idle_redials + 1

    async def _run_stream(self, channel: grpc.aio.Channel) -> str:
        """Opens one stream and reads it; returns why it ended."""
        outbox = StreamOutbox[tokens_pb2.TokenEnvelope]()
        outbox.send(encode_token_request(StreamHello(front=self._front)))
        call = tokens_pb2_grpc.TokensStub(channel).Stream(outbox.messages())
        outbox.cancel = call.cancel
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                # A worker that does not take this front in ends the stream at once: it must not count as back.
                await call.initial_metadata()
                await call.wait_for_connection()  # raises if it has ended
            self.outbox, self.down_reason = outbox, None
            self._listener.worker_restored(self._ref.worker)
            async for message in call:
                self._listener.tokens_came(decode_batch(message))
        except TimeoutError:
            return f"no connection to {self._ref.token_address} within {CONNECT_TIMEOUT_S:g} s"
        except WireError as error:
            return f"it sent a malformed message: {error}"
        except grpc.aio.AioRpcError as error:
            return error.details() or error.code().name
        except asyncio.CancelledError:
            if not outbox.has_overflowed:
                raise
            return "it does not take messages"
        finally:
            self.outbox = None
            call.cancel()
            outbox.close()
        return "it ended the stream"
