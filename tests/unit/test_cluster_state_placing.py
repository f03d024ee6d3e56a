"""Placement through ClusterState: the prefix map is asked, its answer is a hint, and what is cached counts as read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.core.commands import Reserve, RunLocal
from cluster.core.ids import AttemptId, Outcome, WorkerId
from cluster.core.limits import MAX_HEARTBEAT_MS
from cluster.core.messages import BLOCK_HASH_BYTES, BlockEvents, BlockRun, CancelRequest, Heartbeat
from cluster.policy.candidates import NUM_DRAWN
from engine.core.block_hash import ROOT_HASH, hash_blocks
from tests.support.coordinator import D0, D1, P0, P1, Bench, make_config, make_load

PROMPT = range(500, 820)
CHAIN = b"".join(hash_blocks(PROMPT, 16, b""))


def bench_of(*workers: WorkerId, **config: Any) -> Bench:
    bench = Bench(make_config(**config))
    bench.connect()
    bench.join(*workers)
    return bench


def tell(bench: Bench, worker: WorkerId, number: int, num_blocks: int, *, evicted: tuple[bytes, ...] = ()) -> None:
    """The worker's events: a snapshot of the chain's first blocks, or what it has evicted."""
    stored = (BlockRun(parent=ROOT_HASH, hashes=CHAIN[: num_blocks * BLOCK_HASH_BYTES]),) if num_blocks else ()
    events = BlockEvents(sequence_number=number, is_snapshot=not evicted, stored=stored, evicted=evicted)
    bench.worker_says(worker, events)


def submit(bench: Bench, request_id: str = "r") -> Any:
    return bench.submit(request_id, num_prompt_tokens=len(PROMPT), block_hashes=CHAIN)


def leave(bench: Bench, request_id: str) -> None:
    """The client leaves before decode has answered; nothing of the request is left."""
    bench.front_says(CancelRequest(request_id=request_id, outcome=Outcome.CANCELLED, reason="left"))
    for worker in (D0, D1):
        bench.release(worker, AttemptId(request_id, 1))


def reader(bench: Bench, request_id: str = "r") -> WorkerId | None:
    views = bench.state.requests(bench.now_ns)
    return next(view.prefill for view in views if view.request_id == request_id)


def test_a_prompt_goes_where_its_beginning_is() -> None:
    bench = bench_of(P0, P1, D0, D1)
    tell(bench, P1, 1, 10)
    tell(bench, D1, 1, 4)
    submit(bench)
    assert reader(bench) == P1
    (reserve,) = bench.commands(D1)
    assert isinstance(reserve, Reserve) and reserve.source.worker == P1
    why = bench.state.requests(bench.now_ns)[0].why
    assert "p1#1 reads 160 of 320 tokens after 0" in why


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_prefix_is_fetched_only_where_transports_reach_the_pool(device: str) -> None:
    config = make_config(with_prefill=False)
    bench = Bench(replace(config, pools=tuple(replace(pool, device=device) for pool in config.pools)))
    bench.connect()
    bench.join(D0, D1)
    bench.beat(D1, step_ms_per_token=10.0)
    tell(bench, D0, 1, 20)
    bench.worker_says(D0, Heartbeat(load=make_load(25)))  # room for one
    submit(bench, "one")
    submit(bench)
    fetch = [body.num_prefix_blocks for body in bench.commands(D1) if isinstance(body, Reserve)]
    assert bench.phase() == "local" and fetch == ([19] if device == "cpu" else [])


def test_only_what_is_not_cached_counts_as_backlog() -> None:
    bench = bench_of(P0, D0)
    tell(bench, P0, 1, 20)
    for number in range(6):
        submit(bench, f"r{number}")
    phases = [bench.phase(f"r{number}") for number in range(6)]
    assert phases == ["reserving"] * 4 + ["queued"] * 2, "the pool of decode is the limit"
    assert "reads 16 of 320 tokens after 48" in bench.state.requests(bench.now_ns)[3].why
    uncached = bench_of(P0, D0)
    for number in range(3):
        uncached.submit(f"r{number}", num_prompt_tokens=len(PROMPT))
    assert [uncached.phase(f"r{number}") for number in range(3)] == ["reserving", "queued", "queued"]


def test_prompts_that_come_together_are_read_by_one_worker() -> None:
    bench = bench_of(P0, P1, D0, D1)
    for request_id in ("r", "s", "t"):
        submit(bench, request_id)
    assert [reader(bench, request_id) for request_id in ("r", "s", "t")] == [P0, P0, P0]
    assert "reads 16 of 320 tokens after 336" in bench.state.requests(bench.now_ns)[2].why
    for request_id in ("r", "s", "t"):
        leave(bench, request_id)
    submit(bench, "u")
    assert reader(bench, "u") == P1, "nothing is expected of the first any more, and it has been given more to read"


def test_the_hint_follows_the_events_and_the_worker_that_is_lost() -> None:
    bench = bench_of(P0, P1, D0)
    tell(bench, P1, 1, 10)
    tell(bench, P1, 2, 0, evicted=(CHAIN[: 10 * BLOCK_HASH_BYTES],))
    submit(bench)
    assert reader(bench) == P0
    leave(bench, "r")
    tell(bench, P1, 3, 10)
    submit(bench, "s")
    assert reader(bench, "s") == P1
    bench.worker_gone(P1)
    assert reader(bench, "s") == P0


def test_a_request_that_waits_is_placed_by_what_is_known_then() -> None:
    bench = bench_of(P0, P1)
    submit(bench)
    assert bench.phase() == "queued"
    tell(bench, P1, 1, 10)
    bench.join(D0)
    assert reader(bench) == P1


def test_hashes_beyond_the_prompt_or_of_its_last_token_are_left_out() -> None:
    bench = bench_of(P0, P1, D0)
    tell(bench, P1, 1, 20)
    bench.submit("r", num_prompt_tokens=64, block_hashes=CHAIN)
    assert "p1#1 reads 16 of 64 tokens after 0" in bench.state.requests(bench.now_ns)[0].why


def test_a_prompt_that_decode_reads_goes_where_it_is_cached() -> None:
    bench = bench_of(D0, D1, with_prefill=False)
    tell(bench, D1, 1, 20)
    submit(bench)
    assert [type(command) for command in bench.commands(D1)] == [RunLocal]


def test_a_holder_is_found_among_many_workers() -> None:
    workers = [WorkerId(f"p{number}", 1) for number in range(5 * NUM_DRAWN)]
    bench = bench_of(*workers, D0, D1)
    tell(bench, workers[-1], 1, 10)
    submit(bench)
    assert reader(bench) == workers[-1]
    bench.worker_gone(workers[-1])
    assert reader(bench) in workers[:-1]


def test_a_holder_that_leaves_is_passed_over() -> None:
    bench = bench_of(P0, P1, D0, D1)
    tell(bench, P1, 1, 10)
    bench.worker_says(P1, Heartbeat(load=make_load(100), is_leaving=True))
    submit(bench)
    assert reader(bench) == P0


def backlog_told(bench: Bench, request_id: str) -> str:
    """The reader, and what it had to read before, as the reason of a placement has it."""
    why = next(view.why for view in bench.state.requests(bench.now_ns) if view.request_id == request_id)
    return why.split("; ")[1].split(",")[0]


def test_between_heartbeats_a_worker_is_taken_to_read_on() -> None:
    """320 tokens at 1 ms each: others go where less is left, the last where the long one is nearly read."""
    bench = bench_of(P0, P1, D0, D1)
    for reader_id in (P0, P1):
        bench.worker_says(reader_id, Heartbeat(load=make_load(100, step_ms_per_token=1.0)))
    bench.submit("long", num_prompt_tokens=320)
    bench.submit("other", num_prompt_tokens=60)
    assert backlog_told(bench, "other") == "p1#1 reads 60 of 60 tokens after 0"
    bench.wait_ms(200)
    bench.submit("third", num_prompt_tokens=200)
    assert backlog_told(bench, "third") == "p1#1 reads 200 of 200 tokens after 0"
    bench.wait_ms(90)
    bench.submit("fourth", num_prompt_tokens=60)
    assert backlog_told(bench, "fourth") == "p0#1 reads 60 of 60 tokens after 30"


def test_of_a_worker_that_is_silent_nobody_knows_that_it_reads() -> None:
    """It is taken to read until its next heartbeat is due, and no longer."""
    bench = bench_of(P0, D0, D1)
    bench.worker_says(P0, Heartbeat(load=make_load(100, step_ms_per_token=20.0)))
    bench.submit("long", num_prompt_tokens=120)
    for waited_ms, backlog_tokens in ((400, 100), (500, 91), (900, 102)):
        bench.wait_ms(waited_ms)
        request_id = f"after {waited_ms}"
        bench.submit(request_id, num_prompt_tokens=16)
        assert backlog_told(bench, request_id) == f"p0#1 reads 16 of 16 tokens after {backlog_tokens}"
    assert MAX_HEARTBEAT_MS == 1000
