"""What happens to the processes of a cluster in a chaos run: who is killed and stopped, and what is seen of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc

from cluster.agent.exit_status import EXIT_AGAIN
from cluster.core.errors import StartupError
from cluster.live.local_processes import ClusterHandle, LocalProcess
from tests.e2e.conftest import status

HEARTBEAT_TIMEOUT_S = 3.0
LONG_PAUSE_S = HEARTBEAT_TIMEOUT_S + 1.0
"""A worker is given up in it, and must do no harm when it wakes. A coordinator gives nobody up whom it did not hear."""
SHORT_PAUSE_S = 1.0
"""Everybody lives on after it."""
VERY_LONG_PAUSE_S = 12.0
"""Of a coordinator: longer than fronts may take to answer a failed attempt."""
CALM_S = (1.0, 3.0)
"""Between two faults."""
MAX_LONGER_S = 120.0
"""On a busy machine few requests run in the short share, and faults may miss them all."""
KEEP_POLL_S = 0.1
POLL_S = 0.05
LOG_CHARACTERS = 2000
TAKE_OVER_TIMEOUT_S = 60.0
"""A new life serves within this, on a machine that is busy with the load and with workers that start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """From its first moment to when all that it stopped runs again, in monotonic seconds."""

    kind: str
    target: str
    begin_s: float
    end_s: float


