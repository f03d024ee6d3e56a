"""Every family against transformers, with small random models that transformers wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.attention.base import Backend
from engine.attention.cpu import NativeCpuBackend
from engine.attention.kv_cache import KVCache, KVLayout
from engine.attention.native_library import KernelsUnavailableError
from engine.attention.torch_reference import TorchReferenceBackend
from engine.core.step import StepPlan
from engine.model.config import DtypeName, ModelConfig
from engine.model.decoder import DecoderModel
from engine.model.weights import load_weights
from engine.runner import Runner
from engine.step_tensors import StepTensorBuilder
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
"""Of logits of about 10, in float32: what the order of some thousand additions explains."""
BFLOAT16_TOLERANCE = 0.03
"""Of the mean difference between backends as a share of the mean logit: 8 bits of every activation in three layers."""

Saved = Callable[[str, int], tuple[Path, list[torch.Tensor], list[list[int]]]]


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Of a case and seed: the directory, and transformers' last logits and greedy answers for each prompt."""
    done: dict[tuple[str, int], tuple[Path, list[torch.Tensor], list[list[int]]]] = {}

    def save(case: str, seed: int) -> tuple[Path, list[torch.Tensor], list[list[int]]]:
        if (case, seed) not in done:
            directory = tmp_path_factory.mktemp("model")
            model = make_model(case, seed)
            save_model(model, directory)
            asked = prompts(model.config.vocab_size)
            answers = [generate(model, prompt, MAX_TOKENS) for prompt in asked] if seed == 0 else []
            done[case, seed] = directory, [logits(model, prompt)[-1] for prompt in asked], answers
        return done[case, seed]

    return save


def native_backend() -> Backend:
    try:
        return NativeCpuBackend(1)
    except KernelsUnavailableError as error:
        pytest.skip(str(error))


BACKENDS = {"torch_reference": TorchReferenceBackend, "native": native_backend}


def make_decoder(model_dir: Path, backend: Backend, dtype: DtypeName) -> DecoderModel:
    config = ModelConfig.from_directory(model_dir)
    layout = KVLayout.for_model(config, dtype=dtype, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    with torch.inference_mode():
        weights = load_weights(model_dir, config, dtype)
        return DecoderModel(config, dtype, weights, backend, KVCache.allocate(layout))


def make_runner(model_dir: Path, backend: Backend, dtype: DtypeName = "float32") -> Runner:
    return Runner(make_decoder(model_dir, backend, dtype))


def logits_in_two_chunks(runner: Runner) -> torch.Tensor:
    """[S, V] after the last tokens of all prompts, which are read in one batch, and each in two chunks."""
    asked = prompts(runner.config.vocab_size)
    tables = [list(range(10 * index, 10 * index + 10)) for index in range(len(asked))]
    parts = [len(prompt) // 3 for prompt in asked]
    first = [make_step(p[:n], 0, table, sample=False) for p, n, table in zip(asked, parts, tables, strict=True) if n]
    runner.run(StepPlan(step_id=0, sequences=first))
    second = [make_step(p[n:], n, table) for p, n, table in zip(asked, parts, tables, strict=True)]
    return runner.logits(StepPlan(step_id=1, sequences=second))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_those_of_transformers(saved: Saved, case: str, backend: str) -> None:
    """Alone and in one chunk, and all at once with their prompts in chunks."""
    model_dir, _, expected = saved(case, 0)
    assert len({token for answer in expected for token in answer}) > 10, "the model is degenerate"
    runner = make_runner(model_dir, BACKENDS[backend]())
    asked = prompts(runner.config.vocab_size)
    alone = [GreedyLoop(runner, chunk_size=256, max_running=1).generate([p], MAX_TOKENS)[0] for p in asked]
    assert alone == expected
    loop = GreedyLoop(runner, chunk_size=11, max_running=6)
    assert loop.generate(asked, MAX_TOKENS) == expected
    assert loop.max_batch > 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(saved: Saved, case: str, seed: int, backend: str) -> None:
    model_dir, expected, _ = saved(case, seed)
    found_SV = logits_in_two_chunks(make_runner(model_dir, BACKENDS[backend]()))
    assert float((found_SV - torch.stack(expected)).abs().max()) < LOGITS_TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_backends_agree_in_bfloat16(saved: Saved, case: str) -> None:
    """In the median prompt: a rounding that sends a token to another expert changes that prompt's logits at large."""
    model_dir, _, _ = saved(case, 1)
    native_SV = logits_in_two_chunks(make_runner(model_dir, native_backend(), "bfloat16"))
    reference_SV = logits_in_two_chunks(make_runner(model_dir, TorchReferenceBackend(), "bfloat16"))
    difference_S = (native_SV - reference_SV).abs().mean(dim=1) / reference_SV.abs().mean(dim=1)
    assert float(difference_S.median()) < BFLOAT16_TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_a_wanted_rows_bits_do_not_depend_on_what_else_is_wanted(saved: Saved, case: str, dtype: DtypeName) -> None:
    """All rows of a prompt in one step, as for its log-probabilities, and each alone or with a few, in chunks."""
    model_dir, _, _ = saved(case, 0)
    model = make_decoder(model_dir, native_backend(), dtype)
    vocab_size, pool_BLKCSD = model.config.vocab_size, model.cache.pool_BLKCSD
    builder = StepTensorBuilder(
        vocab_size=vocab_size, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_positions=NUM_BLOCKS * BLOCK_SIZE
    )
    prompt, table = max(prompts(vocab_size), key=len), list(range(10))
    whole = make_step(prompt, 0, table, sample=False, scored_ids=[0] * len(prompt))
    expected_TV = model.forward(builder.build(StepPlan(step_id=0, sequences=[whole]))).clone()
    assert expected_TV.shape[0] == len(prompt) and bool(expected_TV.isfinite().all())
    written_BLKCSD = pool_BLKCSD[:10].clone()
    for ends in ([len(prompt)], [3, len(prompt) - 1, len(prompt)], [len(prompt) // 2, len(prompt)]):
        pool_BLKCSD.zero_()
        start = 0
        for end in ends:
            # The first chunk wants nothing, if it is not the only one; then the last row, beside one that wants none.
            mine = make_step(prompt[start:end], start, table, sample=start > 0 or end == len(prompt))
            other = make_step(prompt[:5], 0, [20], sample=False)
            found_RV = model.forward(builder.build(StepPlan(step_id=1, sequences=[other, mine])))
            if mine.sample:
                assert torch.equal(found_RV[0], expected_TV[end - 1]), (ends, end)
            start = end
        assert torch.equal(pool_BLKCSD[:10], written_BLKCSD)


def test_text_alone_of_a_model_with_images(tmp_path: Path) -> None:
    model = make_model_with_images()
    save_model(model, tmp_path)
    runner = make_runner(tmp_path, TorchReferenceBackend())
    for prompt in prompts():
        found_SV = runner.logits(StepPlan(step_id=0, sequences=[make_step(prompt, 0, range(10))]))
        assert float((found_SV[0] - logits(model, prompt)[-1]).abs().max()) < LOGITS_TOLERANCE
