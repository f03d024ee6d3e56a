"""Workers whose model transformers computes: prompts are read by one, answered by the other, and both say so."""

from __future__ import annotations

import asyncio
from pathlib import Path

from transformers import AutoModelForCausalLM, GPTNeoXConfig

from baton.v1 import admin_pb2, admin_pb2_grpc
from cluster.cli.status import status_text
from cluster.core.ids import Outcome, Role
from cluster.wire.channels import make_channel
from tests.support.plain_cluster import PlainCluster, greedy
from tests.support.transformers_models import generate, prompts, randomise, save_model

MAX_TOKENS = 12
ARGUMENTS = ("--kv-blocks", "60", "--prefill-chunk-tokens", "16")


def test_answers_are_those_of_transformers(tmp_path: Path) -> None:
    config = GPTNeoXConfig(
        vocab_size=96,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=256,
    )
    model = AutoModelForCausalLM.from_config(config)
    randomise(model, seed=4)
    model.eval()
    model_dir = tmp_path / "model"
    save_model(model, model_dir)
    expected = [generate(model, prompt, MAX_TOKENS) for prompt in prompts()]

    async def scenario(cluster: PlainCluster) -> None:
        for role, name in ((Role.PREFILL, "p"), (Role.DECODE, "d")):
            worker = await cluster.start_worker(role, name, *ARGUMENTS)
            await worker.ready()
        answers = [
            cluster.front.submit(f"at-once-{i}", greedy(prompt, MAX_TOKENS)) for i, prompt in enumerate(prompts())
        ]
        await asyncio.gather(*(answer.done.wait() for answer in answers))
        assert [answer.tokens for answer in answers] == expected
        assert {answer.outcome for answer in answers} == {Outcome.LENGTH}
        async with make_channel(cluster.address) as channel:
            status = await admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest())
        engines = {worker.name: worker.engine for pool in status.pools for worker in pool.workers if worker.engine}
        assert engines == dict.fromkeys(("p", "d"), "transformers (GPTNeoXForCausalLM)")
        assert "engine transformers (GPTNeoXForCausalLM), up for" in status_text(status)

    async def main() -> None:
        async with PlainCluster(model_dir, tmp_path) as cluster:
            await scenario(cluster)

    asyncio.run(main())
