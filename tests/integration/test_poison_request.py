"""With real processes: a request that ends the workers that compute it, and one that fails their steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.v1 import admin_pb2, admin_pb2_grpc
from cluster.core.ids import Outcome, Role
from cluster.wire.channels import make_channel
from engine.core.request import RequestBody
from tests.support.engine_model import engine_alone, write_tiny_model
from tests.support.plain_cluster import PlainCluster, greedy, nothing_held, prompt
from tests.support.poison_worker import DEADLY, EXIT_STATUS, FAILING

ARGUMENTS = ("--kv-blocks", "200", "--prefill-chunk-tokens", "64")
WAIT_S = 60.0
NUM_INNOCENTS = 5


def poisoned(mark: tuple[int, ...]) -> RequestBody:
    return greedy([*prompt(30, salt=50), *mark, *prompt(5)], 20)


async def innocents(cluster: PlainCluster, salt: int) -> list[tuple[RequestBody, list[int]]]:
    """Requests that run beside a poison one, and what they were answered."""
    bodies = [greedy(prompt(60 + index, salt=salt + index), 40) for index in range(NUM_INNOCENTS)]
    answers = [cluster.front.submit(f"good-{salt}-{index}", body) for index, body in enumerate(bodies)]
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(answer.done.wait() for answer in answers))
    assert [answer.outcome for answer in answers] == [Outcome.LENGTH] * NUM_INNOCENTS, [a.reason for a in answers]
    return [(body, answer.tokens) for body, answer in zip(bodies, answers, strict=True)]


@pytest.mark.timeout(180)
def test_poison_is_stopped_after_the_second_worker_and_harms_nobody_else(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tiny_model(model, max_position_embeddings=512)

    async def scenario() -> list[tuple[RequestBody, list[int]]]:
        async with PlainCluster(model, tmp_path) as cluster:
            module = "tests.support.poison_worker"
            roles = [("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE)]
            workers = [
                await cluster.start_worker(role, name, *ARGUMENTS, module=(module, role.value)) for name, role in roles
            ]
            for worker in workers:
                await worker.ready()
            others = asyncio.create_task(innocents(cluster, 0))
            answer = await cluster.answer("failing", poisoned(FAILING), WAIT_S)
            assert answer.outcome is Outcome.INTERNAL and "cannot be computed" in answer.reason, answer.reason
            answers = await others
            assert [worker.process.returncode for worker in workers] == [None] * 3
            others = asyncio.create_task(innocents(cluster, 10))
            answer = await cluster.answer("deadly", poisoned(DEADLY), WAIT_S)
            assert answer.outcome is Outcome.INTERNAL and answer.reason.count("#") >= 2, answer.reason
            assert workers[-1].process.returncode is None, "decode has nothing to do with it"
            answers += await others
            ended = [worker for worker in workers if worker.process.returncode is not None]
            assert [worker.process.returncode for worker in ended] == [EXIT_STATUS] * 2
            assert all(worker.name in answer.reason for worker in ended)
            async with make_channel(cluster.address) as channel:
                status = await admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest())
            assert status.num_poison == 2
            await nothing_held(cluster)
            return answers

    expected = engine_alone(model, context_tokens=512)
    for body, tokens in asyncio.run(scenario()):
        assert tokens == expected(body)
