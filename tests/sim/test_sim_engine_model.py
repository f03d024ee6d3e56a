"""The engine model betrays every mistake with blocks, whatever the chunking."""

from __future__ import annotations

import pytest

from cluster.core.ids import Outcome
from cluster.sim.engine_model import EOS_TOKEN_ID, Oracle, StepRun
from cluster.sim.kv_memory import ContextHash, KVMemory, checksum
from engine.core.sampling import SamplingParams
from engine.core.step import SequenceKey, SequenceStep, StepPlan

PROMPT = [5, 9, 13, 7, 7, 40, 21, 3, 60, 11]


def answer(sampling: SamplingParams, max_model_tokens: int, stop_pair: tuple[int, int] | None = None) -> Oracle:
    """An oracle that was given the right answer to its end."""
    oracle = Oracle(PROMPT, sampling, max_model_tokens, stop_pair=stop_pair)
    while oracle.outcome is None:
        oracle.accept(oracle.choices()[0])
    return oracle


def prompt_context() -> ContextHash:
    context = ContextHash()
    for token_id in PROMPT:
        context.append(token_id)
    return context


def run_alone(memory: KVMemory, table: list[int], chunk: int, sampling: SamplingParams, num_tokens: int) -> list[int]:
    """A sequence by itself: the prompt in chunks, then one token a step."""
    tokens, output, start = list(PROMPT), [], 0
    while len(output) < num_tokens:
        token_ids = tokens[start : start + chunk]
        sample = start + len(token_ids) == len(tokens)
        step = SequenceStep(
            key=SequenceKey("r", 1),
            token_ids=token_ids,
            start=start,
            block_table=table,
            sample=sample,
            sampling=sampling,
            position=len(output),
            prompt_ids=PROMPT,
            output_ids=output,
        )
        tokens_drawn = StepRun(StepPlan(step_id=0, sequences=[step]), memory).finish().tokens[0]
        start += len(token_ids)
        assert len(tokens_drawn) == sample
        for drawn in tokens_drawn:
            output.append(drawn.token_id)
            tokens.append(drawn.token_id)
    return output


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_the_answer_is_computable_without_a_pool(chunk: int, penalty: float) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True, presence_penalty=penalty)
    output = run_alone(KVMemory(12, 4, rubbish=chunk), [7, 2, 9, 0, 5], chunk, sampling, 8)
    assert output == answer(sampling, 64).token_ids


def test_a_wrong_block_changes_the_answer() -> None:
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    right = answer(sampling, 64).token_ids
    memory, table = KVMemory(12, 4, rubbish=1), [7, 2, 9, 0, 5]
    run_alone(memory, table, 4, sampling, 1)
    for position in range(len(PROMPT)):
        damaged = KVMemory(12, 4, rubbish=1)
        damaged.data[:] = memory.data
        damaged.data[(table[position // 4] * 4 + position % 4) * 8] ^= 1
        step = SequenceStep(
            key=SequenceKey("r", 1),
            token_ids=[right[0]],
            start=len(PROMPT),
            block_table=table,
            sample=True,
            sampling=sampling,
            position=1,
            prompt_ids=PROMPT,
            output_ids=[right[0]],
        )
        (drawn,) = StepRun(StepPlan(step_id=0, sequences=[step]), damaged).finish().tokens[0]
        assert drawn.token_id != right[1], f"position {position} is not seen"


def test_every_layer_of_every_token_is_read() -> None:
    memory, table = KVMemory(12, 4, rubbish=1, num_layers=3), [7, 2, 9, 0, 5]
    run_alone(memory, table, 4, SamplingParams(max_tokens=8, ignore_eos=True), 1)
    whole, num_tokens = memory.read(table, len(PROMPT)), len(PROMPT)
    assert ContextHash(whole).value == prompt_context().value
    for position in range(num_tokens):
        for layer in range(3):
            damaged = KVMemory(12, 4, rubbish=1, num_layers=3)
            damaged.data[:] = memory.data
            damaged.data[((table[position // 4] * 3 + layer) * 4 + position % 4) * 8] ^= 1
            assert damaged.read(table, num_tokens) != whole, f"layer {layer} of position {position} is not seen"


@pytest.mark.parametrize("layers", [range(1), range(1, 3), range(2, 3)])
def test_layers_of_another_block_are_seen(layers: range) -> None:
    """As if the last groups of a push had never come, and the block still held what it held before."""
    memory, table = KVMemory(12, 4, rubbish=1, num_layers=3), [7, 2, 9, 0, 5]
    run_alone(memory, table, 4, SamplingParams(max_tokens=8, ignore_eos=True), 1)
    whole = memory.read(table, 8)
    start, size = memory.layout.layers_slice(7, layers)
    memory.data[start : start + size] = memory.block(2, layers)
    assert memory.read(table, 8) != whole


def test_layers_that_a_step_has_not_reached_are_not_written() -> None:
    memory, table = KVMemory(12, 4, rubbish=1, num_layers=3), [7, 2, 9]
    before = memory.block(7)
    step = SequenceStep(
        key=SequenceKey("r", 1),
        token_ids=PROMPT[:4],
        start=0,
        block_table=table,
        sample=False,
        sampling=SamplingParams(),
        position=0,
        prompt_ids=PROMPT,
        output_ids=[],
    )
    run = StepRun(StepPlan(step_id=0, sequences=[step]), memory)
    run.compute()
    assert memory.block(7) == before
    run.write_layers(2)
    assert memory.block(7, range(2, 3)) == before[64:]
    for layer in range(2):
        assert memory.block(7, range(layer, layer + 1)) != before[:32]
    run.finish()
    alone = ContextHash()
    assert memory.read(table, 4) == b"".join(alone.append(token_id).to_bytes(8, "big") for token_id in PROMPT[:4])


def test_swapped_blocks_are_seen() -> None:
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    memory = KVMemory(12, 4, rubbish=1)
    run_alone(memory, [7, 2, 9, 0], 4, sampling, 1)
    contents = memory.read([7, 2, 9], 8), memory.read([2, 7, 9], 8)
    assert checksum(contents[0]) != checksum(contents[1])


def test_ends_of_answers() -> None:
    free = SamplingParams(max_tokens=60, ignore_eos=True)
    tokens = answer(free, 40)
    assert tokens.outcome is Outcome.LENGTH and len(tokens.token_ids) == 30
    stop_id = tokens.token_ids[4]
    first = tokens.token_ids.index(stop_id)
    stopped = answer(SamplingParams(max_tokens=60, stop_token_ids=(stop_id,), ignore_eos=True), 40)
    assert stopped.outcome is Outcome.STOP and stopped.token_ids == tokens.token_ids[: first + 1]
    assert not stopped.has_stop_match and stopped.choices() == []
    matched = answer(free, 40, (tokens.token_ids[2], tokens.token_ids[3]))
    assert matched.outcome is Outcome.STOP and matched.has_stop_match and len(matched.token_ids) <= 4


def test_no_end_before_min_tokens() -> None:
    for seed in range(300):
        sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=6, min_tokens=3)
        assert EOS_TOKEN_ID not in answer(sampling, 64).token_ids[:3]


def test_inexact_answers_do_not_mix() -> None:
    """Several tokens are right at a position, but which ones depends on the tokens given before it."""
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    oracles = [Oracle(PROMPT, sampling, 64, num_variants=3) for _ in range(2)]
    first, second = oracles[0].choices()[:2]
    assert first != second
    oracles[0].accept(first)
    oracles[1].accept(second)
    assert not set(oracles[0].choices()) & set(oracles[1].choices())
