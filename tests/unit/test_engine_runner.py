"""The runner: plans to tensors, results in the plan's order, the pool's bytes, the layer hook, warm-up."""

from __future__ import annotations

import mmap
import random
from pathlib import Path

import pytest
import torch

from engine.attention.native_library import KernelsUnavailableError, load_kernels
from engine.core.sampling import SamplingParams
from engine.core.step import SequenceStep, StepPlan
from engine.core.tiers import BlockCopy
from engine.model.safetensors_file import ModelWeightsError
from engine.runner import Runner, kv_block_size_bytes
from engine.step_tensors import StepTensorBuilder
from tests.support.engine_model import make_step, random_tensors, write_safetensors, write_tiny_model

BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(directory)
    return directory


@pytest.fixture
def runner(model_dir: Path) -> Runner:
    return Runner.from_directory(model_dir, "float32", 16, BLOCK_SIZE, 1)


def plan(*sequences: SequenceStep) -> StepPlan:
    return StepPlan(step_id=7, sequences=list(sequences))


def make_builder() -> StepTensorBuilder:
    return StepTensorBuilder(vocab_size=70, block_size=4, num_blocks=20, max_positions=100)


def test_builds_a_mixed_step() -> None:
    steps = plan(
        make_step([50], 5, [9, 3, 8]),
        make_step([60, 61, 62], 2, [4, 7]),
        make_step([63] * 5, 14, range(10, 17), sample=False),
    )
    batch = make_builder().build(steps)
    assert (batch.num_tokens, batch.num_sequences, batch.num_selected) == (9, 3, 2)
    assert batch.ids_T.tolist() == [50, 60, 61, 62, 63, 63, 63, 63, 63]
    assert batch.positions_T.tolist() == [5, 2, 3, 4, 14, 15, 16, 17, 18]
    assert batch.slots_T.tolist() == [3 * 4 + 1, 4 * 4 + 2, 4 * 4 + 3, 7 * 4 + 0, 54, 55, 56, 57, 58]
    assert batch.query_starts_S1.tolist() == [0, 1, 4, 9]
    assert batch.context_starts_S.tolist() == [5, 2, 14]
    tables = [9, 3, 4, 7, 10, 11, 12, 13, 14]
    assert batch.block_tables[:9].tolist() == tables, "blocks beyond the step's tokens are left out"
    assert batch.table_starts_S.tolist() == [0, 2, 4]
    assert batch.rows_R.tolist() == [0, 3]
    assert make_builder().build(steps, every_sequence=True).rows_R.tolist() == [0, 3, 8]
    for tensor in (batch.ids_T, batch.positions_T, batch.slots_T, batch.rows_R):
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()
    for tensor in (batch.query_starts_S1, batch.context_starts_S, batch.table_starts_S, batch.block_tables):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()


def test_views_follow_the_steps() -> None:
    """Steps of equal and of changing sizes, through growing arrays: each batch holds its own step."""
    builder = make_builder()
    for count in (1, 1, 3, 3, 60, 2, 1):
        steps = plan(*(make_step([7] * count, index, range(index, 20)) for index in range(3)))
        batch = builder.build(steps)
        positions = [index + token for index in range(3) for token in range(count)]
        assert batch.positions_T.tolist() == positions
        assert batch.rows_R.tolist() == [count - 1, 2 * count - 1, 3 * count - 1]
        for index in range(3):
            assert int(batch.block_tables[int(batch.table_starts_S[index])]) == index


@pytest.mark.parametrize(
    "step",
    [
        make_step([1], 4, [0]),  # the table ends before the token
        make_step([1], 0, [20]),  # no such block
        make_step([1], 0, [-1]),
        make_step([1], 100, list(range(20)) * 2),  # beyond the context
        make_step([], 0, [0]),
        make_step([70], 0, [0]),  # no such token
        make_step([-1], 0, [0]),
    ],
)
def test_refuses_a_plan_that_would_write_elsewhere(step: SequenceStep) -> None:
    with pytest.raises(AssertionError):
        make_builder().build(plan(step))


def test_results_come_in_the_plans_order(runner: Runner) -> None:
    prompts = [[5, 6, 7], [9], [11, 12, 13, 14]]
    steps = [make_step(ids, 0, [index], request_id=str(index), sample=index != 1) for index, ids in enumerate(prompts)]
    result = runner.run(plan(*steps))
    assert result.step_id == 7
    assert result.tokens[1] == ()
    for index in (0, 2):
        alone = runner.run(plan(make_step(prompts[index], 0, [5], request_id=str(index))))
        assert result.tokens[index] == alone.tokens[0]


