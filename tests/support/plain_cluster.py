"""A coordinator in this process, workers as plain processes, and a front that a test plays. No Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from baton.v1 import admin_pb2, admin_pb2_grpc, control_pb2_grpc, tokens_pb2_grpc
from cluster.core.config import ClusterConfig, CoordinatorConfig, ModelConfig, PoolConfig
from cluster.core.disaggregation import ALWAYS_PUSHED, DisaggregationConfig
from cluster.core.ids import AttemptId, FrontId, Outcome, Role
from cluster.core.messages import (
    AttemptFailed,
    CancelRequest,
    EndRequest,
    FrontHello,
    FrontMessage,
    LegTimeline,
    Placed,
    Refused,
    RequestDone,
    Resubmit,
    Submit,
    WorkerRef,
)
from cluster.core.token_messages import Forget, StreamHello, TokenRun, Watch
from cluster.live.coordinator import CoordinatorSettings, run_coordinator
from cluster.wire.channels import LOOPBACK, make_channel
from cluster.wire.codec import (
    decode_batch,
    decode_to_front,
    encode_body,
    encode_front,
    encode_token_request,
)
from engine.core.request import RequestBody
from engine.core.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
RELEASE_TIMEOUT_S = 60.0
MARGIN_MS = 50
FRONT = FrontId("test-front", 1)


class WorkerProcess:
    """`python -m prefill_worker|decode_worker`, with its standard error in a file."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @classmethod
    async def start(
        cls,
        role: Role,
        name: str,
        coordinator: str,
        model: Path,
        folder: Path,
        *arguments: str,
        within: tuple[str, ...] = (),
        module: tuple[str, ...] = (),
    ) -> WorkerProcess:
        """`within`: a command that runs the one behind it in surroundings of its own. `module`: another one to run."""
        log = folder / f"{name}-{time.monotonic_ns()}.log"
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "OMP_NUM_THREADS": "1"}
        command = (
            *within,
            sys.executable,
            "-m",
            *(module or (f"{role.value}_worker",)),
            "--coordinator",
            coordinator,
            "--model",
            str(model),
        )
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *command,
                *("--name", name, "--with-parent", *arguments),
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env=environment,
                cwd=ROOT,
            )
        return cls(name, process, log)

    async def ready(self) -> str:
        """Waits until it is registered; returns its token address."""
        assert self.process.stdout is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            line = (await self.process.stdout.readline()).decode()
        assert line.startswith("ready "), f"{self.name} did not start:\n{self.log.read_text()}"
        return line.split()[1]

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(STOP_TIMEOUT_S):
            return await self.process.wait()


