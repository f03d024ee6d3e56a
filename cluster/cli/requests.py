"""Requests to a cluster from the command line: over a blocking channel, with errors made into CommandError."""

from __future__ import annotations

import contextlib
import math
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from baton.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from cluster.cli.address import Target
from cluster.cli.errors import FAILED, NOT_FOUND, CommandError
from cluster.cli.failures import Failure, describe_failure
from cluster.core.ids import Outcome
from cluster.live.reachability import split_address
from cluster.wire.channels import make_sync_channel
from cluster.wire.codec import outcome_from_wire

CONNECT_TIMEOUT_S: Final = 5.0
ADMIN_TIMEOUT_S: Final = 10.0
LAST_MESSAGE_S: Final = 3.0
"""So long after a request's timeout its last message may come; then the front has not kept to it."""
TIMELINE_PARTS: Final = ("queued", "reserved", "prefill", "push", "first_token", "decode")


@dataclass(slots=True, kw_only=True)
class Choice:
    """One of the answers that a request has. `logprobs` is one object a token, where they were asked for."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    outcome: Outcome | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "outcome": None if self.outcome is None else self.outcome.value,
            **({"logprobs": self.logprobs} if self.logprobs else {}),
        }


@dataclass(slots=True, kw_only=True)
class Answer:
    """What has come of a request so far; complete once `done` is there."""

    request_id: str = ""
    choices: dict[int, Choice] = field(default_factory=lambda: {0: Choice()})
    prompt_logprobs: list[dict[str, Any]] = field(default_factory=list)
    done: inference_pb2.Done | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    def add(self, reply: inference_pb2.GenerateResponse) -> None:
        self.request_id = reply.request_id or self.request_id
        choice = self.choices.setdefault(reply.choice, Choice())
        choice.text += reply.text
        choice.token_ids.extend(reply.token_ids)
        choice.logprobs += _logprobs(reply.token_ids, reply.logprobs)
        if reply.finish:
            choice.outcome = outcome_from_wire(reply.finish)
        self.prompt_logprobs += _logprobs(reply.prompt_logprobs.token_ids, reply.prompt_logprobs.logprobs)
        if reply.HasField("done"):
            self.done = reply.done

    def as_json(self, outcome: Outcome | None) -> dict[str, Any]:
        """The object that `baton generate --json` prints; what is not known is null or empty.

        `text`, `token_ids` and `logprobs` are the first answer's; where there are several, `choices` has all of them.
        """
        done = self.done or inference_pb2.Done()
        timeline = {name: _if_set(done.timeline, f"{name}_ms") for name in TIMELINE_PARTS}
        choices = [self.choices[number] for number in sorted(self.choices)]
        num_tokens = sum(len(choice.token_ids) for choice in choices)
        return {
            "request_id": self.request_id,
            **choices[0].as_json(),
            "outcome": None if outcome is None else outcome.value,
            **({"choices": [choice.as_json() for choice in choices]} if len(choices) > 1 else {}),
            **({"prompt_logprobs": self.prompt_logprobs} if self.prompt_logprobs else {}),
            "seed": done.seed if self.done else None,
            "num_attempts": done.num_attempts if self.done else None,
            "usage": {
                "prompt_tokens": done.usage.prompt_tokens or None,
                "cached_tokens": _if_set(done.usage, "cached_tokens"),
                "completion_tokens": done.usage.completion_tokens or num_tokens,
            },
            "route": {"taken": done.route or None, "reason": done.route_reason or None},
            "workers": {"prefill": done.prefill_worker or None, "decode": done.decode_worker or None},
            "kv": {"bytes": _if_set(done.kv, "bytes"), "transport": done.kv.transport or None},
            "timeline_ms": {name: None if value is None else round(value, 3) for name, value in timeline.items()},
        }


def _if_set(message: Message, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _logprobs(token_ids: Iterable[int], entries: Iterable[inference_pb2.TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        {
            "token_id": token_id,
            "logprob": entry.logprob,
            "top": [{"token_id": top.token_id, "logprob": top.logprob} for top in entry.top],
        }
        for token_id, entry in zip(token_ids, entries, strict=False)
    ]


class RequestFailed(CommandError):
    """The call ended without an answer, or in the middle of one: `answer` is what there is of it."""

    def __init__(self, failure: Failure, answer: Answer) -> None:
        self.answer = answer
        self._outcome = failure.outcome
        self._reason = failure.message
        was_taken = failure.outcome not in (None, Outcome.REJECTED_INVALID)
        super().__init__(
            f"{failure.message} (request {answer.request_id})" if was_taken else failure.message, failure.exit_code
        )

    def as_json(self) -> dict[str, Any]:
        """As of an answer, and with the error."""
        return self.answer.as_json(self._outcome) | {"error": self._reason}


class Client:
    """One connection to a front; use it as a context manager."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._channel = make_sync_channel(target.address)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def connect(self) -> None:
        """Raises CommandError where nothing answers at the address within the time limit.

        Asked with a plain socket: gRPC's own way takes a fifth of a second, and says less.
        """
        target = self._target
        try:
            socket.create_connection(split_address(target.address), timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            message = f"no cluster answers at {target.address}: {error.strerror or str(error)}"
            if target.cluster is not None:
                name = target.cluster
                message += (
                    f"; a front that died is started again within seconds, so try again; if cluster {name} has "
                    f"crashed, `baton down {name}` clears it away"
                )
            raise CommandError(message, NOT_FOUND) from error

    def generate(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float | None,
        on_reply: Callable[[inference_pb2.GenerateResponse], None],
    ) -> Answer:
        """Runs the request; `on_reply` gets each message as it arrives.

        The front ends the request after `timeout_s` and says what is known of it, which the call leaves time for.

        Raises RequestFailed, and KeyboardInterrupt after having cancelled the request.
        """
        if not request.request_id:
            request.request_id = uuid.uuid4().hex  # known from the start, whatever comes of it
        answer = Answer(request_id=request.request_id)
        if timeout_s is not None:
            request.timeout_ms = math.ceil(timeout_s * 1e3)
        deadline_s = None if timeout_s is None else timeout_s + LAST_MESSAGE_S
        call: Any = self._inference.Generate(request, timeout=deadline_s)
        try:
            for reply in call:
                answer.add(reply)
                on_reply(reply)
        except grpc.RpcError as error:
            raise RequestFailed(describe_failure(error, self._target.address), answer) from error
        finally:
            call.cancel()
        if answer.done is None:
            message = "the answer ended without its last message"
            raise RequestFailed(Failure(message=message, exit_code=FAILED, outcome=None), answer)
        return answer

    def status(self) -> admin_pb2.GetStatusResponse:
        with self._admin_errors():
            return self._admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=ADMIN_TIMEOUT_S)

    def leases(self) -> admin_pb2.GetLeasesResponse:
        with self._admin_errors():
            return self._admin.GetLeases(admin_pb2.GetLeasesRequest(), timeout=ADMIN_TIMEOUT_S)

    def drain(self, request: admin_pb2.DrainRequest) -> admin_pb2.DrainResponse:
        with self._admin_errors():
            return self._admin.Drain(request, timeout=ADMIN_TIMEOUT_S)

    def flip(self, request: admin_pb2.FlipRequest) -> admin_pb2.FlipResponse:
        with self._admin_errors():
            return self._admin.Flip(request, timeout=ADMIN_TIMEOUT_S)

    @contextlib.contextmanager
    def _admin_errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            failure = describe_failure(error, self._target.address)
            raise CommandError(failure.message, failure.exit_code) from error
