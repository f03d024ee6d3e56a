"""Placement: small worlds in, decisions with reasons out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from cluster.core.ids import WorkerId
from cluster.policy.candidates import MAX_ALL, MAX_HOLDERS, NUM_DRAWN, candidates_of
from cluster.policy.decision import NO_ROOM, TOO_SLOW
from cluster.policy.placement import Candidates, Demand, Placement, Wait, demand_of, place
from tests.support.fake_workers import FakeLinks, FakeWorker
from tests.support.fake_workers import make_worker as _worker


def _place(
    prefill: list[FakeWorker],
    decode: list[FakeWorker],
    *,
    num_tokens: int = 40,
    excluded: tuple[str, ...] = (),
    held: dict[str, int] | None = None,
    links: dict[tuple[str, str], int] | None = None,
    sources: dict[str, int] | None = None,
) -> tuple[str | None, str] | str:
    """Names of prefill and decode, or the reason to wait. `held`: blocks of the prompt, by worker name. `sources`: what
    may be fetched."""
    demand = demand_of(num_tokens, 8, 16)
    candidates = _candidates(prefill, decode, held, links)
    by_name = {worker.id.name: worker for worker in (*prefill, *decode)}
    told = tuple((by_name[name], num_blocks) for name, num_blocks in (sources or {}).items())
    candidates = replace(candidates, sources=told)
    decision = place(demand, candidates, {WorkerId(name, 1): 0 for name in excluded})
    if isinstance(decision, Wait):
        return decision.reason
    assert isinstance(decision, Placement) and decision.reason
    return (None if decision.prefill is None else decision.prefill.name, decision.decode.name)


def _candidates(
    prefill: list[FakeWorker],
    decode: list[FakeWorker],
    held: dict[str, int] | None = None,
    links: dict[tuple[str, str], int] | None = None,
) -> Candidates:
    return Candidates(
        prefill=tuple(prefill),
        decode=tuple(decode),
        num_held_blocks={WorkerId(name, 1): num_blocks for name, num_blocks in (held or {}).items()},
        links=FakeLinks(links or {}),
    )


# ---- placement ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_left", "num_read_blocks", "num_expected_blocks"),
    [(15, 1, 1, 1), (16, 1, 2, 2), (16, 100, 2, 8), (16, 10_000, 2, 17), (16, 0, 2, 2)],
)
def test_demand_counts_the_prompt_one_more_and_what_is_expected(
    num_tokens: int, num_left: int, num_read_blocks: int, num_expected_blocks: int
) -> None:
    assert demand_of(num_tokens, num_left, 16) == Demand(
        num_tokens=num_tokens,
        num_sequences=1,
        num_emitted=max(1, min(num_left, 256)),
        num_read_blocks=num_read_blocks,
        num_kv_blocks=num_read_blocks,
        num_expected_blocks=num_expected_blocks,
        block_size=16,
    )


def test_several_answers_share_the_prompt() -> None:
    demand = demand_of(40, 20, 16, num_choices=3)
    assert (demand.num_sequences, demand.num_read_blocks, demand.num_kv_blocks) == (3, 3, 5)
    # 40 + 20 tokens of the first; of either other one 8 tokens of the third block again, and 20 of its own.
    least = 4 + 2 * 2
    assert least <= demand.num_expected_blocks <= least + 1
    resumed = demand_of(40, 20, 16, num_choices=3, num_unshared=30)
    assert demand.num_expected_blocks < resumed.num_expected_blocks <= demand.num_expected_blocks + 2


def test_each_answer_takes_a_place_in_the_batch() -> None:
    def placed(num_choices: int, num_running: int) -> Placement | Wait:
        prefill = [_worker("p0", num_sequences=7)]
        demand = demand_of(40, 8, 16, num_choices=num_choices)
        return place(demand, _candidates(prefill, [_worker("d0", num_sequences=num_running)]), {})

    assert isinstance(placed(4, 4), Placement)
    assert placed(4, 5) == Wait(reason="no decode worker has room")
    assert isinstance(placed(16, 0), Placement), "an idle worker takes more than it runs at once"


def test_decode_with_the_most_blocks_left_is_taken() -> None:
    decode = [
        _worker("d0", num_promised_blocks=50, num_sequences=1),
        _worker("d1", num_promised_blocks=40, num_sequences=5),
    ]
    assert _place([_worker("p0")], decode) == ("p0", "d1")


def test_then_the_one_with_fewer_sequences_then_the_smaller_id() -> None:
    same = [_worker("d1", num_sequences=2), _worker("d2", num_sequences=1), _worker("d0", num_sequences=2)]
    assert _place([_worker("p0")], same) == ("p0", "d2")
    assert _place([_worker("p1"), _worker("p0")], [_worker("d1"), _worker("d0")]) == ("p0", "d0")


def test_prefill_is_taken_by_predicted_time_to_first_token() -> None:
    slow_but_idle = _worker("p0", ms_per_token=9.0)
    fast_but_busy = _worker("p1", ms_per_token=1.0, backlog_tokens=200, num_sequences=1)
    assert _place([slow_but_idle, fast_but_busy], [_worker("d0")]) == ("p1", "d0")
    assert _place([slow_but_idle, fast_but_busy], [_worker("d0")], num_tokens=10) == ("p0", "d0")


def test_an_unmeasured_worker_counts_as_an_average_one() -> None:
    assert _place([_worker("p0", ms_per_token=4.0), _worker("p1", backlog_tokens=1)], [_worker("d0")]) == ("p0", "d0")


@pytest.mark.parametrize(
    ("decode", "reason"),
    [
        ([], "no decode worker is alive"),
        ([_worker("d0", num_sequences=8)], "no decode worker has room"),
        ([_worker("d0", num_sequences=1, num_promised_blocks=98)], "no decode worker has room"),
    ],
)
def test_nothing_is_placed_without_decode(decode: list[FakeWorker], reason: str) -> None:
    assert _place([_worker("p0")], decode) == reason


def test_an_excluded_decode_worker_is_passed_over() -> None:
    decode = [_worker("d0"), _worker("d1", num_sequences=3)]
    assert _place([_worker("p0")], decode, excluded=("d0",)) == ("p0", "d1")
    assert _place([_worker("p0")], decode, excluded=("d0", "d1")) == "no decode worker has room"


def test_a_busy_prefill_worker_leaves_the_request_in_the_queue() -> None:
    assert _place([_worker("p0", backlog_tokens=256)], [_worker("d0")]) == ("p0", "d0")
    assert _place([_worker("p0", backlog_tokens=257)], [_worker("d0")]) == "no prefill worker can start soon"
    full = _worker("p0", num_sequences=1, num_promised_blocks=98)
    assert _place([full], [_worker("d0")]) == "no prefill worker can start soon"


def test_an_idle_worker_takes_what_is_expected_to_outgrow_it() -> None:
    assert _place([_worker("p0")], [_worker("d0", num_total_blocks=4)]) == ("p0", "d0")


def test_without_prefill_decode_reads_the_prompt() -> None:
    busy = _worker("d0", backlog_tokens=257)
    assert _place([], [busy, _worker("d1", num_promised_blocks=50, num_sequences=2)]) == (None, "d1")
    assert _place([], [busy]) == "no decode worker has room"


def test_a_prompt_too_large_for_a_reservation_is_read_on_decode() -> None:
    decode = _worker("d0", num_total_blocks=10)
    assert _place([_worker("p0")], [decode], num_tokens=7 * 16 - 1) == ("p0", "d0")
    assert _place([_worker("p0")], [decode], num_tokens=7 * 16) == (None, "d0")
    waiting = replace(decode, backlog_tokens=1000)
    assert "cannot start soon" in str(_place([_worker("p0")], [waiting], num_tokens=7 * 16))


# ---- placement by what it should cost -------------------------------------------------------------------------


def test_decode_is_taken_by_predicted_time_per_token() -> None:
    costs = {"decode_base_ms": 10.0, "decode_context_token_ms": 0.01}
    full_of_long_contexts = _worker("d0", num_promised_blocks=80, num_sequences=1, **costs)
    many_short_ones = _worker("d1", num_promised_blocks=20, num_sequences=6, **costs)
    assert _place([_worker("p0")], [full_of_long_contexts, many_short_ones]) == ("p0", "d1")
    straggler = _worker("d2", decode_base_ms=40.0, decode_context_token_ms=0.01)
    assert _place([_worker("p0")], [straggler, many_short_ones]) == ("p0", "d1")
    unmeasured = _worker("d2")
    assert _place([_worker("p0")], [unmeasured, many_short_ones]) == ("p0", "d2"), "it counts as an average one, idle"


def test_nearly_equal_costs_are_decided_by_load() -> None:
    loaded = _worker("d0", num_promised_blocks=60, num_sequences=2, decode_base_ms=10.0)
    empty = _worker("d1", decode_base_ms=10.9)
    assert _place([_worker("p0")], [loaded, empty]) == ("p0", "d1")
    assert _place([_worker("p0")], [loaded, replace(empty, decode_base_ms=11.1)]) == ("p0", "d0")
    readers = [_worker("p0", ms_per_token=1.0, num_given_tokens=500), _worker("p1", ms_per_token=1.02)]
    assert _place(readers, [empty]) == ("p1", "d1"), "idle ones take turns, by what they have been given before"


def test_nearly_equal_is_measured_by_the_own_time() -> None:
    """A long prompt's reading costs others much, wherever it is done: that hides no wait beside an idle worker."""
    idle = _worker("p1", ms_per_token=1.0, num_given_tokens=10_000)
    for backlog_tokens, taken in ((11, "p0"), (14, "p1")):
        fresher = _worker("p0", ms_per_token=1.0, backlog_tokens=backlog_tokens)
        assert _place([fresher, idle], [_worker("d0")], num_tokens=400) == (taken, "d0")


