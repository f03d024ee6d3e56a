"""What waits to be sent to one client. The client's reading speed decides how it is cut into messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from baton.v1 import inference_pb2
from cluster.core.token_messages import TokenInfo
from cluster.front.request_effects import End

MAX_WAITING_TOKENS = 4096
"""A client that falls further behind than this does not read: its request is cancelled."""


class ClientOutput:
    """Filled on the event loop as tokens come, and taken by the call that writes to the client.

    Everything that came since the last write goes out in one message: one for each step for a client that keeps up,
    and fewer, longer ones for a slow client.
    """

    def __init__(self, request_id: str, *, with_logprobs: bool) -> None:
        self._request_id = request_id
        self._with_logprobs = with_logprobs
        self.position = 0  # of the first waiting token
        self._tokens: list[TokenInfo] = []
        self._text: list[str] = []
        self._has_news = asyncio.Event()
        self.end: End | None = None

    @property
    def is_overflowing(self) -> bool:
        return len(self._tokens) > MAX_WAITING_TOKENS

    def add(self, tokens: Sequence[TokenInfo], text: str) -> None:
        self._tokens.extend(tokens)
        if text:
            self._text.append(text)
        self._has_news.set()

    def finish(self, end: End) -> None:
        """Nothing follows."""
        assert self.end is None, "a request ends once"
        self.end = end
        self._has_news.set()

    async def wait(self) -> None:
        """Until there is something to take, or the end."""
        await self._has_news.wait()
        self._has_news.clear()

    def take(self) -> inference_pb2.GenerateResponse | None:
        """All that waits, as one message; None if there is nothing."""
        if not self._tokens and not self._text:
            return None
        message = inference_pb2.GenerateResponse(
            request_id=self._request_id,
            position=self.position,
            token_ids=[token.token_id for token in self._tokens],
            text="".join(self._text),
        )
        if self._with_logprobs:
            for token in self._tokens:
                entry = message.logprobs.add(logprob=token.logprob or 0.0)
                for token_id, logprob in token.top:
                    entry.top.add(token_id=token_id, logprob=logprob)
        self.position += len(self._tokens)
        self._tokens, self._text = [], []
        return message
