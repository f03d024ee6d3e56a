"""A whole answer with each transport that a cluster file may ask for, pushed over it and named everywhere, and with
each kind of checksums."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.v1 import admin_pb2, admin_pb2_grpc
from cluster.core.ids import Outcome, Role
from cluster.wire.channels import make_channel
from kv_transfer.transport.backends import PREFERENCE, why_unavailable
from tests.support.engine_model import write_tiny_model
from tests.support.plain_cluster import PlainCluster, greedy

DEADLINE_S = 60.0
CHECKSUMS = ("sampled", "full", "off")


@pytest.mark.parametrize(("transport", "checksums"), list(zip(PREFERENCE, CHECKSUMS, strict=True)))
def test_answers_are_pushed_over_the_transport_asked_for(transport: str, checksums: str, tmp_path: Path) -> None:
    reason = why_unavailable(transport)
    if reason is not None:
        pytest.skip(reason)
    write_tiny_model(tmp_path / "model", max_position_embeddings=256)
    body = greedy([3 + 7 * index % 90 for index in range(100)], 10)

    async def main() -> None:
        async with PlainCluster(tmp_path / "model", tmp_path) as cluster:
            # Decode takes whatever there is (not ucx beside nixl): the one that writes has but one to offer.
            taken = "ucx" if transport == "ucx" else "auto"
            options = ["--kv-blocks", "40", "--checksums", checksums, "--transport"]
            await (await cluster.start_worker(Role.DECODE, "d0", *options, taken)).ready()
            alone = await cluster.answer("alone", body)
            prefill = await cluster.start_worker(Role.PREFILL, "p0", *options, transport)
            await prefill.ready()
            answer = await cluster.answer("pushed", body)
            assert (alone.outcome, answer.outcome) == (Outcome.LENGTH, Outcome.LENGTH), answer.reason
            assert [ref.worker.name for ref in answer.workers] == ["p0", "d0"]
            assert answer.tokens == alone.tokens
            timeline = answer.timelines["d0"]
            assert timeline.kv_transport == transport and timeline.kv_bytes > 0
            async with make_channel(cluster.address) as channel, asyncio.timeout(DEADLINE_S):
                admin = admin_pb2_grpc.AdminStub(channel)
                while not (links := (await admin.GetStatus(admin_pb2.GetStatusRequest())).links):
                    await asyncio.sleep(0.05)
            assert [(link.writer.partition("#")[0], link.transport) for link in links] == [("p0", transport)]

    asyncio.run(main())