def test_the_prompt_is_read_where_its_beginning_is_cached() -> None:
    holder, other = _worker("p1", ms_per_token=1.0), _worker("p0", ms_per_token=1.0)
    assert _place([other, holder], [_worker("d0")], held={"p1": 2}) == ("p1", "d0")
    busy = replace(holder, backlog_tokens=20)
    assert _place([other, busy], [_worker("d0")], held={"p1": 2}) == ("p1", "d0")
    busier = replace(holder, backlog_tokens=140)
    assert _place([other, busier], [_worker("d0")], held={"p1": 2}) == ("p0", "d0"), "computing it again is better"


def test_what_others_would_wait_for_counts_as_well() -> None:
    """The holder would have read it a little later than the other one, which would be busy for much longer."""
    holder, other = _worker("p1", ms_per_token=1.0, backlog_tokens=60), _worker("p0", ms_per_token=1.0)
    assert _place([other, holder], [_worker("d0")], held={"p1": 2}) == ("p1", "d0")


def test_a_prompt_may_wait_longer_where_it_saves_as_much() -> None:
    holder = _worker("p0", backlog_tokens=4 * 64 + 64)
    assert _place([holder], [_worker("d0")], held={"p0": 2}) == ("p0", "d0")
    assert _place([holder], [_worker("d0")], held={"p0": 1}) == "no prefill worker can start soon"
    reader = _worker("d0", backlog_tokens=4 * 64 + 64)
    assert _place([], [reader], held={"d0": 2}) == (None, "d0")


