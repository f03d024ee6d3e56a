"""Workers as real processes, with a tiny model: answers, losses, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.v1 import admin_pb2, admin_pb2_grpc
from cluster.agent.assembly import load_engine
from cluster.agent.settings import WorkerSettings
from cluster.core.ids import Outcome, Role, WorkerId
from cluster.wire.channels import make_channel
from decode_worker.profile import PROFILE
from engine.core.block_hash import extra_key, hash_blocks
from engine.core.request import RequestBody
from engine.core.sampling import SamplingParams
from engine.model.config import model_fingerprint
from kv_transfer.transport.shm_pool import PoolMemoryError
from tests.support.engine_model import engine_alone, write_tiny_model
from tests.support.plain_cluster import ROOT, Answer, PlainCluster, WorkerProcess, greedy, nothing_held, prompt

CONTEXT = 1024
BLOCK_SIZE = 16
ARGUMENTS = ("--kv-blocks", "200", "--prefill-chunk-tokens", "64")
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, max_position_embeddings=CONTEXT)
    return directory


@pytest.fixture(scope="module")
def expected(model: Path) -> Callable[[RequestBody], list[int]]:
    return engine_alone(model)


def run(test: Callable[[PlainCluster], Awaitable[None]], model: Path, folder: Path, **coordinator: float) -> None:
    async def main() -> None:
        async with PlainCluster(model, folder, **coordinator) as cluster:
            await test(cluster)

    asyncio.run(main())


async def start(cluster: PlainCluster, *, num_prefill: int = 1, num_decode: int = 1) -> dict[str, WorkerProcess]:
    roles = [(Role.PREFILL, f"p{i}") for i in range(num_prefill)] + [(Role.DECODE, f"d{i}") for i in range(num_decode)]
    workers = [await cluster.start_worker(role, name, *ARGUMENTS) for role, name in roles]
    for worker in workers:
        await worker.ready()
    return {worker.name: worker for worker in workers}


@pytest.mark.bad_day(22)
def test_disaggregated_answers_equal_those_of_the_engine_alone(
    model: Path, tmp_path: Path, expected: Callable[[RequestBody], list[int]]
) -> None:
    async def scenario(cluster: PlainCluster) -> None:
        workers = await start(cluster)
        bodies = [greedy(prompt(n, salt=n), 20) for n in (1, 2, 15, 16, 17, 32, 33, 64, 255, 256, 500)]
        seeded = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=7, logprobs=2)
        bodies.append(RequestBody(prompt_ids=tuple(prompt(40, salt=5)), sampling=seeded))
        alone = [await cluster.answer(f"alone-{i}", body) for i, body in enumerate(bodies)]
        at_once = [cluster.front.submit(f"at-once-{i}", body) for i, body in enumerate(bodies)]
        await asyncio.gather(*(answer.done.wait() for answer in at_once))
        wanted = await asyncio.to_thread(lambda: [expected(body) for body in bodies])
        for answers in (alone, at_once):
            for answer, tokens in zip(answers, wanted, strict=True):
                assert answer.outcome is Outcome.LENGTH, answer.reason
                assert [ref.worker.name for ref in answer.workers] == ["p0", "d0"]
                assert answer.tokens == tokens, f"{len(answer.body.prompt_ids)} prompt tokens"
        check_timelines(alone[10])
        await first_token_ends_the_request(cluster)
        await clients_leave(cluster)
        await nothing_held(cluster)
        assert [await worker.stop() for worker in workers.values()] == [0, 0]

    run(scenario, model, tmp_path)


def check_timelines(answer: Answer) -> None:
    """Of 500 tokens in chunks of 64: all blocks are sent, once."""
    prefill, decode = answer.timelines["p0"], answer.timelines["d0"]
    block_size_bytes = 3 * 2 * 2 * BLOCK_SIZE * 16 * 4
    assert decode.kv_bytes == 32 * block_size_bytes
    assert decode.kv_early_bytes <= decode.kv_bytes
    assert decode.kv_transport == "shm"
    assert prefill.prefill_ms is not None and decode.push_ms is not None and decode.decode_ms is not None


async def first_token_ends_the_request(cluster: PlainCluster) -> None:
    answer = await cluster.answer("single", greedy(prompt(40), 1))
    assert (answer.outcome, len(answer.tokens)) == (Outcome.LENGTH, 1)


async def clients_leave(cluster: PlainCluster) -> None:
    """Before the first token, after it, and later."""
    for index, num_tokens in enumerate((0, 1, 5, 50)):
        answer = cluster.front.submit(f"leaves-{index}", greedy(prompt(300, salt=index), 600))
        async with asyncio.timeout(DEADLINE_S):
            while len(answer.tokens) < num_tokens:
                await asyncio.sleep(0.001)
        cluster.front.cancel(f"leaves-{index}")


def test_layers_of_a_prompt_are_pushed_while_the_others_are_computed(tmp_path: Path) -> None:
    """A prompt of one chunk has no earlier chunks to push: what is written before its end are groups of layers."""
    model = tmp_path / "model"
    write_tiny_model(
        model, max_position_embeddings=CONTEXT, num_hidden_layers=12, hidden_size=192, intermediate_size=512
    )

    async def scenario(cluster: PlainCluster) -> None:
        for role, name in ((Role.PREFILL, "p0"), (Role.DECODE, "d0")):
            worker = await cluster.start_worker(role, name, "--kv-blocks", "200", "--prefill-chunk-tokens", "1024")
            await worker.ready()
        bodies = [greedy(prompt(n, salt=n), 8) for n in (1000, 1001, 1003, 17, 16, 1)]
        answers = [await cluster.answer(f"r{i}", body) for i, body in enumerate(bodies)]
        wanted = await asyncio.to_thread(lambda: [engine_alone(model)(body) for body in bodies])
        assert [answer.tokens for answer in answers] == wanted
        decode = [answer.timelines["d0"] for answer in answers]
        block_size_bytes = 12 * 2 * 2 * BLOCK_SIZE * 16 * 4
        assert [timeline.kv_bytes // block_size_bytes for timeline in decode] == [63, 63, 63, 2, 1, 1]
        assert max(timeline.kv_early_bytes for timeline in decode) > decode[0].kv_bytes // 2
        await nothing_held(cluster)

    run(scenario, model, tmp_path)


@pytest.mark.bad_day(11, 23)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_killed_worker_costs_no_token(
    model: Path, tmp_path: Path, expected: Callable[[RequestBody], list[int]], victim: str
) -> None:
    async def scenario(cluster: PlainCluster) -> None:
        workers = await start(cluster, num_prefill=2, num_decode=2)
        body = greedy(prompt(400), 150)
        answer = cluster.front.submit("r", body)
        async with asyncio.timeout(DEADLINE_S):
            while len(answer.tokens) < (5 if victim == "decode" else 0) or not answer.workers:
                await asyncio.sleep(0.001)
        killed = answer.workers[1 if victim == "decode" else 0].worker.name
        workers[killed].process.kill()
        async with asyncio.timeout(DEADLINE_S):
            await answer.done.wait()
        assert answer.outcome is Outcome.LENGTH, answer.reason
        assert answer.tokens == await asyncio.to_thread(expected, body)
        await nothing_held(cluster)

    run(scenario, model, tmp_path)


@pytest.mark.bad_day(8)
def test_stopped_prefill_worker_leaves_in_order_and_costs_no_token(
    model: Path, tmp_path: Path, expected: Callable[[RequestBody], list[int]]
) -> None:
    """It may take its time for the push (how much of it, tests/sim/test_scenarios.py shows) and then ends well."""

    async def scenario(cluster: PlainCluster) -> None:
        workers = await start(cluster)
        body = greedy(prompt(400), 20)
        answer = cluster.front.submit("r", body)
        async with asyncio.timeout(DEADLINE_S):
            while not answer.workers:
                await asyncio.sleep(0.0005)
            assert await workers["p0"].stop(signal.SIGTERM) == 0
            await answer.done.wait()
        assert answer.outcome is Outcome.LENGTH, answer.reason
        assert answer.tokens == await asyncio.to_thread(expected, body)
        await nothing_held(cluster)

    run(scenario, model, tmp_path)


async def conversation_comes_back(cluster: PlainCluster, model: Path) -> None:
    """Its next turn is read by the worker that has told of the first one's blocks, although the other one is as idle
    and has read less."""
    readers = []
    for turn, num_tokens in enumerate((200, 230)):
        body = greedy(prompt(num_tokens, salt=50), 3)
        hashes = hash_blocks(body.prompt_ids, BLOCK_SIZE, extra_key(model_fingerprint(model)))
        answer = cluster.front.submit(f"turn-{turn}", body, b"".join(hashes))
        async with asyncio.timeout(DEADLINE_S):
            await answer.done.wait()
            await told_of_blocks(cluster)
        readers.append(answer.workers[0].worker)
    assert readers[0] == readers[1] and answer.timelines[readers[0].name].num_cached_tokens == 192


async def told_of_blocks(cluster: PlainCluster) -> None:
    """Waits until the coordinator knows of all blocks of the first turn at a prefill worker."""
    async with make_channel(cluster.address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        while True:
            status = await admin.GetStatus(admin_pb2.GetStatusRequest())
            workers = [worker for pool in status.pools if pool.role == "prefill" for worker in pool.workers]
            if any(worker.prefix_cache.num_blocks >= 200 // BLOCK_SIZE for worker in workers):
                return
            await asyncio.sleep(0.01)


def test_paused_prefill_worker_is_ended_and_the_request_recomputed(
    model: Path, tmp_path: Path, expected: Callable[[RequestBody], list[int]]
) -> None:
    async def scenario(cluster: PlainCluster) -> None:
        workers = await start(cluster, num_prefill=2)
        await conversation_comes_back(cluster, model)
        body = greedy(prompt(900), 20)
        answer = cluster.front.submit("r", body)
        async with asyncio.timeout(DEADLINE_S):
            while not answer.workers:
                await asyncio.sleep(0.0005)
        paused = workers[answer.workers[0].worker.name]
        paused.process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(DEADLINE_S):
            await answer.done.wait()
        assert answer.tokens == await asyncio.to_thread(expected, body)
        if answer.attempt > 1:  # else it was done before it was paused
            assert await paused.process.wait() == -signal.SIGKILL
        await nothing_held(cluster)

    run(scenario, model, tmp_path, heartbeat_timeout_s=2.0)


def test_worker_without_coordinator_ends_and_says_why(model: Path, tmp_path: Path) -> None:
    async def scenario(cluster: PlainCluster) -> None:
        worker = await cluster.start_worker(
            Role.DECODE, "d0", "--kv-blocks", "64", "--coordinator", "127.0.0.1:1", "--coordinator-grace", "0.2"
        )
        async with asyncio.timeout(DEADLINE_S):
            assert await worker.process.wait() == 1
        assert "no coordinator" in worker.log.read_text()

    run(scenario, model, tmp_path)


def test_workers_end_when_their_coordinator_does_not_come_back(model: Path, tmp_path: Path) -> None:
    async def scenario(cluster: PlainCluster) -> None:
        worker = await cluster.start_worker(Role.PREFILL, "p0", *ARGUMENTS, "--coordinator-grace", "0.5")
        await worker.ready()
        await cluster.stop_coordinator()
        async with asyncio.timeout(DEADLINE_S):
            assert await worker.process.wait() in (1, -signal.SIGKILL)

    run(scenario, model, tmp_path)


@pytest.mark.bad_day(25)
def test_workers_import_neither_the_front_nor_the_tokenizer() -> None:
    """They would take memory that belongs to the pool."""
    script = (
        "import sys, prefill_worker.worker, decode_worker.worker, cluster.agent.main; "
        "print(sorted({'transformers', 'tokenizers', 'fastapi', 'ray', 'typer', 'cluster.front'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_model_ends_the_process_with_a_reason(model: Path, tmp_path: Path) -> None:
    async def scenario(cluster: PlainCluster) -> None:
        worker = await cluster.start_worker(Role.DECODE, "d0", "--kv-blocks", "64", "--model", "/nowhere")
        async with asyncio.timeout(DEADLINE_S):
            assert await worker.process.wait() == 1
        log = worker.log.read_text()
        assert "/nowhere" in log.strip().splitlines()[-1] and "Traceback" not in log

    run(scenario, model, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transport": "loopback"}, "transport"),
        ({"max_model_tokens": 4096}, "max_model_tokens"),
        ({"num_blocks": 4_000_000_000}, "does not fit"),
        ({"max_step_tokens": 8}, "max_step_tokens"),
        ({"block_size": 0}, "block_size"),
        ({"device": "cuda"}, "device: cuda cannot serve this model: .*bfloat16"),
    ],
)
def test_impossible_settings_are_refused_by_name(model: Path, changes: dict[str, Any], message: str) -> None:
    settings = WorkerSettings(
        worker=WorkerId("d0", 1),
        pool="decode",
        role=Role.DECODE,
        coordinator_address="127.0.0.1:1",
        model_dir=model,
        dtype="float32",
        num_blocks=64,
    )
    with pytest.raises((ValueError, PoolMemoryError), match=message):
        load_engine(replace(settings, **changes), PROFILE)


def test_worker_ends_with_the_process_that_started_it(model: Path, tmp_path: Path) -> None:
    async def scenario(cluster: PlainCluster) -> None:
        script = (
            "import subprocess, sys, time; "
            f"p = subprocess.Popen([sys.executable, '-m', 'decode_worker', '--coordinator', '{cluster.address}', "
            f"'--model', {str(model)!r}, '--kv-blocks', '64', '--name', 'd0', '--with-parent']); "
            "print(p.pid, flush=True); time.sleep(600)"
        )
        parent = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            script,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        )
        assert parent.stdout is not None
        child = psutil.Process(int(await parent.stdout.readline()))
        assert (await parent.stdout.readline()).startswith(b"ready")
        parent.kill()
        await parent.wait()
        deadline_s = time.monotonic() + DEADLINE_S
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline_s, "the worker outlives its parent"
            await asyncio.sleep(0.05)

    run(scenario, model, tmp_path)
