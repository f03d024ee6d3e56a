"""Plays a front and all workers to a coordinator, as cheaply as it can: `python -m benchmarks.coordinator_load`.

It is started by benchmarks/coordinator.py. Every stream has a connection of its own, as in a cluster, and says for each
request what benchmarks/coordinator.py lists, but for the blocks: workers tell of these at intervals. Prints one line of
JSON: how long the requests after the warm-up took, by the clock and in the coordinator's processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Final

from baton.v1 import control_pb2
from benchmarks.coordinator_load.workload import (
    FRONT,
    GRANTED,
    NEW_TOKENS,
    PROMPT_TOKENS,
    TIMELINE,
    BlockCache,
    Prompts,
    make_config,
    make_hello,
)
from cluster.core.config import PoolConfig
from cluster.core.ids import AttemptId, Outcome, WorkerId
from cluster.core.messages import (
    Committed,
    Finished,
    FrontHello,
    LegReleased,
    PrefillDone,
    RequestDone,
    ReserveGranted,
    Submit,
    WorkerMessage,
)
from cluster.wire.channels import make_channel
from cluster.wire.codec import encode_body, encode_front, encode_worker
from cluster.wire.stream_outbox import StreamOutbox
from engine.core.request import RequestBody
from engine.core.sampling import SamplingParams

NUM_RUNNING: Final = 64
END_AFTER_S: Final = 0.005
"""The front hears of an end from the worker itself, a little later than the worker says so to the coordinator."""
BLOCK_EVENTS_INTERVAL_S: Final = 0.05
"""As workers do by default."""
METHOD: Final = "/baton.v1.Coordinator/"


class Peer:
    """One stream of bytes to the coordinator."""

    def __init__(self, address: str, method: str) -> None:
        self.outbox = StreamOutbox[bytes]()
        self._channel = make_channel(address)
        self.call: Any = self._channel.stream_stream(METHOD + method, None, None)(self.outbox.messages())

    async def close(self) -> None:
        self.outbox.close()
        await self._channel.close(None)


class Load:
    """A closed loop: when a request ends, the next one begins."""

    def __init__(self, address: str, coordinator_pid: int, num_workers: int, num_warm: int, num_measured: int) -> None:
        self._address = address
        self._pid = coordinator_pid
        self._num_workers = num_workers
        self._num_left = num_warm + num_measured
        self._measured_at = {num_measured: "begin", 0: "end"}
        self._num_unfinished = self._num_left
        self._marks: dict[str, tuple[float, float]] = {}
        self._prompts = Prompts(0)
        self._hashes: dict[str, bytes] = {}
        self._decode: dict[str, WorkerId] = {}
        self._peers: dict[WorkerId, Peer] = {}
        self._caches: dict[WorkerId, BlockCache] = {}
        self._front = Peer(address, "ConnectFront")
        self._done = asyncio.Event()
        body = RequestBody(
            prompt_ids=tuple(range(1000, 1000 + PROMPT_TOKENS + 1)), sampling=SamplingParams(max_tokens=NEW_TOKENS)
        )
        self._body = encode_body(body)

    async def run(self) -> dict[str, float]:
        with socket.create_server(("127.0.0.1", 0)) as listener:  # the coordinator looks whether workers can be reached
            token_address = f"127.0.0.1:{listener.getsockname()[1]}"
            config = make_config(self._num_workers)
            workers = [(WorkerId(name, 1), pool) for pool in config.pools for name in pool.worker_names]
            tasks = [asyncio.create_task(self._serve(worker, pool, token_address)) for worker, pool in workers]
            tasks.append(asyncio.create_task(self._drain(self._front)))
            self._front.outbox.send(encode_front(FrontHello(front=FRONT, address="h:1")).SerializeToString())
            while len(self._peers) < len(workers):
                await asyncio.sleep(0.01)
            for _ in range(NUM_RUNNING):
                self._begin()
            while not self._done.is_set():
                await asyncio.sleep(BLOCK_EVENTS_INTERVAL_S)
                for worker, cache in self._caches.items():
                    self._say(worker, cache.tell())
            for task in tasks:
                task.cancel()
            for peer in (self._front, *self._peers.values()):
                await peer.close()
        seconds, cpu_s = (end - begin for begin, end in zip(self._marks["begin"], self._marks["end"], strict=True))
        return {"seconds": seconds, "cpu_s": cpu_s}

    def _begin(self) -> None:
        if not self._num_left:
            return
        self._num_left -= 1
        request_id = f"r-{self._num_left}"
        hashes = self._hashes[request_id] = self._prompts.next()
        submit = Submit(
            request_id=request_id, num_prompt_tokens=PROMPT_TOKENS + 1, max_tokens=NEW_TOKENS, block_hashes=hashes
        )
        self._front.outbox.send(encode_front(submit, self._body).SerializeToString())

    def _end(self, request_id: str) -> None:
        done = RequestDone(request_id=request_id, outcome=Outcome.LENGTH, num_output_tokens=NEW_TOKENS)
        self._front.outbox.send(encode_front(done).SerializeToString())
        self._num_unfinished -= 1
        mark = self._measured_at.get(self._num_unfinished)
        if mark is not None:
            self._marks[mark] = time.perf_counter(), _cpu_s(self._pid)
        if not self._num_unfinished:
            self._done.set()
        self._begin()

    async def _drain(self, peer: Peer) -> None:
        async for _ in peer.call:
            pass

    async def _serve(self, worker: WorkerId, pool: PoolConfig, token_address: str) -> None:
        peer = Peer(self._address, "ConnectWorker")
        self._caches[worker] = BlockCache()
        peer.outbox.send(encode_worker(make_hello(worker, pool, token_address)).SerializeToString())
        async for data in peer.call:
            command = control_pb2.Command.FromString(data)
            match command.WhichOneof("command"):
                case "worker_welcome":
                    self._peers[worker] = peer
                case "reserve":
                    attempt = AttemptId(command.reserve.attempt.request_id, command.reserve.attempt.attempt)
                    self._decode[attempt.request_id] = worker
                    granted = ReserveGranted(
                        attempt=attempt,
                        lease_id=command.reserve.lease_id,
                        num_cached_blocks=0,
                        blocks=GRANTED,
                        ttl_ms=10_000,
                    )
                    self._say(worker, granted)
                case "prefill":
                    attempt = AttemptId(command.prefill.attempt.request_id, command.prefill.attempt.attempt)
                    self._work(attempt, worker)

    def _work(self, attempt: AttemptId, prefill: WorkerId) -> None:
        """Both workers' part of a request, in no time."""
        decode, hashes = self._decode.pop(attempt.request_id), self._hashes.pop(attempt.request_id)
        self._caches[prefill].store(hashes)
        self._caches[decode].store(hashes)
        self._say(prefill, PrefillDone(attempt=attempt, outcome=None, timeline=TIMELINE))
        self._say(decode, Committed(attempt=attempt, timeline=TIMELINE))
        self._say(prefill, LegReleased(attempt=attempt))
        self._say(
            decode,
            Finished(attempt=attempt, outcome=Outcome.LENGTH, num_output_tokens=NEW_TOKENS, timeline=TIMELINE),
        )
        asyncio.get_running_loop().call_later(END_AFTER_S, self._end, attempt.request_id)

    def _say(self, worker: WorkerId, message: WorkerMessage) -> None:
        self._peers[worker].outbox.send(encode_worker(message).SerializeToString())


def _cpu_s(pid: int) -> float:
    """What the process has used of its processors, the kernel's part included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="of the coordinator")
    parser.add_argument("--pid", type=int, required=True, help="the coordinator's")
    for name in ("workers", "warm", "measured"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()

    async def run() -> dict[str, float]:
        return await Load(args.address, args.pid, args.workers, args.warm, args.measured).run()

    print(json.dumps(asyncio.run(run())))


if __name__ == "__main__":
    main()