def test_an_empty_plan_and_one_that_samples_nothing(runner: Runner) -> None:
    assert runner.run(plan()).tokens == []
    assert runner.run(plan(make_step([3, 4], 0, [0], sample=False))).tokens == [()]


def test_a_chunk_that_samples_nothing_writes_the_same_kv(runner: Runner) -> None:
    """The shortcut in the last layer must not leave out keys and values."""
    runner.run(plan(make_step([3, 4, 5], 0, [0], sample=False)))
    runner.run(plan(make_step([3, 4, 5], 0, [1], sample=True)))
    assert torch.equal(runner.cache.pool_BLKCSD[0], runner.cache.pool_BLKCSD[1])
    assert runner.cache.pool_BLKCSD[0, -1].abs().sum() > 0


def test_writes_only_the_slots_of_the_plan(runner: Runner) -> None:
    runner.cache.pool_BLKCSD.fill_(float("nan"))
    runner.run(plan(make_step(range(3, 13), 0, [4, 2])))
    written = ~runner.cache.pool_BLKCSD.isnan()
    expected = torch.zeros_like(written)
    expected[4] = True
    expected[2, :, :, :, :2] = True
    assert torch.equal(written, expected)


def test_logits_lead_to_the_token(runner: Runner) -> None:
    step = make_step([3, 4, 5], 0, [0], sampling=SamplingParams(logprobs=3))
    logits = runner.logits(plan(step))
    (token,) = runner.run(plan(step)).tokens[0]
    assert logits.shape == (1, runner.config.vocab_size)
    assert token.token_id == int(logits.argmax())
    assert token.logprob == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-5)
    assert len(token.top) == 3


def test_twins_draw_from_the_same_logits_as_they_would_alone(runner: Runner) -> None:
    sampling = SamplingParams(temperature=5.0, seed=4, logprobs=1)
    together = runner.run(plan(make_step([3, 4, 5], 0, [0], sampling=sampling, choice=2, twins=[0, 5]))).tokens[0]
    alone = [
        runner.run(plan(make_step([3, 4, 5], 0, [0], sampling=sampling, choice=choice))).tokens[0]
        for choice in (2, 0, 5)
    ]
    assert [(token,) for token in together] == alone
    assert len({token.token_id for token in together}) > 1, "they have random numbers of their own"


@pytest.mark.parametrize("cut", [1, 4, 7, 19])
def test_prompt_tokens_are_scored_chunk_by_chunk_beside_others(runner: Runner, cut: int) -> None:
    prompt = [3 + 5 * index % 40 for index in range(20)]
    sampling = SamplingParams(prompt_logprobs=3)
    other = make_step([9, 8, 7], 0, [15], request_id="other")
    first = make_step(prompt[:cut], 0, [0, 1, 2], sampling=sampling, sample=False, scored_ids=prompt[1 : cut + 1])
    rest = make_step(prompt[cut:], cut, [0, 1, 2], sampling=sampling, scored_ids=prompt[cut + 1 :])
    results = [runner.run(plan(other, first)), runner.run(plan(rest, other))]
    scores = results[0].scores[1] + results[1].scores.get(0, [])
    assert [score.token_id for score in scores] == prompt[1:]
    for position, score in enumerate(scores, start=1):
        logits = runner.logits(plan(make_step(prompt[:position], 0, [4, 5, 6])))[0]
        logprobs = logits.double().log_softmax(-1)
        assert score.logprob == pytest.approx(float(logprobs[prompt[position]]), abs=1e-4)
        assert [token_id for token_id, _ in score.top] == logprobs.topk(3).indices.tolist()
    alone = runner.run(plan(make_step(prompt, 0, [7, 8, 9], sampling=sampling)))
    assert results[1].tokens[0] == alone.tokens[0] and alone.scores == {}
    assert results[0].tokens[0] == results[1].tokens[1], "the other one does not notice"


def test_layer_hook_comes_when_the_layers_kv_is_written(runner: Runner) -> None:
    runner.cache.pool_BLKCSD.fill_(float("nan"))
    seen = []

    def on_layer_written(layer: int) -> None:
        seen.append(layer)
        written = ~runner.cache.pool_BLKCSD[0].isnan().flatten(1).all(dim=1)
        assert written.tolist() == [index <= layer for index in range(3)]

    runner.run(plan(make_step([3, 4, 5], 0, [0])), on_layer_written)
    assert seen == [0, 1, 2]


