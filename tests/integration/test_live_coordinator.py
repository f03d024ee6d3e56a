"""The coordinator over real streams, with fronts and workers that a test plays."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1 import admin_pb2, admin_pb2_grpc, control_pb2, control_pb2_grpc
from cluster.agent.translation import pack_grants
from cluster.core.commands import CancelLeg, Command, Prefill, Reserve, WorkerRefused, WorkerWelcome
from cluster.core.config import ClusterConfig, CoordinatorConfig, ModelConfig, PoolConfig
from cluster.core.ids import AttemptId, FrontId, Outcome, RefusalCause, Role, WorkerId
from cluster.core.messages import (
    AttemptFailed,
    BlockCounts,
    Committed,
    EndRequest,
    Finished,
    FrontHello,
    FrontMessage,
    FrontWelcome,
    Heartbeat,
    LegReleased,
    LegTimeline,
    Placed,
    PrefillDone,
    Refused,
    RequestDone,
    ReserveGranted,
    Resubmit,
    Submit,
    ToFrontMessage,
    WorkerHello,
    WorkerLoad,
    WorkerMessage,
    WorkerRef,
)
from cluster.core.state import ClusterState
from cluster.core.tenant_config import NamedTenant, QuotaConfig, TenantConfig, TenantsConfig
from cluster.live import services
from cluster.live.coordinator import CoordinatorSettings, run_coordinator
from cluster.wire.channels import PortInUseError, make_channel
from cluster.wire.codec import decode_command, decode_to_front, encode_body, encode_front, encode_worker
from cluster.wire.stream_outbox import StreamOutbox
from engine.core.request import RequestBody
from engine.core.sampling import SamplingParams
from kv_transfer.protocol.messages import BlockGrant
from tests.support.cli_scripted import baton

TIMEOUT_S = 10.0
BLOCKS = 100


def make_config(**coordinator: Any) -> ClusterConfig:
    return ClusterConfig(
        name="test",
        model=ModelConfig(path="model"),
        pools=(
            PoolConfig(name="p", role=Role.PREFILL, kv_blocks=BLOCKS, kv_bytes=None),
            PoolConfig(name="d", role=Role.DECODE, kv_blocks=BLOCKS, kv_bytes=None),
        ),
        coordinator=CoordinatorConfig(**coordinator),
    )


class Peer:
    """One end of a stream that a test plays."""

    def __init__(self, call: Any, encode: Callable[..., Any], decode: Callable[[Any], Any]) -> None:
        self.call = call
        self._encode = encode
        self._decode = decode

    async def say(self, message: FrontMessage | WorkerMessage, *body: Any) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self.call.write(self._encode(message, *body))

    async def hear(self) -> Any:
        """The next message; None where the coordinator ended the stream."""
        async with asyncio.timeout(TIMEOUT_S):
            envelope = await self.call.read()
        return None if envelope is grpc.aio.EOF else self._decode(envelope)

    async def hear_a(self, kind: type) -> Any:
        message = await self.hear()
        body = message.body if isinstance(message, Command) else message
        assert isinstance(body, kind), f"{message} is not a {kind.__name__}"
        return message


class Running:
    """A coordinator, and peers to talk to it."""

    def __init__(self, address: str, channel: grpc.aio.Channel, listener: socket.socket) -> None:
        self.address = address
        self.channel = channel
        self.token_address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.admin = admin_pb2_grpc.AdminStub(channel)
        self.bodies: list[RequestBody | None] = []

    async def front(self, name: str = "f", incarnation: int = 1) -> Peer:
        call = control_pb2_grpc.CoordinatorStub(self.channel).ConnectFront()
        peer = Peer(call, encode_front, decode_to_front)
        await peer.say(FrontHello(front=FrontId(name, incarnation), address="127.0.0.1:1"))
        await peer.hear_a(FrontWelcome)
        return peer

    async def worker(self, name: str, role: Role, *, incarnation: int = 1, **fields: Any) -> Peer:
        call = control_pb2_grpc.CoordinatorStub(self.channel).ConnectWorker()
        peer = Peer(call, encode_worker, self._decode_command)
        await peer.say(self.hello(name, role, incarnation, **fields))
        return peer

    def hello(self, name: str, role: Role, incarnation: int, **fields: Any) -> WorkerHello:
        counts = BlockCounts(total=BLOCKS, free=BLOCKS, active=0, cached=0, reserved=0, quarantined=0)
        defaults: dict[str, Any] = {
            "ref": WorkerRef(worker=WorkerId(name, incarnation), token_address=self.token_address),
            "pool": "p" if role is Role.PREFILL else "d",
            "role": role,
            "host": "elsewhere",
            "pid": 1,
            "model": "tiny",
            "compatibility": "c",
            "compatibility_details": "",
            "block_size": 16,
            "block_size_bytes": 4096,
            "max_model_tokens": 1024,
            "load": WorkerLoad(blocks=counts),
        }
        return WorkerHello(**{**defaults, **fields})

    async def status(self) -> admin_pb2.GetStatusResponse:
        return await self.admin.GetStatus(admin_pb2.GetStatusRequest())

    async def until(self, condition: Callable[[admin_pb2.GetStatusResponse], bool]) -> admin_pb2.GetStatusResponse:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition(status := await self.status()):
                await asyncio.sleep(0.01)
        return status

    def _decode_command(self, envelope: control_pb2.Command) -> Command:
        command, body = decode_command(envelope)
        self.bodies.append(body)
        return command


@contextlib.asynccontextmanager
async def running(
    config: ClusterConfig | None = None, epoch: int = 7, journal_dir: Path | None = None
) -> AsyncIterator[Running]:
    stop = asyncio.Event()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    settings = CoordinatorSettings(config=config or make_config(), epoch=epoch, journal_dir=journal_dir)
    task = asyncio.create_task(run_coordinator(settings, address.set_result, stop))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with asyncio.timeout(TIMEOUT_S), make_channel(await address) as channel:
            yield Running(address.result(), channel, listener)
        stop.set()
        async with asyncio.timeout(TIMEOUT_S):
            await task


def run(
    scenario: Callable[[Running], Awaitable[None]], config: ClusterConfig | None = None, journal_dir: Path | None = None
) -> None:
    async def main() -> None:
        async with running(config, journal_dir=journal_dir) as coordinator:
            await scenario(coordinator)

    asyncio.run(main())


def submit(request_id: str = "r", num_tokens: int = 40, **fields: Any) -> tuple[Submit, bytes]:
    body = RequestBody(prompt_ids=tuple(range(num_tokens)), sampling=SamplingParams(max_tokens=8, seed=5))
    message = Submit(request_id=request_id, num_prompt_tokens=num_tokens, max_tokens=8, **fields)
    return message, encode_body(body)


async def joined(coordinator: Running) -> tuple[Peer, Peer, Peer]:
    front = await coordinator.front()
    prefill = await coordinator.worker("p-0", Role.PREFILL)
    decode = await coordinator.worker("d-0", Role.DECODE)
    for worker in (prefill, decode):
        await worker.hear_a(WorkerWelcome)
    return front, prefill, decode


async def granted(decode: Peer, reserve: Command) -> ReserveGranted:
    assert isinstance(reserve.body, Reserve)
    blocks = pack_grants(BlockGrant(i, i + 1, 1) for i in range(3))
    grant = ReserveGranted(
        attempt=reserve.body.attempt, lease_id=reserve.body.lease_id, num_cached_blocks=0, blocks=blocks, ttl_ms=10_000
    )
    await decode.say(grant)
    return grant


def test_a_request_takes_its_way_and_its_body_goes_with_the_orders(tmp_path: Path) -> None:
    async def scenario(coordinator: Running) -> None:
        front, prefill, decode = await joined(coordinator)
        await front.say(*submit())
        reserve = await decode.hear_a(Reserve)
        assert reserve.epoch == 7 and reserve.worker == WorkerId("d-0", 1)
        grant = await granted(decode, reserve)
        order = await prefill.hear_a(Prefill)
        assert order.body.blocks == grant.blocks and order.body.destination.token_address == coordinator.token_address
        placed = await front.hear_a(Placed)
        assert placed.attempt == AttemptId("r", 1) and placed.decode.worker == WorkerId("d-0", 1)
        bodies = [body for body in coordinator.bodies if body is not None]
        assert len(bodies) == 2 and bodies[0] == bodies[1] and bodies[0].prompt_ids == tuple(range(40))
        leases = await coordinator.admin.GetLeases(admin_pb2.GetLeasesRequest())
        assert {(lease.side, lease.worker) for lease in leases.leases} >= {("reserved", "d-0#1")}
        attempt = placed.attempt
        await prefill.say(PrefillDone(attempt=attempt, outcome=None, timeline=LegTimeline(prefill_ms=3.0)))
        await decode.say(Committed(attempt=attempt, timeline=LegTimeline(push_ms=1.0)))
        await prefill.say(LegReleased(attempt=attempt))
        await decode.say(Finished(attempt=attempt, outcome=Outcome.STOP, num_output_tokens=4, timeline=LegTimeline()))
        await front.say(RequestDone(request_id="r", outcome=Outcome.STOP, num_output_tokens=4))
        status = await coordinator.until(lambda status: status.num_running == 0)
        assert status.cluster == "test" and status.model == "tiny" and status.epoch == 7 and status.num_fronts == 1
        assert not (await coordinator.admin.GetLeases(admin_pb2.GetLeasesRequest())).leases

    run(scenario, journal_dir=tmp_path)
    said = baton("replay", str(tmp_path), "--request", "r", home=tmp_path)
    assert said.exit_code == 0, said.stderr
    story = [line.split(" ms  ", 1)[1].strip() for line in said.stdout.splitlines()]
    assert story[0] == "<- f#1: Submit num_prompt_tokens=40 max_tokens=8"
    assert story[1].startswith("reserving, attempt 1, on p-0#1 and d-0#1, ")
    assert {"-> its prompt is dropped", "it has ended and is forgotten"} <= set(story)
    kinds = ["-> d-0#1: Reserve ", "<- d-0#1: ReserveGranted ", "-> p-0#1: Prefill "]
    places = [next(i for i, line in enumerate(story) if line.startswith(kind)) for kind in kinds]
    assert places == sorted(places)


def test_status_shows_the_workers() -> None:
    async def scenario(coordinator: Running) -> None:
        await joined(coordinator)
        pools = (await coordinator.status()).pools
        assert [(pool.name, pool.role, pool.wanted_replicas) for pool in pools] == [
            ("p", "prefill", 1),
            ("d", "decode", 1),
        ]
        worker = pools[1].workers[0]
        assert (worker.name, worker.state, worker.incarnation, worker.host) == ("d-0", "ready", 1, "elsewhere")
        assert (worker.blocks.total, worker.blocks.free) == (BLOCKS, BLOCKS)

    run(scenario)


@pytest.mark.bad_day(13)
@pytest.mark.bad_day(31)
def test_a_tenant_over_its_quota_is_refused_and_status_tells_of_it() -> None:
    quota = TenantConfig(quota=QuotaConfig(tokens_per_s=1, burst_tokens=60))
    config = dataclasses.replace(make_config(), tenants=TenantsConfig(named=(NamedTenant(name="a", config=quota),)))

    async def scenario(coordinator: Running) -> None:
        front, _, decode = await joined(coordinator)
        await front.say(*submit("first", tenant="a"))
        await decode.hear_a(Reserve)
        await front.say(*submit("second", tenant="a"))
        refused = await front.hear_a(Refused)
        assert refused.request_id == "second" and refused.outcome is Outcome.REJECTED_OVERLOAD
        assert refused.cause is RefusalCause.QUOTA and 0 < refused.retry_after_ms <= 36_000
        await front.say(*submit("third", tenant="b"))
        await decode.hear_a(Reserve)
        admission = (await coordinator.status()).admission
        assert [(refusal.cause, refusal.count) for refusal in admission.refusals] == [("quota", 1)]
        named, other = admission.tenants
        assert (named.name, named.num_running, named.num_refused, other.name) == ("a", 1, 1, "b")
        assert (
            named.HasField("quota") and 12 <= named.quota.level_tokens <= 12 + TIMEOUT_S and not other.HasField("quota")
        )

    run(scenario, config)


def test_an_unreachable_worker_is_refused_with_the_address_tried() -> None:
    async def scenario(coordinator: Running) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            dead = f"127.0.0.1:{unused.getsockname()[1]}"
        ref = WorkerRef(worker=WorkerId("d-0", 1), token_address=dead)
        worker = await coordinator.worker("d-0", Role.DECODE, ref=ref)
        refused = await worker.hear_a(WorkerRefused)
        assert dead in refused.body.reason and "refused" in refused.body.reason
        assert await worker.hear() is None
        pools = (await coordinator.status()).pools
        assert [(worker.name, worker.state) for pool in pools for worker in pool.workers] == [
            ("p-0", "down"),
            ("d-0", "down"),
        ]

    run(scenario)


@pytest.mark.bad_day(12)
def test_an_incompatible_worker_is_refused_and_its_stream_ends() -> None:
    async def scenario(coordinator: Running) -> None:
        await joined(coordinator)
        other = await coordinator.worker("d-1", Role.DECODE, compatibility="x", compatibility_details="float16")
        assert "float16" in (await other.hear_a(WorkerRefused)).body.reason
        assert await other.hear() is None

    run(scenario)


def test_a_front_that_leaves_takes_its_requests_with_it() -> None:
    async def scenario(coordinator: Running) -> None:
        front, _, decode = await joined(coordinator)
        await front.say(*submit())
        reserve = await decode.hear_a(Reserve)
        front.call.cancel()
        assert (await decode.hear_a(CancelLeg)).body.attempt == reserve.body.attempt
        assert (await coordinator.until(lambda status: status.num_fronts == 0)).num_running == 0

    run(scenario)


def test_a_front_cannot_replace_the_body_of_anothers_request() -> None:
    async def scenario(coordinator: Running) -> None:
        front, other = await coordinator.front("f"), await coordinator.front("g")
        await front.say(*submit())
        await coordinator.until(lambda status: status.num_queued == 1)
        message, body = submit()
        changed = control_pb2.RequestBody.FromString(body)
        changed.prompt_ids[0] = 77
        resubmit = Resubmit(request_id=message.request_id, failed_attempt=1, num_delivered=0)
        await other.say(resubmit, changed.SerializeToString())
        await other.say(*submit("s"))
        await coordinator.until(lambda status: status.num_queued == 2)
        await coordinator.worker("p-0", Role.PREFILL)
        decode = await coordinator.worker("d-0", Role.DECODE)
        await decode.hear_a(WorkerWelcome)
        assert (await decode.hear_a(Reserve)).body.attempt.request_id == "r"
        assert coordinator.bodies[-1] is not None and coordinator.bodies[-1].prompt_ids == tuple(range(40))

    run(scenario)


def test_a_worker_that_leaves_fails_what_it_had() -> None:
    async def scenario(coordinator: Running) -> None:
        front, prefill, decode = await joined(coordinator)
        await front.say(*submit())
        await granted(decode, await decode.hear_a(Reserve))
        await front.hear_a(Placed)
        await prefill.hear_a(Prefill)
        decode.call.cancel()
        failed = await front.hear_a(AttemptFailed)
        assert failed.attempt == AttemptId("r", 1) and "d-0" in failed.reason
        again = await coordinator.worker("d-0", Role.DECODE, incarnation=1)
        await again.hear_a(WorkerRefused)

    run(scenario)


def test_time_passes_without_messages() -> None:
    async def scenario(coordinator: Running) -> None:
        front = await coordinator.front()
        await front.say(*submit(deadline_ms=50))
        ended = await front.hear()
        assert isinstance(ended, EndRequest | Refused) and ended.outcome is Outcome.DEADLINE_EXCEEDED

    run(scenario)


def test_a_silent_worker_is_killed_and_one_that_speaks_is_not() -> None:
    async def scenario(coordinator: Running) -> None:
        sleepers = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
        try:
            os.kill(sleepers[0].pid, signal.SIGSTOP)
            host = socket.gethostname()
            silent = await coordinator.worker("d-0", Role.DECODE, host=host, pid=sleepers[0].pid)
            alive = await coordinator.worker("p-0", Role.PREFILL, host=host, pid=sleepers[1].pid)
            await silent.hear_a(WorkerWelcome)
            await alive.hear_a(WorkerWelcome)
            load = coordinator.hello("p-0", Role.PREFILL, 1).load
            async with asyncio.timeout(TIMEOUT_S):
                while sleepers[0].poll() is None:
                    await alive.say(Heartbeat(load=load))
                    await asyncio.sleep(0.05)
            assert sleepers[0].returncode == -signal.SIGKILL
            assert sleepers[1].poll() is None
            assert await silent.hear() is None
        finally:
            for sleeper in sleepers:
                sleeper.kill()
                sleeper.wait()

    run(scenario, make_config(heartbeat_timeout_s=0.5))


@pytest.mark.parametrize(
    "envelope",
    [
        control_pb2.FrontEnvelope(),
        encode_front(RequestDone(request_id="r", outcome=Outcome.STOP, num_output_tokens=0)),
        control_pb2.FrontEnvelope(front_hello=control_pb2.FrontHello()),
    ],
    ids=["empty", "no hello", "a hello without a name"],
)
def test_a_front_that_does_not_say_who_it_is_is_turned_away(envelope: control_pb2.FrontEnvelope) -> None:
    async def scenario(coordinator: Running) -> None:
        call = control_pb2_grpc.CoordinatorStub(coordinator.channel).ConnectFront()
        await call.write(envelope)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(scenario)


def test_a_front_that_says_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "HELLO_TIMEOUT_S", 0.05)

    async def scenario(coordinator: Running) -> None:
        call = control_pb2_grpc.CoordinatorStub(coordinator.channel).ConnectFront()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    run(scenario)


@pytest.mark.parametrize("body", [None, b"\x0a\x01\x01", b"\xff"], ids=["absent", "incomplete", "unreadable"])
def test_a_malformed_message_ends_that_front_alone(body: bytes | None) -> None:
    """A body whose parameters are not filled in would end every worker that it is given to."""

    async def scenario(coordinator: Running) -> None:
        bad = await coordinator.front("bad")
        good = await coordinator.front("good")
        message, _ = submit()
        await bad.call.write(encode_front(message, body))
        assert await bad.hear() is None
        await good.say(*submit("other", deadline_ms=50))
        ended: ToFrontMessage = await good.hear()
        assert isinstance(ended, EndRequest | Refused) and ended.request_id == "other"

    run(scenario)


def test_a_second_hello_ends_that_stream_alone() -> None:
    async def scenario(coordinator: Running) -> None:
        front, _, decode = await joined(coordinator)
        await front.say(FrontHello(front=FrontId("g", 1), address="127.0.0.1:1"))
        assert await front.hear() is None
        await decode.say(coordinator.hello("d-1", Role.DECODE, 1))
        assert await decode.hear() is None
        assert (await coordinator.until(lambda status: status.num_fronts == 0)).cluster == "test"

    run(scenario)


def test_a_front_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream's writer waits for it, so the word that it is over must come from outside."""
    monkeypatch.setattr(
        "cluster.live.services.FrontStream", lambda: StreamOutbox[control_pb2.ToFrontEnvelope](limit=64)
    )

    async def scenario(coordinator: Running) -> None:
        # A connection of its own: one that is not read holds up everything on it.
        async with make_channel(coordinator.address) as channel:
            call = control_pb2_grpc.CoordinatorStub(channel).ConnectFront()
            deaf = Peer(call, encode_front, decode_to_front)
            await deaf.say(FrontHello(front=FrontId("deaf", 1), address="127.0.0.1:1"))
            await coordinator.until(lambda status: status.num_fronts == 1)

            async def submit_on() -> None:
                # Every one after the first is refused; the refusals, which carry the long id, are never read.
                for number in range(2_000):
                    await call.write(encode_front(*submit(f"{number}-" + "x" * 20_000, num_tokens=1)))

            submitting = asyncio.create_task(submit_on())
            await coordinator.until(lambda status: status.num_fronts == 0)
            submitting.cancel()
            call.cancel()
            await asyncio.wait({submitting})

    run(scenario, make_config(queue_limit=1))


def test_a_port_in_use_is_an_error_at_start() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            settings = CoordinatorSettings(config=make_config(), epoch=1, port=taken.getsockname()[1])
            with pytest.raises(PortInUseError):
                await run_coordinator(settings, lambda address: None, asyncio.Event())

    asyncio.run(main())


def test_a_broken_state_machine_ends_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("a bug")

    async def main() -> None:
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        settings = CoordinatorSettings(config=make_config(), epoch=1)
        task = asyncio.create_task(run_coordinator(settings, address.set_result, asyncio.Event()))
        async with asyncio.timeout(TIMEOUT_S), make_channel(await address) as channel:
            call = control_pb2_grpc.CoordinatorStub(channel).ConnectFront()
            monkeypatch.setattr(ClusterState, "handle", broken)
            await call.write(encode_front(FrontHello(front=FrontId("f", 1), address="127.0.0.1:1")))
            with pytest.raises(AssertionError, match="a bug"):
                await task

    asyncio.run(main())


def test_health_is_answered() -> None:
    async def scenario(coordinator: Running) -> None:
        stub = health_pb2_grpc.HealthStub(coordinator.channel)
        for service in ("", "baton.v1.Coordinator", "baton.v1.Admin"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

    run(scenario)
