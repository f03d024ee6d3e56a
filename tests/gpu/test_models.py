"""Whole models on a GPU: the tokens of the host's engine, or as good ones where bfloat16 cannot tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.step import StepPlan
from engine.runner import Runner
from tests.support.engine_model import GreedyLoop, make_step, real_model_dir, reference, write_tiny_model

BLOCK_SIZE = 16
NEAR_TIE = 0.25
"""A margin between logits of about 20 that bfloat16 can flip: it keeps 8 bits of every activation."""


@pytest.fixture(scope="module")
def model_dir() -> Path:
    directory, reason = real_model_dir()
    if directory is None:
        pytest.skip(reason)
    return directory


def test_generated_tokens_are_as_likely_as_the_hosts(tmp_path: Path) -> None:
    """Prompts in chunks beside decoding sequences, whose number changes; each token judged by the host's engine."""
    write_tiny_model(tmp_path, head_dim=64, num_attention_heads=6, num_key_value_heads=2, dtype="bfloat16")
    runner = Runner.from_directory(tmp_path, "bfloat16", 100, BLOCK_SIZE, 1, device="cuda")
    runner.warm_up(32, 6)
    prompts = [[3, 9, 4, 1, 5] * 9, [7], [11, 12, 13, 60], [8] * 17, [5, 6], [70, 71, 72] * 5]
    outputs = GreedyLoop(runner, chunk_size=32, max_running=6).generate(prompts, max_tokens=40)
    host = Runner.from_directory(tmp_path, "bfloat16", 100, BLOCK_SIZE, 1)
    for prompt, output in zip(prompts, outputs, strict=True):
        for position, token in enumerate(output):
            ids = [*prompt, *output[:position]]
            plan = StepPlan(step_id=0, sequences=[make_step(ids, 0, range(-(-len(ids) // BLOCK_SIZE)))])
            logits = host.logits(plan)[0]
            assert logits[token] >= logits.max() - 0.03 * logits.abs().max()


def test_a_pool_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, head_dim=64, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"num_blocks: a KV pool of .*GiB is more than"):
        Runner.from_directory(tmp_path, "bfloat16", 10**8, BLOCK_SIZE, 1, device="cuda")


def test_real_model_agrees_where_the_margin_is_not_a_near_tie(model_dir: Path) -> None:
    """Forced along the committed float32 tokens, prompt in one chunk and then token by token, through recordings."""
    runner = Runner.from_directory(model_dir, "bfloat16", 400, BLOCK_SIZE, 1, device="cuda")
    runner.warm_up(512, 40)
    num_positions, num_far = 0, 0
    for entry in reference()["prompts"][::5]:
        ids, output, table = entry["prompt_ids"], entry["output_ids"], list(range(140))
        chunks = [(ids, 0), *(([token], len(ids) + index) for index, token in enumerate(output[:-1]))]
        for (chunk, start), token, margin in zip(chunks, output, entry["margins"], strict=True):
            logits = runner.logits(StepPlan(step_id=0, sequences=[make_step(chunk, start, table)]))[0]
            num_positions += 1
            num_far += int(logits.argmax()) != token and margin > NEAR_TIE
    assert num_positions > 800
    assert num_far <= num_positions // 100, f"{num_far} of {num_positions} positions differ beyond a near-tie"


def test_real_model_generates_the_committed_tokens_up_to_near_ties(model_dir: Path) -> None:
    """Greedy, many at once. A near-tie may lead an answer astray, so each is compared up to its first one."""
    entries = [entry for entry in reference()["prompts"] if len(entry["prompt_ids"]) <= 512]
    runner = Runner.from_directory(model_dir, "bfloat16", 1500, BLOCK_SIZE, 1, device="cuda")
    runner.warm_up(512, 40)
    loop = GreedyLoop(runner, chunk_size=512, max_running=40)
    outputs = loop.generate([entry["prompt_ids"] for entry in entries], max_tokens=64)
    assert loop.max_batch == 40
    num_compared, num_different = 0, 0
    for entry, output in zip(entries, outputs, strict=True):
        near_ties = [index for index, margin in enumerate(entry["margins"]) if margin <= NEAR_TIE]
        end = near_ties[0] if near_ties else len(entry["output_ids"])
        num_compared += end
        num_different += output[:end] != entry["output_ids"][:end]
    assert num_compared > 500
    assert num_different <= len(entries) // 20, f"{num_different} of {len(entries)} answers differ before a near-tie"
