"""What a request costs the coordinator: CPU time from arrival to end, journal on, with few workers and with many.

The life of a request is that of the events that the state machine handles (EVENTS below). Prompts have 2,048 tokens,
half of them begin like others, and both workers report the prompt's blocks as stored and as many as evicted, as workers
with full pools do. Requests overlap: a worker has several at a time. Both sizes of cluster take turns; the figures are
those of the best round, since whatever else runs on the machine can only add to them. Memory is what Python holds for
requests that are being decoded, less what it held without them and less the prompts' hashes, which the front hands in.
"""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

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
    make_load,
)
from benchmarks.report import Report, Result, arguments, at_least, at_most, finish
from cluster.core.commands import Prefill, Reserve
from cluster.core.effects import Effect, ToWorker
from cluster.core.events import Event, FromFront, FromWorker
from cluster.core.ids import Outcome, WorkerId
from cluster.core.messages import (
    Committed,
    Finished,
    FrontHello,
    Heartbeat,
    LegReleased,
    PrefillDone,
    RequestDone,
    ReserveGranted,
    Submit,
)
from cluster.core.state import ClusterState
from cluster.live.config_file import render_cluster_config
from cluster.live.coordinator import GC_THRESHOLDS
from cluster.live.journal import Journal, JournalSettings

EVENTS: Final = (
    "Submit",
    "ReserveGranted",
    "BlockEvents of prefill",
    "PrefillDone",
    "Committed",
    "LegReleased of prefill",
    "BlockEvents of decode",
    "Finished",
    "RequestDone",
)
FEW, MANY = 10, 1000
RUNNING_PER_WORKER: Final = 2
REQUEST_NS: Final = 1_000_000
"""Of the cluster's time, from one request to the next."""
NUM_REQUESTS, NUM_QUICK_REQUESTS = 2000, 300
NUM_ROUNDS, NUM_QUICK_ROUNDS = 5, 2
MAX_CPU_US: Final = 200.0
MAX_GROWTH: Final = 1.3
MIN_REQUESTS_PER_S: Final = 3000.0
MIN_LIVE_REQUESTS_PER_S: Final = 800.0
MAX_REQUEST_BYTES: Final = 10_000.0
NUM_LIVE_ROUNDS: Final = 3
LIVE_TIMEOUT_S: Final = 300.0


def _clock_ns() -> int:
    """What reading the clock adds to each event's time: it is a system call."""
    started_ns = [time.thread_time_ns() for _ in range(1000)]
    return min(after - before for before, after in itertools.pairwise(started_ns))


CLOCK_NS: Final = _clock_ns()


@dataclass(slots=True, kw_only=True)
class Cluster:
    """A coordinator's state with its journal, among workers and a front that the script plays."""

    state: ClusterState
    journal: Journal | None
    now_ns: int = 10**9
    cpu_ns: int = 0
    num_events: int = 0
    caches: dict[WorkerId, BlockCache] = field(default_factory=dict)

    def handle(self, event: Event) -> list[Effect]:
        """What is measured: the decision, and writing it down."""
        started_ns = time.thread_time_ns()
        effects = self.state.handle(self.now_ns, event)
        if self.journal is not None:
            self.journal.write(self.now_ns, event, effects)
        self.cpu_ns += time.thread_time_ns() - started_ns - CLOCK_NS
        self.num_events += 1
        return effects


def make_cluster(num_workers: int, journal_dir: Path | None) -> Cluster:
    config = make_config(num_workers)
    state = ClusterState(config, epoch=1)
    journal = None
    if journal_dir is not None:
        settings = JournalSettings(directory=journal_dir, file_size_bytes=2**30, max_files=1, release="bench")
        journal = Journal(settings, state, 1, lambda: 0)
    cluster = Cluster(state=state, journal=journal)
    cluster.handle(FromFront(front=FRONT, message=FrontHello(front=FRONT, address="h:1")))
    workers = [(WorkerId(name, 1), pool) for pool in config.pools for name in pool.worker_names]
    for worker, pool in workers:
        cluster.handle(FromWorker(worker=worker, message=make_hello(worker, pool, f"{worker.name}:1")))
        cluster.caches[worker] = BlockCache()
    for worker, _ in workers:
        cluster.handle(FromWorker(worker=worker, message=Heartbeat(load=make_load())))
    return cluster


