from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.core import scheduler as scheduler_module
from engine.core.block_pool import OutOfBlocksError
from engine.core.errors import SchedulerFullError
from engine.core.sampling import SamplingParams
from engine.core.scheduler import SequenceMode, StepOutcome
from engine.core.step import SequenceKey
from tests.support.scheduler_bench import BLOCK_SIZE, Bench
from tests.support.toy_engine import kv_of, run_step, undisturbed

# Batching and chunks


def test_a_prompt_runs_in_chunks_that_end_on_block_boundaries_and_then_decodes() -> None:
    bench = Bench(prefill_chunk_tokens=9)
    spec = bench.add("a", 18, max_tokens=3)
    planned = [bench.step() for _ in range(5)]
    assert planned == [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 2)], [("a", 18, 1)], [("a", 19, 1)]]
    assert bench.schedule() == []
    bench.check_answer(spec)


def test_decoding_sequences_come_first_and_prefill_gets_the_rest_of_the_budget() -> None:
    bench = Bench(max_step_tokens=12, max_running=8)
    first, second = bench.add("a", 3, max_tokens=8), bench.add("b", 4, max_tokens=8)
    assert bench.step() == [("a", 0, 3), ("b", 0, 4)]
    third = bench.add("c", 21)
    assert bench.step() == [("a", 3, 1), ("b", 4, 1), ("c", 0, 8)]
    assert bench.step() == [("a", 4, 1), ("b", 5, 1), ("c", 8, 8)]
    assert bench.step() == [("a", 5, 1), ("b", 6, 1), ("c", 16, 5)]
    bench.finish()
    for spec in (first, second, third):
        bench.check_answer(spec)


def test_one_chunk_budget_serves_several_prompts() -> None:
    bench = Bench(prefill_chunk_tokens=16)
    bench.add("a", 6)
    bench.add("b", 6)
    bench.add("c", 9)
    assert bench.schedule() == [("a", 0, 6), ("b", 0, 6), ("c", 0, 4)]
    bench.apply()
    assert bench.schedule() == [("a", 6, 1), ("b", 6, 1), ("c", 4, 5)]


def test_a_plan_says_what_to_sample_and_from_which_history() -> None:
    bench = Bench(prefill_chunk_tokens=4)
    spec = bench.add("a", [1, 2, 3, 4, 5], forced=[6, 7], max_tokens=5)
    bench.schedule()
    assert bench.plan is not None
    [step] = bench.plan.sequences
    assert (step.token_ids, step.sample, step.prompt_ids, step.output_ids) == ([1, 2, 3, 4], False, [], [])
    bench.apply()
    bench.schedule()
    [step] = bench.plan.sequences
    assert (step.token_ids, step.start, step.sample, step.position) == ([5, 6, 7], 4, True, 2)
    assert (step.prompt_ids, step.output_ids) == ([1, 2, 3, 4, 5], [6, 7])
    bench.apply()
    bench.finish()
    assert bench.scheduler.has(spec.key) is False
    assert bench.tokens(spec) == undisturbed(spec.prompt_ids, spec.sampling, forced_ids=[6, 7]).token_ids


def test_waiting_sequences_run_by_priority_then_arrival() -> None:
    bench = Bench(max_running=1)
    for name, priority in (("a", 0), ("b", 0), ("c", 1), ("d", 1)):
        bench.add(name, 3, max_tokens=1, priority=priority)
    assert [bench.step()[0][0] for _ in range(4)] == ["c", "d", "a", "b"]


def test_no_more_than_max_running_are_admitted() -> None:
    bench = Bench(max_running=2, max_step_tokens=40, prefill_chunk_tokens=40)
    for name in "abc":
        bench.add(name, 3, max_tokens=2)
    assert bench.step() == [("a", 0, 3), ("b", 0, 3)]
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 1)
    bench.step()
    assert bench.step() == [("c", 0, 3)]


def test_the_backlog_counts_what_is_left_to_prefill() -> None:
    bench = Bench(prefill_chunk_tokens=8)
    bench.add("a", 20)
    bench.add("b", 5)
    assert bench.scheduler.waiting_prefill_tokens == 25
    bench.step()
    assert bench.scheduler.waiting_prefill_tokens == 17


def test_a_step_can_be_planned_only_when_the_last_one_is_over() -> None:
    bench = Bench()
    bench.add("a", 3)
    bench.schedule()
    with pytest.raises(AssertionError, match="neither applied nor failed"):
        bench.scheduler.schedule()