def test_what_can_be_fetched_is_read_where_it_starts_first() -> None:
    """A block of 1 MB takes 1 ms over that link and 16 ms to compute."""
    readers = [_worker("p0", ms_per_token=1.0), _worker("p1", ms_per_token=1.0, backlog_tokens=60)]
    both = {"p1": 20, "d0": 20}
    links = {(source, "p0"): 10**9 for source in both}
    assert _place(readers, [_worker("d0")], num_tokens=400, held=both, links=links) == ("p1", "d0")
    for source in both:
        found = _place(readers, [_worker("d0")], num_tokens=400, held=both, links=links, sources={source: 20})
        assert found == ("p0", "d0")
    slow = dict.fromkeys(links, 10**8)
    assert _place(readers, [_worker("d0")], num_tokens=400, held=both, links=slow, sources=both) == ("p1", "d0")


def test_a_fetch_takes_its_time() -> None:
    """Of 25 blocks over a link that takes 3 ms for each, beside a holder that is busy for longer or not so long."""
    for backlog_tokens, taken in ((40, "p1"), (120, "p0")):
        readers = [_worker("p0", ms_per_token=1.0), _worker("p1", ms_per_token=1.0, backlog_tokens=backlog_tokens)]
        links = {("p1", "p0"): 10**9 // 3}
        found = _place(readers, [_worker("d0")], num_tokens=401, held={"p1": 25}, links=links, sources={"p1": 25})
        assert found == (taken, "d0")


def test_a_prompt_does_not_wait_for_a_holder_where_another_could_fetch() -> None:
    """The other one has no room now; the holder's backlog is longer than what a prompt that nobody holds may wait for.
    Where nothing can be fetched, that is still worth waiting for."""
    full = _worker("p0", ms_per_token=1.0, num_sequences=8, backlog_tokens=300)
    holder = _worker("p1", ms_per_token=1.0, num_sequences=1, backlog_tokens=300)
    args = {"num_tokens": 400, "held": {"p1": 20}, "links": {("p1", "p0"): 10**9}}
    assert _place([full, holder], [_worker("d0")], **args) == ("p1", "d0")
    waiting = _place([full, holder], [_worker("d0")], **args, sources={"p1": 20})
    assert waiting == "no prefill worker can start soon"
    slow = {**args, "links": {("p1", "p0"): 10**8}}
    assert _place([full, holder], [_worker("d0")], **slow, sources={"p1": 20}) == ("p1", "d0")
    assert _place([holder], [_worker("d0")], **args, sources={"p1": 20}) == ("p1", "d0"), "there is no other"


def test_decode_holds_what_is_not_to_be_pushed() -> None:
    """2 of 3 blocks of 1 MB are there already, which over a slow link costs more than a token's time does."""
    decode = [_worker("d0", decode_base_ms=10.0), _worker("d1", decode_base_ms=11.5)]
    slow = {("p0", "d0"): 10_000_000, ("p0", "d1"): 10_000_000}
    assert _place([_worker("p0")], decode, held={"d1": 2}, links=slow) == ("p0", "d1")
    assert _place([_worker("p0")], decode, links=slow) == ("p0", "d0")
    fast = dict.fromkeys(slow, 10**10)
    assert _place([_worker("p0")], decode, held={"d1": 2}, links=fast) == ("p0", "d0")


def test_a_slow_link_counts_where_the_push_takes_longer_than_the_reading() -> None:
    readers = [_worker("p0", ms_per_token=0.5), _worker("p1", ms_per_token=1.0)]
    assert _place(readers, [_worker("d0")]) == ("p0", "d0")
    assert _place(readers, [_worker("d0")], links={("p0", "d0"): 10_000_000}) == ("p1", "d0")


def test_without_prefill_the_prompt_goes_where_it_is_cached() -> None:
    costs = {"ms_per_token": 10.0, "decode_base_ms": 1.0}
    decode = [_worker("d0", **costs), _worker("d1", num_promised_blocks=10, num_sequences=1, **costs)]
    assert _place([], decode, num_tokens=60, held={"d1": 3}) == (None, "d1")
    assert _place([], decode, num_tokens=60) == (None, "d0")


def test_the_reason_tells_the_numbers() -> None:
    decode = [_worker("d0", decode_base_ms=10.0, num_promised_blocks=25)]
    candidates = _candidates([_worker("p0", backlog_tokens=7, ms_per_token=2.0)], decode, {"p0": 2})
    decision = place(demand_of(40, 8, 16), candidates, {})
    assert isinstance(decision, Placement) and decision.num_uncached_tokens == 8
    assert decision.reason == (
        "d0#1 with 75 blocks left should write a token in 10.0 ms; p0#1 reads 8 of 40 tokens after 7, done in 30 ms"
    )


# ---- candidates -----------------------------------------------------------------------------------------------


def test_few_workers_are_all_candidates_with_the_holders_first() -> None:
    workers = [_worker(f"p{number}") for number in range(MAX_ALL)]
    names = [worker.id.name for worker in candidates_of(workers, [workers[5], workers[2]], seed=1)]
    assert names[:2] == ["p5", "p2"] and sorted(names) == [worker.id.name for worker in workers]


def test_of_many_workers_a_few_are_drawn_anew_for_each_decision() -> None:
    workers = [_worker(f"p{number:03}") for number in range(500)]
    holders = workers[:MAX_HOLDERS]
    draws = [candidates_of(workers, holders, seed) for seed in range(1000)]
    assert draws[7] == candidates_of(workers, holders, 7) != draws[8], "the seed decides"
    assert all(drawn[:MAX_HOLDERS] == tuple(holders) for drawn in draws)
    assert all(len(drawn) <= MAX_HOLDERS + NUM_DRAWN for drawn in draws)
    times = Counter(worker.id for drawn in draws for worker in drawn[MAX_HOLDERS:])
    assert len(times) == len(workers) - MAX_HOLDERS and max(times.values()) <= 40, "16 is the mean"


# ---- a limit on the time per token ----------------------------------------------------------------------------


def test_a_worker_takes_no_answer_that_would_slow_all_of_its_answers_beyond_the_limit() -> None:
    """A token takes 10 ms, and 0.01 ms more for each token of context: 50 blocks promised and 7 more are 19.12 ms."""
    costs = {"decode_base_ms": 10.0, "decode_context_token_ms": 0.01}
    busy = _worker("d0", num_sequences=3, num_promised_blocks=50, **costs)
    calm = _worker("d1", num_sequences=1, num_promised_blocks=90, **costs)
    demand = demand_of(100, 8, 16)
    candidates = _candidates([_worker("p0")], [busy, calm])
    for max_tpot_ms, expected in ((None, "d0"), (19.2, "d0"), (19.1, TOO_SLOW)):
        decision = place(demand, replace(candidates, max_tpot_ms=max_tpot_ms), {})
        assert (decision.reason if isinstance(decision, Wait) else decision.decode.name) == expected
    idle = _worker("d2", decode_base_ms=99.0)
    decision = place(demand, replace(_candidates([_worker("p0")], [busy, idle]), max_tpot_ms=19.1), {})
    assert isinstance(decision, Placement) and decision.decode.name == "d2", "an idle one takes anything"
    full = _worker("d0", num_sequences=8, max_running=8, **costs)
    decision = place(demand, replace(_candidates([_worker("p0")], [full]), max_tpot_ms=19.1), {})
    assert decision == Wait(reason=NO_ROOM)
