"""When decode reads a prompt itself and when prefill writes an answer: small worlds in, decisions with reasons out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.core.disaggregation import ALWAYS_PUSHED, DisaggregationConfig
from cluster.core.ids import Route, WorkerId
from cluster.policy.break_even import MAX_READING_SHARE, MAX_STRETCH, HandOver, chunk_within
from cluster.policy.decision import Cause
from cluster.policy.placement import Candidates, Placement, Wait, break_even_tokens, demand_of, place
from tests.support.fake_workers import FakeLinks, FakeWorker

AUTO = DisaggregationConfig()
NO_STAY = DisaggregationConfig(may_stay=False)
HAND_OVER = HandOver(reserve_ms=4.0, take_over_ms=6.0)
READER = FakeWorker(id=WorkerId("p0", 1), ms_per_token=1.0, chunk_tokens=256)
WRITER = FakeWorker(id=WorkerId("d0", 1), decode_base_ms=20.0, decode_context_token_ms=0.001, chunk_token_ms=0.8)
"""A step takes 20 ms, and 0.8 ms more for each prompt token in it."""


def decide(
    num_tokens: int,
    *,
    prefill: tuple[FakeWorker, ...] = (READER,),
    decode: tuple[FakeWorker, ...] = (WRITER,),
    held: dict[str, int] | None = None,
    rules: DisaggregationConfig = AUTO,
    hand_over: HandOver = HAND_OVER,
    num_left: int = 8,
) -> Placement | Wait:
    return place(demand_of(num_tokens, num_left, 16), candidates(prefill, decode, held, rules, hand_over), {})


def candidates(
    prefill: tuple[FakeWorker, ...] = (READER,),
    decode: tuple[FakeWorker, ...] = (WRITER,),
    held: dict[str, int] | None = None,
    rules: DisaggregationConfig = AUTO,
    hand_over: HandOver = HAND_OVER,
) -> Candidates:
    num_held_blocks = {WorkerId(name, 1): number for name, number in (held or {}).items()}
    return Candidates(
        prefill=prefill,
        decode=decode,
        num_held_blocks=num_held_blocks,
        links=FakeLinks(),
        rules=rules,
        hand_over=hand_over,
    )


def way(num_tokens: int, **situation: Any) -> tuple[Route, str, Cause] | str:
    """Which way, with whom as the writer, and why; or what is waited for."""
    decision = decide(num_tokens, **situation)
    if isinstance(decision, Wait):
        return decision.reason
    return decision.route, decision.decode.name, decision.cause


def busy(worker: FakeWorker, num_sequences: int = 2, num_blocks: int = 20) -> FakeWorker:
    return replace(worker, num_sequences=num_sequences, num_promised_blocks=num_blocks)


# ---- decode reads ---------------------------------------------------------------------------------------------


@pytest.mark.bad_day(28)
def test_a_short_prompt_is_read_by_decode_and_a_long_one_pushed() -> None:
    assert way(10) == (Route.LOCAL, "d0", Cause.BREAK_EVEN)
    assert way(200) == (Route.PUSHED, "d0", Cause.RULE)
    limit = break_even_tokens(candidates(), 16, 4096)
    assert 10 <= limit < 200
    assert way(limit) == (Route.LOCAL, "d0", Cause.BREAK_EVEN) and way(limit + 1) == (Route.PUSHED, "d0", Cause.RULE)


def test_what_a_push_costs_besides_reading_moves_the_break_even() -> None:
    cheap = break_even_tokens(candidates(hand_over=HandOver()), 16, 4096)
    dear = break_even_tokens(candidates(hand_over=HandOver(reserve_ms=20.0, take_over_ms=40.0)), 16, 4096)
    assert cheap < break_even_tokens(candidates(), 16, 4096) < dear


def test_so_does_what_has_to_be_read_before_it() -> None:
    waiting = (replace(READER, backlog_tokens=150),)
    assert break_even_tokens(candidates(waiting), 16, 4096) > break_even_tokens(candidates(), 16, 4096)
    assert way(60) == (Route.PUSHED, "d0", Cause.RULE) and way(60, prefill=waiting)[0] is Route.LOCAL
    beyond = (replace(READER, backlog_tokens=100_000),)
    assert way(60, prefill=beyond)[0] is Route.LOCAL, "no prefill worker can start soon, and decode can"
    assert way(60, prefill=beyond, decode=(replace(WRITER, backlog_tokens=1000),)) == "no prefill worker can start soon"


def test_a_long_prompt_of_which_decode_holds_most_is_read_there() -> None:
    large = replace(WRITER, num_total_blocks=1000)
    assert way(2000, held={"d0": 124}, decode=(large,)) == (Route.LOCAL, "d0", Cause.BREAK_EVEN)
    both_hold = {"d0": 122, "p0": 122}
    assert way(2000, held=both_hold, decode=(large,))[0] is Route.PUSHED, "48 tokens are left for either"
    other = replace(large, id=WorkerId("d1", 1))
    assert way(2000, held={"d1": 124}, decode=(large, other)) == (Route.LOCAL, "d1", Cause.BREAK_EVEN)


def test_a_decode_worker_that_writes_more_slowly_pays_for_it() -> None:
    slow = replace(WRITER, id=WorkerId("d1", 1), decode_base_ms=60.0)
    both = (WRITER, slow)
    assert way(200, held={"d1": 12}, decode=both, num_left=100) == (Route.PUSHED, "d0", Cause.RULE)
    assert way(200, held={"d1": 12}, decode=both, num_left=5) == (Route.LOCAL, "d1", Cause.BREAK_EVEN)


def test_each_running_answer_that_would_be_held_up_counts() -> None:
    rules = DisaggregationConfig(max_tpot_ms=100.0)
    by_number = [break_even_tokens(candidates(decode=(busy(WRITER, n),), rules=rules), 16, 4096) for n in (1, 2, 4)]
    assert by_number == sorted(by_number, reverse=True) and by_number[0] > by_number[-1]


def test_running_answers_keep_their_time_per_token() -> None:
    """A block would add 12.8 ms to 20.3, which is more than half of that."""
    decode = (busy(WRITER, num_sequences=1),)
    expensive = HandOver(take_over_ms=200.0)
    assert way(12, decode=decode, hand_over=expensive)[0] is Route.LOCAL
    assert way(20, decode=decode, hand_over=expensive)[0] is Route.PUSHED
    allowed = DisaggregationConfig(max_tpot_ms=40.0)
    assert way(20, decode=decode, hand_over=expensive, rules=allowed)[0] is Route.LOCAL
    assert way(60, hand_over=expensive)[0] is Route.LOCAL, "on an idle one there is nobody to wait for a single step"
    assert way(70, hand_over=expensive)[0] is Route.PUSHED, "in the second one there may be"


def test_the_worker_is_told_how_long_its_steps_may_take() -> None:
    local = decide(10)
    assert isinstance(local, Placement) and local.step_limit_ms == pytest.approx(MAX_STRETCH * 20.0)
    named = decide(10, rules=DisaggregationConfig(max_tpot_ms=35.0))
    assert isinstance(named, Placement) and named.step_limit_ms == 35.0
    pushed = decide(200)
    assert isinstance(pushed, Placement) and pushed.step_limit_ms == 0


def test_nothing_is_read_by_decode_before_it_is_known_what_it_costs() -> None:
    assert way(10, decode=(replace(WRITER, decode_base_ms=0.0, decode_context_token_ms=0.0),))[0] is Route.PUSHED
    assert way(10, prefill=(replace(READER, ms_per_token=0.0),))[0] is Route.PUSHED


def test_while_decode_has_read_nothing_a_token_counts_what_it_costs_prefill_less_the_step() -> None:
    unread = replace(WRITER, chunk_token_ms=0.0)
    like = replace(WRITER, chunk_token_ms=1.0 - 20.0 / 256)
    for num_tokens in (8, 10, 12, 14, 40):
        assert way(num_tokens, decode=(unread,)) == way(num_tokens, decode=(like,))
    other = replace(unread, id=WorkerId("d1", 1))
    assert way(10, decode=(replace(WRITER, chunk_token_ms=9.0), other)) == (Route.PUSHED, "d0", Cause.RULE)


def test_the_cluster_file_can_fix_it() -> None:
    unmeasured = {"prefill": (FakeWorker(id=WorkerId("p0", 1)),), "decode": (FakeWorker(id=WorkerId("d0", 1)),)}
    fixed = DisaggregationConfig(max_local_tokens=50, may_stay=False)
    assert way(50, rules=fixed, **unmeasured) == (Route.LOCAL, "d0", Cause.FIXED)
    assert way(51, rules=fixed, **unmeasured) == (Route.PUSHED, "d0", Cause.RULE)
    assert way(66, rules=fixed, held={"d0": 1}, **unmeasured) == (Route.LOCAL, "d0", Cause.FIXED)
    assert way(1, rules=ALWAYS_PUSHED) == (Route.PUSHED, "d0", Cause.RULE)
    assert way(50, rules=fixed, decode=(replace(WRITER, backlog_tokens=257),))[0] is Route.PUSHED, "it must start soon"
    assert break_even_tokens(candidates(rules=fixed), 16, 4096) == 50
    assert break_even_tokens(candidates(rules=ALWAYS_PUSHED), 16, 4096) == 0


def test_what_cannot_be_pushed_is_read_by_decode_whatever_the_file_says() -> None:
    assert way(200, prefill=(), rules=ALWAYS_PUSHED) == (Route.LOCAL, "d0", Cause.NO_PREFILL)
    small = (replace(WRITER, num_total_blocks=10),)
    assert way(130, decode=small, rules=ALWAYS_PUSHED) == (Route.LOCAL, "d0", Cause.TOO_LARGE)
    failed = place(demand_of(40, 8, 16), candidates(rules=ALWAYS_PUSHED), {}, "the last transfer failed")
    assert isinstance(failed, Placement) and failed.cause is Cause.TRANSFER_FAILED


def test_the_reason_tells_both_costs() -> None:
    local = decide(10)
    assert isinstance(local, Placement) and local.prefill is None
    assert local.reason == (
        "d0#1 with 100 blocks left should write a token in 20.0 ms, and reads 10 of 10 tokens itself in 28 ms, which "
        "costs all 66 ms, and a push 69"
    )


@pytest.mark.parametrize(
    ("limit_ms", "step_ms", "token_ms", "num_tokens"),
    [(30.0, 20.0, 0.5, 20), (30.0, 20.0, 1.0, 16), (10.0, 20.0, 1.0, 16), (30.0, 20.0, 0.0, 16)],
)
def test_a_chunk_fills_what_the_step_leaves_and_is_a_block_at_least(
    limit_ms: float, step_ms: float, token_ms: float, num_tokens: int
) -> None:
    assert chunk_within(limit_ms, step_ms, token_ms, block_size=16) == num_tokens


# ---- prefill writes -------------------------------------------------------------------------------------------

FULL = replace(WRITER, num_sequences=8)
"""As many as it may run."""
IDLE = replace(READER, decode_base_ms=20.0, decode_context_token_ms=0.001)


def test_a_request_stays_where_decode_has_no_room_and_prefill_idles() -> None:
    assert way(200, decode=(FULL,)) == (Route.STAYED, "p0", Cause.DECODE_FULL)
    assert way(200, decode=(FULL,), rules=ALWAYS_PUSHED) == "no decode worker has room"
    stayed = decide(200, decode=(FULL,))
    assert isinstance(stayed, Placement) and stayed.prefill is None and stayed.step_limit_ms == 0
    assert stayed.reason.startswith("no decode worker has room: p0#1 reads 200 of 200 tokens after 0, and p0#1 with")


@pytest.mark.parametrize(
    "reader",
    [
        replace(READER, backlog_tokens=1),
        replace(READER, reading_share=MAX_READING_SHARE + 0.01),
        replace(READER, num_writing=16, num_sequences=0),
        replace(READER, num_sequences=1, num_promised_blocks=99),
        replace(READER, num_writing=1, num_writing_blocks=5000),
    ],
    ids=["reads", "has read much lately", "writes enough answers", "has no room", "has long contexts to go through"],
)
def test_it_does_not_where_the_prompts_of_others_would_wait_for_it(reader: FakeWorker) -> None:
    assert way(200, prefill=(reader,), decode=(FULL,)) == "no decode worker has room"
    other = replace(READER, id=WorkerId("p1", 1))
    assert way(200, prefill=(reader, other), decode=(FULL,)) == (Route.STAYED, "p1", Cause.DECODE_FULL)


def test_a_request_stays_where_decode_would_write_it_much_more_slowly() -> None:
    straggling = replace(WRITER, decode_base_ms=31.0)
    assert way(200, prefill=(IDLE,), decode=(straggling,)) == (Route.STAYED, "p0", Cause.DECODE_SLOW)
    assert way(200, prefill=(IDLE,), decode=(replace(straggling, decode_base_ms=29.0),))[0] is Route.PUSHED
    reading = replace(IDLE, reading_share=0.4)
    assert way(200, prefill=(reading,), decode=(straggling,))[0] is Route.PUSHED, "beside prompts it writes as slowly"


def test_or_more_slowly_than_the_file_allows() -> None:
    limited = DisaggregationConfig(max_local_tokens=0, max_tpot_ms=25.0)
    slower = replace(WRITER, decode_base_ms=26.0)
    assert way(200, prefill=(IDLE,), decode=(slower,), rules=limited) == (Route.STAYED, "p0", Cause.DECODE_SLOW)
    assert way(200, prefill=(replace(IDLE, reading_share=0.3),), decode=(slower,), rules=limited)[0] is Route.PUSHED


def test_without_any_decode_worker_requests_wait() -> None:
    """One will come: a cluster that starts, or whose only one has died."""
    assert way(200, decode=()) == "no decode worker is alive"


def test_prompts_avoid_prefill_workers_that_write() -> None:
    writing = replace(READER, num_writing=2)
    other = replace(READER, id=WorkerId("p1", 1), ms_per_token=1.2)
    decision = decide(200, prefill=(writing, other), rules=NO_STAY)
    assert isinstance(decision, Placement) and decision.prefill == other.id
    decision = decide(200, prefill=(READER, other), rules=NO_STAY)
    assert isinstance(decision, Placement) and decision.prefill == READER.id