@dataclass(slots=True)
class Chaos:
    """Kills and stops workers, the coordinator and the front. Whoever is dead is started again at once, as Ray would.

    Attributes:
        faults: in their order. outages: each time without a coordinator, until its next life had a front.
        front_outages: each time without a front.
        epochs: of the coordinator's lives, less those that were ended before they had a front. num_coordinators: all.
        lives: processes that have ended, with their logs to be looked through. num_restarts: of workers, by name.
    """

    cluster: ClusterHandle
    source: random.Random
    faults: list[Fault] = field(default_factory=list)
    outages: list[tuple[float, float]] = field(default_factory=list)
    front_outages: list[tuple[float, float]] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    num_coordinators: int = 1
    lives: list[LocalProcess] = field(default_factory=list)
    num_restarts: Counter[str] = field(default_factory=Counter)

    async def storm(self, end_s: float, has_hit: Callable[[], bool]) -> None:
        """Until then, and through the whole first deck: a fault, some seconds of calm, the next one.

        `has_hit`: whether faults have struck running requests. It goes on for that, but for MAX_LONGER_S at most.
        """
        self.epochs.append(await asyncio.to_thread(self._epoch))
        deck = self._deck(is_first=True)
        num_in_first = len(deck)
        while (
            len(self.faults) < num_in_first
            or time.monotonic() < end_s
            or (time.monotonic() < end_s + MAX_LONGER_S and not has_hit())
        ):
            await asyncio.sleep(self.source.uniform(*CALM_S))
            deck = deck or self._deck(is_first=False)
            begin_s, fault = time.monotonic(), deck.pop()
            target = await fault()
            kind = fault.__name__.replace("_", " ")
            self.faults.append(Fault(kind=kind, target=target, begin_s=begin_s, end_s=time.monotonic()))

    async def keep(self) -> None:
        """Until cancelled: starts workers again that have ended, whoever ended them."""
        while True:
            for name, worker in tuple(self.cluster.workers.items()):
                if worker.is_alive:
                    with contextlib.suppress(StartupError):  # It is started again, as below.
                        worker.poll_ready()
                elif worker.popen.returncode != EXIT_AGAIN:
                    self.lives.append(worker)
                    self.num_restarts[name] += 1
                    self.cluster.start_worker(name)
            for front in self.cluster.fronts.values():
                assert front.is_alive, f"{front.name} has ended by itself: {front.log()[-LOG_CHARACTERS:]}"
            await asyncio.sleep(KEEP_POLL_S)

    # ---- the faults: each returns whom it hit, once all that it stopped runs again ----

    def _deck(self, *, is_first: bool) -> list[Callable[[], Coroutine[Any, Any, str]]]:
        deck = [
            *(2 * [self.kill_worker]),
            self.stop_worker_until_given_up,
            self.stop_worker_briefly,
            self.kill_coordinator,
            self.stop_coordinator_briefly,
            self.stop_coordinator,
            self.kill_coordinator_while_a_worker_is_stopped,
        ]
        if not is_first:
            deck += [self.kill_two_workers, self.kill_coordinator_and_a_worker, self.kill_coordinator_twice]
            deck += [self.stop_coordinator_for_long, self.kill_front, self.stop_front]
        self.source.shuffle(deck)
        return deck

    async def kill_worker(self) -> str:
        worker = await self._some_worker()
        await asyncio.to_thread(worker.kill)
        return worker.name

    async def kill_two_workers(self) -> str:
        return f"{await self.kill_worker()} and {await self.kill_worker()}"

    async def stop_worker_until_given_up(self) -> str:
        return await self._stop(await self._some_worker(), LONG_PAUSE_S)

    async def stop_worker_briefly(self) -> str:
        return await self._stop(await self._some_worker(), SHORT_PAUSE_S)

    async def stop_coordinator_briefly(self) -> str:
        return await self._stop(self._coordinator(), SHORT_PAUSE_S)

    async def stop_coordinator(self) -> str:
        return await self._stop(self._coordinator(), LONG_PAUSE_S)

    async def stop_coordinator_for_long(self) -> str:
        return await self._stop(self._coordinator(), VERY_LONG_PAUSE_S)

    async def stop_front(self) -> str:
        return await self._stop(self._front(), LONG_PAUSE_S)

    async def kill_front(self) -> str:
        """Its clients see it at once, and come again. Nothing of what it had asked for may stay."""
        begin_s, former = time.monotonic(), self._front()
        former.kill()
        self.lives.append(former)
        front = self.cluster.start_front(former.name)
        async with asyncio.timeout(TAKE_OVER_TIMEOUT_S):
            while not front.poll_ready() or await asyncio.to_thread(self._epoch) == 0:
                await asyncio.sleep(POLL_S)
        self.front_outages.append((begin_s, time.monotonic()))
        return front.name

    async def kill_coordinator(self) -> str:
        begin_s = time.monotonic()
        async with asyncio.timeout(TAKE_OVER_TIMEOUT_S):
            await self._restart_coordinator()
            await self._taken_over(begin_s)
        return f"epoch {self.epochs[-2]}"

    async def kill_coordinator_twice(self) -> str:
        """The next life ends as soon as it serves, while it is still being told what there is."""
        begin_s = time.monotonic()
        async with asyncio.timeout(TAKE_OVER_TIMEOUT_S):
            await self._restart_coordinator()
            await asyncio.sleep(self.source.uniform(0.0, SHORT_PAUSE_S))
            await self._restart_coordinator()
            await self._taken_over(begin_s)
        return f"epoch {self.epochs[-2]} and the next"

    async def kill_coordinator_while_a_worker_is_stopped(self) -> str:
        """The next life hears of the worker late, or not at all."""
        worker = await self._some_worker()
        worker.pause()
        try:
            ended = await self.kill_coordinator()
        finally:
            worker.resume()
        return f"{ended}, {worker.name}"

    async def kill_coordinator_and_a_worker(self) -> str:
        """What the worker had is announced by fronts, and by its peers, and never by itself."""
        worker = await self._some_worker()
        await asyncio.to_thread(worker.kill)
        return f"{await self.kill_coordinator()}, {worker.name}"

    # ---- inside ----

    def _coordinator(self) -> LocalProcess:
        coordinator = self.cluster.coordinator
        assert coordinator is not None and coordinator.is_alive, "the coordinator has ended by itself"
        return coordinator

    def _front(self) -> LocalProcess:
        return self.source.choice(sorted(self.cluster.fronts.values(), key=lambda front: front.name))

    async def _some_worker(self) -> LocalProcess:
        """One that serves; waits until there is one."""
        while True:
            serving = [worker for worker in self.cluster.workers.values() if worker.is_alive and worker.address]
            if serving:
                return self.source.choice(sorted(serving, key=lambda worker: worker.name))
            await asyncio.sleep(KEEP_POLL_S)

    async def _stop(self, process: LocalProcess, pause_s: float) -> str:
        process.pause()
        try:
            await asyncio.sleep(pause_s)
        finally:
            process.resume()
        return process.name

    async def _restart_coordinator(self) -> None:
        """Kills the coordinator; returns once its next life serves at the same address."""
        former = self._coordinator()
        await asyncio.to_thread(former.kill)
        self.lives.append(former)
        coordinator = self.cluster.start_coordinator()
        self.num_coordinators += 1
        while not coordinator.poll_ready():
            await asyncio.sleep(POLL_S)
        assert coordinator.address == self.cluster.coordinator_address, "it serves elsewhere"

    async def _taken_over(self, begin_s: float) -> None:
        """Returns once the front has a coordinator again, whose epoch is higher. `begin_s`: since when it had none."""
        while (epoch := await asyncio.to_thread(self._epoch)) <= self.epochs[-1]:
            assert not epoch, f"epoch {epoch} after {self.epochs[-1]}"
            await asyncio.sleep(POLL_S)
        self.epochs.append(epoch)
        self.outages.append((begin_s, time.monotonic()))

    def _epoch(self) -> int:
        """Of the coordinator that has the front; 0 while there is none."""
        try:
            answer = status(self.cluster.address)
        except grpc.RpcError:
            return 0
        return answer.epoch if answer.num_fronts else 0
