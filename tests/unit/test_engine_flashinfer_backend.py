"""The CUDA backend, with the host in the place of the GPU and torch in that of FlashInfer, against the reference.

That leaves untested whether the two stand-ins are true: `tests/gpu` makes the same comparisons on a real device.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.attention import flashinfer_attention
from engine.attention.base import Rows
from engine.attention.batch import StepBatch
from engine.attention.flashinfer import FlashInferBackend
from tests.support import backend_cases as cases
from tests.support.fake_flashinfer import FakeFlashInfer
from tests.support.host_device import HostDevice

HOST = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16]
SHAPE = cases.LAYER_SHAPES[0]


@pytest.fixture
def device() -> HostDevice:
    return HostDevice()


@pytest.fixture
def library(device: HostDevice) -> FakeFlashInfer:
    return FakeFlashInfer(device)


@pytest.fixture
def backend(device: HostDevice, library: FakeFlashInfer, monkeypatch: pytest.MonkeyPatch) -> FlashInferBackend:
    monkeypatch.setattr(flashinfer_attention, "_WORKSPACE_SIZE_BYTES", 4096)
    return FlashInferBackend(
        library,
        device,  # type: ignore[arg-type]
        block_size=cases.BLOCK_SIZE,
        scratch_block=cases.SCRATCH_BLOCK,
        max_blocks_per_sequence=cases.MAX_BLOCKS_PER_SEQUENCE,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operation", cases.OPERATIONS, ids=lambda operation: operation.name)
def test_operation(backend: FlashInferBackend, operation: cases.Operation, dtype: torch.dtype) -> None:
    before = cases.layer_tensors(SHAPE, dtype)
    batch = cases.spans_batch(cases.MIXED, selected=[0, 2, 4])
    expected = cases.reference_run(batch, before, operation.run)
    actual = cases.on_device(before, HOST)
    with backend.running(batch):
        operation.run(backend, actual)
    cases.assert_operation(operation, before, expected, actual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", cases.LAYER_SHAPES, ids=str)
def test_layer_over_steps_of_all_kinds(
    backend: FlashInferBackend, device: HostDevice, shape: cases.LayerShape, dtype: torch.dtype
) -> None:
    tensors = cases.layer_tensors(shape, dtype)
    step = backend.compile(lambda: cases.run_layer(backend, shape, tensors))
    for seed, (spans, selected) in enumerate(cases.STEPS):
        batch = cases.spans_batch(spans, seed, selected)
        before = cases.on_device(tensors, HOST)
        step.run(batch)
        cases.check_layer(tensors, batch, shape, before)
    assert device.num_replays == 3


def test_records_each_size_once_and_replays_it(backend: FlashInferBackend, device: HostDevice) -> None:
    tensors = cases.layer_tensors(SHAPE, torch.bfloat16)
    step = backend.compile(lambda: cases.run_layer(backend, SHAPE, tensors))
    spans = tuple((position, 1) for position in range(1, 14))
    for round_number, num_rows in enumerate([1, 2, 3, 9, 13, 1, 2, 3, 9, 13]):
        batch = cases.spans_batch(spans[:num_rows], seed=round_number)
        before = cases.on_device(tensors, HOST)
        step.run(batch)
        cases.check_layer(tensors, batch, SHAPE, before)
    assert device.num_captures == len([1, 2, 4, 8, 16]), "the buffers have room for 16 rows"
    assert device.num_replays == 10


def test_a_full_size_replays_what_the_operations_compute_one_by_one(backend: FlashInferBackend) -> None:
    """Without padding both make the same calls, so that not a bit may differ."""
    tensors = cases.layer_tensors(SHAPE, torch.bfloat16)
    one_by_one = cases.on_device(tensors, HOST)
    step = backend.compile(lambda: cases.run_layer(backend, SHAPE, tensors))
    batch = cases.spans_batch(cases.DECODING[:4])
    step.run(batch)
    with backend.running(batch):
        cases.run_layer(backend, SHAPE, one_by_one)
    assert torch.equal(tensors["logits"][:4], one_by_one["logits"][:4])
    assert torch.equal(tensors["pool"][: cases.NUM_BLOCKS], one_by_one["pool"][: cases.NUM_BLOCKS])


def test_padding_writes_to_the_scratch_block_alone(backend: FlashInferBackend) -> None:
    tensors = cases.layer_tensors(SHAPE, torch.bfloat16)
    tensors["pool"].fill_(7.0)
    step = backend.compile(lambda: cases.run_layer(backend, SHAPE, tensors))
    batch = cases.spans_batch(cases.DECODING[:3])
    step.run(batch)
    scratch_slot = cases.SCRATCH_BLOCK * cases.BLOCK_SIZE
    assert cases.written_slots(tensors["pool"], 7.0) == {*batch.slots_T.tolist(), scratch_slot}


def test_two_shapes_of_attention_in_one_sequence(backend: FlashInferBackend, device: HostDevice) -> None:
    """As in models with sliding and global layers: each shape has a plan of its own, in steps of every kind."""
    sliding = dataclasses.replace(SHAPE, window=4)
    tensors = cases.layer_tensors(SHAPE, torch.bfloat16)

    def body(target: FlashInferBackend, t: cases.Tensors) -> None:
        cases.run_layer(target, SHAPE, t)
        t["logits"], t["other"] = t["other"], t["logits"]
        cases.run_layer(target, sliding, t)
        t["logits"], t["other"] = t["other"], t["logits"]

    tensors["other"] = torch.zeros_like(tensors["logits"])
    step = backend.compile(lambda: body(backend, tensors))
    for seed, spans in enumerate([cases.DECODING, cases.MIXED[1:], cases.DECODING]):
        batch = cases.spans_batch(spans, seed)
        before = cases.on_device(tensors, HOST)
        step.run(batch)
        expected = cases.reference_run(batch, before, body)  # type: ignore[arg-type]
        for name in ("logits", "other"):
            count = batch.num_selected
            cases.assert_close(tensors[name][:count], expected[name][:count], torch.bfloat16, name)
        assert not torch.allclose(tensors["logits"][0], tensors["other"][0], atol=1e-3), "the window has no effect"
    assert device.num_replays == 2


def test_whoever_waits_for_layers_hears_of_each_one_when_it_is_there(
    backend: FlashInferBackend, device: HostDevice
) -> None:
    tensors = cases.layer_tensors(SHAPE, torch.bfloat16)
    step = backend.compile(lambda: cases.run_layer(backend, SHAPE, tensors))
    step.run(cases.spans_batch(cases.DECODING))
    replays, waits = device.num_replays, device.num_synchronizations
    heard: list[tuple[int, int]] = []
    step.run(cases.spans_batch(cases.DECODING), lambda layer: heard.append((layer, device.num_synchronizations)))
    assert heard == [(0, waits + 1)], "queued is not written: the host waits before it tells"
    assert device.num_replays == replays, "a recording cannot tell"


def test_a_sequence_with_work_for_the_host_is_not_recorded(backend: FlashInferBackend, device: HostDevice) -> None:
    tensors = cases.layer_tensors(SHAPE, torch.bfloat16)
    called: list[int] = []

    def body() -> None:
        backend.call(lambda batch: called.append(batch.num_tokens))
        cases.run_layer(backend, SHAPE, tensors)

    step = backend.compile(body)
    for num_rows in (2, 3, 2):
        batch = cases.spans_batch(cases.DECODING[:num_rows])
        before = cases.on_device(tensors, HOST)
        step.run(batch)
        cases.check_layer(tensors, batch, SHAPE, before)
    assert called[-3:] == [2, 3, 2]
    assert device.num_captures == device.num_replays == 0


def test_more_rows_than_are_recorded_run_one_operation_after_another(
    backend: FlashInferBackend, device: HostDevice
) -> None:
    tensors = cases.layer_tensors(SHAPE, torch.bfloat16)
    small = {name: tensor[:5] if len(tensor) == cases.NUM_ROWS else tensor for name, tensor in tensors.items()}
    step = backend.compile(lambda: cases.run_layer(backend, SHAPE, small))
    for spans, replays in ((cases.DECODING[:4], 1), (cases.DECODING, 1)):
        batch = cases.spans_batch(spans)
        before = cases.on_device(small, HOST)
        step.run(batch)
        cases.check_layer(small, batch, SHAPE, before)
        assert device.num_replays == replays


def test_a_long_prompt_outgrows_the_inputs(backend: FlashInferBackend) -> None:
    table = torch.randn(cases.VOCAB_SIZE, 16).bfloat16()
    residual = torch.zeros(1400, 16)
    for num_tokens in (10, 700, 1400, 20):
        batch = StepBatch(
            ids_T=torch.arange(num_tokens) % cases.VOCAB_SIZE,
            positions_T=torch.arange(num_tokens),
            slots_T=torch.arange(num_tokens),
            query_starts_S1=torch.tensor([0, num_tokens], dtype=torch.int32),
            context_starts_S=torch.zeros(1, dtype=torch.int32),
            table_starts_S=torch.zeros(1, dtype=torch.int32),
            block_tables=torch.arange(-(-num_tokens // cases.BLOCK_SIZE), dtype=torch.int32),
            rows_R=torch.tensor([num_tokens - 1]),
        )
        with backend.running(batch):
            backend.embed(table, 1.0, residual)
        assert torch.equal(residual[:num_tokens], table[batch.ids_T].float())


def test_largest_logits(backend: FlashInferBackend) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, -2.0], [float("-inf"), -1.0, -1.0, -3.0], [0.0, float("nan"), 9.0, 9.0]])
    indices, largest = backend.argmax(logits)
    assert indices[:2] == [1, 1] and largest[:2] == [5.0, -1.0] and largest[2] != largest[2]
    assert all(isinstance(index, int) for index in indices)


@pytest.mark.parametrize(("head_dim", "dtype"), [(80, torch.bfloat16), (64, torch.float32)])
def test_refuses_attention_that_there_are_no_kernels_for(
    backend: FlashInferBackend, head_dim: int, dtype: torch.dtype
) -> None:
    qkv, out = (
        torch.zeros(cases.NUM_ROWS, 3 * head_dim, dtype=dtype),
        torch.zeros(cases.NUM_ROWS, head_dim, dtype=dtype),
    )
    pool = torch.zeros(cases.NUM_BLOCKS + 1, 1, 2, cases.BLOCK_SIZE, head_dim, dtype=dtype)
    with (
        pytest.raises(ValueError, match=rf"heads of {head_dim} elements in {dtype}"),
        backend.running(cases.spans_batch(cases.MIXED)),
    ):
        backend.attend(qkv, pool, 1.0, 0, out)


def test_a_failed_step_leaves_the_backend_usable(backend: FlashInferBackend) -> None:
    def fail(batch: StepBatch) -> None:
        raise OSError("this step's own")

    with pytest.raises(OSError, match="own"), backend.running(cases.spans_batch(cases.MIXED)):
        backend.call(fail)
    residual = torch.zeros(cases.NUM_ROWS, 16)
    with backend.running(cases.spans_batch(cases.MIXED)):
        backend.add_norm(None, None, residual, torch.ones(16), cases.EPS, torch.ones_like(residual), Rows.TOKENS)