# How a sequence ends


def first_token(prompt_ids: list[int], position: int = 0) -> int:
    return undisturbed(prompt_ids, SamplingParams(max_tokens=position + 1)).token_ids[position]


@pytest.mark.parametrize(
    ("sampling", "num_tokens", "reason"),
    [
        ({}, 3, "stop"),
        ({"min_tokens": 2}, 3, "stop"),
        ({"min_tokens": 3}, 8, "length"),
        ({"ignore_eos": True}, 8, "length"),
        ({"max_tokens": 3}, 3, "stop"),
        ({"max_tokens": 2}, 2, "length"),
        ({"max_tokens": 1}, 1, "length"),
    ],
)
def test_end_of_sequence_and_length(sampling: dict[str, int], num_tokens: int, reason: str) -> None:
    prompt_ids = [9, 8, 7, 6, 5]
    output = undisturbed(prompt_ids, SamplingParams(max_tokens=8)).token_ids
    assert output.count(output[2]) == 1
    bench = Bench(eos_token_ids=frozenset({output[2]}))
    spec = bench.add("a", prompt_ids, **{"max_tokens": 8, **sampling})
    bench.finish()
    bench.check_answer(spec)
    assert (len(bench.tokens(spec)), bench.answers.finish_reasons[spec.key]) == (num_tokens, reason)
    assert bench.pool.counts().active == 0


def test_stop_token_ids_end_a_sequence_also_when_eos_is_ignored() -> None:
    prompt_ids = [9, 8, 7, 6, 5]
    bench = Bench()
    spec = bench.add("a", prompt_ids, 8, stop_token_ids=(first_token(prompt_ids, 1),), ignore_eos=True)
    bench.finish()
    bench.check_answer(spec)
    assert bench.answers.finish_reasons[spec.key] == "stop"


def test_a_sequence_ends_where_the_model_does() -> None:
    bench = Bench(max_model_tokens=10)
    spec = bench.add("a", 7, max_tokens=50)
    bench.finish()
    assert len(bench.tokens(spec)) == 3
    bench.check_answer(spec)


def test_forced_output_counts_towards_max_tokens() -> None:
    bench = Bench()
    spec = bench.add("a", 5, forced=[1, 2, 3], max_tokens=4)
    bench.finish()
    assert len(bench.tokens(spec)) == 4
    assert bench.answers.finish_reasons[spec.key] == "length"


# Prefix cache


def test_a_second_turn_finds_prompt_and_answer_of_the_first() -> None:
    bench = Bench()
    first = bench.add("a", 10, max_tokens=7)
    bench.finish()
    # 16 of the first turn's 17 tokens have KV, since the last one was never an input: four blocks.
    second = bench.add("b", first.prompt_ids + bench.tokens(first) + [1, 2])
    assert bench.schedule() == [("b", 16, 3)]
    bench.apply()
    bench.finish()
    bench.check_answer(second)


def test_at_least_one_token_of_a_cached_prompt_is_computed() -> None:
    bench = Bench()
    first = bench.add("a", 8)
    bench.finish()
    second = bench.add("b", first.prompt_ids)
    assert bench.schedule() == [("b", 4, 4)]
    bench.apply()
    bench.finish()
    assert bench.tokens(second) == bench.tokens(first)


def test_running_sequences_share_blocks() -> None:
    bench = Bench()
    specs = [bench.add("a", 13, max_tokens=6)]
    bench.step()
    specs += [bench.add(name, [*specs[0].prompt_ids[:12], tail], max_tokens=6) for name, tail in (("b", 1), ("c", 2))]
    assert bench.schedule() == [("a", 13, 1), ("b", 12, 1), ("c", 12, 1)]
    assert bench.plan is not None
    tables = [step.block_table for step in bench.plan.sequences]
    assert tables[0][:3] == tables[1][:3] == tables[2][:3]
    assert bench.pool.counts().active == 3 + 3
    bench.apply()
    bench.finish()
    for spec in specs:
        bench.check_answer(spec)


def test_blocks_are_not_shared_before_they_are_computed() -> None:
    bench = Bench()
    first = bench.add("a", 8)
    bench.schedule()
    second = bench.add("b", first.prompt_ids)
    bench.apply()
    assert bench.schedule() == [("a", 8, 1), ("b", 4, 4)]
    bench.apply()
    bench.finish()
    bench.check_answer(second)


