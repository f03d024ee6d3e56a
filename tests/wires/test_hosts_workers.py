"""Workers on two hosts (network namespaces): a prefill worker on one, a decode worker on the other. Coordinator and
front are on the router between them, which both go on reaching while the link between the hosts is cut.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import admin_pb2, admin_pb2_grpc
from cluster.agent.main import EXIT_ENDED
from cluster.core.ids import Outcome, Role
from cluster.wire.channels import make_channel
from engine.core.request import RequestBody
from kv_transfer.transport.backends import why_unavailable
from tests.support.engine_model import engine_alone, real_model_dir, reference, write_tiny_model
from tests.support.network_namespaces import Host, TwoHosts, call_on
from tests.support.plain_cluster import ROOT, Answer, PlainCluster, WorkerProcess, greedy, nothing_held, prompt

PREFILL, DECODE = "prefill-0", "decode-0"
WIRES = {"auto": "nixl", "ucx": "ucx"}
"""What the workers are started with, and what then carries the KV from host to host."""
NOTICE_S = 5.0
"""Within it a worker knows that its peer is cut off, by default."""
SLACK_S = 10.0
"""Between the end of a wait and the moment at which a test on a busy machine sees what came of it. Without that wait it
would take more than a minute."""
DEADLINE_S = 120.0
LOG_CHARACTERS = 4_000
CONTEXT = 8192
LONG = 5000
"""Tokens of a prompt that is read, and pushed, in 313 steps: long enough to be cut off in the midst of it."""
SLOW = ("--kv-blocks", "1200", "--prefill-chunk-tokens", "16")
TINY = ("--kv-blocks", "1200")
UNDER_WAY_BYTES = 1_000_000
"""Of the 15 MB that such a push carries."""
REAL = ("--kv-blocks", "70", "--max-model-tokens", "1024")
NUM_RUNNING_TOKENS = 1500
"""Of an answer that is running when the link is cut."""


class HostsCluster(PlainCluster):
    """Its workers are on two hosts."""

    def __init__(self, hosts: TwoHosts, transport: str, model: Path, folder: Path) -> None:
        super().__init__(model, folder, host=hosts.router.address)
        self.hosts = hosts
        self.wire = WIRES[transport]
        self._transport = transport

    async def start_prefill(self, *arguments: str) -> WorkerProcess:
        return await self._start(Role.PREFILL, PREFILL, self.hosts.left, *arguments)

    async def start_decode(self, *arguments: str) -> WorkerProcess:
        return await self._start(Role.DECODE, DECODE, self.hosts.right, *arguments)

    async def _start(self, role: Role, name: str, host: Host, *arguments: str) -> WorkerProcess:
        network = ("--host", host.address, "--transport", self._transport)
        worker = await self.start_worker(role, name, *network, *arguments, within=host.within)
        await worker.ready()
        return worker

    async def pushed(self, request_id: str, body: RequestBody, tokens: list[int]) -> Answer:
        """An answer, after a check that it is right, at the first attempt, and that its KV came over the wire."""
        before = self.hosts.num_bytes_from_left()
        answer = await self.answer(request_id, body)
        check(answer, tokens)
        assert [ref.worker.name for ref in answer.workers] == [PREFILL, DECODE] and answer.attempt == 1, answer.reason
        timeline = answer.timelines[DECODE]
        assert timeline.kv_transport == self.wire
        assert 0 < timeline.kv_bytes <= self.hosts.num_bytes_from_left() - before
        return answer

    async def cli_status(self) -> dict[str, Any]:
        """What `baton status --json` prints."""
        command = (sys.executable, "-m", "cluster.cli", "status", "--json", "--address", self.address)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
        output, _ = await process.communicate()
        status: dict[str, Any] = json.loads(output)
        return status


def check(answer: Answer, tokens: list[int]) -> None:
    assert answer.outcome is Outcome.LENGTH, f"{answer.outcome}: {answer.reason}"
    assert answer.tokens == tokens, f"{answer.body.sampling.max_tokens} tokens after {len(answer.body.prompt_ids)}"


async def until(condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> float:
    """Waits for it. Returns when it was seen (monotonic)."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain: {what}"
        await asyncio.sleep(0.005)
    return time.monotonic()