def _life(cluster: Cluster, request_id: str, hashes: bytes) -> Iterator[None]:
    """Goes on by one event at a time."""
    submit = Submit(
        request_id=request_id, num_prompt_tokens=PROMPT_TOKENS + 1, max_tokens=NEW_TOKENS, block_hashes=hashes
    )
    effects = cluster.handle(FromFront(front=FRONT, message=submit))
    reserve_to, reserve = _command(effects, Reserve)
    yield
    grant = ReserveGranted(
        attempt=reserve.attempt, lease_id=reserve.lease_id, num_cached_blocks=0, blocks=GRANTED, ttl_ms=10_000
    )
    prefill_to = _command(cluster.handle(FromWorker(worker=reserve_to, message=grant)), Prefill)[0]
    attempt = reserve.attempt
    del submit, effects, reserve, grant  # what is left is the coordinator's
    yield
    for event in (
        _stored(cluster, prefill_to, hashes),
        FromWorker(worker=prefill_to, message=PrefillDone(attempt=attempt, outcome=None, timeline=TIMELINE)),
        FromWorker(worker=reserve_to, message=Committed(attempt=attempt, timeline=TIMELINE)),
        FromWorker(worker=prefill_to, message=LegReleased(attempt=attempt)),
        _stored(cluster, reserve_to, hashes),
    ):
        cluster.handle(event)
        yield
    finished = Finished(attempt=attempt, outcome=Outcome.LENGTH, num_output_tokens=NEW_TOKENS, timeline=TIMELINE)
    cluster.handle(FromWorker(worker=reserve_to, message=finished))
    yield
    done = RequestDone(request_id=request_id, outcome=Outcome.LENGTH, num_output_tokens=NEW_TOKENS)
    cluster.handle(FromFront(front=FRONT, message=done))


def _command(effects: list[Effect], kind: type[Reserve] | type[Prefill]) -> tuple[WorkerId, Reserve | Prefill]:
    for effect in effects:
        if isinstance(effect, ToWorker) and isinstance(effect.command.body, kind):
            return effect.worker, effect.command.body
    raise AssertionError(f"no {kind.__name__} came of it: {effects}")


def _stored(cluster: Cluster, worker: WorkerId, hashes: bytes) -> FromWorker:
    cache = cluster.caches[worker]
    cache.store(hashes)
    return FromWorker(worker=worker, message=cache.tell())


def serve(cluster: Cluster, prompts: Prompts, num_requests: int, prefix: str) -> float:
    """CPU time in microseconds of one request's life, over so many that overlap."""
    running: deque[Iterator[None]] = deque()
    started_ns = cluster.cpu_ns
    num_running = RUNNING_PER_WORKER * FEW
    for number in range(num_requests):
        cluster.now_ns += REQUEST_NS
        running.append(_life(cluster, f"{prefix}-{number}", prompts.next()))
        for life in list(running):
            next(life, None)
        while len(running) > num_running:
            for _ in running.popleft():
                pass
    for life in running:
        for _ in life:
            pass
    return (cluster.cpu_ns - started_ns) / 1000 / num_requests


def bytes_per_request(num_requests: int) -> float:
    """Of requests that are being decoded, their prompts' hashes not counted."""
    cluster = make_cluster(MANY, None)
    prompts = Prompts(1)
    chains = [prompts.next() for _ in range(num_requests)]
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    lives = []
    for number, hashes in enumerate(chains):
        life = _life(cluster, f"m-{number}", hashes)
        for _ in range(6):  # up to LegReleased: what is left is decode's
            next(life)
        lives.append(life)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(cluster.state.requests(cluster.now_ns)) == num_requests
    return (after - before) / num_requests