def test_equal_beginnings_that_arrive_together_are_computed_once() -> None:
    bench = Bench(prefill_chunk_tokens=8, max_step_tokens=32)
    shared = random.Random("shared").choices(range(1000), k=16)
    specs = [bench.add(name, [*shared, *range(tail, tail + 3)]) for name, tail in (("a", 0), ("b", 5), ("c", 9))]
    # "b" and "c" have 16 tokens in common with "a", so they come in when those have been computed.
    assert bench.step() == [("a", 0, 8)]
    assert bench.step() == [("a", 8, 8)]
    assert bench.step() == [("a", 16, 3), ("b", 16, 3)]
    assert bench.step() == [("a", 19, 1), ("b", 19, 1), ("c", 16, 3)]
    bench.finish()
    for spec in specs:
        bench.check_answer(spec)


def test_whoever_is_not_concerned_does_not_wait_along() -> None:
    bench = Bench(prefill_chunk_tokens=16)
    first = bench.add("a", 8)
    bench.add("b", [*first.prompt_ids, 1])
    bench.add("c", 5)
    bench.add("d", [*first.prompt_ids, 2])
    assert bench.step() == [("a", 0, 8), ("c", 0, 5)]
    assert bench.step() == [("a", 8, 1), ("c", 5, 1), ("b", 8, 1), ("d", 8, 1)]


def test_one_that_waits_for_anothers_block_keeps_its_place_and_its_room() -> None:
    bench = Bench(max_running=2, max_step_tokens=40)
    first = bench.add("a", 8, max_tokens=2)
    bench.add("b", [*first.prompt_ids, 1], max_tokens=2)
    bench.add("c", 3, max_tokens=1)
    assert bench.step() == [("a", 0, 8)]
    assert bench.step() == [("a", 8, 1), ("b", 8, 1)]
    bench = Bench(num_blocks=8)
    bench.add("a", first.prompt_ids)
    bench.add("b", [*first.prompt_ids, *range(7)])
    bench.add("c", 5)
    # Of eight blocks "a" takes two, wants one more, and "b" may come to need four: too few are left for "c".
    assert bench.step() == [("a", 0, 8)]
    assert bench.step() == [("a", 8, 1), ("b", 8, 7), ("c", 0, 5)]


@pytest.mark.parametrize(("priority", "does_wait"), [(0, True), (1, False)])
def test_nobody_waits_for_a_block_of_one_that_is_served_later(priority: int, does_wait: bool) -> None:
    bench = Bench()
    first = bench.add("a", 20)
    bench.step()
    second = bench.add("b", [*first.prompt_ids, 1, 2, 3], priority=priority)
    planned = bench.step()
    assert planned == ([("a", 16, 4)] if does_wait else [("a", 16, 4), ("b", 16, 7)])
    bench.finish()
    bench.check_answer(first)
    bench.check_answer(second)


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_one_that_waits_for_anothers_block_goes_on_without_it(how: str) -> None:
    bench = Bench(prefill_chunk_tokens=8)
    first = bench.add("a", 20)
    second = bench.add("b", first.prompt_ids)
    bench.step()
    assert bench.schedule() == [("a", 8, 8)]
    if how == "abort":
        bench.scheduler.abort(first.key)
        bench.apply()
        assert bench.schedule() == [("b", 16, 4)]
    else:
        bench.scheduler.fail_step()
        assert bench.schedule() == [("b", 8, 8)]
    bench.apply()
    bench.finish()
    bench.check_answer(second)


def test_nobody_waits_for_a_block_under_another_extra_key() -> None:
    bench = Bench()
    first = bench.add("a", 8, extra_key=b"tenant-1")
    bench.add("b", first.prompt_ids, extra_key=b"tenant-2")
    assert bench.step() == [("a", 0, 8), ("b", 0, 8)]


def test_prompts_that_were_pushed_here_twice_share_their_blocks() -> None:
    bench = Bench()
    specs = [bench.spec(name, [*range(8), tail], mode=SequenceMode.DECODE) for name, tail in (("a", 1), ("b", 2))]
    for spec in specs:
        bench.receive(spec)
    assert bench.schedule() == [("a", 9, 1), ("b", 9, 1)]
    assert bench.plan is not None
    tables = [step.block_table for step in bench.plan.sequences]
    assert tables[0][:2] == tables[1][:2]
    assert bench.pool.counts().active == 2 + 2
    bench.apply()
    bench.finish()
    for spec in specs:
        bench.check_answer(spec)


