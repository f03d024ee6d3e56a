"""The scheduler with several answers to one prompt, and with prompts whose tokens are scored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.core.outcome import ScoredPrompt
from engine.core.planning import MAX_SCORED_ROWS
from engine.core.request import Sibling
from engine.core.sampling import SamplingParams
from engine.core.scheduler import SequenceMode
from engine.core.step import SequenceKey
from tests.support.scheduler_bench import Bench
from tests.support.toy_engine import kv_of, run_step, scores_of, undisturbed

THREE = (Sibling(choice=1), Sibling(choice=2))


def test_a_prompt_is_computed_once_and_its_last_block_once_an_answer() -> None:
    bench = Bench()
    spec = bench.add("a", 10, max_tokens=3, siblings=THREE)
    assert bench.step() == [("a", 0, 10)]
    assert bench.pool.counts().active == 3, "the others have no block of their own yet"
    assert bench.step() == [("a", 10, 1), ("a", 8, 3), ("a", 8, 3)]
    assert bench.pool.counts().active == 2 + 3
    assert bench.step() == [("a", 11, 1)] * 3
    assert bench.schedule() == []
    bench.check_answer(spec)
    assert bench.pool.counts().active == 0


def test_nothing_is_computed_twice_of_a_prompt_that_fills_its_blocks() -> None:
    bench = Bench()
    spec = bench.add("a", 8, max_tokens=2, siblings=THREE)
    assert [bench.step(), bench.step()] == [[("a", 0, 8)], [("a", 8, 1)] * 3]
    bench.check_answer(spec)


def test_an_answer_that_ends_at_its_first_token_leaves_the_prompt_to_the_others() -> None:
    bench = Bench()
    prompt = [5] * 10
    firsts = [undisturbed(prompt, SamplingParams(), choice=choice).token_ids[0] for choice in range(3)]
    assert len(set(firsts)) == 3
    spec = bench.add("a", prompt, siblings=THREE, stop_token_ids=(firsts[0], firsts[2]))
    bench.step()
    assert sorted(key.choice for key in bench.answers.finish_reasons) == [0, 2]
    assert bench.step() == [("a", 8, 3)]
    bench.finish()
    bench.check_answer(spec)
    assert bench.pool.counts().active == 0


def test_siblings_share_what_they_have_in_common_with_the_leading_answer() -> None:
    """After a failure: one has as much, one went on from there, one is different from its second token on."""
    bench = Bench()
    siblings = (
        Sibling(choice=0, delivered_ids=(7, 8, 9)),
        Sibling(choice=1, delivered_ids=(7, 8, 9, 10, 11, 12, 13)),
        Sibling(choice=5, delivered_ids=(7, 1, 1)),
    )
    spec = bench.spec("a", 10, max_tokens=9, choice=3, forced=[7, 8, 9], siblings=siblings)
    bench.scheduler.add(spec)
    assert bench.step() == [("a", 0, 13)]
    # 3 goes on; 0 computes the last input token and its own first one, 1 and 5 what they do not share.
    assert bench.step() == [("a", 13, 1), ("a", 12, 2), ("a", 12, 5), ("a", 8, 5)]
    bench.finish()
    bench.check_answer(spec)
    assert bench.pool.counts().active == 0


def test_pushed_kv_serves_all_answers_from_blocks_that_were_reserved_for_them() -> None:
    bench = Bench(num_blocks=5)
    spec = bench.spec("a", 10, max_tokens=3, mode=SequenceMode.DECODE, siblings=THREE)
    granted = bench.pool.reserve(3 + 2)
    table = [block_id for block_id, _ in granted]
    bench.runner.write(table[:3], kv_of(spec.prompt_ids, 0))
    bench.pool.commit(granted)
    firsts = [undisturbed(spec.prompt_ids, spec.sampling, choice=choice).token_ids[0] for choice in range(3)]
    for emitted in bench.scheduler.add_with_kv(spec, table[:3], firsts, table[3:]):
        bench.answers.take(emitted)
    bench.scheduler.check_invariants()
    assert bench.step() == [("a", 10, 1), ("a", 8, 3), ("a", 8, 3)], "nobody waits for a block"
    bench.finish()
    bench.check_answer(spec)
    assert bench.pool.counts().active == 0


def test_all_answers_end_at_first_tokens_that_were_pushed() -> None:
    bench = Bench()
    spec = bench.spec("a", 10, max_tokens=1, mode=SequenceMode.DECODE, siblings=THREE)
    emitted = bench.scheduler.add_with_kv(spec, bench.pool.allocate(3), [1, 2, 3], bench.pool.allocate(2))
    assert [(token.key.choice, token.token_id, token.finish_reason) for token in emitted] == [
        (0, 1, "length"),
        (1, 2, "length"),
        (2, 3, "length"),
    ]
    bench.scheduler.check_invariants()
    assert bench.pool.counts().active == 0 and not bench.scheduler.has(spec.key)


def test_prefill_draws_for_each_answer_and_holds_one_prompt() -> None:
    bench = Bench()
    spec = bench.add("a", 10, mode=SequenceMode.PREFILL_ONLY, siblings=THREE)
    bench.step()
    firsts = [undisturbed(spec.prompt_ids, spec.sampling, choice=choice).token_ids[0] for choice in range(3)]
    drawn = [bench.answers.token_ids[SequenceKey("a", 1, choice)] for choice in range(3)]
    assert drawn == [[token_id] for token_id in firsts]
    assert not bench.scheduler.has(SequenceKey("a", 1, 1)) and bench.pool.counts().active == 3
    bench.pool.release(bench.scheduler.take_blocks(spec.key))
    assert bench.pool.counts().active == 0


def test_answers_are_preempted_and_aborted_one_by_one() -> None:
    bench = Bench(num_blocks=6)
    spec = bench.add("a", 8, max_tokens=12, siblings=THREE)
    bench.step()
    bench.step()
    assert bench.scheduler.abort(SequenceKey("a", 1, 1))
    preempted: list[str] = []
    while bench.schedule():
        preempted += bench.apply()
    assert preempted, "six blocks do not hold two answers"
    bench.check_answer(replace(spec, siblings=THREE[1:]))
    assert bench.pool.counts().active == 0


def test_siblings_that_cannot_be_are_refused() -> None:
    bench = Bench()
    with pytest.raises(ValueError, match="different choices"):
        bench.scheduler.add(bench.spec("a", 3, siblings=(Sibling(choice=0),)))
    with pytest.raises(ValueError, match="forced_output_ids has 4 tokens, max_tokens is 4"):
        bench.scheduler.add(bench.spec("a", 3, siblings=(Sibling(choice=1, delivered_ids=(1, 2, 3, 4)),)))
    pushed = bench.spec("c", 3, mode=SequenceMode.DECODE, siblings=THREE)
    with pytest.raises(ValueError, match="spare_blocks has 1 blocks for 2 siblings"):
        bench.scheduler.add_with_kv(pushed, [0], [1, 2, 3], [1])
    with pytest.raises(ValueError, match="first_token_ids has 2 ids for 3 answers"):
        bench.scheduler.add_with_kv(pushed, [0], [1, 2], [1, 2])
    assert not bench.scheduler.has(pushed.key)


# Log-probabilities of the prompt


def scores_in(parts: list[ScoredPrompt]) -> list[tuple[int, int, float]]:
    """(position, token id, log-probability), in the order in which they came."""
    return [
        (scored.position + offset, token.token_id, token.logprob)
        for scored in parts
        for offset, token in enumerate(scored.tokens)
    ]


def expected_scores(prompt: list[int]) -> list[tuple[int, int, float]]:
    return list(zip(range(1, len(prompt)), prompt[1:], scores_of(prompt), strict=True))


def run_scored(bench: Bench) -> list[ScoredPrompt]:
    scored: list[ScoredPrompt] = []
    while (outcome := run_step(bench.scheduler, bench.runner)) is not None:
        scored += outcome.scored
        for emitted in outcome.emitted:
            bench.answers.take(emitted)
    return scored


def test_a_scored_prompt_takes_nothing_from_the_cache_and_leaves_it_there() -> None:
    bench = Bench(prefill_chunk_tokens=8)
    plain = bench.add("a", 20)
    bench.finish()
    num_run = bench.runner.num_tokens_run
    scored = bench.add("b", plain.prompt_ids, prompt_logprobs=0)
    assert scores_in(run_scored(bench)) == expected_scores(plain.prompt_ids)
    assert bench.runner.num_tokens_run == num_run + 20 + 3, "all of it was computed again"
    bench.check_answer(scored)
    assert bench.pool.counts().cached == 5, "but not kept twice"
    num_run = bench.runner.num_tokens_run
    bench.add("c", plain.prompt_ids)
    assert run_scored(bench) == [] and bench.runner.num_tokens_run == num_run + 4 + 3


def test_a_step_scores_no_more_rows_than_its_limit() -> None:
    bench = Bench(num_blocks=200, max_step_tokens=300, prefill_chunk_tokens=256)
    specs = [bench.add(name, 150, prompt_logprobs=2) for name in ("a", "b")]
    other = bench.add("c", 130)
    num_scored = []
    scored: list[ScoredPrompt] = []
    while (plan := bench.scheduler.schedule()) is not None:
        num_scored.append(sum(len(step.scored_ids) for step in plan.sequences))
        outcome = bench.scheduler.apply(bench.runner.run(plan))
        scored += outcome.scored
        for emitted in outcome.emitted:
            bench.answers.take(emitted)
    assert num_scored[:2] == [MAX_SCORED_ROWS] * 2
    assert max(num_scored) == MAX_SCORED_ROWS and sum(num_scored) == 2 * 149
    for spec in specs:
        assert scores_in([part for part in scored if part.key == spec.key]) == expected_scores(spec.prompt_ids)
    for spec in (*specs, other):
        bench.check_answer(spec)


def test_a_prompt_of_one_token_and_forced_output_are_not_scored() -> None:
    bench = Bench()
    bench.add("a", 1, prompt_logprobs=0)
    spec = bench.add("b", 3, max_tokens=6, forced=[7, 8, 9], prompt_logprobs=0)
    scored = run_scored(bench)
    assert {part.key for part in scored} == {spec.key}
    assert scores_in(scored) == expected_scores(spec.prompt_ids)


def test_several_answers_score_their_prompt_once() -> None:
    bench = Bench()
    spec = bench.add("a", 10, siblings=THREE, prompt_logprobs=0)
    scored = run_scored(bench)
    assert scores_in(scored) == expected_scores(spec.prompt_ids)
    bench.check_answer(spec)


def test_decode_never_scores_what_prefill_has_scored() -> None:
    """Not even when it computes the prompt itself, after a preemption."""
    bench = Bench(num_blocks=6)
    spec = bench.spec("a", 8, max_tokens=9, mode=SequenceMode.DECODE, prompt_logprobs=0)
    old = bench.add("b", 8, max_tokens=9, priority=1)
    bench.receive(spec)
    preempted: list[str] = []
    while bench.schedule():
        assert bench.plan is not None and not any(step.scored_ids for step in bench.plan.sequences)
        preempted += bench.apply()
    assert preempted == ["a"]
    bench.check_answer(spec)
    bench.check_answer(old)


def test_what_was_scored_before_a_preemption_is_not_reported_again() -> None:
    """Its first chunks were scored, and their blocks are gone: they are scored again, and reported once."""
    bench = Bench(num_blocks=20, prefill_chunk_tokens=4, max_running=2, max_step_tokens=6)
    scored: list[ScoredPrompt] = []
    spec = bench.add("a", 16, max_tokens=2, prompt_logprobs=0)

    def step() -> list[str]:
        outcome = run_step(bench.scheduler, bench.runner)
        assert outcome is not None
        scored.extend(outcome.scored)
        for emitted in outcome.emitted:
            bench.answers.take(emitted)
        return [key.request_id for key in outcome.preempted]

    step()
    step()
    assert scores_in(scored) == expected_scores(spec.prompt_ids)[:8]
    num_run = bench.runner.num_tokens_run
    # Others come with their KV, take all tokens of every step, and grow until "a" has to go, and its blocks with it.
    pushed = [bench.spec(name, 1, max_tokens=14, mode=SequenceMode.DECODE, priority=1) for name in "bcdefg"]
    for other in pushed:
        bench.receive(other)
    preempted: list[str] = []
    while bench.scheduler.num_running + bench.scheduler.num_waiting:
        preempted += step()
    assert preempted[0] == "a"
    assert bench.runner.num_tokens_run - num_run >= 16 + 1 + 6 * 13, "its prompt was computed from the start"
    assert scores_in(scored) == expected_scores(spec.prompt_ids)
    for other in (spec, *pushed):
        bench.check_answer(other)
