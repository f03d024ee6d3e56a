"""The coordinator's process is killed in the midst of answers and started again: they go on as if nothing had been."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.v1 import admin_pb2, admin_pb2_grpc
from cluster.core.ids import FrontId, Outcome, Role
from cluster.core.limits import NS_PER_S
from cluster.front.client_output import ClientOutput
from cluster.front.output_text import TextPiece
from cluster.front.request_spec import RequestLimits, RequestSpec
from cluster.front.sessions import Sessions
from cluster.live.replay import find_files, replay_file
from cluster.wire.channels import make_channel
from engine.core.request import RequestBody
from tests.support.engine_model import engine_alone, write_tiny_model
from tests.support.plain_cluster import ROOT, WorkerProcess, greedy

CONTEXT = 1024
MAX_TOKENS = 120
TIMEOUT_S = 90.0
NUM_REQUESTS = 3
LIMITS = RequestLimits(stream_lost_ns=120 * NS_PER_S, coordinator_lost_ns=120 * NS_PER_S)
CLUSTER_FILE = """
version: 1
name: restart
model: {{path: {model}, dtype: float32}}
pools:
  - {{name: prefill, role: prefill, kv_blocks: 200}}
  - {{name: decode, role: decode, kv_blocks: 200}}
disaggregation: {{local_prefill: never, stay: never}}
"""


@dataclass(slots=True)
class Tokens:
    """Stands in the place of a text: keeps the ids themselves."""

    ids: list[int] = field(default_factory=list)

    def push(self, token_ids: list[int]) -> TextPiece:
        self.ids += token_ids
        return TextPiece(text="", num_tokens=len(token_ids), is_stopped=False)

    def finish(self) -> TextPiece:
        return TextPiece(text="", num_tokens=0, is_stopped=False)


class Cluster:
    """A coordinator's process, one worker of each role, and a front of this process."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self.file = folder / "cluster.yaml"
        self.file.write_text(CLUSTER_FILE.format(model=model))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.workers: dict[Role, WorkerProcess] = {}
        self.sessions = Sessions(FrontId("front", 1), self.address, LIMITS)
        self.coordinator: asyncio.subprocess.Process

    async def start_coordinator(self, epoch: int, *arguments: str) -> None:
        with (self.folder / f"coordinator-{epoch}.log").open("wb") as log:
            self.coordinator = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "cluster.live.coordinator", "-f", str(self.file)),
                *("--port", str(self.port), "--epoch", str(epoch), *arguments),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
                cwd=ROOT,
            )
        assert self.coordinator.stdout is not None
        assert (await self.coordinator.stdout.readline()).startswith(b"ready "), log.name

    async def start_worker(self, role: Role) -> None:
        arguments = ("--kv-blocks", "200", "--prefill-chunk-tokens", "64")
        worker = await WorkerProcess.start(role, role.value, self.address, self.model, self.folder, *arguments)
        self.workers[role] = worker
        await worker.ready()

    def open(self, request_id: str, body: RequestBody) -> tuple[ClientOutput, Tokens]:
        tokens = Tokens()
        make_text: Any = lambda: tokens  # noqa: E731 (of another class than a text)
        return self.sessions.open(RequestSpec(request_id=request_id, body=body), make_text), tokens

    async def status(self) -> admin_pb2.GetStatusResponse:
        async with make_channel(self.address) as channel:
            return await admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest())


@contextlib.asynccontextmanager
async def running(model: Path, folder: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(model, folder)
    link = asyncio.create_task(cluster.sessions.link.run())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await cluster.start_coordinator(1)
            await asyncio.gather(*(cluster.start_worker(role) for role in Role))
            await cluster.sessions.link.welcomed.wait()
        yield cluster
    finally:
        link.cancel()
        await asyncio.gather(link, return_exceptions=True)
        await cluster.sessions.streams.close()
        for process in (cluster.coordinator, *(worker.process for worker in cluster.workers.values())):
            if process.returncode is None:
                process.kill()
                await process.wait()


def test_answers_go_on_when_the_coordinator_is_killed_and_started_again(tmp_path: Path) -> None:
    """In the midst of them decode is stopped for as long as there is no coordinator, so that they outlast it. All go
    on with the attempt they had, and no token is lost or changed."""
    model = tmp_path / "model"
    write_tiny_model(model, max_position_embeddings=CONTEXT)
    bodies = [
        greedy([3 + (7 * index + salt) % 90 for index in range(40 + 9 * salt)], MAX_TOKENS)
        for salt in range(NUM_REQUESTS)
    ]

    async def scenario() -> None:
        async with running(model, tmp_path) as cluster, asyncio.timeout(TIMEOUT_S):
            answers = [cluster.open(f"r{index}", body) for index, body in enumerate(bodies)]
            while any(len(tokens.ids) < 3 for _, tokens in answers):
                await asyncio.sleep(0)
            decode = cluster.workers[Role.DECODE].process
            decode.send_signal(signal.SIGSTOP)
            cluster.coordinator.send_signal(signal.SIGKILL)
            await cluster.coordinator.wait()
            await cluster.sessions.link.lost.wait()
            assert any(output.end is None for output, _ in answers)
            late = cluster.open("late", bodies[0])
            await cluster.start_coordinator(2)
            decode.send_signal(signal.SIGCONT)
            for output, _ in (*answers, late):
                while output.end is None:
                    await asyncio.sleep(0.01)
            draw = engine_alone(model)
            for body, (output, tokens) in zip((*bodies, bodies[0]), (*answers, late), strict=True):
                assert output.end is not None and output.end.outcome is Outcome.LENGTH, output.end
                assert tokens.ids == draw(body)
                assert output.end.report.num_attempts == 1
            while (status := await cluster.status()).num_running or status.num_queued:
                await asyncio.sleep(0.05)
            assert status.epoch == 2

    asyncio.run(scenario())


def test_two_lives_that_are_given_one_epoch_keep_both_their_journals(tmp_path: Path) -> None:
    """As where both begin in the same second, the first of which is killed at once."""
    model, journal = tmp_path / "model", tmp_path / "journal"
    write_tiny_model(model, max_position_embeddings=CONTEXT)

    async def scenario() -> None:
        cluster = Cluster(model, tmp_path)
        for _ in range(2):
            await cluster.start_coordinator(5, "--journal", str(journal))
            cluster.coordinator.kill()
            await cluster.coordinator.wait()

    asyncio.run(scenario())
    assert [replay_file(path).header.epoch for path in find_files(journal)] == [5, 6]