def test_lookups_and_hits_are_counted_once_a_sequence() -> None:
    bench = Bench(num_blocks=5)
    old, new = bench.add("old", 7, max_tokens=8), bench.add("new", 7, max_tokens=8)
    while bench.scheduler.num_waiting == 0 or not bench.answers.token_ids[old.key]:
        bench.step()
    assert bench.scheduler.num_waiting == 1  # preempted: when it runs again it finds blocks, which is no hit
    bench.finish()
    counters = bench.pool.prefix_counters()
    assert (counters.num_query_tokens, counters.num_hit_tokens) == (14, 0)
    bench.add("again", new.prompt_ids)
    bench.finish()
    counters = bench.pool.prefix_counters()
    assert (counters.num_query_tokens, counters.num_hit_tokens) == (21, 4)


def test_blocks_that_decoding_has_filled_twice_lie_in_the_pool_once() -> None:
    bench = Bench()
    first = bench.add("a", 4, max_tokens=9)
    second = bench.add("b", first.prompt_ids, max_tokens=9)
    for _ in range(7):
        bench.step()
    # Four tokens of prompt and at least four of output: two full blocks, and a partial one for each.
    assert bench.pool.counts().active == 2 + 2
    bench.finish()
    bench.check_answer(first)
    bench.check_answer(second)


def test_blocks_are_not_shared_across_extra_keys() -> None:
    bench = Bench()
    first = bench.add("a", 8, extra_key=b"tenant-1")
    bench.finish()
    bench.add("b", first.prompt_ids, extra_key=b"tenant-2")
    assert bench.schedule() == [("b", 0, 8)]


def test_progress_tells_what_is_final_and_what_was_cached() -> None:
    bench = Bench(prefill_chunk_tokens=8)
    first = bench.add("a", 9, max_tokens=1)
    bench.finish()
    bench.add("b", first.prompt_ids[:8] + [1] * 10, mode=SequenceMode.PREFILL_ONLY)
    seen = []
    for _ in range(2):
        outcome = run_step(bench.scheduler, bench.runner)
        assert outcome is not None
        [progress] = outcome.progress
        seen.append((progress.num_computed_tokens, progress.num_total_tokens, len(progress.block_table)))
        assert progress.num_cached_tokens == 8
        num_emitted = len(outcome.emitted)
    assert seen == [(16, 18, 4), (18, 18, 5)]
    assert num_emitted == 1


# Memory


def test_blocks_are_taken_only_when_a_token_needs_them() -> None:
    bench = Bench()
    bench.add("a", 4, max_tokens=10)
    num_active = []
    while bench.step():
        num_active.append(bench.pool.counts().active)
    assert num_active == [1, 2, 2, 2, 2, 3, 3, 3, 3, 0]


def test_as_many_sequences_run_as_fit() -> None:
    bench = Bench(num_blocks=12, max_running=20, max_step_tokens=200, prefill_chunk_tokens=100, max_model_tokens=48)
    specs = [bench.add(f"{index}", 7, max_tokens=2) for index in range(7)]
    assert len(bench.step()) == 6  # 8 tokens have KV: two blocks each
    bench.finish()
    for spec in specs:
        bench.check_answer(spec)


def test_two_hundred_requests_pass_through_a_pool_that_holds_ten() -> None:
    source = random.Random(7)
    # Prompt and answer have 60 tokens on average; the pool holds ten of those.
    bench = Bench(num_blocks=150, max_running=64, max_step_tokens=256, prefill_chunk_tokens=64, max_model_tokens=160)
    prefix = source.choices(range(1000), k=24)
    specs = []
    for index in range(200):
        prompt = source.choices(range(1000), k=source.randint(1, 70))
        if index % 4 == 0:
            prompt = prefix + prompt
        specs.append(bench.add(f"{index}", prompt, source.randint(1, 60), priority=source.choice([0, 0, 1])))
    num_preempted = 0
    while bench.schedule():
        num_preempted += len(bench.apply())
    for spec in specs:
        bench.check_answer(spec)
    assert num_preempted > 0, "the pool was never short, so this has shown nothing"
    assert bench.runner.max_sequences_in_step >= 10
    counts = bench.pool.counts()
    assert counts.active == counts.reserved == counts.quarantined == 0


