"""Token records, watches and what a front is sent of them."""

from __future__ import annotations

import pytest

from cluster.agent.limits import AgentLimits
from cluster.agent.outbox import Outbox
from cluster.core.ids import AttemptId, FrontId, Outcome
from cluster.core.messages import LegTimeline
from cluster.core.token_messages import Forget, TokenInfo, TokenRun, Watch

FRONT = FrontId("f", 1)
ATTEMPT = AttemptId("r", 1)


class Bench:
    """An outbox and all runs that it has sent, by front. The front takes batches at once unless told otherwise."""

    def __init__(self, **limits: int) -> None:
        self.outbox = Outbox(AgentLimits(**limits))
        self.runs: dict[FrontId, list[TokenRun]] = {}
        self.reads = True

    def flush(self) -> None:
        while batches := self.outbox.flush():
            for batch in batches:
                self.runs.setdefault(batch.front, []).extend(batch.runs)
                if self.reads:
                    self.outbox.written(batch.front)
        self.outbox.check_invariants()

    def connect(self, front: FrontId = FRONT) -> None:
        assert self.outbox.connect(front)
        self.flush()

    def watch(
        self, next_position: int = 0, *, attempt: AttemptId = ATTEMPT, front: FrontId = FRONT, now_ns: int = 0
    ) -> None:
        self.outbox.request(now_ns, front, Watch(attempt=attempt, choice=0, next_position=next_position))
        self.flush()

    def draw(self, *positions: int, attempt: AttemptId = ATTEMPT) -> None:
        for position in positions:
            self.outbox.append(attempt, 0, position, [TokenInfo(token_id=100 + position)])
        self.flush()

    def end(self, finish: Outcome | None = Outcome.STOP, *, attempt: AttemptId = ATTEMPT, now_ns: int = 0) -> None:
        self.outbox.end(now_ns, attempt, 0, finish=finish, timeline=LegTimeline(kv_bytes=7))
        self.flush()

    def sent(self, front: FrontId = FRONT) -> list[tuple[int, list[int]]]:
        return [(run.position, [token.token_id for token in run.tokens]) for run in self.runs.get(front, [])]


def test_tokens_go_to_the_watching_front_as_they_are_drawn() -> None:
    bench = Bench()
    bench.connect()
    bench.outbox.open(ATTEMPT, 0, first_position=0)
    bench.watch()
    bench.draw(0)
    bench.draw(1)
    bench.end()
    assert bench.sent() == [(0, [100]), (1, [101]), (2, [])]
    last = bench.runs[FRONT][-1]
    assert last.finish is Outcome.STOP and last.timeline == LegTimeline(kv_bytes=7)


def test_what_is_measured_before_the_end_goes_with_one_run_and_again_to_who_watches_again() -> None:
    bench = Bench()
    bench.connect()
    bench.outbox.open(ATTEMPT, 0, first_position=0)
    bench.watch()
    bench.outbox.measured(ATTEMPT, 0, LegTimeline(kv_bytes=3))
    assert bench.sent() == []
    bench.draw(0)
    bench.draw(1)
    bench.watch(1)
    bench.end()
    told = [run.timeline and run.timeline.kv_bytes for run in bench.runs[FRONT]]
    assert (bench.sent(), told) == ([(0, [100]), (1, [101]), (1, [101]), (2, [])], [3, None, 3, 7])


def test_one_batch_carries_what_all_attempts_have_for_a_front() -> None:
    bench = Bench()
    bench.connect()
    attempts = [AttemptId(f"r{index}", 1) for index in range(3)]
    for attempt in attempts:
        bench.outbox.open(attempt, 0, first_position=0)
        bench.watch(attempt=attempt)
    for attempt in attempts:
        bench.outbox.append(attempt, 0, 0, [TokenInfo(token_id=1)])
    (batch,) = bench.outbox.flush()
    assert [run.attempt for run in batch.runs] == attempts


def test_watch_that_comes_first_is_remembered_and_serves_from_the_first_token() -> None:
    bench = Bench()
    bench.connect()
    bench.watch()
    bench.outbox.open(ATTEMPT, 0, first_position=0)
    bench.draw(0)
    assert bench.sent() == [(0, [100])]


def test_watch_below_the_attempts_first_position_starts_there() -> None:
    bench = Bench()
    bench.connect()
    bench.outbox.open(ATTEMPT, 0, first_position=5)
    bench.draw(5, 6)
    bench.watch(2)
    assert bench.sent() == [(5, [105, 106])]


def test_watch_ahead_of_what_is_drawn_waits_for_its_position() -> None:
    bench = Bench()
    bench.connect()
    bench.outbox.open(ATTEMPT, 0, first_position=0)
    bench.watch(2)
    bench.draw(0)
    bench.draw(1)
    assert bench.sent() == []
    bench.draw(2)
    assert bench.sent() == [(2, [102])]


