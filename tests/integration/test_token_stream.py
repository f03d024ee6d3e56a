"""The token stream between a real front's end and a real worker's, in one event loop."""

from __future__ import annotations

import asyncio

from baton.v1 import tokens_pb2_grpc
from cluster.agent import events as ev
from cluster.agent.token_server import TokenService
from cluster.core.ids import AttemptId, FrontId, WorkerId
from cluster.core.messages import WorkerRef
from cluster.core.token_messages import TokenBatch, TokenInfo, TokenRun, Watch
from cluster.front.worker_streams import WorkerStreams
from cluster.wire.channels import LOOPBACK, bind, make_server

TIMEOUT_S = 10.0
WORKER = WorkerId("d", 1)
WATCH = Watch(attempt=AttemptId("r", 1), choice=0, next_position=0)
RUN = TokenRun(attempt=WATCH.attempt, choice=0, position=0, tokens=(TokenInfo(token_id=7),))


class Worker:
    """WorkerState's part: takes fronts in, or refuses them, and answers a watch with a token."""

    def __init__(self, *, takes_fronts: bool) -> None:
        self.service = TokenService(WORKER, self.post)
        self.takes_fronts = takes_fronts
        self.num_fronts = 0

    def post(self, event: ev.Event) -> None:
        match event:
            case ev.FrontConnected(front=front):
                if self.takes_fronts:
                    self.num_fronts += 1
                else:
                    self.service.refuse(front)
            case ev.FrontDisconnected():
                self.num_fronts -= 1
            case ev.TokenRequestReceived(front=front):
                self.service.send(front, (RUN,))


class Listener:
    """The requests' part: watches as soon as the worker is there."""

    def __init__(self) -> None:
        self.streams = WorkerStreams(FrontId("f", 1), self)
        self.heard: list[str] = []
        self.news = asyncio.Event()

    def is_watching(self, worker: WorkerId) -> bool:
        return True

    def worker_restored(self, worker: WorkerId) -> None:
        self._note("restored")

    def worker_lost(self, worker: WorkerId, reason: str) -> None:
        self._note(f"lost: {reason}")

    def tokens_came(self, batch: TokenBatch) -> None:
        self._note(f"token {batch.runs[0].tokens[0].token_id}")

    def _note(self, what: str) -> None:
        self.heard.append(what)
        self.news.set()

    async def hear(self, num: int) -> list[str]:
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.heard) < num:
                self.news.clear()
                await self.news.wait()
        return self.heard[:num]


async def talk(worker: Worker, num: int) -> list[str]:
    server = make_server()
    address = f"{LOOPBACK}:{bind(server, LOOPBACK)}"
    tokens_pb2_grpc.add_TokensServicer_to_server(worker.service, server)
    await server.start()
    listener = Listener()
    ref = WorkerRef(worker=WORKER, token_address=address)
    try:
        listener.streams.watch(ref, WATCH)
        await listener.hear(1)
        listener.streams.watch(ref, WATCH)
        return await listener.hear(num)
    finally:
        await listener.streams.close()
        await server.stop(None)


def test_a_front_that_is_taken_in_gets_its_tokens() -> None:
    worker = Worker(takes_fronts=True)
    assert asyncio.run(talk(worker, 2)) == ["restored", "token 7"]
    assert worker.num_fronts == 0


def test_a_front_that_is_refused_never_takes_the_worker_for_reachable() -> None:
    """It would wait for tokens for ever; as it is, its requests learn that the worker is out of reach."""
    heard = asyncio.run(talk(Worker(takes_fronts=False), 3))
    assert heard == ["lost: d#1 serves too many fronts already"] * 3
