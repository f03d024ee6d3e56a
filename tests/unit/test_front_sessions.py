"""Sessions: which of a front's requests hears what."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cluster.core.errors import DuplicateRequestError
from cluster.core.ids import AttemptId, FrontId, Outcome, WorkerId
from cluster.core.messages import CancelRequest, EndRequest, Placed, Refused, Submit, WorkerRef
from cluster.core.token_messages import TokenBatch, TokenInfo, TokenRun
from cluster.front.client_output import ClientOutput
from cluster.front.request_spec import RequestLimits, RequestSpec
from cluster.front.sessions import Sessions
from engine.core.request import RequestBody
from engine.core.sampling import SamplingParams

DECODE = WorkerRef(worker=WorkerId("d", 1), token_address="d:1")


class Link:
    """A coordinator that is there and keeps what it is told."""

    is_up = True
    epoch = 1

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any, body: RequestBody | None = None) -> None:
        self.sent.append(message)


class Streams:
    def watch(self, ref: WorkerRef, watch: object) -> None:
        return None

    def forget(self, worker: WorkerId, attempt: AttemptId, choice: int | None) -> None:
        return None


class Text:
    """One character a token."""

    def push(self, token_ids: list[int]) -> Any:
        return Piece("x" * len(token_ids), len(token_ids))

    def finish(self) -> Any:
        return Piece("", 0)


class Piece:
    is_stopped = False

    def __init__(self, text: str, num_tokens: int) -> None:
        self.text, self.num_tokens = text, num_tokens


class Front:
    def __init__(self) -> None:
        self.link = Link()
        self.sessions = Sessions(FrontId("f", 1), "coordinator:1", RequestLimits())
        self.sessions.link = self.link  # type: ignore[assignment]
        self.sessions.streams = Streams()  # type: ignore[assignment]

    def open(self, request_id: str = "r", first_id: int = 1) -> ClientOutput:
        body = RequestBody(prompt_ids=(first_id, 2), sampling=SamplingParams(max_tokens=4))
        return self.sessions.open(RequestSpec(request_id=request_id, body=body), Text)  # type: ignore[arg-type]

    def submitted(self) -> list[str]:
        return [message.request_id for message in self.link.sent if isinstance(message, Submit)]


def run(scenario: Callable[[Front], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(Front())

    asyncio.run(main())


def placed(request_id: str, attempt: int = 1) -> Placed:
    attempt_id = AttemptId(request_id, attempt)
    return Placed(epoch=1, attempt=attempt_id, prefill=None, decode=DECODE, queued_ms=0.0, reserved_ms=0.0)


def test_what_was_meant_for_an_earlier_request_of_the_id_does_not_reach_its_next() -> None:
    """The client left and asked again at once; the coordinator had not heard of it when it sent these."""

    async def scenario(front: Front) -> None:
        front.open()
        assert front.sessions.cancel("r", "the client left")
        again = front.open(first_id=9)
        front.sessions.coordinator_said(placed("r"))
        tokens = (TokenInfo(token_id=5),)
        run = TokenRun(attempt=AttemptId("r", 1), choice=0, position=0, tokens=tokens, finish=Outcome.STOP)
        front.sessions.tokens_came(TokenBatch(worker=DECODE.worker, runs=(run,)))
        outcome = Outcome.DEADLINE_EXCEEDED
        front.sessions.coordinator_said(EndRequest(epoch=1, request_id="r", outcome=outcome, reason="late"))
        front.sessions.coordinator_said(
            Refused(request_id="r", outcome=Outcome.REJECTED_OVERLOAD, reason="late", retry_after_ms=1)
        )
        assert again.end is None and again.take() == []

    run(scenario)


def test_an_id_that_is_used_again_is_another_request_to_the_cluster_alone() -> None:
    async def scenario(front: Front) -> None:
        front.open()
        front.sessions.cancel("r", "the client left")
        again = front.open()
        first, second = front.submitted()
        assert first == "r" and second != "r" and second.startswith("r")
        assert "r" in front.sessions and len(front.sessions) == 1
        with pytest.raises(DuplicateRequestError):
            front.open()
        front.sessions.coordinator_said(placed(second))
        run = TokenRun(attempt=AttemptId(second, 1), choice=0, position=0, tokens=(TokenInfo(token_id=5),))
        front.sessions.tokens_came(TokenBatch(worker=DECODE.worker, runs=(run,)))
        (message,) = again.take()
        assert message.request_id == "r" and list(message.token_ids) == [5]
        assert front.sessions.cancel("r", "the client left")
        assert isinstance(front.link.sent[-1], CancelRequest) and front.link.sent[-1].request_id == second
        assert again.end is not None and "r" not in front.sessions and len(front.sessions) == 0

    run(scenario)
