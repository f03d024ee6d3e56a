"""Every family against transformers, with small random models that transformers wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.base import Backend
from engine.attention.cpu import NativeCpuBackend
from engine.attention.kv_cache import KVCache, KVLayout
from engine.attention.native_library import KernelsUnavailableError
from engine.attention.torch_reference import TorchReferenceBackend
from engine.core.step import StepPlan
from engine.model.config import ModelConfig
from engine.model.decoder import DecoderModel
from engine.model.weights import load_weights
from engine.runner import Runner
from tests.support.engine_model import GreedyLoop, make_step
from tests.support.transformers_models import (
    CASES,
    generate,
    logits,
    make_model,
    make_model_with_images,
    prompts,
    save_model,
)

transformers = pytest.importorskip("transformers")

MAX_TOKENS = 12
BLOCK_SIZE = 8
NUM_BLOCKS = 80
LOGITS_TOLERANCE = 1e-4
"""Of logits of about 10: twenty places of float32, which the order of some thousand additions explains."""


@pytest.fixture(autouse=True)
def single_thread() -> Any:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def native_backend() -> Backend:
    try:
        return NativeCpuBackend(1)
    except KernelsUnavailableError as error:
        pytest.skip(str(error))


BACKENDS = {"torch_reference": TorchReferenceBackend, "native": native_backend}


def make_runner(model_dir: Path, backend: Backend) -> Runner:
    config = ModelConfig.from_directory(model_dir)
    layout = KVLayout.for_model(config, dtype="float32", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    with torch.inference_mode():
        weights = load_weights(model_dir, config, "float32")
        return Runner(DecoderModel(config, "float32", weights, backend, KVCache.allocate(layout)))


def check_tokens(model_dir: Path, expected: list[list[int]], backend: Backend, vocab_size: int) -> None:
    """Alone and in one chunk, and all at once with their prompts in chunks."""
    runner = make_runner(model_dir, backend)
    asked = prompts(vocab_size)
    alone = [GreedyLoop(runner, chunk_size=256, max_running=1).generate([p], MAX_TOKENS)[0] for p in asked]
    assert alone == expected
    loop = GreedyLoop(runner, chunk_size=11, max_running=6)
    assert loop.generate(asked, MAX_TOKENS) == expected
    assert loop.max_batch > 3


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_those_of_transformers(tmp_path: Path, case: str) -> None:
    model = make_model(case, seed=0)
    save_model(model, tmp_path)
    vocab_size = model.config.vocab_size
    expected = [generate(model, prompt, MAX_TOKENS) for prompt in prompts(vocab_size)]
    assert len({token for answer in expected for token in answer}) > 10, "the model is degenerate"
    check_tokens(tmp_path, expected, TorchReferenceBackend(), vocab_size)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str, seed: int, backend: str) -> None:
    """After the last token of prompts of all lengths, each read in two chunks in one batch with the others."""
    model = make_model(case, seed)
    save_model(model, tmp_path)
    runner = make_runner(tmp_path, BACKENDS[backend]())
    asked = prompts(model.config.vocab_size)
    tables = [list(range(10 * index, 10 * index + 10)) for index in range(len(asked))]
    parts = [len(prompt) // 3 for prompt in asked]
    first = [make_step(p[:n], 0, table, sample=False) for p, n, table in zip(asked, parts, tables, strict=True) if n]
    runner.run(StepPlan(step_id=0, sequences=first))
    second = [make_step(p[n:], n, table) for p, n, table in zip(asked, parts, tables, strict=True)]
    found_SV = runner.logits(StepPlan(step_id=1, sequences=second))
    expected_SV = torch.stack([logits(model, prompt)[-1] for prompt in asked])
    assert float((found_SV - expected_SV).abs().max()) < LOGITS_TOLERANCE


def test_text_alone_of_a_model_with_images(tmp_path: Path) -> None:
    model = make_model_with_images()
    save_model(model, tmp_path)
    runner = make_runner(tmp_path, TorchReferenceBackend())
    for prompt in prompts():
        found_SV = runner.logits(StepPlan(step_id=0, sequences=[make_step(prompt, 0, range(10))]))
        assert float((found_SV[0] - logits(model, prompt)[-1]).abs().max()) < LOGITS_TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_native_kernels_give_the_same_tokens(tmp_path: Path, case: str) -> None:
    model = make_model(case, seed=3)
    save_model(model, tmp_path)
    vocab_size = model.config.vocab_size
    loop = GreedyLoop(make_runner(tmp_path, TorchReferenceBackend()), chunk_size=64, max_running=4)
    check_tokens(tmp_path, loop.generate(prompts(vocab_size), MAX_TOKENS), native_backend(), vocab_size)
