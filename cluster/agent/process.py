"""The shell around WorkerState: one event loop, a thread for the engine, one for verifying, and the clock.

Everything that can be decided is decided in WorkerState; here its effects are carried out and what comes of them is
posted back. All of it happens on the loop's thread, so there are no locks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from baton.v1 import tokens_pb2_grpc
from cluster.agent import effects as fx
from cluster.agent import events as ev
from cluster.agent.assembly import Engine, load_engine, state_config
from cluster.agent.control_client import ControlClient
from cluster.agent.job_thread import JobThread
from cluster.agent.limits import WorkerStateConfig
from cluster.agent.metrics import WorkerMetrics
from cluster.agent.settings import RoleProfile, WorkerSettings
from cluster.agent.state import WorkerState
from cluster.agent.token_server import TokenService
from cluster.agent.transport_port import TransportPort
from cluster.core.drain_orders import Leave
from cluster.wire.channels import bind, make_server
from cluster.wire.metrics_server import MetricsServer
from engine.core.disk_tier import DiskResult
from engine.core.step import StepResult
from kv_transfer.protocol.ranks import bad_blocks

logger = logging.getLogger(__name__)

STOP_GRACE_S = 0.2
"""How long token streams may take to end when the worker stops."""
THREAD_STOP_TIMEOUT_S = 10.0
"""A running step is waited for, since its memory must outlive it; one takes far less."""
NANOSECOND_S = 1e-9

OnReady = Callable[[str], None]
OnClosed = Callable[[BaseException | None, Leave | None], None]


class WorkerEndedError(Exception):
    """The worker ended by itself: refused, without a coordinator, or with a broken engine."""


async def run_worker(
    settings: WorkerSettings,
    profile: RoleProfile,
    *,
    on_ready: OnReady | None = None,
    on_closed: OnClosed | None = None,
    stop: asyncio.Event | None = None,
) -> Leave | None:
    """Loads the model, registers and serves until `stop` is set and its pushes have ended; without one, until it is
    cancelled.

    Args:
        on_ready: called once, with the token stream's address, when the coordinator has welcomed the worker.
        on_closed: called when everything is given back but the control stream, with the error that ended the worker,
            if one did, and what is returned. The coordinator kills the process of a worker whose stream has ended, so
            this is the moment to leave in an orderly way.

    Returns:
        Of a worker that was drained, what it was told; None of one that was asked to stop.

    Raises:
        WorkerEndedError: this life is over by itself; whoever wants another starts one with a higher incarnation.
        FileNotFoundError, ValueError, ModelWeightsError: the model or the settings do not work.
    """
    if settings.role is not profile.role:
        raise ValueError(f"role: a {profile.role.value} worker was given settings of a {settings.role.value} worker")
    if settings.cores is not None:
        # Of this thread and every thread that it starts from here on.
        os.sched_setaffinity(0, settings.cores)
    torch.set_num_threads(settings.threads)
    engine_thread = JobThread("engine", asyncio.get_running_loop())
    try:
        engine = await engine_thread.call(lambda: load_engine(settings, profile))
        return await _serve(settings, profile, engine, engine_thread, on_ready, on_closed, stop or asyncio.Event())
    finally:
        engine_thread.close(THREAD_STOP_TIMEOUT_S)


async def _serve(
    settings: WorkerSettings,
    profile: RoleProfile,
    engine: Engine,
    engine_thread: JobThread,
    on_ready: OnReady | None,
    on_closed: OnClosed | None,
    stop: asyncio.Event,
) -> Leave | None:
    loop = asyncio.get_running_loop()
    server = make_server()
    address = f"{settings.host}:{bind(server, settings.host)}"
    metrics = MetricsServer(settings.metrics_host, settings.metrics_port)
    config = state_config(settings, profile, engine, address, metrics.address)
    worker = _Worker(settings, config, engine, engine_thread, on_ready)
    tokens_pb2_grpc.add_TokensServicer_to_server(worker.tokens, server)
    await server.start()
    await metrics.start(worker.metrics.measure)
    loop.add_reader(worker.transport.fileno(), worker.poll_transport)
    dialling = asyncio.create_task(worker.control.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        waited: tuple[asyncio.Future[Any], ...] = (stopping, dialling, worker.ended)
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            worker.leave()
            await asyncio.wait((dialling, worker.ended), return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(worker.transport.fileno())
        stopping.cancel()
        worker.close()
        await metrics.close()
        await server.stop(STOP_GRACE_S)
        # The pool's memory goes with the engine, so the step that may be running in it ends first.
        if engine_thread.close(THREAD_STOP_TIMEOUT_S):
            engine.close()
        error = next((done.exception() for done in (worker.ended, dialling) if _has_failed(done)), None)
        if on_closed is not None:
            on_closed(error, worker.leave_order)
        dialling.cancel()
    if error is not None:
        raise error
    return worker.leave_order


def _has_failed(future: asyncio.Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is not None


class _Worker:
    """Feeds one WorkerState and carries out its effects."""

    def __init__(
        self,
        settings: WorkerSettings,
        config: WorkerStateConfig,
        engine: Engine,
        engine_thread: JobThread,
        on_ready: OnReady | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._engine_thread = engine_thread
        self._verifier = JobThread("verifier", self._loop)
        self._disk_thread = JobThread("disk", self._loop)
        self._state = WorkerState(config, time.monotonic_ns())
        self._is_leaving = False
        self.leave_order: Leave | None = None
        """As which it left, once a coordinator has told it to."""
        self._address = config.hello.ref.token_address
        self._on_ready = on_ready
        self._events: deque[ev.Event] = deque()
        self._is_handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns: int | None = None
        self.metrics = WorkerMetrics(settings, self._state, config.hello.block_size_bytes, engine.disk_cache)
        self.tokens = TokenService(settings.worker, self.post)
        self.control = ControlClient(settings.coordinator_address, self.post)
        self.transport = TransportPort(engine.transport, engine.layout, post=self.post)
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the worker has left as it was asked to. It raises WorkerEndedError otherwise, or what WorkerState
        raised, which is a bug."""

    def close(self) -> None:
        """Nothing more is posted or carried out."""
        if not self.ended.done():
            self.ended.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self.tokens.close()
        self._verifier.close(THREAD_STOP_TIMEOUT_S)
        self._disk_thread.close(THREAD_STOP_TIMEOUT_S)

    def leave(self) -> None:
        """Takes nothing new; `ended` follows in WorkerState's own time."""
        self._is_leaving = True
        self.post(ev.LeaveRequested())

    def poll_transport(self) -> None:
        try:
            self.transport.poll()
        except Exception as error:  # noqa: BLE001 - a broken transport ends the worker, by way of `ended`
            self._end(error)

    def post(self, event: ev.Event) -> None:
        """Handles the event, and whatever its effects post in turn, before it returns (unless it is such a one)."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events and not self.ended.done():
                for effect in self._state.handle(time.monotonic_ns(), self._events.popleft()):
                    self._execute(effect)
        except Exception as error:  # noqa: BLE001 - a bug: the state cannot be trusted, so this life ends
            self._end(error)
        finally:
            self._is_handling = False
        self._set_timer()
        if self._on_ready is not None and self._state.is_registered:
            on_ready, self._on_ready = self._on_ready, None
            on_ready(self._address)

    def _end(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    def _execute(self, effect: fx.Effect) -> None:
        match effect:
            case fx.RunStep():
                self._run_step(effect)
            case fx.CopyBlocks(copies=copies):
                # On the loop's thread: what follows must not be told, nor any step planned, before the bytes are there.
                self._engine.copy_blocks(copies)
            case fx.DoDiskWork():
                self._do_disk_work(effect)
            case fx.SendRuns(front=front, runs=runs):
                self.tokens.send(front, runs)
            case fx.RefuseFront(front=front):
                self.tokens.refuse(front)
            case fx.WriteBlocks():
                self.transport.write(effect)
            case fx.SendMessage():
                self.transport.send(effect)
            case fx.VerifyBlocks():
                self._verify(effect)
            case fx.ToCoordinator(message=message):
                self.control.send(message)
            case fx.ConnectPeer():
                self.transport.connect(effect)
            case fx.CancelWrite():
                self.transport.cancel(effect)
            case fx.FencePeer():
                self.transport.fence(effect)
            case fx.Shutdown(reason=reason, leave=leave):
                self.leave_order = leave
                if not self._is_leaving and leave is None:
                    self._end(WorkerEndedError(reason))
                elif not self.ended.done():
                    self.ended.set_result(None)

    # ---- threads ---------------------------------------------------------------------------------------------

    def _run_step(self, effect: fx.RunStep) -> None:
        plan, marks = effect.plan, frozenset(effect.layer_marks)
        num_written = 0

        def layer_written(layer: int) -> None:
            nonlocal num_written
            if layer != num_written:
                return  # a model that takes its layers in another order: they are pushed when the step is over
            num_written += 1
            if num_written in marks:
                event = ev.LayersWritten(step_id=plan.step_id, num_layers=num_written)
                self._engine_thread.report(self.post, event)

        def run() -> tuple[StepResult, int]:
            start_ns = time.monotonic_ns()
            result = self._engine.run(plan, layer_written if marks else None)
            return result, time.monotonic_ns() - start_ns

        def done(outcome: tuple[StepResult, int]) -> None:
            self.post(ev.StepDone(result=outcome[0], duration_ns=outcome[1]))

        def failed(error: BaseException) -> None:
            logger.error("step %d failed", plan.step_id, exc_info=error)
            self.post(ev.StepFailed(reason=f"{type(error).__name__}: {error}"))

        self._engine_thread.submit(run, done, failed)

    def _verify(self, effect: fx.VerifyBlocks) -> None:
        def done(sums: list[int]) -> None:
            bad = bad_blocks(effect.block_ids, sums, effect.checksums)
            if bad and self._state.is_receiving(effect.key):  # else others may write there meanwhile
                logger.warning("blocks %s of %s arrived corrupt", bad, effect.key)
            self.post(ev.Verified(key=effect.key, chunk=effect.chunk, bad_block_ids=bad))

        def failed(error: BaseException) -> None:
            self._end(RuntimeError(f"cannot verify blocks: {error}"))

        self._verifier.submit(lambda: self._engine.checksums(effect.block_ids, effect.layers), done, failed)

    def _do_disk_work(self, effect: fx.DoDiskWork) -> None:
        def done(result: DiskResult) -> None:
            self.post(ev.DiskWorkDone(result=result))

        def failed(error: BaseException) -> None:
            self._end(RuntimeError(f"cannot work with the files of the prefix cache: {error}"))

        self._disk_thread.submit(lambda: self._engine.do_disk_work(effect.work), done, failed)

    # ---- time ------------------------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        deadline_ns = None if self.ended.done() else self._state.next_deadline_ns()
        if deadline_ns == self._timer_ns:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_ns = deadline_ns
        if deadline_ns is not None:
            # The loop's own clock is the same monotonic one.
            self._timer = self._loop.call_at(deadline_ns * NANOSECOND_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._timer_ns = None
        self.post(ev.Tick())