def test_the_newest_is_preempted_recomputed_and_loses_nothing() -> None:
    bench = Bench(num_blocks=5)
    old, new = bench.add("old", 7, max_tokens=8), bench.add("new", 7, max_tokens=8)
    bench.step()
    bench.step()
    assert bench.schedule() == [("old", 8, 1)]  # five blocks: old takes the last one, new has to go
    assert bench.apply() == ["new"]
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (1, 1)
    assert bench.scheduler.output_ids(new.key) == bench.tokens(new)
    bench.finish()
    bench.check_answer(old)
    bench.check_answer(new)


def test_a_prompt_pushed_out_while_it_is_read_takes_no_part_in_that_step() -> None:
    bench = Bench(num_blocks=7, prefill_chunk_tokens=4)
    old, new = bench.add("old", 3, max_tokens=12), bench.add("new", 23)
    for _ in range(6):
        bench.step()
    assert bench.pool.num_allocatable == 0
    assert bench.schedule() == [("old", 8, 1)]
    assert bench.apply() == ["new"]
    bench.finish()
    bench.check_answer(old)
    bench.check_answer(new)


def test_lower_priority_is_preempted_before_newer() -> None:
    bench = Bench(num_blocks=5)
    bench.add("low", 7, max_tokens=8)
    bench.add("high", 7, max_tokens=8, priority=1)
    bench.step()
    bench.step()
    assert bench.schedule() == [("high", 8, 1)]
    assert bench.apply() == ["low"]


def test_none_is_preempted_twice_in_a_row_without_progress() -> None:
    # Without that rule, the third is pushed out a second time while it is still being recomputed in small chunks.
    bench = Bench(num_blocks=7, prefill_chunk_tokens=4, max_running=4)
    specs = [bench.add("0", 1, max_tokens=10), bench.add("1", 1, max_tokens=13)]
    bench.step()
    specs.append(bench.add("2", 7, max_tokens=10))
    num_preempted = 0
    progress_at_preemption: dict[str, int] = {}
    while bench.schedule():
        for name in bench.apply():
            num_tokens = len(bench.answers.token_ids[SequenceKey(name, 1)])
            assert progress_at_preemption.get(name, -1) < num_tokens, f"{name} was preempted again"
            progress_at_preemption[name] = num_tokens
            num_preempted += 1
    assert num_preempted > 0
    for spec in specs:
        bench.check_answer(spec)


def test_the_only_running_sequence_waits_for_blocks_that_others_hold() -> None:
    bench = Bench(num_blocks=4)
    spec = bench.add("a", 7, max_tokens=8)
    granted = bench.pool.reserve(2)
    bench.step()
    bench.step()
    assert bench.schedule() == []
    assert bench.scheduler.num_running == 1
    bench.pool.release_reserved([block_id for block_id, _ in granted])
    bench.finish()
    bench.check_answer(spec)


def test_a_prefill_whose_blocks_a_push_reads_is_not_preempted() -> None:
    bench = Bench(num_blocks=8, prefill_chunk_tokens=8)
    old = bench.add("old", 4, max_tokens=20)
    bench.step()
    new = bench.add("new", 23, mode=SequenceMode.PREFILL_ONLY)
    assert bench.step() == [("old", 4, 1), ("new", 0, 8)]
    for _ in range(2):
        assert bench.scheduler.num_running == 2
        bench.step()
    assert bench.tokens(new) == undisturbed(new.prompt_ids, SamplingParams(max_tokens=1)).token_ids
    bench.pool.release(bench.scheduler.take_blocks(new.key))
    bench.finish()
    bench.check_answer(old)


def test_reservations_leave_running_sequences_room_to_grow() -> None:
    bench = Bench(num_blocks=8, prefill_chunk_tokens=8)
    bench.add("a", 14, max_tokens=10)
    bench.step()
    # Two of the four blocks for prompt and next token are still missing.
    with pytest.raises(OutOfBlocksError, match="headroom"):
        bench.pool.reserve(5)
    bench.step()
    # Decoding at token 15 of 23: the fourth block is taken, the next one is kept.
    assert bench.pool.num_reservable == 3
    bench.finish()
    assert bench.pool.num_reservable == 8