def live_rates(num_workers: int, num_warm: int, num_measured: int) -> tuple[float, float]:
    """Requests that a coordinator's process serves over its gRPC streams, journal on: in a second of the clock, with
    whatever else runs on the machine (the load generator does), and in a second of its own processor time."""
    with tempfile.TemporaryDirectory(prefix="baton-coordinator-") as folder:
        cluster_file = Path(folder) / "cluster.yaml"
        cluster_file.write_text(render_cluster_config(make_config(num_workers)))
        journal = str(Path(folder) / "journal")
        serve_command = ["-m", "cluster.live.coordinator", "-f", str(cluster_file), "--journal", journal]
        coordinator = subprocess.Popen(
            [sys.executable, *serve_command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert coordinator.stdout is not None
            address = coordinator.stdout.readline().split()[1]
            options = {"workers": num_workers, "warm": num_warm, "measured": num_measured, "pid": coordinator.pid}
            load_command = ["-m", "benchmarks.coordinator_load", "--address", address]
            load_command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
            done = subprocess.run(
                [sys.executable, *load_command], stdout=subprocess.PIPE, text=True, check=True, timeout=LIVE_TIMEOUT_S
            )
        finally:
            coordinator.terminate()
            coordinator.wait()
    found = json.loads(done.stdout)
    return num_measured / found["seconds"], num_measured / found["cpu_s"]


def measure(*, quick: bool) -> Report:
    gc.set_threshold(*GC_THRESHOLDS)  # as in the coordinator's process
    num_requests = NUM_QUICK_REQUESTS if quick else NUM_REQUESTS
    num_rounds = NUM_QUICK_ROUNDS if quick else NUM_ROUNDS
    costs: dict[int, list[float]] = {FEW: [], MANY: []}
    with tempfile.TemporaryDirectory(prefix="baton-journal-") as folder:
        clusters = {size: make_cluster(size, Path(folder) / str(size)) for size in costs}
        prompts = Prompts(0)
        for size, cluster in clusters.items():  # pools fill, caches warm
            serve(cluster, prompts, num_requests, f"w{size}")
        for number in range(num_rounds):
            for size, cluster in clusters.items():
                costs[size].append(serve(cluster, prompts, num_requests, f"{number}-{size}"))
        for cluster in clusters.values():
            cluster.state.check_invariants()
            assert not cluster.state.requests(cluster.now_ns), "a request was left"
            assert cluster.journal is not None and cluster.journal.is_open
            cluster.journal.close()
    few_us, many_us = min(costs[FEW]), min(costs[MANY])
    memory = bytes_per_request(200 if quick else 1000)
    live = [live_rates(FEW, num_requests // 2, num_requests) for _ in range(NUM_LIVE_ROUNDS)]
    live_clock, live_core = (max(rates) for rates in zip(*live, strict=True))
    return Report(
        "coordinator",
        [
            at_most(f"CPU of a request's life, {FEW} workers", few_us, MAX_CPU_US, "us"),
            at_most(f"CPU with {MANY} workers against {FEW}", many_us / few_us, MAX_GROWTH, "1"),
            at_least("requests a second of one core", 1e6 / few_us, MIN_REQUESTS_PER_S, "1/s"),
            at_least("live driver: requests a second of one core", live_core, MIN_LIVE_REQUESTS_PER_S, "1/s"),
            Result(measure="live driver: requests a second beside its load", value=live_clock, unit="1/s"),
            at_most("memory of a running request", memory, MAX_REQUEST_BYTES, "B"),
            Result(measure=f"CPU of a request's life, {MANY} workers", value=many_us, unit="us"),
        ],
        {
            "events": EVENTS,
            "prompt_tokens": PROMPT_TOKENS,
            "rounds_us": {str(size): rounds for size, rounds in costs.items()},
            "live_rounds_per_s": [{"clock": wall, "core": cpu} for wall, cpu in live],
        },
    )


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    finish(measure(quick=args.quick), args)


if __name__ == "__main__":
    main()