async def noticed(cut_s: float, *workers: WorkerProcess) -> None:
    """Each of the two finds the other gone, in time."""
    for worker in workers:
        timeout_s = cut_s + NOTICE_S + SLACK_S - time.monotonic()
        seen_s = await until(lambda w=worker: " is gone: " in w.log.read_text(), f"{worker.name} notices", timeout_s)
        print(f"{worker.name} noticed the cut after {seen_s - cut_s:.1f} s")


async def registered(cluster: HostsCluster) -> None:
    """Both workers are known to the coordinator."""
    async with make_channel(cluster.address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        while True:
            status = await admin.GetStatus(admin_pb2.GetStatusRequest())
            if all(worker.state == "ready" for pool in status.pools for worker in pool.workers):
                return
            await asyncio.sleep(0.05)


@pytest.fixture(params=WIRES)
def transport(request: pytest.FixtureRequest) -> str:
    reason = why_unavailable(WIRES[request.param])
    if reason is not None:
        pytest.skip(reason)
    return str(request.param)


def run(
    scenario: Callable[[HostsCluster], Awaitable[None]], hosts: TwoHosts, transport: str, model: Path, folder: Path
) -> None:
    """To be called on the router. What the workers have logged goes with what failed."""

    async def main() -> None:
        async with HostsCluster(hosts, transport, model, folder) as cluster, asyncio.timeout(DEADLINE_S):
            await scenario(cluster)

    try:
        asyncio.run(main())
    except BaseException as error:
        for log in sorted(folder.glob("*.log")):
            error.add_note(f"---- {log.name}\n{log.read_text()[-LOG_CHARACTERS:]}")
        raise


# ---- answers --------------------------------------------------------------------------------------------------


async def answers_are_those_of_one_host(cluster: HostsCluster) -> None:
    """The real model's: on one host the engine draws the reference's tokens, as its own tests say."""
    cases = [case for case in reference()["prompts"] if 100 < len(case["prompt_ids"]) < 800]
    await cluster.start_decode(*REAL)
    await cluster.start_prefill(*REAL)
    for case in cases[:2]:
        await cluster.pushed(case["name"], greedy(case["prompt_ids"], 16), case["output_ids"][:16])
    await nothing_held(cluster)
    status = await cluster.cli_status()
    [link] = status["links"]
    assert [link[end].partition("#")[0] for end in ("writer", "peer")] == [PREFILL, DECODE]
    assert link["transport"] == cluster.wire and link["bandwidth_bytes_per_s"] > 0, link
    where = {worker["name"]: worker["host"] for pool in status["pools"] for worker in pool["workers"]}
    assert where == {PREFILL: cluster.hosts.left.namespace, DECODE: cluster.hosts.right.namespace}, where


def test_answers_between_hosts_are_those_of_one_host(hosts: TwoHosts, transport: str, tmp_path: Path) -> None:
    model, reason = real_model_dir()
    if model is None:
        pytest.skip(reason)
    call_on(hosts.router, run, answers_are_those_of_one_host, hosts, transport, model, tmp_path)


# ---- cuts -----------------------------------------------------------------------------------------------------


async def cut_in_mid_push(cluster: HostsCluster) -> None:
    """What was being pushed is computed again by the decode worker, what runs there is not disturbed, and once the
    link is back KV is pushed again: by the same life of the prefill worker, or by its next one if it was fenced."""
    bodies = [greedy(prompt(50), 10), greedy(prompt(60, salt=5), NUM_RUNNING_TOKENS), greedy(prompt(LONG, salt=9), 20)]
    bodies.append(greedy(prompt(300, salt=13), 20))
    wanted = asyncio.create_task(asyncio.to_thread(lambda: [engine_alone(cluster.model, CONTEXT)(b) for b in bodies]))
    decode = await cluster.start_decode(*TINY)
    prefill = await cluster.start_prefill(*SLOW)
    first, running_tokens, victim_tokens, last = await wanted
    await cluster.pushed("first", bodies[0], first)
    running = cluster.front.submit("running", bodies[1])
    await until(lambda: len(running.tokens) > 5, "it decodes")
    before = cluster.hosts.num_bytes_from_left()
    victim = cluster.front.submit("victim", bodies[2])
    await until(lambda: cluster.hosts.num_bytes_from_left() > before + UNDER_WAY_BYTES, "it is pushed")
    cluster.hosts.cut()
    cut_s = time.monotonic()
    num_before = len(running.tokens)
    await noticed(cut_s, prefill, decode)
    await asyncio.gather(victim.done.wait(), running.done.wait())
    check(victim, victim_tokens)
    assert [ref.worker.name for ref in victim.workers] == [DECODE] and victim.attempt > 1
    check(running, running_tokens)
    assert running.attempt == 1 and num_before < NUM_RUNNING_TOKENS
    await nothing_held(cluster)
    if f"fencing {PREFILL}" in decode.log.read_text():
        # The coordinator has heard of it and given that life up, which then ends itself: whoever supervises the
        # worker (Ray, in a cluster) starts its next one.
        assert await prefill.process.wait() == EXIT_ENDED
        cluster.hosts.mend()
        await cluster.start_prefill(*SLOW)
    else:
        cluster.hosts.mend()
    await cluster.pushed("last", bodies[3], last)
    await nothing_held(cluster)


async def fence_that_no_coordinator_hears_of(cluster: HostsCluster) -> None:
    """The decode worker fences its cut-off peer while there is no coordinator. The next one is told as soon as it
    places a request on that pair, which is then answered without a push; the fenced life ends, and another follows."""
    bodies = [greedy(prompt(50), 10), greedy(prompt(60, salt=5), 10), greedy(prompt(70, salt=9), 10)]
    wanted = asyncio.create_task(asyncio.to_thread(lambda: [engine_alone(cluster.model, CONTEXT)(b) for b in bodies]))
    decode = await cluster.start_decode(*TINY)
    prefill = await cluster.start_prefill(*SLOW)
    first, after_tokens, last = await wanted
    await cluster.pushed("first", bodies[0], first)
    before = cluster.hosts.num_bytes_from_left()
    cluster.front.submit("lost", greedy(prompt(LONG, salt=13), 20))
    await until(lambda: cluster.hosts.num_bytes_from_left() > before + UNDER_WAY_BYTES, "it is pushed")
    cluster.hosts.cut()
    await cluster.front.close()
    await cluster.stop_coordinator()
    await until(lambda: f"fencing {PREFILL}" in decode.log.read_text(), "the fence")
    cluster.hosts.mend()
    await cluster.start_coordinator(epoch=2)
    await registered(cluster)
    after = await cluster.answer("after", bodies[1])
    check(after, after_tokens)
    assert [ref.worker.name for ref in after.workers] == [DECODE]
    assert await prefill.process.wait() == EXIT_ENDED
    await cluster.start_prefill(*SLOW)
    await cluster.pushed("last", bodies[2], last)
    await nothing_held(cluster)


async def cut_while_idle(cluster: HostsCluster) -> None:
    """Both ends find out, and nobody is given up for it: once the link is back the same lives push over it again."""
    bodies = [greedy(prompt(300, salt=salt), 20) for salt in range(3)]
    wanted = asyncio.create_task(asyncio.to_thread(lambda: [engine_alone(cluster.model, CONTEXT)(b) for b in bodies]))
    decode = await cluster.start_decode(*TINY)
    prefill = await cluster.start_prefill(*SLOW)
    first, during_tokens, last = await wanted
    before = await cluster.pushed("first", bodies[0], first)
    await nothing_held(cluster)
    cluster.hosts.cut()
    await noticed(time.monotonic(), prefill, decode)
    during = await cluster.answer("during", bodies[1])
    check(during, during_tokens)
    assert [ref.worker.name for ref in during.workers] == [DECODE]
    await nothing_held(cluster)
    cluster.hosts.mend()
    after = await cluster.pushed("last", bodies[2], last)
    assert after.workers == before.workers and "fencing" not in decode.log.read_text()
    assert prefill.process.returncode is None
    await nothing_held(cluster)


@pytest.mark.parametrize(
    "scenario",
    [cut_in_mid_push, cut_while_idle, fence_that_no_coordinator_hears_of],
    ids=lambda scenario: scenario.__name__,
)
def test_cut_between_hosts(
    scenario: Callable[[HostsCluster], Awaitable[None]], hosts: TwoHosts, transport: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    write_tiny_model(model, max_position_embeddings=CONTEXT, num_hidden_layers=12)
    call_on(hosts.router, run, scenario, hosts, transport, model, tmp_path)
