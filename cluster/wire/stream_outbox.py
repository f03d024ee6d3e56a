"""Messages on their way to the other end of a stream: bounded, in order, and sending never waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

MAX_WAITING_MESSAGES = 4096
"""With so many waiting, the other end has stopped reading, and the stream is given up: it would act on stale words."""

MessageT = TypeVar("MessageT")


class StreamOutbox(Generic[MessageT]):
    """For one life of one stream; used from the event loop's thread only.

    Attributes:
        cancel: ends the stream from outside. Called once, when the box overflows: the stream's writer may be waiting
            for a peer that does not read, and would never come back for the word that it is over.
    """

    def __init__(self, limit: int = MAX_WAITING_MESSAGES) -> None:
        self._queue: asyncio.Queue[MessageT | None] = asyncio.Queue()
        self._limit = limit
        self._is_closed = False
        self.has_overflowed = False
        self.cancel: Callable[[], object] | None = None

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def send(self, message: MessageT) -> None:
        """Queues the message; at the limit gives the stream up instead. Once closed it does nothing."""
        if self._is_closed:
            return
        if self._queue.qsize() < self._limit:
            self._queue.put_nowait(message)
            return
        self.has_overflowed = True
        self.close()
        if self.cancel is not None:
            self.cancel()

    def close(self) -> None:
        """Ends the stream after what is queued already."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.put_nowait(None)

    async def messages(self) -> AsyncIterator[MessageT]:
        """The messages until the box is closed."""
        while (message := await self._queue.get()) is not None:
            yield message
