"""The bounded queue between the coordinator's state and one peer's stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final, Generic, TypeVar

MessageT = TypeVar("MessageT")

OUTGOING_LIMIT: Final = 4096
"""Messages waiting for one peer. A peer that falls this far behind is cut off: it would act on stale orders."""


class OutgoingStream(Generic[MessageT]):
    """Messages for one peer, in order. Used from the event loop's thread only.

    `send` never waits, so that no peer can hold up the state machine.
    """

    def __init__(self, limit: int = OUTGOING_LIMIT) -> None:
        self._queue: asyncio.Queue[MessageT | None] = asyncio.Queue()
        self._limit = limit
        self._closed = False
        self.overflowed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def send(self, message: MessageT) -> None:
        """Queues the message; at the limit closes the stream instead. After closing it does nothing."""
        if self._closed:
            return
        if self._queue.qsize() >= self._limit:
            self.overflowed = True
            self.close()
            return
        self._queue.put_nowait(message)

    def close(self) -> None:
        """Ends the stream after what is queued already."""
        if not self._closed:
            self._closed = True
            self._queue.put_nowait(None)

    async def messages(self) -> AsyncIterator[MessageT]:
        """The messages until the stream is closed."""
        while (message := await self._queue.get()) is not None:
            yield message