def test_reservations_leave_room_for_the_next_to_be_admitted() -> None:
    """Else what was preempted would wait for as long as short requests come: each takes what another gave back."""
    bench = Bench(num_blocks=8, prefill_chunk_tokens=8, max_running=4)
    bench.add("first", 6, max_tokens=11)
    long = bench.add("long", 10, max_tokens=20)
    while bench.scheduler.num_running < 2:
        bench.step()
    while not bench.scheduler.num_waiting:
        bench.step()
    num_taken = 0
    for number in range(40):
        while bench.pool.num_reservable >= 2:
            num_taken += 1
            bench.receive(bench.spec(f"short {number} {num_taken}", 5, max_tokens=3, mode=SequenceMode.DECODE))
        if not bench.scheduler.has(long.key):
            break
        bench.step()
    bench.check_answer(long)
    assert num_taken > 0
    bench.finish()


def test_a_prompt_is_admitted_only_beside_what_prefills_under_way_still_need() -> None:
    bench = Bench(num_blocks=5, prefill_chunk_tokens=11)
    long = bench.add("long", 17, mode=SequenceMode.PREFILL_ONLY)
    bench.add("short", 3, mode=SequenceMode.PREFILL_ONLY)
    # Three tokens of the budget and three blocks are left, but those blocks are the long prompt's.
    assert bench.step() == [("long", 0, 8)]
    assert bench.step() == [("long", 8, 9)]
    assert bench.step() == []
    bench.pool.release(bench.scheduler.take_blocks(long.key))
    assert bench.step() == [("short", 0, 3)]


def test_cached_blocks_that_a_prompt_would_take_do_not_count_as_room_for_it() -> None:
    bench = Bench(num_blocks=6)
    first = bench.add("a", 12, max_tokens=1)
    bench.finish()
    granted = bench.pool.reserve(2)
    second = bench.add("b", [*first.prompt_ids, *range(7)], max_tokens=1)
    assert bench.schedule() == []  # three hits, two blocks more are needed, one is left
    assert bench.scheduler.num_waiting == 1
    bench.pool.release_reserved([block_id for block_id, _ in granted])
    assert bench.schedule() == [("b", 12, 7)]
    bench.apply()
    bench.check_answer(second)


# Two roles


def test_a_finished_prefill_holds_its_blocks_until_they_are_taken() -> None:
    bench = Bench()
    spec = bench.add("a", 9, max_tokens=5, mode=SequenceMode.PREFILL_ONLY)
    bench.finish()
    assert len(bench.tokens(spec)) == 1
    assert bench.scheduler.has(spec.key)
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (0, 0)
    block_table = bench.scheduler.take_blocks(spec.key)
    assert bench.runner.read(block_table, 9) == kv_of(spec.prompt_ids, 0)
    assert not bench.scheduler.has(spec.key)
    assert bench.pool.counts().active == 3
    bench.pool.release(block_table)
    assert bench.pool.counts().cached == 2


def test_blocks_can_be_taken_of_finished_prefills_only() -> None:
    bench = Bench()
    spec = bench.add("a", 9)
    with pytest.raises(KeyError):
        bench.scheduler.take_blocks(spec.key)
    with pytest.raises(KeyError):
        bench.scheduler.take_blocks(SequenceKey("unknown", 1))


def test_a_first_token_that_ends_the_request_is_reported_by_the_prefill() -> None:
    prompt_ids = [9, 8, 7]
    bench = Bench(eos_token_ids=frozenset({first_token(prompt_ids)}))
    spec = bench.add("a", prompt_ids, mode=SequenceMode.PREFILL_ONLY)
    bench.finish()
    assert bench.answers.finish_reasons[spec.key] == "stop"
    assert bench.scheduler.abort(spec.key)
    assert bench.pool.counts().active == 0


@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("num_extra_blocks", [0, 1])
def test_a_pushed_sequence_goes_on_decoding(num_prompt_tokens: int, num_extra_blocks: int) -> None:
    bench = Bench()
    spec = bench.spec("a", num_prompt_tokens, max_tokens=9, mode=SequenceMode.DECODE)
    if num_extra_blocks and num_prompt_tokens % BLOCK_SIZE:
        with pytest.raises(ValueError, match="block_table"):
            bench.receive(spec, num_extra_blocks)
        return
    emitted = bench.receive(spec, num_extra_blocks)
    assert (emitted.position, emitted.finish_reason) == (0, None)
    assert bench.schedule() == [("a", num_prompt_tokens, 1)]
    bench.apply()
    bench.finish()
    bench.check_answer(spec)


