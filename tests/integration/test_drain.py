"""Workers as real processes, with a tiny model, drained and flipped under load: no token is lost, and nothing stays."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from baton.v1 import admin_pb2, admin_pb2_grpc
from cluster.agent.exit_status import AGAIN, EXIT_AGAIN, EXIT_LEFT
from cluster.core.ids import Outcome, Role
from cluster.wire.channels import make_channel
from engine.core.request import RequestBody
from tests.support.engine_model import engine_alone, write_tiny_model
from tests.support.plain_cluster import Answer, PlainCluster, WorkerProcess, greedy, nothing_held, prompt

CONTEXT = 1024
NUM_ANSWERS = 4
TIMEOUT_S = 300.0
WORKERS = ((Role.PREFILL, "p0"), (Role.PREFILL, "w"), (Role.DECODE, "d0"), (Role.DECODE, "d1"))

Draw = Callable[[RequestBody], list[int]]


@pytest.mark.timeout(320)
@pytest.mark.bad_day(8, 23)
def test_answers_go_on_while_their_workers_are_drained_and_flipped(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tiny_model(model, max_position_embeddings=CONTEXT)

    async def main() -> None:
        async with (
            asyncio.timeout(TIMEOUT_S),
            PlainCluster(model, tmp_path) as cluster,
            make_channel(cluster.address) as channel,
        ):
            admin = admin_pb2_grpc.AdminStub(channel)
            started = [await start(cluster, role, name) for role, name in WORKERS]
            for worker in started:
                await worker.ready()
            workers = {worker.name: worker for worker in started}
            draw = engine_alone(model)
            await drain_in_mid_answer(cluster, admin, workers["d0"], draw)
            await flip(cluster, admin, workers["w"], Role.DECODE, draw)
            await flip(cluster, admin, cluster.workers[-1], Role.PREFILL, draw)
            await refusals(admin)
            await nothing_held(cluster)

    asyncio.run(main())


async def start(cluster: PlainCluster, role: Role, name: str) -> WorkerProcess:
    return await cluster.start_worker(role, name, "--kv-blocks", "400", "--prefill-chunk-tokens", "64")


async def drain_in_mid_answer(
    cluster: PlainCluster, admin: admin_pb2_grpc.AdminStub, drained: WorkerProcess, draw: Draw
) -> None:
    """The worker is stopped while the order is given, so that its answers are certain to be unfinished."""
    bodies = [greedy(prompt(100 + 30 * index, salt=index), 700) for index in range(NUM_ANSWERS)]
    answers = [cluster.front.submit(f"r{index}", body) for index, body in enumerate(bodies)]
    while any(len(answer.tokens) < 5 for answer in answers):
        await asyncio.sleep(0.001)
    drained.process.send_signal(signal.SIGSTOP)
    there = [answer for answer in answers if answer.workers[1].worker.name == "d0" and answer.outcome is None]
    for _ in range(2):
        await admin.Drain(admin_pb2.DrainRequest(worker="d0", migrate=True))
    during = cluster.front.submit("during", greedy(prompt(50), 20))
    drained.process.send_signal(signal.SIGCONT)
    assert await drained.process.wait() == EXIT_LEFT
    await assert_right([*answers, during], draw)
    assert during.attempt == 1 and during.workers[1].worker.name == "d1"
    assert there, "none of them was running there"
    for answer in there:
        assert answer.attempt == 2
        assert_handed_over(answer)
    assert await where(admin, "d0") is None
    assert not (await admin.GetLeases(admin_pb2.GetLeasesRequest())).leases


def assert_handed_over(answer: Answer) -> None:
    """The drained worker was the source of all that the next attempt began with, and computed next to nothing of it."""
    assert [ref.worker.name for ref in answer.workers] == ["d0", "d1"]
    assert answer.timelines["d0"].num_cached_tokens >= (len(answer.body.prompt_ids) // 16 - 1) * 16


async def flip(
    cluster: PlainCluster, admin: admin_pb2_grpc.AdminStub, worker: WorkerProcess, role: Role, draw: Draw
) -> None:
    """Its process ends with a word to whoever runs it, which is the test, and the next one serves in the other pool."""
    body = greedy(prompt(120), 20)
    answers = [cluster.front.submit(f"{role.value}-{index}", body) for index in range(3)]
    assert (await admin.Flip(admin_pb2.FlipRequest(worker="w", migrate=True))).pool == role.value
    assert await worker.process.wait() == EXIT_AGAIN
    assert worker.process.stdout is not None
    assert (await worker.process.stdout.read()).decode() == f"{AGAIN}{role.value}\n"
    await (await start(cluster, role, "w")).ready()
    assert await where(admin, "w") == (role.value, "ready")
    await assert_right(answers, draw)


async def assert_right(answers: list[Answer], draw: Draw) -> None:
    await asyncio.gather(*(answer.done.wait() for answer in answers))
    for answer in answers:
        assert answer.outcome is Outcome.LENGTH, answer.reason
        assert answer.tokens == await asyncio.to_thread(draw, answer.body)


async def where(admin: admin_pb2_grpc.AdminStub, name: str) -> tuple[str, str] | None:
    """The worker's pool and state, None if it is not registered."""
    status = await admin.GetStatus(admin_pb2.GetStatusRequest())
    found = [(pool.name, worker) for pool in status.pools for worker in pool.workers if worker.name == name]
    there = [(pool, worker.state) for pool, worker in found if worker.state not in ("down", "drained")]
    return there[0] if there else None


async def refusals(admin: admin_pb2_grpc.AdminStub) -> None:
    """Nothing is changed by what cannot be, and the reason is told."""
    with pytest.raises(
        grpc.aio.AioRpcError, match="worker 'd0' has been drained and is gone; there is: d1, p0, w"
    ) as unknown:
        await admin.Drain(admin_pb2.DrainRequest(worker="d0"))
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.aio.AioRpcError, match=r"d1 is the last decode worker: .* use --force") as last:
        await admin.Flip(admin_pb2.FlipRequest(worker="d1"))
    assert last.value.code() is grpc.StatusCode.FAILED_PRECONDITION
