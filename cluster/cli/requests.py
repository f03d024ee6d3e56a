"""Requests to a cluster from the command line: over a blocking channel, with errors made into CommandError."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from baton.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from cluster.cli.errors import FAILED, INVALID, NOT_FOUND, TRY_LATER, CommandError
from cluster.live.reachability import split_address
from cluster.wire.channels import RETRY_AFTER_TRAILER, make_sync_channel
from cluster.wire.codec import outcome_from_wire

CONNECT_TIMEOUT_S: Final = 5.0
ADMIN_TIMEOUT_S: Final = 10.0

_EXIT_CODES: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: INVALID,
    grpc.StatusCode.ALREADY_EXISTS: INVALID,
    grpc.StatusCode.NOT_FOUND: NOT_FOUND,
    grpc.StatusCode.UNAVAILABLE: NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED: NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED: TRY_LATER,
    grpc.StatusCode.DEADLINE_EXCEEDED: TRY_LATER,
}
_OUTCOMES: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: "rejected_invalid",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "rejected_overload",
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline_exceeded",
    grpc.StatusCode.CANCELLED: "cancelled",
    grpc.StatusCode.ABORTED: "worker_lost",
    grpc.StatusCode.INTERNAL: "internal",
}


@dataclass(slots=True, kw_only=True)
class Answer:
    """What has come of an answer so far; complete once `done` is there."""

    request_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    done: inference_pb2.Done | None = None

    def add(self, reply: inference_pb2.GenerateResponse) -> None:
        self.request_id = reply.request_id or self.request_id
        self.text += reply.text
        self.token_ids.extend(reply.token_ids)
        if reply.HasField("done"):
            self.done = reply.done

    def as_json(self) -> dict[str, Any]:
        """The object that `baton generate --json` prints. Only for a complete answer."""
        assert self.done is not None
        done = self.done
        timeline = {name: getattr(done.timeline, f"{name}_ms") for name in TIMELINE_PARTS}
        return {
            "request_id": self.request_id,
            "text": self.text,
            "token_ids": self.token_ids,
            "outcome": outcome_from_wire(done.outcome).value,
            "usage": {
                "prompt_tokens": done.usage.prompt_tokens,
                "cached_tokens": done.usage.cached_tokens,
                "completion_tokens": done.usage.completion_tokens,
            },
            "workers": {"prefill": done.prefill_worker or None, "decode": done.decode_worker or None},
            "kv": {"bytes": done.kv.bytes, "transport": done.kv.transport or None},
            "timeline_ms": {
                name: round(value, 3) if done.timeline.HasField(f"{name}_ms") else None  # type: ignore[arg-type]
                for name, value in timeline.items()
            },
        }


TIMELINE_PARTS: Final = ("queued", "reserved", "prefill", "push", "first_token", "decode")


class Client:
    """One connection to a front; use it as a context manager."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = make_sync_channel(address)
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
        try:
            socket.create_connection(split_address(self._address), timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            reason = error.strerror or str(error)
            raise CommandError(f"no cluster answers at {self._address}: {reason}", NOT_FOUND) from error

    def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None, on_text: Callable[[str], None]
    ) -> Answer:
        """Runs the request; `on_text` gets each piece of text as it arrives.

        Raises RequestFailed, and KeyboardInterrupt after having cancelled the request.
        """
        answer = Answer()
        call: Any = self._inference.Generate(request, timeout=timeout_s)
        try:
            for reply in call:
                answer.add(reply)
                if reply.text:
                    on_text(reply.text)
        except grpc.RpcError as error:
            raise RequestFailed(error, answer) from error
        finally:
            call.cancel()
        if answer.done is None:
            raise CommandError("the answer ended without its last message", FAILED)
        return answer

    def status(self) -> admin_pb2.GetStatusResponse:
        with self._admin_errors():
            return self._admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=ADMIN_TIMEOUT_S)

    def leases(self) -> admin_pb2.GetLeasesResponse:
        with self._admin_errors():
            return self._admin.GetLeases(admin_pb2.GetLeasesRequest(), timeout=ADMIN_TIMEOUT_S)

    @contextlib.contextmanager
    def _admin_errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise CommandError(*_described(error)) from error


class RequestFailed(CommandError):
    """The call ended with an error status. `outcome` is None where the request never became one."""

    def __init__(self, error: grpc.RpcError, answer: Answer) -> None:
        self.answer = answer
        self.outcome = _OUTCOMES.get(error.code())
        super().__init__(*_described(error))


def _described(error: grpc.RpcError) -> tuple[str, int]:
    """A line for the user, and the exit code."""
    code: grpc.StatusCode = error.code()
    details = " ".join((error.details() or "no details").split())
    message = f"{code.name.lower().replace('_', ' ')}: {details}"
    trailers: Any = error.trailing_metadata() or ()
    for key, value in trailers:
        if key == RETRY_AFTER_TRAILER:
            message += f" (try again in {value} ms)"
    return message, _EXIT_CODES.get(code, FAILED)
