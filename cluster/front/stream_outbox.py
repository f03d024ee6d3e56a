"""Messages on their way to the other end of a stream: bounded, in order, and sending never waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

MAX_WAITING_MESSAGES = 4096
"""With so many waiting, the other end has stopped reading, and the stream is given up."""

MessageT = TypeVar("MessageT")


class StreamOutbox(Generic[MessageT]):
    """For one life of one stream. `cancel` is called once, where the box overflows; nothing is taken after that."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[MessageT | None] = asyncio.Queue(MAX_WAITING_MESSAGES)
        self.has_overflowed = False
        self.cancel: Callable[[], object] | None = None

    def put(self, message: MessageT) -> None:
        if self.has_overflowed:
            return
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self.has_overflowed = True
            if self.cancel is not None:
                self.cancel()

    def close(self) -> None:
        """The stream has ended: whoever waits for messages is let go (with a full box nobody waits)."""
        with contextlib.suppress(asyncio.QueueFull):
            self._queue.put_nowait(None)

    async def messages(self) -> AsyncIterator[MessageT]:
        """Until the box is closed."""
        while (message := await self._queue.get()) is not None:
            yield message