def test_watching_again_after_the_end_sends_the_end_again() -> None:
    bench = Bench()
    bench.connect()
    bench.outbox.open(ATTEMPT, 0, first_position=0)
    bench.watch()
    bench.draw(0)
    bench.end()
    bench.runs.clear()
    bench.outbox.disconnect(FRONT)
    bench.connect()
    bench.watch(1)
    assert [(run.position, run.finish) for run in bench.runs[FRONT]] == [(1, Outcome.STOP)]


def test_leg_without_an_outcome_says_that_another_goes_on() -> None:
    bench = Bench()
    bench.connect()
    bench.outbox.open(ATTEMPT, 0, first_position=0)
    bench.watch()
    bench.outbox.append(ATTEMPT, 0, 0, [TokenInfo(token_id=100)])
    bench.end(None)
    (run,) = bench.runs[FRONT]
    assert run.leg_done and run.finish is None and run.timeline is not None and len(run.tokens) == 1


def test_batches_are_bounded_in_number_and_size() -> None:
    bench = Bench(max_batches_in_flight=2, max_tokens_per_batch=3)
    bench.connect()
    bench.reads = False
    bench.outbox.open(ATTEMPT, 0, first_position=0)
    bench.draw(*range(10))
    bench.watch()
    assert bench.sent() == [(0, [100, 101, 102]), (3, [103, 104, 105])]
    bench.outbox.written(FRONT)
    bench.flush()
    assert bench.sent()[2:] == [(6, [106, 107, 108])]


def test_front_that_takes_nothing_is_named_as_stalled() -> None:
    bench = Bench(max_batches_in_flight=1, max_stalled_tokens=2)
    bench.connect()
    bench.reads = False
    bench.outbox.open(ATTEMPT, 0, first_position=0)
    bench.watch()
    bench.draw(0, 1, 2)
    bench.outbox.append(ATTEMPT, 0, 3, [TokenInfo(token_id=1)])
    assert bench.outbox.stalled() == []
    bench.outbox.append(ATTEMPT, 0, 4, [TokenInfo(token_id=1)])
    bench.outbox.append(ATTEMPT, 0, 5, [TokenInfo(token_id=1)])
    assert bench.outbox.stalled() == [ATTEMPT]
    bench.outbox.written(FRONT)
    assert bench.outbox.stalled() == []


def test_dropped_attempt_sends_nothing_more_but_an_ended_one_stays() -> None:
    bench = Bench()
    bench.connect()
    other = AttemptId("other", 1)
    for attempt in (ATTEMPT, other):
        bench.outbox.open(attempt, 0, first_position=0)
        bench.draw(0, attempt=attempt)
    bench.end(attempt=other)
    bench.outbox.drop(ATTEMPT)
    bench.outbox.drop(other)
    bench.watch()
    bench.watch(attempt=other)
    assert [run.attempt for run in bench.runs[FRONT]] == [other]


def test_forgotten_records_are_gone_at_once_or_when_they_end() -> None:
    bench = Bench()
    bench.connect()
    ended, running = AttemptId("ended", 1), AttemptId("running", 1)
    for attempt in (ended, running):
        bench.outbox.open(attempt, 0, first_position=0)
    bench.end(attempt=ended)
    for attempt in (ended, running):
        bench.outbox.request(0, FRONT, Forget(attempt=attempt))
    assert bench.outbox.num_records() == 1
    bench.draw(0, attempt=running)
    bench.end(attempt=running)
    assert bench.outbox.num_records() == 0
    assert bench.sent() == []


def test_early_watches_expire_and_are_bounded() -> None:
    bench = Bench(early_watch_ttl_ns=10, max_early_watches=2)
    bench.connect()
    attempts = [AttemptId(f"r{index}", 1) for index in range(3)]
    for now_ns, attempt in enumerate(attempts):
        bench.watch(attempt=attempt, now_ns=now_ns)
    assert bench.outbox.next_deadline_ns() == 11
    bench.outbox.expire(11)
    assert bench.outbox.next_deadline_ns() == 12
    for attempt in attempts:
        bench.outbox.open(attempt, 0, first_position=0)
        bench.draw(0, attempt=attempt)
    assert [run.attempt for run in bench.runs[FRONT]] == attempts[2:]


def test_fronts_are_bounded() -> None:
    bench = Bench(max_fronts=1)
    bench.connect()
    assert not bench.outbox.connect(FrontId("g", 1))
    assert bench.outbox.connect(FRONT)


def test_requests_of_a_front_that_has_gone_are_ignored() -> None:
    bench = Bench()
    bench.outbox.open(ATTEMPT, 0, first_position=0)
    bench.watch()
    bench.draw(0)
    assert bench.runs == {}


def test_positions_must_follow_each_other() -> None:
    bench = Bench()
    bench.outbox.open(ATTEMPT, 0, first_position=0)
    with pytest.raises(AssertionError, match="position 1"):
        bench.draw(1)
