"""With real processes: the same answer whether its prompt is pushed, read by decode, or answered by prefill."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.v1 import admin_pb2, admin_pb2_grpc
from cluster.cli.status import status_json, status_text
from cluster.core.disaggregation import DisaggregationConfig
from cluster.core.ids import Outcome, Role
from cluster.wire.channels import make_channel
from engine.core.block_hash import extra_key, hash_blocks
from engine.model.config import model_fingerprint
from tests.integration.test_metrics import read_samples
from tests.support.engine_model import engine_alone, write_tiny_model
from tests.support.plain_cluster import Answer, PlainCluster, greedy, nothing_held, prompt

CONTEXT = 8192
"""An answer of that length goes on for as long as the others take."""
BLOCK_SIZE = 16
NUM_BLOCKS = CONTEXT // BLOCK_SIZE + 40
DEADLINE_S = 60.0
BODY = greedy(prompt(30, salt=3), 24)
RULES = DisaggregationConfig(max_local_tokens=20)
"""Of the prompt's 30 tokens, 14 are left where its first block is cached."""


@pytest.mark.bad_day(22)
def test_an_answer_is_the_same_whichever_way_it_took(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tiny_model(model, max_position_embeddings=CONTEXT)

    async def main() -> None:
        async with PlainCluster(model, tmp_path, disaggregation=RULES, decode_max_running=1) as cluster:
            for role, name in ((Role.PREFILL, "p0"), (Role.DECODE, "d0")):
                await (await cluster.start_worker(role, name, "--kv-blocks", str(NUM_BLOCKS))).ready()
            answers = [await _pushed(cluster), await _read_by_decode(cluster, model), await _stayed(cluster)]
            took = [[worker.worker.name for worker in answer.workers] for answer in answers]
            assert took == [["p0", "d0"], ["d0"], ["p0"]]
            assert [answer.outcome for answer in answers] == [Outcome.LENGTH] * 3
            alone = await asyncio.to_thread(lambda: engine_alone(model)(BODY))
            assert [answer.tokens for answer in answers] == [alone] * 3
            assert answers[1].timelines["d0"].num_cached_tokens == BLOCK_SIZE
            await nothing_held(cluster)
            await _check_counts(cluster)

    asyncio.run(main())


async def _pushed(cluster: PlainCluster) -> Answer:
    return await cluster.answer("pushed", BODY)


async def _read_by_decode(cluster: PlainCluster, model: Path) -> Answer:
    """Once the coordinator knows what of the prompt decode has."""
    async with asyncio.timeout(DEADLINE_S):
        while not any(w.prefix_cache.num_blocks for w in (await _status(cluster)).pools[1].workers):
            await asyncio.sleep(0.05)
        hashes = hash_blocks(BODY.prompt_ids, BLOCK_SIZE, extra_key(model_fingerprint(model)))
        answer = cluster.front.submit("local", BODY, b"".join(hashes))
        await answer.done.wait()
    return answer


async def _stayed(cluster: PlainCluster) -> Answer:
    """While decode writes the one answer that it may write at once."""
    long = cluster.front.submit("long", greedy(prompt(40, salt=9), CONTEXT - 100))
    async with asyncio.timeout(DEADLINE_S):
        while len(long.tokens) < 2:
            await asyncio.sleep(0.001)
    answer = await cluster.answer("stayed", BODY)
    assert long.outcome is None, "it was to be written all the while"
    cluster.front.cancel("long")
    return answer


async def _check_counts(cluster: PlainCluster) -> None:
    """On the coordinator's page and in the status that operators see."""
    status = await _status(cluster)
    counts = {("pushed", "rule"): 2, ("local", "fixed"): 1, ("stayed", "decode_full"): 1}
    assert {(count.route, count.cause): count.count for count in status.routes.counts} == counts
    samples = await asyncio.to_thread(read_samples, status.metrics_address)
    placed = [sample for sample in samples if sample.name == "baton_placements_total"]
    assert {(sample.labels["route"], sample.labels["cause"]): sample.value for sample in placed} == counts
    values = {sample.name: sample.value for sample in samples}
    assert values["baton_pushed_share"] == 0.5 and values["baton_pushed_share_is_low"] == 0
    assert values["baton_local_prefill_tokens"] == 20
    assert status.routes.reserve_ms > 0 and status.routes.take_over_ms >= 0
    assert "requests: 1 local (fixed), 2 pushed, 1 stayed (decode_full); of the last 4, 50% pushed" in status_text(
        status
    )
    assert "a prompt of up to 20 uncached tokens would be read by decode now" in status_text(status)
    assert status_json(status)["routes"]["pushed_share"] == 0.5


async def _status(cluster: PlainCluster) -> admin_pb2.GetStatusResponse:
    async with make_channel(cluster.address) as channel:
        return await admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest())
