"""Workers and the coordinator are killed and stopped at random under load: every answer is the undisturbed one, no
request hangs, and nothing is left. Half a minute of it, or as much as BATON_CHAOS_S says (`make soak-chaos`)."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from benchmarks.serving import Client, Trace, cluster_config, serving_cluster
from cluster.core.config import ClusterConfig
from cluster.front.request_spec import RequestLimits
from cluster.live.local_processes import ClusterHandle, LocalProcess
from cluster.live.readiness import wait_until_ready
from cluster.live.replay import find_files, replay_file
from tests.e2e.chaos_faults import HEARTBEAT_TIMEOUT_S, Chaos
from tests.e2e.conftest import DECODE, PREFILL, assert_nothing_left, run
from tests.support.soak import CHAOS_S

SEED: Final = 20
NUM_CLIENTS: Final = 6
NUM_SAMPLED: Final = 6
NUM_SALTS: Final = 3
"""Requests of one salt share what is cached of their prompts, so blocks are pinned and shared, too."""
MAX_TOKENS: Final = 48
MAX_ATTEMPTS: Final = 5
QUEUE_TIMEOUT_S: Final = 90.0
HUNG_S: Final = 120.0
"""Every request has ended by then. (What waits for longer than the queue's limit is refused: no client may see it.)"""
LEAVES: Final = 0.1
"""So many clients go away in the midst of their answers."""
MIN_ANSWERED: Final = 0.95
FEW: Final = 3
"""So many may fail also where few are asked."""
GIVEN_UP_S: Final = RequestLimits().coordinator_lost_ns / 1e9
"""Only a coordinator that has been away for longer may cost a request."""
RETRY_S: Final = 1.0
LOSSES: Final = ("worker_lost: ", "transfer_failed: ")
CONVICTED: Final = "internal: workers died or failed while they computed this request"
JOURNAL: Final = {"file_size": "1MiB", "max_files": 10_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    name: str
    prompt_ids: list[int]
    sampling: dict[str, Any]
    answer: list[int]


@dataclass(slots=True, kw_only=True)
class Asked:
    """One request. `end_s`: None while it has not ended. `error`: what the client saw instead of its end."""

    request_id: str
    question: Question
    trace: Trace
    has_left: bool = False
    end_s: float | None = None
    error: grpc.aio.AioRpcError | None = None

    @property
    def is_answered(self) -> bool:
        return self.end_s is not None and self.error is None and not self.has_left

    @property
    def num_attempts(self) -> int:
        return 0 if self.trace.done is None else self.trace.done.num_attempts


@dataclass(slots=True)
class Crowd:
    """Clients that ask one question after the other."""

    client: Client
    questions: list[Question]
    asked: list[Asked] = field(default_factory=list)

    async def ask(self, number: int, storm: asyncio.Task[None]) -> None:
        """Until the storm is over."""
        source = random.Random(SEED + number)
        count = 0
        while not storm.done():
            count += 1
            await self._ask_once(f"chaos-{number}-{count}", source)

    async def _ask_once(self, request_id: str, source: random.Random) -> None:
        question = source.choice(self.questions)
        salt = str(source.choice([*range(NUM_SALTS), source.random()]))
        leave_after = source.randrange(len(question.answer)) if source.random() < LEAVES else None
        asked = Asked(request_id=request_id, question=question, trace=Trace(sent_s=time.monotonic()))
        self.asked.append(asked)
        call = asyncio.create_task(
            self.client.generate(
                question.prompt_ids, trace=asked.trace, request_id=request_id, cache_salt=salt, **question.sampling
            )
        )
        watch = None if leave_after is None else asyncio.create_task(_leave(call, asked, leave_after))
        try:
            async with asyncio.timeout(HUNG_S):
                await call
        except grpc.aio.AioRpcError as error:
            asked.error = error
            await asyncio.sleep(RETRY_S)
        except TimeoutError:
            return  # It hangs: `end_s` stays None.
        except asyncio.CancelledError:
            if not asked.has_left:
                raise
        finally:
            if watch is not None:
                watch.cancel()
        asked.end_s = time.monotonic()


async def _leave(call: asyncio.Task[Trace], asked: Asked, num_tokens: int) -> None:
    """The client goes away once it has so many tokens."""
    while len(asked.trace.token_ids) < num_tokens:
        await asyncio.sleep(0.01)
    if not call.done():
        asked.has_left = call.cancel()


def _config(journal: Path) -> ClusterConfig:
    pools = [{**PREFILL, "replicas": 2, "kv_memory": "256MiB"}, {**DECODE, "replicas": 2, "kv_memory": "256MiB"}]
    coordinator = {
        "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
        "max_attempts": MAX_ATTEMPTS,
        "queue_timeout_s": QUEUE_TIMEOUT_S,
        "fetch_prefixes": True,
    }
    return cluster_config(
        pools,
        dtype="float32",
        model={"max_model_tokens": 512},
        coordinator=coordinator,
        journal={**JOURNAL, "directory": str(journal)},
    )


async def _questions(client: Client, reference: dict[str, Any]) -> list[Question]:
    """Greedy ones, whose answers another implementation gives; some with sampling, which the calm cluster answers."""
    entries = [entry for entry in reference["prompts"] if len(entry["prompt_ids"]) <= 257]
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS}
    questions = [
        Question(
            name=entry["name"],
            prompt_ids=entry["prompt_ids"],
            sampling=greedy,
            answer=entry["output_ids"][:MAX_TOKENS],
        )
        for entry in entries
    ]
    for number, entry in enumerate(random.Random(SEED).sample(entries, NUM_SAMPLED)):
        sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": number, "max_tokens": MAX_TOKENS}
        trace = await client.generate(entry["prompt_ids"], cache_salt="calm", **sampling)
        name = f"{entry['name']} sampled by seed {number}"
        questions.append(Question(name=name, prompt_ids=entry["prompt_ids"], sampling=sampling, answer=trace.token_ids))
    return questions


@pytest.mark.timeout(CHAOS_S + 600)
def test_killed_and_stopped_processes_under_load(reference: dict[str, Any], tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with serving_cluster(_config(journal)) as cluster, _kept_logs(cluster, tmp_path / "logs"):

        async def storm(client: Client) -> tuple[Chaos, list[Asked]]:
            crowd = Crowd(client, await _questions(client, reference))
            chaos = Chaos(cluster, random.Random(SEED))
            async with asyncio.TaskGroup() as group:
                keeper = group.create_task(chaos.keep())
                faults = group.create_task(
                    chaos.storm(time.monotonic() + CHAOS_S, lambda: _has_hit(chaos, crowd.asked))
                )
                await asyncio.gather(*(crowd.ask(number, faults) for number in range(NUM_CLIENTS)))
                await asyncio.to_thread(wait_until_ready, cluster.address, cluster.plan)
                keeper.cancel()
            return chaos, crowd.asked

        chaos, asked = run(cluster, storm)
        _report(chaos, asked)
        _check_no_request_hung(asked, journal)
        assert_nothing_left(cluster)
        _check_logs([*chaos.lives, *cluster.processes()])
    _check_answers(chaos, asked)
    _check_lives(chaos)
    _check_journal(chaos, journal)


# ---- what is looked at ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _kept_logs(cluster: ClusterHandle, folder: Path) -> Iterator[None]:
    """Where something fails, the processes' logs are there to be read."""
    try:
        yield
    except BaseException:
        shutil.copytree(cluster.folder, folder)
        print(f"logs are in {folder}")
        raise


def _report(chaos: Chaos, asked: list[Asked]) -> None:
    answered = [one for one in asked if one.is_answered]
    attempts = Counter(one.num_attempts for one in answered)
    outages_s = sorted(end_s - begin_s for begin_s, end_s in chaos.outages)
    ended_s = [one.end_s - one.trace.sent_s for one in asked if one.end_s is not None]
    cut_off = [one for one in asked if _is_cut_off(chaos, one)]
    failed = [one for one in asked if one.error is not None and not _is_cut_off(chaos, one)]
    print(
        f"\n{len(asked)} requests: {len(answered)} answers, {sum(one.has_left for one in asked)} clients that left, "
        f"{len(cut_off)} cut off by their front's end, {len(failed)} errors; the longest took {max(ended_s):.1f} s"
        f"\nanswers by attempts: {dict(sorted(attempts.items()))}; "
        f"{sum(_spans_outage(chaos, one) for one in answered)} of them begun before and ended after the end of a "
        "coordinator"
        f"\n{len(chaos.faults)} faults: {dict(Counter(fault.kind for fault in chaos.faults))}"
        f"\nlives of workers that ended: {dict(chaos.num_restarts)}; coordinators: {chaos.num_coordinators}, "
        f"without one for {', '.join(f'{outage_s:.1f}' for outage_s in outages_s)} s"
    )
    for one in failed:
        assert one.error is not None
        print(f"{one.request_id}, {one.num_attempts} attempts: {one.error.code().name}: {one.error.details()}")


def _spans_outage(chaos: Chaos, one: Asked) -> bool:
    """Whether a coordinator ended in the midst of the answer."""
    arrivals_s = one.trace.arrivals_s
    return bool(arrivals_s) and any(arrivals_s[0] < begin_s < arrivals_s[-1] for begin_s, _ in chaos.outages)


def _has_hit(chaos: Chaos, asked: list[Asked]) -> bool:
    """Whether an answer went on after its worker's end, and one beyond a coordinator's."""
    answered = [one for one in asked if one.is_answered]
    return any(one.num_attempts > 1 for one in answered) and any(_spans_outage(chaos, one) for one in answered)


def _overlaps(one: Asked, begin_s: float, end_s: float) -> bool:
    return one.end_s is not None and begin_s < one.end_s and end_s > one.trace.sent_s


def _is_cut_off(chaos: Chaos, one: Asked) -> bool:
    """Whether its front was killed, or not there yet."""
    is_unavailable = one.error is not None and one.error.code() is grpc.StatusCode.UNAVAILABLE
    return is_unavailable and any(_overlaps(one, *outage) for outage in chaos.front_outages)


def _check_no_request_hung(asked: list[Asked], journal: Path) -> None:
    hung = [one for one in asked if one.end_s is None]
    for one in hung:
        print(f"{one.request_id} hangs after {len(one.trace.token_ids)} tokens. Its story:")
        for path in find_files(journal):
            replay_file(path, request_id=one.request_id, tell=lambda line: print(f"   {line.wall_ns} {line.what}"))
    assert not hung, f"not ended after {HUNG_S:g} s: {', '.join(one.request_id for one in hung)}"


def _check_logs(processes: list[LocalProcess]) -> None:
    """Nobody has met what should not be: those that were killed said nothing at all at their ends."""
    for process in processes:
        log = process.log()
        assert "Traceback" not in log, f"{process.stderr_path.name}: {log[log.index('Traceback') - 500 :]}"


def _check_answers(chaos: Chaos, asked: list[Asked]) -> None:
    for one in asked:
        tokens, answer = one.trace.token_ids, one.question.answer
        assert tokens == answer[: len(tokens)], f"{one.request_id}: {one.question.name}"
        assert one.trace.positions == list(range(len(tokens))), one.request_id
        assert not one.is_answered or tokens == answer, f"{one.request_id} has {len(tokens)} of {len(answer)} tokens"
        if one.error is not None:
            _check_error(chaos, one, one.error)
    answered = [one for one in asked if one.is_answered]
    asked_to_the_end = [one for one in asked if not one.has_left and not _is_cut_off(chaos, one)]
    assert len(asked_to_the_end) - len(answered) <= max(FEW, len(asked_to_the_end) * (1 - MIN_ANSWERED))
    num_convicted = sum(one.error is not None and one.error.code() is grpc.StatusCode.INTERNAL for one in asked)
    assert num_convicted <= chaos.num_restarts.total(), "a worker that ends convicts at most one request"
    assert _has_hit(chaos, asked), "no worker ended under an answer, or no coordinator in its midst"


def _check_error(chaos: Chaos, one: Asked, error: grpc.aio.AioRpcError) -> None:
    """Only what the documentation says that clients may see, and only where what it says of it was the case."""
    code, details = error.code(), error.details() or ""
    shown = f"{one.request_id}, after {one.num_attempts} attempts: {code.name}: {details}"
    assert one.end_s is not None
    if code is grpc.StatusCode.ABORTED:
        assert details.startswith(LOSSES) and one.num_attempts >= MAX_ATTEMPTS, shown
    elif code is grpc.StatusCode.INTERNAL:
        # Two workers in turn that ended while they tried it look like its own work (decision 12).
        assert details.startswith(CONVICTED) and one.num_attempts >= 2, shown
    else:
        assert code is grpc.StatusCode.UNAVAILABLE, shown
        if _is_cut_off(chaos, one):
            return
        away_s = max((end_s - begin_s for begin_s, end_s in chaos.outages if _overlaps(one, begin_s, end_s)), default=0)
        assert away_s >= GIVEN_UP_S, f"{shown}, with the coordinator away for {away_s:.1f} s"


def _check_lives(chaos: Chaos) -> None:
    assert chaos.epochs == sorted(set(chaos.epochs)), chaos.epochs
    assert 2 <= len(chaos.epochs) <= chaos.num_coordinators
    assert chaos.num_restarts, "no worker has ended"


def _check_journal(chaos: Chaos, journal: Path) -> None:
    """Each life of the coordinator has decided just what its events make one decide again."""
    num_events: Counter[int] = Counter()
    for path in find_files(journal):
        report = replay_file(path)
        assert report.difference is None, report.difference
        num_events[report.header.epoch] += report.num_events
    print(f"{num_events.total()} events of {len(num_events)} coordinators replayed")
    assert len(num_events) == chaos.num_coordinators, "a life of the coordinator has no journal"