def test_pool_in_a_mapped_buffer(model_dir: Path, runner: Runner) -> None:
    size = 4 * kv_block_size_bytes(runner.config, "float32", BLOCK_SIZE)
    buffer = mmap.mmap(-1, size)
    mapped = Runner.from_directory(model_dir, "float32", 4, BLOCK_SIZE, 1, buffer=buffer)
    step = make_step([3, 4, 5], 0, [3])
    assert mapped.run(plan(step)).tokens == runner.run(plan(step)).tokens
    block = size // 4
    assert buffer[: 3 * block] == bytes(3 * block)
    ours = runner.cache.pool_BLKCSD[3].contiguous().view(torch.uint8).numpy().tobytes()
    assert buffer[3 * block :] == ours


def test_reports_loading_and_refuses_bad_arguments(model_dir: Path) -> None:
    seen: list[tuple[int, int]] = []

    def progress(loaded_bytes: int, total_bytes: int) -> None:
        seen.append((loaded_bytes, total_bytes))

    Runner.from_directory(model_dir, "auto", 4, BLOCK_SIZE, 1, progress=progress)
    assert seen[-1][0] == seen[-1][1] > 0
    with pytest.raises(ValueError, match="dtype"):
        Runner.from_directory(model_dir, "int8", 4, BLOCK_SIZE, 1)
    with pytest.raises(ValueError, match="num_blocks"):
        Runner.from_directory(model_dir, "float32", 0, BLOCK_SIZE, 1)
    with pytest.raises(FileNotFoundError):
        Runner.from_directory(model_dir / "missing", "float32", 4, BLOCK_SIZE, 1)


def test_warm_up_touches_block_0_only(runner: Runner) -> None:
    runner.warm_up(20, 3)
    assert runner.cache.pool_BLKCSD[1:].abs().sum() == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_whose_output_is_not_finite_is_said_to_be_so(tmp_path: Path, dtype: str) -> None:
    """Its weights are, but not what it computes with them."""
    config = write_tiny_model(tmp_path)
    tensors = random_tensors(config)
    tensors["model.layers.0.mlp.down_proj.weight"].fill_(3e38)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    runner = Runner.from_directory(tmp_path, dtype, 4, BLOCK_SIZE, 1)
    with pytest.raises(ModelWeightsError, match=rf"output is not finite: .*in its weights.*range of {dtype}$"):
        runner.warm_up(20, 3)


NAN_TOKEN = 7


def test_a_sequence_whose_logits_are_not_finite_fails_alone(tmp_path: Path) -> None:
    """One token's embedding is damaged: whoever has it in its context fails, and nobody else sees anything of it. Its
    blocks are used again, with what it left in them, by sequences that fill them in part."""
    write_tiny_model(tmp_path, tie_word_embeddings=False)
    runner = Runner.from_directory(tmp_path, "float32", 8, BLOCK_SIZE, 1)
    good, more = [11, 12, 13, 14, 15], [21, 22, 23]
    sampling = SamplingParams(temperature=1.0, seed=5)
    steps = (
        make_step(good, 0, [0], request_id="good", sampling=sampling),
        make_step(more, 0, [1], request_id="more"),
        make_step([31, 32], 0, [2], request_id="scored", scored_ids=[32], sampling=SamplingParams(prompt_logprobs=1)),
    )
    expected = runner.run(plan(*steps))
    assert not expected.failures
    with torch.inference_mode():
        runner._model._weights.embedding_VE[NAN_TOKEN] = torch.nan  # type: ignore[union-attr]
    scored = SamplingParams(prompt_logprobs=0)
    bad = [
        make_step([NAN_TOKEN, 3, 4], 0, [3], request_id="bad"),
        make_step([3, NAN_TOKEN], 0, [4], request_id="choices", sampling=SamplingParams(logprobs=2), twins=(1, 2)),
        make_step([4, NAN_TOKEN], 0, [5], request_id="bad prompt", sample=False, scored_ids=[3, 5], sampling=scored),
        make_step([NAN_TOKEN] * 8, 0, [6], request_id="unseen", sample=False),
    ]
    result = runner.run(plan(steps[0], bad[0], steps[1], *bad[1:], steps[2]))
    assert set(result.failures) == {1, 3, 4} and all("not finite" in reason for reason in result.failures.values())
    assert result.tokens == [expected.tokens[0], (), expected.tokens[1], (), (), (), expected.tokens[2]]
    assert result.scores == {6: expected.scores[2]}
    # What was written for a chunk that draws nothing is found out by the token that follows it.
    assert set(runner.run(plan(make_step([9], 8, [6, 7], request_id="unseen"))).failures) == {0}
    good_again = make_step(good, 0, [6], request_id="good", sampling=sampling)
    result = runner.run(plan(good_again, make_step(more, 0, [3], request_id="more")))
    assert result.tokens == expected.tokens[:2] and not result.failures


