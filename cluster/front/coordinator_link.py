"""The front's stream to the coordinator: one at a time, dialled again whenever it ends."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import grpc.aio

from baton.v1 import control_pb2, control_pb2_grpc
from cluster.core.messages import FrontHello, FrontMessage, FrontWelcome, ToFrontMessage
from cluster.wire.channels import make_channel
from cluster.wire.codec import decode_to_front, encode_body, encode_front
from cluster.wire.mirror import WireError
from cluster.wire.stream_outbox import StreamOutbox
from engine.core.request import RequestBody

RECONNECT_DELAY_S = 0.2
WELCOME_TIMEOUT_S = 5.0
"""A coordinator that does not answer the hello within this time is taken for gone."""

logger = logging.getLogger(__name__)


class LinkListener(Protocol):
    """Who uses the link. All methods are called on the event loop and must not wait."""

    def hello(self) -> FrontHello:
        """What to say first on a new stream."""

    def coordinator_regained(self, epoch: int) -> None: ...

    def coordinator_lost(self) -> None: ...

    def coordinator_said(self, message: ToFrontMessage) -> None: ...


class CoordinatorLink:
    """`welcomed` and `lost` are always opposite: whether there is a coordinator, to be waited for either way."""

    def __init__(self, address: str, listener: LinkListener) -> None:
        self._address = address
        self._listener = listener
        self._outbox: StreamOutbox[control_pb2.FrontEnvelope] | None = None
        self._epoch = 0
        self.welcomed = asyncio.Event()
        self.lost = asyncio.Event()
        self.lost.set()

    @property
    def epoch(self) -> int:
        """The highest that was seen, 0 before the first welcome."""
        return self._epoch

    @property
    def is_up(self) -> bool:
        return self.welcomed.is_set()

    def send(self, message: FrontMessage, body: RequestBody | None = None) -> None:
        """Dropped while there is no stream: its users ask again once it is regained."""
        if self._outbox is not None and self.is_up:
            self._outbox.send(encode_front(message, None if body is None else encode_body(body)))

    async def run(self) -> None:
        """Keeps a stream open until cancelled."""
        async with make_channel(self._address) as channel:
            while True:
                reason = await self._run_stream(channel)
                if self.is_up:
                    logger.warning("the coordinator at %s is gone: %s", self._address, reason)
                    self.welcomed.clear()
                    self.lost.set()
                    self._listener.coordinator_lost()
                else:
                    logger.info("no coordinator at %s: %s", self._address, reason)
                await asyncio.sleep(RECONNECT_DELAY_S)

    async def _run_stream(self, channel: grpc.aio.Channel) -> str:
        """Opens one stream and serves it; returns why it ended."""
        outbox = self._outbox = StreamOutbox[control_pb2.FrontEnvelope]()
        outbox.send(encode_front(self._listener.hello()))
        call = control_pb2_grpc.CoordinatorStub(channel).ConnectFront(outbox.messages())
        outbox.cancel = call.cancel
        envelopes = aiter(call)
        try:
            async with asyncio.timeout(WELCOME_TIMEOUT_S):
                self._welcome(await anext(envelopes))
            async for envelope in envelopes:
                self._listener.coordinator_said(decode_to_front(envelope))
        except StopAsyncIteration:
            return "it ended the stream at once"
        except TimeoutError:
            return f"it did not answer within {WELCOME_TIMEOUT_S:g} s"
        except WireError as error:
            return f"it sent a malformed message: {error}"
        except grpc.aio.AioRpcError as error:
            return error.details() or error.code().name
        except asyncio.CancelledError:
            if not outbox.has_overflowed:
                raise
            return "it does not take messages"
        finally:
            self._outbox = None
            call.cancel()
            outbox.close()
        return "it ended the stream"

    def _welcome(self, envelope: control_pb2.ToFrontEnvelope) -> None:
        """Raises WireError for anything but a welcome of this coordinator's latest life."""
        message = decode_to_front(envelope)
        if not isinstance(message, FrontWelcome):
            raise WireError(f"the first message is a {type(message).__name__}")
        if message.epoch < self._epoch:
            raise WireError(f"epoch {message.epoch} is older than {self._epoch}, which was seen before")
        self._epoch = message.epoch
        self.welcomed.set()
        self.lost.clear()
        logger.info("the coordinator at %s is there, epoch %d", self._address, message.epoch)
        self._listener.coordinator_regained(message.epoch)