def test_pushed_blocks_are_indexed_at_once() -> None:
    bench = Bench()
    spec = bench.spec("a", 9, max_tokens=9, mode=SequenceMode.DECODE)
    bench.receive(spec)
    other = bench.add("b", spec.prompt_ids)
    assert bench.schedule() == [("a", 9, 1), ("b", 8, 1)]
    bench.apply()
    bench.finish()
    bench.check_answer(other)


def test_a_pushed_first_token_may_end_the_sequence() -> None:
    bench = Bench()
    emitted = bench.receive(bench.spec("a", 9, max_tokens=1, mode=SequenceMode.DECODE))
    assert emitted.finish_reason == "length"
    assert not bench.scheduler.has(emitted.key)
    assert bench.pool.counts().active == 0
    assert bench.schedule() == []


def test_a_pushed_sequence_resumes_at_the_position_after_forced_output() -> None:
    bench = Bench()
    spec = bench.spec("a", 6, max_tokens=9, mode=SequenceMode.DECODE, forced=[3, 4, 5])
    assert bench.receive(spec).position == 3
    bench.finish()
    assert bench.tokens(spec) == undisturbed(spec.prompt_ids, spec.sampling, forced_ids=[3, 4, 5]).token_ids


def test_a_pushed_sequence_that_is_preempted_is_recomputed_here() -> None:
    bench = Bench(num_blocks=5)
    old = bench.add("old", 7, max_tokens=12)
    bench.step()
    new = bench.spec("new", 7, max_tokens=8, mode=SequenceMode.DECODE)
    bench.receive(new)
    bench.step()
    assert bench.schedule() == [("old", 8, 1)]
    assert bench.apply() == ["new"]
    bench.finish()
    bench.check_answer(old)
    bench.check_answer(new)


def test_pushed_sequences_beyond_the_token_budget_take_turns() -> None:
    bench = Bench(max_running=1, max_step_tokens=5)
    specs = [bench.spec(f"{index}", 3, max_tokens=6, mode=SequenceMode.DECODE) for index in range(8)]
    for spec in specs:
        bench.receive(spec)
    assert [name for name, _, _ in bench.step()] == ["0", "1", "2", "3", "4"]
    assert [name for name, _, _ in bench.step()] == ["5", "6", "7", "0", "1"]
    bench.finish()
    for spec in specs:
        bench.check_answer(spec)


# Aborts and failures


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "decoding", "held"])
def test_an_abort_between_steps_releases_everything_at_once(phase: str) -> None:
    bench = Bench(prefill_chunk_tokens=8)
    mode = SequenceMode.PREFILL_ONLY if phase == "held" else SequenceMode.LOCAL
    spec = bench.add("a", 14, mode=mode)
    for _ in range({"waiting": 0, "prefilling": 1, "decoding": 3, "held": 2}[phase]):
        bench.step()
    assert bench.scheduler.abort(spec.key) is True
    assert bench.scheduler.abort(spec.key) is False
    bench.scheduler.check_invariants()
    assert bench.pool.counts().active == 0
    assert bench.schedule() == []


def test_blocks_of_an_aborted_sequence_stay_until_its_step_is_applied() -> None:
    bench = Bench()
    spec = bench.add("a", 9)
    other = bench.add("b", 3)
    bench.schedule()
    assert bench.scheduler.abort(spec.key)
    assert not bench.scheduler.has(spec.key)
    assert bench.pool.counts().active == 4
    bench.apply()
    assert bench.tokens(spec) == []
    assert bench.pool.counts().active == 1
    assert bench.pool.counts().cached == 2  # what was computed is worth keeping
    bench.finish()
    bench.check_answer(other)


def test_a_key_can_be_used_again_while_its_predecessor_is_still_in_a_step() -> None:
    bench = Bench()
    spec = bench.add("a", 9)
    bench.schedule()
    bench.scheduler.abort(spec.key)
    bench.scheduler.add(spec)
    bench.apply()
    bench.finish()
    bench.check_answer(spec)
    assert bench.pool.counts().active == 0


def test_a_failed_step_aborts_its_sequences_and_only_those() -> None:
    bench = Bench(max_running=2)
    for name in "abc":
        bench.add(name, 5)
    bench.schedule()
    bench.scheduler.abort(SequenceKey("a", 1))
    assert [key.request_id for key in bench.scheduler.fail_step()] == ["b"]
    bench.scheduler.check_invariants()
    counts = bench.pool.counts()
    assert (counts.active, counts.cached) == (0, 0)
    assert bench.step() == [("c", 0, 5)]


