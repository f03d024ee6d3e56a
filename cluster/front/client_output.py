"""What waits to be sent to one client. The client's reading speed decides how it is cut into messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from baton.v1 import inference_pb2
from cluster.core.ids import Outcome
from cluster.core.token_messages import TokenInfo
from cluster.front.request_effects import End
from cluster.wire.codec import outcome_to_wire

MAX_WAITING_TOKENS = 4096
"""A client that falls further behind than this does not read: its request is cancelled."""
MAX_SCORES_PER_MESSAGE = 512
"""Prompt tokens with log-probabilities in one message. With all their alternatives that is some 150 KB; clients take
messages of up to 4 MB unless they say otherwise."""


class _Choice:
    """What waits of one answer. `position` is that of the first waiting token."""

    def __init__(self) -> None:
        self.position = 0
        self.tokens: list[TokenInfo] = []
        self.text: list[str] = []
        self.finish: Outcome | None = None

    @property
    def has_news(self) -> bool:
        return bool(self.tokens or self.text or self.finish)


class ClientOutput:
    """Filled on the event loop as tokens come, and taken by the call that writes to the client.

    Everything that came of an answer since the last write goes out in one message: one for each step for a client that
    keeps up, and fewer, longer ones for a slow client.
    """

    def __init__(self, request_id: str, *, choices: Iterable[int], with_logprobs: bool) -> None:
        self._request_id = request_id
        self._with_logprobs = with_logprobs
        self._choices = {choice: _Choice() for choice in choices}
        self._score_position = 1  # of the first waiting one
        self._scores: list[TokenInfo] = []
        self._has_news = asyncio.Event()
        self.end: End | None = None

    @property
    def is_overflowing(self) -> bool:
        """The prompt's log-probabilities do not count: there are no more of them than the prompt has tokens."""
        return sum(len(choice.tokens) for choice in self._choices.values()) > MAX_WAITING_TOKENS

    def add(self, choice: int, tokens: Sequence[TokenInfo], text: str) -> None:
        waiting = self._choices[choice]
        waiting.tokens.extend(tokens)
        if text:
            waiting.text.append(text)
        self._has_news.set()

    def add_scores(self, tokens: Sequence[TokenInfo]) -> None:
        """Log-probabilities of the prompt's next tokens."""
        self._scores.extend(tokens)
        self._has_news.set()

    def end_choice(self, choice: int, outcome: Outcome) -> None:
        """Nothing of it follows."""
        assert self._choices[choice].finish is None, "an answer ends once"
        self._choices[choice].finish = outcome
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

    def take(self) -> list[inference_pb2.GenerateResponse]:
        """All that waits: the prompt's log-probabilities in parts, then one message for each answer with news."""
        messages = self._take_scores()
        messages += [self._take_choice(choice) for choice, waiting in self._choices.items() if waiting.has_news]
        return messages

    def take_last(self) -> list[inference_pb2.GenerateResponse]:
        """As `take`, with at least one message: one without news has room for the request's end."""
        return self.take() or [self._take_choice(min(self._choices))]

    def _take_choice(self, choice: int) -> inference_pb2.GenerateResponse:
        waiting = self._choices[choice]
        message = inference_pb2.GenerateResponse(
            request_id=self._request_id,
            choice=choice,
            position=waiting.position,
            token_ids=[token.token_id for token in waiting.tokens],
            text="".join(waiting.text),
        )
        if self._with_logprobs:
            _fill_logprobs(message.logprobs, waiting.tokens)
        if waiting.finish is not None:
            message.finish = outcome_to_wire(waiting.finish)
        waiting.position += len(waiting.tokens)
        waiting.tokens, waiting.text, waiting.finish = [], [], None
        return message

    def _take_scores(self) -> list[inference_pb2.GenerateResponse]:
        messages = []
        for start in range(0, len(self._scores), MAX_SCORES_PER_MESSAGE):
            part = self._scores[start : start + MAX_SCORES_PER_MESSAGE]
            message = inference_pb2.GenerateResponse(request_id=self._request_id)
            message.prompt_logprobs.position = self._score_position
            message.prompt_logprobs.token_ids.extend(token.token_id for token in part)
            _fill_logprobs(message.prompt_logprobs.logprobs, part)
            self._score_position += len(part)
            messages.append(message)
        self._scores = []
        return messages


def _fill_logprobs(target: Any, tokens: Sequence[TokenInfo]) -> None:
    """One entry a token."""
    for token in tokens:
        entry = target.add(logprob=token.logprob or 0.0)
        for token_id, logprob in token.top:
            entry.top.add(token_id=token_id, logprob=logprob)
