"""The control stream, worker's side: dials the coordinator, and dials again when the stream ends.

How long a worker may be without a coordinator is WorkerState's matter (AgentLimits.coordinator_grace_ns); here is only
how often it tries.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc
import grpc.aio

from baton.v1 import control_pb2, control_pb2_grpc
from cluster.agent import events as ev
from cluster.core.messages import WorkerMessage
from cluster.wire.channels import make_channel
from cluster.wire.codec import decode_command, encode_worker
from cluster.wire.mirror import WireError
from cluster.wire.stream_outbox import StreamOutbox

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0


class ControlClient:
    """Posts CoordinatorConnected, commands and CoordinatorLost; writes messages in the order they were sent in."""

    def __init__(self, address: str, post: Callable[[ev.Event], None]) -> None:
        self._address = address
        self._post = post
        self._outbox: StreamOutbox[control_pb2.WorkerEnvelope] | None = None

    def send(self, message: WorkerMessage) -> None:
        """Queues a message on the stream; without a stream it is dropped (the next hello carries an inventory)."""
        if self._outbox is not None:
            self._outbox.send(encode_worker(message))

    async def run(self) -> None:
        """Until cancelled."""
        backoff_s = MIN_BACKOFF_S
        while True:
            was_connected = await self._one_stream()
            backoff_s = MIN_BACKOFF_S if was_connected else min(2 * backoff_s, MAX_BACKOFF_S)
            await asyncio.sleep(backoff_s)

    async def _one_stream(self) -> bool:
        """One stream from its opening to its end. Whether it was opened."""
        outbox = StreamOutbox[control_pb2.WorkerEnvelope]()
        is_open = False
        async with make_channel(self._address) as channel:
            call = control_pb2_grpc.CoordinatorStub(channel).ConnectWorker(outbox.messages())
            outbox.cancel = call.cancel
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await call.wait_for_connection()
                is_open = True
                self._outbox = outbox
                self._post(ev.CoordinatorConnected())
                async for envelope in call:
                    self._on_command(envelope)
                logger.warning("the coordinator ended the control stream")
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                logger.warning("no coordinator at %s: %s", self._address, _describe(error))
            except WireError as error:
                # A command that is passed over would leave its request waiting: the stream ends, and this life with it.
                logger.error("the coordinator sent a malformed command: %s", error)
            except asyncio.CancelledError:
                if not outbox.has_overflowed:
                    raise
                logger.error("the coordinator does not take messages")
            finally:
                self._outbox = None
                outbox.close()
                call.cancel()
                self._post(ev.CoordinatorLost())
        return is_open

    def _on_command(self, envelope: control_pb2.Command) -> None:
        """Raises: WireError."""
        command, body = decode_command(envelope)
        self._post(ev.CommandReceived(command=command, body=body))


def _describe(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return str(error) or type(error).__name__