@dataclass(slots=True)
class Answer:
    """What the front got of one request. `times_s` are when each token came."""

    body: RequestBody
    submitted_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    outcome: Outcome | None = None
    reason: str = ""
    attempt: int = 0
    workers: list[WorkerRef] = field(default_factory=list)
    timelines: dict[str, LegTimeline] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class TestFront:
    """Follows the flow of a request as a front does, without text and HTTP."""

    __test__ = False

    def __init__(self, coordinator: str) -> None:
        self._coordinator = coordinator
        self._channels: list[grpc.aio.Channel] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._workers: dict[str, asyncio.Queue[object]] = {}
        self._outgoing: asyncio.Queue[tuple[FrontMessage, RequestBody | None]] = asyncio.Queue()
        self.answers: dict[str, Answer] = {}

    async def start(self) -> None:
        channel = make_channel(self._coordinator)
        self._channels.append(channel)
        self._outgoing.put_nowait((FrontHello(front=FRONT, address="127.0.0.1:1"), None))

        async def messages() -> AsyncIterator[object]:
            while True:
                message, body = await self._outgoing.get()
                yield encode_front(message, None if body is None else encode_body(body))

        call = control_pb2_grpc.CoordinatorStub(channel).ConnectFront(messages())  # type: ignore[arg-type]

        async def read() -> None:
            async for envelope in call:
                self._on_message(decode_to_front(envelope))

        self._tasks.append(asyncio.create_task(read()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for channel in self._channels:
            await channel.close(None)

    def submit(self, request_id: str, body: RequestBody, block_hashes: bytes = b"") -> Answer:
        answer = Answer(body=body, submitted_s=time.monotonic())
        self.answers[request_id] = answer
        submit = Submit(
            request_id=request_id,
            num_prompt_tokens=len(body.prompt_ids),
            max_tokens=body.sampling.max_tokens,
            block_hashes=block_hashes,
        )
        self._outgoing.put_nowait((submit, body))
        return answer

    def cancel(self, request_id: str) -> None:
        cancel = CancelRequest(request_id=request_id, outcome=Outcome.CANCELLED, reason="test")
        self._outgoing.put_nowait((cancel, None))

    def _on_message(self, message: object) -> None:
        match message:
            case Placed(attempt=attempt, prefill=prefill, decode=decode):
                answer = self.answers[attempt.request_id]
                answer.attempt = attempt.attempt
                answer.workers = [ref for ref in (prefill, decode) if ref is not None]
                for ref in answer.workers:
                    watch = Watch(attempt=attempt, choice=0, next_position=len(answer.tokens))
                    self._to_worker(ref, watch)
            case AttemptFailed(attempt=attempt):
                answer = self.answers[attempt.request_id]
                answer.attempt = attempt.attempt + 1
                body = RequestBody(
                    prompt_ids=answer.body.prompt_ids,
                    sampling=answer.body.sampling,
                    delivered_ids=tuple(answer.tokens),
                )
                again = Resubmit(
                    request_id=attempt.request_id, failed_attempt=attempt.attempt, num_delivered=len(answer.tokens)
                )
                self._outgoing.put_nowait((again, body))
            case Refused(request_id=request_id, outcome=outcome, reason=reason):
                self._end(request_id, outcome, reason)
            case EndRequest(request_id=request_id, outcome=outcome, reason=reason):
                self._end(request_id, outcome, reason)
            case _:
                pass

    def _end(self, request_id: str, outcome: Outcome, reason: str = "") -> None:
        answer = self.answers[request_id]
        if answer.done.is_set():
            return  # messages cross: the first end counts
        answer.outcome = outcome
        answer.reason = reason
        answer.done.set()

    def _to_worker(self, ref: WorkerRef, request: Watch | Forget) -> None:
        if ref.token_address not in self._workers:
            queue: asyncio.Queue[object] = asyncio.Queue()
            self._workers[ref.token_address] = queue
            queue.put_nowait(StreamHello(front=FRONT))
            self._tasks.append(asyncio.create_task(self._read_tokens(ref.token_address, queue)))
        self._workers[ref.token_address].put_nowait(request)

    async def _read_tokens(self, address: str, queue: asyncio.Queue[object]) -> None:
        channel = make_channel(address)
        self._channels.append(channel)

        async def messages() -> AsyncIterator[object]:
            while True:
                yield encode_token_request(await queue.get())  # type: ignore[arg-type]

        call = tokens_pb2_grpc.TokensStub(channel).Stream(messages())  # type: ignore[arg-type]
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for envelope in call:
                batch = decode_batch(envelope)
                for run in batch.runs:
                    self._on_run(batch.worker.name, run)

    def _on_run(self, worker: str, run: TokenRun) -> None:
        answer = self.answers[run.attempt.request_id]
        if run.attempt.attempt != answer.attempt or answer.outcome is not None:
            return
        for position, token in enumerate(run.tokens, start=run.position):
            assert position <= len(answer.tokens), f"{run.attempt}: position {position} after {len(answer.tokens)}"
            if position == len(answer.tokens):
                answer.tokens.append(token.token_id)
                answer.times_s.append(time.monotonic())
        if run.timeline is not None:
            answer.timelines[worker] = run.timeline
        if run.finish is not None:
            self._end(run.attempt.request_id, run.finish)
            done = RequestDone(
                request_id=run.attempt.request_id, outcome=run.finish, num_output_tokens=len(answer.tokens)
            )
            self._outgoing.put_nowait((done, None))
            for ref in answer.workers:
                self._to_worker(ref, Forget(attempt=AttemptId(run.attempt.request_id, run.attempt.attempt)))


class PlainCluster:
    """Use as an async context manager; everything started in it is ended with it. `host`: where the coordinator is."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        host: str = LOOPBACK,
        disaggregation: DisaggregationConfig = ALWAYS_PUSHED,
        decode_max_running: int = 64,
        **coordinator: float,
    ) -> None:
        self._host = host
        self.model = model
        self.folder = folder
        self.workers: list[WorkerProcess] = []
        self.address = ""
        self.front: TestFront
        self._config = ClusterConfig(
            name="test",
            model=ModelConfig(path=str(model)),
            pools=(
                PoolConfig(name="prefill", role=Role.PREFILL),
                PoolConfig(name="decode", role=Role.DECODE, max_running=decode_max_running),
            ),
            coordinator=CoordinatorConfig(**coordinator),  # type: ignore[arg-type]
            disaggregation=disaggregation,
        )
        self._stop = asyncio.Event()
        self._coordinator: asyncio.Task[None] | None = None

    async def __aenter__(self) -> PlainCluster:
        await self.start_coordinator(epoch=1)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.front.close()
        for worker in self.workers:
            if worker.process.returncode is None:
                await worker.stop(signal.SIGKILL)
        await self.stop_coordinator()

    async def start_coordinator(self, epoch: int) -> None:
        """With a new front. A later one takes the place of one that was stopped, at the same address."""
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        port = int(self.address.rpartition(":")[2] or 0)
        settings = CoordinatorSettings(config=self._config, epoch=epoch, host=self._host, port=port)
        self._stop.clear()
        self._coordinator = asyncio.create_task(run_coordinator(settings, ready.set_result, self._stop))
        self.address = await ready
        self.front = TestFront(self.address)
        await self.front.start()

    async def stop_coordinator(self) -> None:
        self._stop.set()
        if self._coordinator is not None:
            await self._coordinator

    async def start_worker(
        self, role: Role, name: str, *arguments: str, within: tuple[str, ...] = (), module: tuple[str, ...] = ()
    ) -> WorkerProcess:
        worker = await WorkerProcess.start(
            role, name, self.address, self.model, self.folder, *arguments, within=within, module=module
        )
        self.workers.append(worker)
        return worker

    async def answer(self, request_id: str, body: RequestBody, timeout_s: float = 60.0) -> Answer:
        answer = self.front.submit(request_id, body)
        async with asyncio.timeout(timeout_s):
            await answer.done.wait()
        return answer


def greedy(prompt: list[int], max_tokens: int) -> RequestBody:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return RequestBody(prompt_ids=tuple(prompt), sampling=sampling)


def prompt(num_tokens: int, salt: int = 0) -> list[int]:
    return [3 + (7 * index + salt) % 90 for index in range(num_tokens)]


async def nothing_held(cluster: PlainCluster) -> None:
    """Waits until heartbeats sent from now on show that no worker holds a block, a lease or a request."""
    began_s = time.monotonic()
    async with make_channel(cluster.address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        while True:
            status = await admin.GetStatus(admin_pb2.GetStatusRequest())
            leases = await admin.GetLeases(admin_pb2.GetLeasesRequest())
            elapsed_ms = (time.monotonic() - began_s) * 1e3
            workers = [worker for pool in status.pools for worker in pool.workers if worker.state != "down"]
            are_fresh = all(worker.heartbeat_age_ms < elapsed_ms - MARGIN_MS for worker in workers)
            if workers and are_fresh and not any(num_held(worker) for worker in workers) and not leases.leases:
                return
            assert elapsed_ms < RELEASE_TIMEOUT_S * 1e3, f"still held: {status} {leases}"
            await asyncio.sleep(0.05)


def num_held(worker: admin_pb2.WorkerStatus) -> int:
    blocks = worker.blocks
    return blocks.active + blocks.reserved + blocks.quarantined + worker.num_running + worker.num_waiting