def test_arrays_grow_and_are_reused(runner: Runner) -> None:
    tokens = [runner.run(plan(make_step(range(3, 3 + n), 0, range(8)))).tokens[0] for n in (2, 60, 2, 3, 60)]
    assert tokens[0] == tokens[2]
    assert tokens[1] == tokens[4]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_do_not_depend_on_how_a_prompt_is_cut(model_dir: Path, dtype: str) -> None:
    """In one chunk, in random chunks, token by token, and in company: with the native kernels equal bit for bit."""
    try:
        load_kernels()
    except KernelsUnavailableError as error:
        pytest.skip(str(error))
    runner = Runner.from_directory(model_dir, dtype, 32, BLOCK_SIZE, 2)
    draw = random.Random(1)
    prompt = [draw.randrange(3, 96) for _ in range(100)]
    table = list(range(13))

    def last_logits(ends: list[int], company: list[SequenceStep]) -> torch.Tensor:
        runner.cache.pool_BLKCSD.fill_(float("nan"))
        for start, end in zip([0, *ends], ends, strict=False):
            logits = runner.logits(plan(make_step(prompt[start:end], start, table), *company))
        return logits[0]

    expected = last_logits([100], [])
    assert expected.isfinite().all()
    beside = [make_step([5, 6, 7] * 5, 0, [20, 21], request_id="a"), make_step([9], 0, [22], request_id="b")]
    assert torch.equal(last_logits([100], beside), expected)
    assert torch.equal(last_logits(list(range(1, 101)), []), expected)
    for _ in range(5):
        ends = [*sorted(draw.sample(range(1, 100), draw.randint(1, 9))), 100]
        assert torch.equal(last_logits(ends, beside), expected), ends


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_come_back_from_the_host_tier_as_they_were(model_dir: Path, dtype: str) -> None:
    """Every byte, whether copies are neighbours or not, and in the order in which they were asked for."""
    runner = Runner.from_directory(model_dir, dtype, 16, BLOCK_SIZE, 1, num_host_blocks=6)
    pool_BLKCSD = runner.cache.pool_BLKCSD
    pool_BLKCSD.copy_(torch.randn(pool_BLKCSD.shape))
    before = pool_BLKCSD.clone()
    spills = ((2, 0), (3, 1), (4, 2), (9, 4), (5, 5))
    runner.copy_blocks(tuple(BlockCopy(block_id=block, slot=slot, is_load=False) for block, slot in spills))
    pool_BLKCSD[2:10] = 7.0
    loads = ((12, 2), (13, 4), (2, 0), (3, 1), (4, 5))
    runner.copy_blocks(tuple(BlockCopy(block_id=block, slot=slot, is_load=True) for block, slot in loads))
    source_of = {slot: block for block, slot in spills}
    found = {block: source_of[slot] for block, slot in loads}
    for block, source in found.items():
        assert torch.equal(pool_BLKCSD[block], before[source])
    assert torch.equal(pool_BLKCSD[:2], before[:2]) and torch.equal(pool_BLKCSD[14:], before[14:])


def test_a_plans_copies_come_before_its_tokens(model_dir: Path) -> None:
    """A step that loads what it reads, into blocks whose own content it saves, gives the tokens of one that has it."""
    prompt, last = [5 + index for index in range(16)], 40
    runner = Runner.from_directory(model_dir, "float32", 16, BLOCK_SIZE, 1, num_host_blocks=4)
    runner.run(plan(make_step(prompt, 0, [1, 2], sample=False)))
    expected = runner.run(plan(make_step([last], 16, [1, 2, 3])))
    other = [60 - index for index in range(16)]
    runner.run(plan(make_step(other, 0, [8, 9], sample=False)))
    for block, slot in ((1, 0), (2, 3)):
        runner.copy_blocks((BlockCopy(block_id=block, slot=slot, is_load=False),))
    copies = (
        *(BlockCopy(block_id=8 + index, slot=1 + index, is_load=False) for index in range(2)),
        BlockCopy(block_id=8, slot=0, is_load=True),
        BlockCopy(block_id=9, slot=3, is_load=True),
        *(BlockCopy(block_id=5 + index, slot=1 + index, is_load=True) for index in range(2)),
    )
    step = StepPlan(step_id=7, sequences=[make_step([last], 16, [8, 9, 3])], copies=copies)
    assert runner.run(step).tokens == expected.tokens
    fresh = Runner.from_directory(model_dir, "float32", 16, BLOCK_SIZE, 1)
    fresh.run(plan(make_step(other, 0, [8, 9], sample=False)))
    assert torch.equal(runner.cache.pool_BLKCSD[5:7], fresh.cache.pool_BLKCSD[8:10])
