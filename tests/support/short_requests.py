"""Many short requests through one worker and a real (tiny, random) model, and what they leave behind in memory.

`python -m tests.support.short_requests MODEL_DIR NUM_REQUESTS` runs them in a process of its own and prints a Report as
JSON: in a process that has done other things, what leaks may fit into memory that was freed before.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psutil
import torch

from cluster.agent import effects as fx
from cluster.agent import events as ev
from cluster.agent.limits import AgentLimits
from cluster.agent.state import WorkerState
from cluster.core.commands import CancelLeg, Command, CommandBody, RunLocal, WorkerWelcome
from cluster.core.ids import AttemptId, FrontId, Outcome, Role, WorkerId
from cluster.core.limits import NS_PER_MS
from cluster.core.messages import BlockEvents, Heartbeat
from cluster.core.token_messages import Forget, Watch
from engine.core.request import RequestBody
from engine.core.sampling import SamplingParams
from engine.runner import Runner
from kv_transfer.protocol.limits import PushLimits
from tests.support.worker_pair import worker_config

NUM_BLOCKS = 26
BLOCK_SIZE = 4
"""As tests.support.worker_pair has it, whose configuration is used."""
NUM_AT_ONCE = 12
NUM_REMEMBERED = 8
"""Ended or cancelled attempts that are remembered, so that the limit is reached while the worker warms up."""
STEP_NS = NS_PER_MS
FRONT = FrontId("front", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Of a worker at rest.

    Attributes:
        num_requests: so many have passed through it.
        rss_bytes: of the process. num_objects: that Python's collector knows.
        held: what is kept for requests, by its kind. num_indexed_blocks, num_pending_changes: of the prefix cache.
        sizes: of every container that can be reached from the worker's state and its runner, by where it is.
    """

    num_requests: int
    rss_bytes: int
    num_objects: int
    held: dict[str, int]
    num_indexed_blocks: int
    num_pending_changes: int
    sizes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Readings in order, and proof that there was something to leave behind."""

    readings: list[Reading]
    num_tokens: int
    num_cancelled: int
    num_preempted: int
    num_evicted_blocks: int
    num_hit_tokens: int
    num_block_events: int


class ShortRequests:
    """Feeds a WorkerState as its process does, keeping NUM_AT_ONCE requests in it."""

    def __init__(self, model_dir: Path, seed: int = 0) -> None:
        config = worker_config(
            WorkerId("d", 1),
            Role.DECODE,
            num_blocks=NUM_BLOCKS,
            limits=AgentLimits(max_cancelled_attempts=NUM_REMEMBERED),
        )
        config = dataclasses.replace(config, push_limits=PushLimits(max_tombstones=NUM_REMEMBERED))
        self.runner = Runner.from_directory(model_dir, "float32", NUM_BLOCKS, BLOCK_SIZE, 1)
        self.now_ns = 0
        self.state = WorkerState(config, self.now_ns)
        self.num_done = self.num_tokens = self.num_cancelled = self.num_preempted = self.num_block_events = 0
        self._worker = config.hello.ref.worker
        self._random = Random(seed)
        self._prefixes = [self._random.choices(range(3, 90), k=16) for _ in range(4)]
        self._num_submitted = 0
        self._live: dict[str, int | None] = {}  # tokens after which its client leaves, if it does
        self._effects: deque[fx.Effect] = deque()
        self._handle(ev.CoordinatorConnected())
        self._command(WorkerWelcome(heartbeat_ms=20))
        self._handle(ev.FrontConnected(front=FRONT))

    def run(self, num_requests: int) -> None:
        """So many more, and then until nothing is left of them."""
        last = self._num_submitted + num_requests
        while self._live or self._num_submitted < last:
            while len(self._live) < NUM_AT_ONCE and self._num_submitted < last:
                self._submit()
            self._carry_out()
        self.state.check_invariants()

    def read(self) -> Reading:
        self.now_ns += 10**12  # whatever is kept for a time goes
        self._handle(ev.Tick())
        self._carry_out()
        gc.collect()
        return Reading(
            num_requests=self.num_done,
            rss_bytes=psutil.Process().memory_info().rss,
            num_objects=len(gc.get_objects()),
            held=self._held(),
            num_indexed_blocks=self.state.pool.num_indexed,
            num_pending_changes=self.state.pool.num_pending_changes,
            sizes=dict(container_sizes({"state": self.state, "runner": self.runner})),
        )

    def _held(self) -> dict[str, int]:
        counts = self.state.pool.counts()
        return {
            "legs": self.state.num_legs(),
            "token records": self.state.num_token_records(),
            "early watches": self.state.num_early_watches(),
            "blocks": counts.active + counts.reserved + counts.quarantined,
        }

    def _submit(self) -> None:
        random = self._random
        name = f"r{self._num_submitted}"
        self._num_submitted += 1
        prompt = random.choice(self._prefixes)[: random.randint(0, 16)] + random.choices(range(3, 90), k=8)
        sampling = SamplingParams(
            max_tokens=random.randint(1, 12),
            temperature=random.choice([0.0, 0.8]),
            seed=random.randrange(2**32),
            repetition_penalty=random.choice([1.0, 1.1]),
            logprobs=random.choice([None, 2]),
            stop_token_ids=(random.randrange(90),),
        )
        body = RequestBody(prompt_ids=tuple(prompt), sampling=sampling, cache_salt=random.choice(["", "", "tenant"]))
        self._live[name] = random.randint(0, 3) if random.random() < 0.05 else None
        attempt = AttemptId(name, 1)
        self._handle(ev.TokenRequestReceived(front=FRONT, request=Watch(attempt=attempt, choice=0, next_position=0)))
        self._command(RunLocal(attempt=attempt), body)

    def _command(self, content: CommandBody, body: RequestBody | None = None) -> None:
        command = Command(epoch=1, worker=self._worker, body=content)
        self._handle(ev.CommandReceived(command=command, body=body))

    def _handle(self, event: ev.Event) -> None:
        self._effects.extend(self.state.handle(self.now_ns, event))

    def _carry_out(self) -> None:
        """Until the engine has run what it was given and nobody has anything more to say."""
        while self._effects:
            match self._effects.popleft():
                case fx.RunStep(plan=plan):
                    result = self.runner.run(plan)
                    self.now_ns += STEP_NS
                    self._handle(ev.StepDone(result=result, duration_ns=STEP_NS))
                    deadline_ns = self.state.next_deadline_ns()
                    if deadline_ns is not None and deadline_ns <= self.now_ns:
                        self._handle(ev.Tick())
                case fx.SendRuns(runs=runs):
                    self._handle(ev.RunsWritten(front=FRONT))
                    for run in runs:
                        self.num_tokens += len(run.tokens)
                        if run.timeline is not None:
                            self.num_preempted += run.timeline.num_preemptions
                        self._read_tokens(run.attempt, run.position + len(run.tokens), run.finish)
                case fx.ToCoordinator(message=message):
                    self.num_block_events += isinstance(message, BlockEvents)
                    assert not isinstance(message, Heartbeat) or len(message.leases) == 0
                case effect:
                    raise AssertionError(f"not expected: {effect}")

    def _read_tokens(self, attempt: AttemptId, num_tokens: int, finish: Outcome | None) -> None:
        name = attempt.request_id
        if name not in self._live:
            return
        leaves_after = self._live[name]
        if leaves_after is not None and num_tokens >= leaves_after and finish is None:
            self.num_cancelled += 1
            self._command(CancelLeg(attempt=attempt, reason="the client left"))
        elif finish is None:
            return
        del self._live[name]
        self.num_done += 1
        self._handle(ev.TokenRequestReceived(front=FRONT, request=Forget(attempt=attempt)))


def container_sizes(roots: dict[str, object]) -> Iterator[tuple[str, int]]:
    """Lengths of all dicts, lists, sets, deques and tuples under the roots, through Baton's own objects, by path."""
    waiting: list[tuple[str, Any]] = list(roots.items())
    seen: set[int] = set()
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict | list | set | frozenset | deque | tuple):
            yield path, len(value)
            items = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
            waiting += [(f"{path}[]", item) for item in items]
        elif type(value).__module__.partition(".")[0] in ("cluster", "engine", "kv_transfer"):
            waiting += [(f"{path}.{name}", part) for name, part in _parts(value)]


def _parts(value: object) -> Iterator[tuple[str, object]]:
    for name in getattr(value, "__dict__", {}):
        yield name, getattr(value, name)
    for cls in type(value).__mro__:
        for name in getattr(cls, "__slots__", ()):
            if hasattr(value, name):
                yield name, getattr(value, name)


def measure(model_dir: Path, num_requests: int, num_readings: int = 4) -> Report:
    """Reads after each of `num_readings` equal parts; the first part is the warm-up."""
    requests = ShortRequests(model_dir)
    readings = []
    for _ in range(num_readings):
        requests.run(num_requests // num_readings)
        readings.append(requests.read())
    prefix = requests.state.pool.prefix_counters()
    return Report(
        readings=readings,
        num_tokens=requests.num_tokens,
        num_cancelled=requests.num_cancelled,
        num_preempted=requests.num_preempted,
        num_evicted_blocks=prefix.num_evicted_blocks,
        num_hit_tokens=prefix.num_hit_tokens,
        num_block_events=requests.num_block_events,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(dataclasses.asdict(measure(Path(sys.argv[1]), int(sys.argv[2])))))
