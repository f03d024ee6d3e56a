"""A front that a test plays, and a way to run `baton` in this process against it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from typer.testing import CliRunner

from baton.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from cluster.cli.main import app

Script = Callable[[inference_pb2.GenerateRequest, grpc.ServicerContext], Iterator[inference_pb2.GenerateResponse]]


@dataclass
class ScriptedFront(inference_pb2_grpc.InferenceServicer, admin_pb2_grpc.AdminServicer):
    """Answers as it is told and remembers what it was asked."""

    script: Script
    status: admin_pb2.GetStatusResponse = field(default_factory=admin_pb2.GetStatusResponse)
    leases: admin_pb2.GetLeasesResponse = field(default_factory=admin_pb2.GetLeasesResponse)
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    next_statuses: list[admin_pb2.GetStatusResponse] = field(default_factory=list)
    """Answered one after the other, before `status`."""
    orders: list[admin_pb2.DrainRequest | admin_pb2.FlipRequest] = field(default_factory=list)
    refusal: tuple[grpc.StatusCode, str] | None = None

    def Generate(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        yield from self.script(request, context)

    def GetStatus(self, request: Any, context: Any) -> Any:
        return self.next_statuses.pop(0) if self.next_statuses else self.status

    def Drain(self, request: Any, context: Any) -> Any:
        return self._ordered(request, context, admin_pb2.DrainResponse(incarnation=1))

    def Flip(self, request: Any, context: Any) -> Any:
        return self._ordered(request, context, admin_pb2.FlipResponse(incarnation=1, pool="d"))

    def _ordered(self, request: Any, context: Any, response: Any) -> Any:
        self.orders.append(request)
        if self.refusal is not None:
            context.abort(*self.refusal)
        return response

    def GetLeases(self, request: Any, context: Any) -> Any:
        return self.leases


@contextlib.contextmanager
def serving(front: ScriptedFront) -> Iterator[str]:
    """The address at which the front answers."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    inference_pb2_grpc.add_InferenceServicer_to_server(front, server)
    admin_pb2_grpc.add_AdminServicer_to_server(front, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@dataclass(frozen=True)
class Said:
    exit_code: int
    stdout: str
    stderr: str


def baton(*arguments: str, home: Path, stdin: bytes = b"", **variables: str) -> Said:
    """Runs the command line; `home` takes the place of the user's cache."""
    environment = {"XDG_CACHE_HOME": str(home), "BATON_ADDRESS": "", "RAY_ADDRESS": "", **variables}
    result = CliRunner().invoke(app, list(arguments), input=stdin, env=environment, prog_name="baton")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Said(result.exit_code, result.stdout, result.stderr)


def answer(
    request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
) -> Iterator[inference_pb2.GenerateResponse]:
    """`Hello world` in three tokens, with all there is to say at the end."""
    yield inference_pb2.GenerateResponse(request_id="r1", position=0, token_ids=[11], text="Hello")
    yield inference_pb2.GenerateResponse(request_id="r1", position=1, token_ids=[12, 13], text=" world")
    done = inference_pb2.Done(
        outcome=inference_pb2.OUTCOME_STOP,
        usage=inference_pb2.Usage(prompt_tokens=20, cached_tokens=16, completion_tokens=3),
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        kv=inference_pb2.KvUsage(bytes=3 * 2**20, early_bytes=2**20, transport="shm"),
        timeline=inference_pb2.Timeline(
            queued_ms=0.5, reserved_ms=1.5, prefill_ms=30.0, push_ms=2.0, first_token_ms=40.0, decode_ms=100.0
        ),
        seed=7,
        num_attempts=1,
    )
    yield inference_pb2.GenerateResponse(request_id="r1", position=3, done=done)
