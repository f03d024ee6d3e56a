"""The real model against the committed tokens of transformers, through the runner alone: no scheduler, no transfer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.step import StepPlan
from engine.model.config import ModelConfig, model_fingerprint
from engine.runner import Runner
from tests.support.engine_model import GreedyLoop, make_step, real_model_dir, reference
from tests.support.soak import ALL_PROMPTS, share_of

# A margin between logits of about 20 that bfloat16 can flip: it keeps 8 bits of every activation.
NEAR_TIE = 0.25
EXACT_LENGTHS = {1, 2, 15, 16, 17, 31, 32, 33, 64, 255, 256, 257, 512, 2048}


@pytest.fixture(scope="module")
def model_dir() -> Path:
    directory, reason = real_model_dir()
    if directory is None:
        pytest.skip(reason)
    return directory


@pytest.fixture(scope="module")
def float32_runner(model_dir: Path) -> Iterator[Runner]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Runner.from_directory(model_dir, "float32", 400, 16, 1)
    torch.set_num_threads(num_threads)


def prompts() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = reference()["prompts"]
    return entries


def test_the_set_is_the_one_that_is_asked_for() -> None:
    entries = prompts()
    assert len(entries) >= 60
    assert {len(entry["prompt_ids"]) for entry in entries} >= EXACT_LENGTHS
    for entry in entries:
        ended = entry["output_ids"][-1] in reference()["eos_token_ids"]
        assert len(entry["output_ids"]) == 64 or ended
        assert len(entry["margins"]) == len(entry["output_ids"])


def test_the_imported_model_is_the_references(model_dir: Path) -> None:
    config = ModelConfig.from_directory(model_dir)
    assert config.eos_token_ids == tuple(reference()["eos_token_ids"]) == (2,)
    assert model_fingerprint(model_dir) == reference()["model_fingerprint"]
    template = json.loads((model_dir / "tokenizer_config.json").read_text())["chat_template"]
    assert "<|im_start|>" in template


def test_alone(float32_runner: Runner) -> None:
    """Each by itself and in one chunk. Answers to their ends are those of the tests of clusters."""
    num_tokens = 64 if ALL_PROMPTS else 16
    for entry in share_of(prompts(), 8):
        loop = GreedyLoop(float32_runner, chunk_size=4096, max_running=1)
        assert loop.generate([entry["prompt_ids"]], num_tokens) == [entry["output_ids"][:num_tokens]], entry["name"]


def test_all_at_once_in_chunks(float32_runner: Runner) -> None:
    """Many prompts through a pool that holds some of them, prompts in chunks beside decoding sequences."""
    loop = GreedyLoop(float32_runner, chunk_size=200, max_running=16)
    entries = share_of(prompts(), 2)
    outputs = loop.generate([entry["prompt_ids"] for entry in entries], 64)
    assert loop.max_batch == 16
    pairs = zip(entries, outputs, strict=True)
    assert [entry["name"] for entry, output in pairs if output != entry["output_ids"]] == []


def test_bfloat16_agrees_where_the_margin_is_not_a_near_tie(model_dir: Path) -> None:
    """Teacher-forced on the float32 tokens: the argmax is theirs, but for near-ties."""
    runner = Runner.from_directory(model_dir, "bfloat16", 400, 16, 1)
    num_positions, num_far = 0, 0
    for entry in prompts()[::5]:
        ids, output, table = entry["prompt_ids"], entry["output_ids"], list(range(140))
        chunks = [(ids, 0), *(([token], len(ids) + index) for index, token in enumerate(output[:-1]))]
        for (chunk, start), token, margin in zip(chunks, output, entry["margins"], strict=True):
            logits = runner.logits(StepPlan(step_id=0, sequences=[make_step(chunk, start, table)]))[0]
            num_positions += 1
            num_far += int(logits.argmax()) != token and margin > NEAR_TIE
    assert num_positions > 800
    assert num_far <= num_positions // 100, f"{num_far} of {num_positions} positions differ beyond a near-tie"
