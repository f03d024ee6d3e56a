"""The decoder's own work: which rows it computes, buffers that grow, the layer hook, dtypes, rotary tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.attention.kv_cache import KVCache, KVLayout
from engine.attention.torch_reference import TorchReferenceBackend
from engine.core.step import StepPlan
from engine.model.config import DtypeName, ModelConfig
from engine.model.decoder import DecoderModel
from engine.model.rope import cos_sin_table, inverse_frequencies
from engine.model.rope_config import RopeConfig
from engine.model.weights import load_weights
from engine.runner import Runner
from engine.step_tensors import StepTensorBuilder
from tests.support.engine_model import TINY_CONFIG, make_step, write_tiny_model

BLOCK_SIZE = 8
NUM_BLOCKS = 64
PROMPT = [5, 9, 33, 71, 8, 8, 90, 12, 40, 77, 3]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(directory)
    return directory


def make_model(model_dir: Path, dtype: DtypeName = "float32") -> DecoderModel:
    config = ModelConfig.from_directory(model_dir)
    layout = KVLayout.for_model(config, dtype=dtype, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    weights = load_weights(model_dir, config, dtype)
    return DecoderModel(config, dtype, weights, TorchReferenceBackend(), KVCache.allocate(layout))


def make_builder() -> StepTensorBuilder:
    return StepTensorBuilder(vocab_size=96, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_positions=256)


def test_only_the_wanted_rows_come_back(model_dir: Path) -> None:
    model, builder = make_model(model_dir), make_builder()
    steps = [make_step(PROMPT[: index + 1], 0, [2 * index, 2 * index + 1]) for index in range(4)]
    every = model.forward(builder.build(StepPlan(step_id=0, sequences=steps))).clone()
    assert every.shape == (4, 96)
    for step, row in zip(steps, every, strict=True):
        alone = model.forward(builder.build(StepPlan(step_id=0, sequences=[step])))
        torch.testing.assert_close(alone[0], row, atol=1e-5, rtol=1e-5)
    unsampled = [make_step(step.token_ids, 0, step.block_table, sample=index == 2) for index, step in enumerate(steps)]
    some = model.forward(builder.build(StepPlan(step_id=0, sequences=unsampled)))
    torch.testing.assert_close(some, every[2:3], atol=1e-5, rtol=1e-5)


def test_without_wanted_rows_the_pool_is_written_all_the_same(model_dir: Path) -> None:
    model, builder = make_model(model_dir), make_builder()
    plan = StepPlan(step_id=0, sequences=[make_step(PROMPT, 0, [4, 7], sample=False)])
    layers: list[int] = []
    assert model.forward(builder.build(plan), layers.append).shape == (0, 96)
    assert layers == [0, 1, 2]
    silent = model.cache.pool_BLKCSD.clone()
    model.cache.pool_BLKCSD.zero_()
    model.forward(builder.build(StepPlan(step_id=1, sequences=[make_step(PROMPT, 0, [4, 7])])))
    assert torch.equal(model.cache.pool_BLKCSD, silent)
    assert bool(silent[[4, 7]].any(dim=-1)[0].all()) and not bool(silent[[0, 5]].any())


def test_the_layer_hook_comes_when_the_layer_is_written(model_dir: Path) -> None:
    model, builder = make_model(model_dir), make_builder()
    written: list[list[bool]] = []

    def look(layer: int) -> None:
        written.append([bool(model.cache.layer_BKCSD(index)[3, :, :, 0].all()) for index in range(3)])

    model.forward(builder.build(StepPlan(step_id=0, sequences=[make_step(PROMPT, 0, [3, 9])])), look)
    assert written == [[True, False, False], [True, True, False], [True, True, True]]


def test_buffers_grow_with_the_step(model_dir: Path) -> None:
    model, builder = make_model(model_dir), make_builder()
    plan = StepPlan(step_id=0, sequences=[make_step(PROMPT[:2], 0, [0])])
    before = model.forward(builder.build(plan)).clone()
    sequences = [make_step(PROMPT, 0, [2 * index, 2 * index + 1]) for index in range(30)]
    many = model.forward(builder.build(StepPlan(step_id=1, sequences=sequences)))
    torch.testing.assert_close(many, many[:1].expand(30, -1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.forward(builder.build(plan)), before, atol=1e-5, rtol=1e-5)


def test_the_head_can_be_run_in_pieces(model_dir: Path) -> None:
    model, builder = make_model(model_dir), make_builder()
    sequences = [make_step(PROMPT[: index + 1], 0, [2 * index, 2 * index + 1]) for index in range(9)]
    batch = builder.build(StepPlan(step_id=0, sequences=sequences))
    whole = model.forward(batch).clone()
    normed = model.hidden(batch)
    assert normed.shape == (9, 48)
    pieces = [model.logits(normed[begin : begin + 4]).clone() for begin in (0, 4, 8)]
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-5, rtol=1e-5)


def test_bfloat16_stays_near_float32(model_dir: Path) -> None:
    """Same weights, rounded: logits differ by rounding only."""
    plan = StepPlan(step_id=0, sequences=[make_step(PROMPT * 5, 0, range(9))])
    wide = Runner(make_model(model_dir)).logits(plan)
    narrow = Runner(make_model(model_dir, "bfloat16")).logits(plan)
    assert (narrow - wide).abs().max() < 0.05 * wide.abs().max()
    assert not torch.equal(narrow, narrow.bfloat16().float()), "logits are not rounded"


def test_llama3_rope_blends_between_the_two_limits() -> None:
    rope = RopeConfig(
        kind="llama3", theta=10_000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
    )
    plain = inverse_frequencies(RopeConfig(theta=10_000.0), 64)
    blended = inverse_frequencies(rope, 64)
    assert blended[0] == plain[0]
    assert blended[-1] == pytest.approx(float(plain[-1]) / 4)
    assert bool((blended <= plain).all() and (blended >= plain / 4 * 0.999).all())


def test_yarn_keeps_fast_frequencies_stretches_slow_ones_and_scales_both() -> None:
    rope = RopeConfig(kind="yarn", theta=10_000.0, factor=8.0, original_max_position=4096, attention_factor=1.5)
    plain = inverse_frequencies(RopeConfig(theta=10_000.0), 64)
    blended = inverse_frequencies(rope, 64)
    assert torch.equal(blended[:4], plain[:4])
    torch.testing.assert_close(blended[-4:], plain[-4:] / 8)
    assert cos_sin_table(rope, 2, 64)[0].tolist() == [1.5] * 32 + [0.0] * 32


def test_kv_cache_lives_in_the_callers_buffer() -> None:
    layout = KVLayout.for_model(ModelConfig.from_dict(TINY_CONFIG), dtype="bfloat16", num_blocks=4, block_size=8)
    buffer = bytearray(layout.size_bytes + 64)
    cache = KVCache.from_buffer(buffer, layout)
    cache.pool_BLKCSD[1] = 1.0
    block = layout.block_size_bytes
    assert bytes(buffer[:block]) == bytes(block)
    assert bytes(buffer[block : block + 2]) == b"\x80\x3f"
    assert bytes(buffer[2 * block :]) == bytes(len(buffer) - 2 * block)
    with pytest.raises(ValueError, match="holds 10 bytes"):
        KVCache.from_buffer(bytearray(10), layout)
    with pytest.raises(ValueError, match="writable"):
        KVCache.from_buffer(memoryview(bytes(layout.size_bytes)), layout)
    with pytest.raises(ValueError, match="num_blocks"):
        KVLayout.for_model(ModelConfig.from_dict(TINY_CONFIG), dtype="float32", num_blocks=0, block_size=8)
