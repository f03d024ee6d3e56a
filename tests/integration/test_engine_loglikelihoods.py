"""Real models against transformers: the log-likelihoods of two hundred short texts, and which answer they favour."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.kv_cache import KVCache, KVLayout
from engine.attention.select import select_backend
from engine.core.step import StepPlan
from engine.model.config import DtypeName, ModelConfig, model_fingerprint
from engine.model.decoder import DecoderModel
from engine.model.packaged_models import GEMMA3, SMOLLM2, PackagedModel
from engine.model.weights import load_weights
from engine.step_tensors import StepTensorBuilder
from tests.reference.questions import QUESTIONS
from tests.support.engine_model import make_step, real_model_dir

BLOCK_SIZE = 16
REFERENCE_FILES = {SMOLLM2: "smollm2_loglikelihoods.json", GEMMA3: "gemma3_loglikelihoods.json"}
NUM_TEXTS_A_STEP = 20
NUM_ROWS_A_PIECE = 64
TOLERANCE: dict[DtypeName, float] = {"float32": 1e-3, "bfloat16": 0.8}
"""Of the sum over a text's tokens, against transformers in float32.

Measured: 7e-5 in float32. In bfloat16 up to 0.57 (Gemma 3, native kernels; 0.23 on the torch reference), where
transformers' own values in bfloat16 differ from its float32 by up to 0.68 (SmolLM2) and 0.44 (Gemma 3). All texts begin
with the same token, so that they share most of their deviation: its mean is -0.21 on the native kernels, -0.11 on the
reference, and with one native operation at a time in the reference between -0.12 and +0.05, whichever it is.
"""


@pytest.fixture(params=[SMOLLM2, GEMMA3], ids=lambda model: model.name)
def model(request: pytest.FixtureRequest) -> tuple[Path, dict[str, Any]]:
    """A model's directory, and its reference."""
    packaged: PackagedModel = request.param
    directory, reason = real_model_dir(packaged)
    if directory is None:
        pytest.skip(reason)
    return directory, reference(packaged)


def reference(model: PackagedModel) -> dict[str, Any]:
    path = Path(__file__).parents[1] / "reference" / REFERENCE_FILES[model]
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def make_model(model_dir: Path, dtype: DtypeName) -> DecoderModel:
    config = ModelConfig.from_directory(model_dir)
    layout = KVLayout.for_model(config, dtype=dtype, num_blocks=4 * NUM_TEXTS_A_STEP, block_size=BLOCK_SIZE)
    weights = load_weights(model_dir, config, dtype)
    return DecoderModel(config, dtype, weights, select_backend(1), KVCache.allocate(layout))


@torch.inference_mode()
def loglikelihoods(model: DecoderModel, texts: list[list[int]]) -> list[float]:
    """Of texts that are read in one step: the sum over all tokens but the first."""
    layout = model.cache.layout
    builder = StepTensorBuilder(
        vocab_size=model.config.vocab_size,
        block_size=layout.block_size,
        num_blocks=layout.num_blocks,
        max_positions=4 * BLOCK_SIZE,
    )
    tables = [list(range(4 * index, 4 * index + 4)) for index in range(len(texts))]
    steps = [make_step(ids, 0, table) for ids, table in zip(texts, tables, strict=True)]
    batch = builder.build(StepPlan(step_id=0, sequences=steps))
    rows, targets = [], []
    for begin, ids in zip(batch.query_starts_S1.tolist(), texts, strict=False):
        rows += range(begin, begin + len(ids) - 1)
        targets += ids[1:]
    normed_RE = model.hidden(replace(batch, rows_R=torch.tensor(rows)))
    logprobs = []
    for begin in range(0, len(rows), NUM_ROWS_A_PIECE):
        logits_RV = model.logits(normed_RE[begin : begin + NUM_ROWS_A_PIECE])
        target_R1 = torch.tensor(targets[begin : begin + NUM_ROWS_A_PIECE]).unsqueeze(1)
        logprobs.append(logits_RV.log_softmax(dim=-1).gather(1, target_R1).flatten())
    parts = torch.cat(logprobs).double().split([len(ids) - 1 for ids in texts])
    return [float(part.sum()) for part in parts]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loglikelihoods_agree(model: tuple[Path, dict[str, Any]], dtype: DtypeName) -> None:
    directory, content = model
    assert model_fingerprint(directory) == content["model_fingerprint"]
    texts = content["texts"]
    assert len(texts) == 200
    decoder = make_model(directory, dtype)
    found: list[float] = []
    for begin in range(0, len(texts), NUM_TEXTS_A_STEP):
        found += loglikelihoods(decoder, [text["ids"] for text in texts[begin : begin + NUM_TEXTS_A_STEP]])
    expected = [text["float32"] for text in texts]
    assert max(abs(one - other) for one, other in zip(found, expected, strict=True)) < TOLERANCE[dtype]
    if dtype == "float32":
        assert favourites(found) == favourites(expected)
    else:
        assert sum(one != other for one, other in zip(favourites(found), favourites(expected), strict=True)) <= 2


def favourites(loglikelihood_of_text: list[float]) -> list[int]:
    """Which of its answers each question's text is likeliest with."""
    groups = [loglikelihood_of_text[begin : begin + 4] for begin in range(0, 4 * len(QUESTIONS), 4)]
    return [group.index(max(group)) for group in groups]