def apply_with_a_failure(bench: Bench, name: str) -> StepOutcome:
    """Runs the outstanding plan, and applies it with nothing usable for that sequence."""
    plan = bench.plan
    assert plan is not None
    result = bench.runner.run(plan)
    index = next(index for index, step in enumerate(plan.sequences) if step.key.request_id == name)
    result.tokens[index] = ()
    outcome = bench.scheduler.apply(replace(result, failures={index: "not finite"}))
    bench.scheduler.check_invariants()
    return outcome


def test_a_sequence_that_failed_alone_is_forgotten_and_what_it_computed_is_not_found() -> None:
    """Also the blocks of its earlier chunks; the others in the step go on."""
    bench = Bench(prefill_chunk_tokens=8)
    bench.add("good", 4, max_tokens=30)
    bench.step()
    bench.add("bad", 14)
    bench.step()
    assert bench.pool.num_indexed == 3, "one of the first, two of the other's first chunk"
    assert bench.schedule() == [("good", 5, 1), ("bad", 8, 6)]
    outcome = apply_with_a_failure(bench, "bad")
    assert [(failed.key.request_id, failed.reason) for failed in outcome.failed] == [("bad", "not finite")]
    assert [emitted.key.request_id for emitted in outcome.emitted] == ["good"]
    assert outcome.progress == [] and not bench.scheduler.has(SequenceKey("bad", 1))
    assert bench.pool.counts().cached == 0 and bench.pool.num_indexed == 1
    assert bench.schedule() == [("good", 6, 1)]


def test_blocks_that_others_use_stay_findable_when_a_sequence_fails() -> None:
    bench = Bench()
    prompt = list(range(12))
    bench.add("first", prompt[:9], max_tokens=30)
    bench.step()
    bench.add("second", prompt, max_tokens=30)
    assert bench.schedule() == [("first", 9, 1), ("second", 8, 4)]
    bench.scheduler.abort(SequenceKey("second", 1))  # its blocks wait for the step
    assert apply_with_a_failure(bench, "second").failed == [], "nobody waits for it any more"
    assert bench.pool.num_indexed == 2 and bench.pool.counts().cached == 0


# Refusals


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"prompt": []}, "prompt_ids must hold"),
        ({"prompt": 40}, "prompt_ids and forced_output_ids have 40 tokens"),
        ({"prompt": 38, "forced": [1, 2]}, "have 40 tokens"),
        ({"prompt": 3, "forced": [1, 2], "max_tokens": 2}, "forced_output_ids has 2 tokens, max_tokens is 2"),
        ({"prompt": 3, "mode": SequenceMode.DECODE}, "add_with_kv"),
    ],
)
def test_what_cannot_run_is_refused(spec: dict[str, object], message: str) -> None:
    bench = Bench(num_blocks=10)
    with pytest.raises(ValueError, match=message):
        bench.add("a", **spec)  # type: ignore[arg-type]
    assert not bench.scheduler.has(SequenceKey("a", 1))


def test_a_key_in_use_is_refused() -> None:
    bench = Bench()
    spec = bench.add("a", 3)
    with pytest.raises(ValueError, match="in use"):
        bench.scheduler.add(spec)


def test_refused_kv_stays_the_callers() -> None:
    bench = Bench()
    block_table = bench.pool.allocate(1)
    with pytest.raises(ValueError, match="block_table has 1 blocks, 9 tokens need 3 to 3"):
        bench.scheduler.add_with_kv(bench.spec("a", 9, mode=SequenceMode.DECODE), block_table, [1])
    with pytest.raises(ValueError, match="mode must be DECODE"):
        bench.scheduler.add_with_kv(bench.spec("a", 3), block_table, [1])
    assert bench.pool.counts().active == 1


def test_the_waiting_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_WAITING_SEQUENCES", 2)
    bench = Bench()
    bench.add("a", 3)
    bench.add("b", 3)
    with pytest.raises(SchedulerFullError):
        bench.add("c", 3)


def test_a_pool_that_cannot_hold_one_longest_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 11 blocks, the pool has 10"):
        Bench(num_blocks=10, max_model_tokens=41)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("max_running", 0),
        ("max_step_tokens", 19),
        ("prefill_chunk_tokens", 3),
        ("max_model_tokens", 1),
    ],
)
def test_an_impossible_configuration_is_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        Bench(**{field: value})
