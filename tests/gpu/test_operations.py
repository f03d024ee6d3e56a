"""Each operation on a GPU, alone and in a recorded layer, against the reference on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.attention.batch import StepBatch
from engine.attention.cuda_device import CudaDevice
from engine.attention.flashinfer import FlashInferBackend
from engine.attention.kv_cache import KVLayout
from tests.support import backend_cases as cases

DTYPES = [torch.bfloat16, torch.float16]
SHAPE = cases.LAYER_SHAPES[0]


@pytest.fixture
def backend(library: Any) -> FlashInferBackend:
    return FlashInferBackend(
        library,
        CudaDevice(),
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
    actual = cases.on_device(before, backend.device.device)
    with backend.running(batch):
        operation.run(backend, actual)
    cases.assert_operation(operation, before, expected, actual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", cases.LAYER_SHAPES, ids=str)
def test_layer_over_steps_of_all_kinds(backend: FlashInferBackend, shape: cases.LayerShape, dtype: torch.dtype) -> None:
    tensors = cases.on_device(cases.layer_tensors(shape, dtype), backend.device.device)
    step = backend.compile(lambda: cases.run_layer(backend, shape, tensors))
    for seed, (spans, selected) in enumerate(cases.STEPS):
        batch = cases.spans_batch(spans, seed, selected)
        before = cases.on_device(tensors, torch.device("cpu"))
        step.run(batch)
        cases.check_layer(tensors, batch, shape, before)


def test_a_replay_is_what_the_operations_compute_one_by_one(backend: FlashInferBackend) -> None:
    """A batch of a recorded size, which is not padded, through both: they differ in the attention's kernel alone."""
    tensors = cases.on_device(cases.layer_tensors(SHAPE, torch.bfloat16), backend.device.device)
    one_by_one = cases.on_device(tensors, backend.device.device)
    step = backend.compile(lambda: cases.run_layer(backend, SHAPE, tensors))
    batch = cases.spans_batch(cases.DECODING[:4])
    for _ in range(3):
        step.run(batch)
        with backend.running(batch):
            cases.run_layer(backend, SHAPE, one_by_one)
        cases.assert_close(tensors["logits"][:4], one_by_one["logits"][:4].cpu(), torch.bfloat16, "logits")
        # Keys and values come before attention.
        assert torch.equal(tensors["pool"][: cases.NUM_BLOCKS], one_by_one["pool"][: cases.NUM_BLOCKS])


def test_padding_writes_to_the_scratch_block_alone(backend: FlashInferBackend) -> None:
    tensors = cases.on_device(cases.layer_tensors(SHAPE, torch.bfloat16), backend.device.device)
    tensors["pool"].fill_(7.0)
    step = backend.compile(lambda: cases.run_layer(backend, SHAPE, tensors))
    batch = cases.spans_batch(cases.DECODING[:3])
    step.run(batch)
    scratch_slot = cases.SCRATCH_BLOCK * cases.BLOCK_SIZE
    assert cases.written_slots(tensors["pool"], 7.0) == {*batch.slots_T.tolist(), scratch_slot}


def test_layers_are_told_of_when_they_are_there(backend: FlashInferBackend) -> None:
    """Whoever is told copies the pool without the backend's stream."""
    tensors = cases.on_device(cases.layer_tensors(SHAPE, torch.bfloat16), backend.device.device)
    before = cases.on_device(tensors, torch.device("cpu"))
    step = backend.compile(lambda: cases.run_layer(backend, SHAPE, tensors))
    batch = cases.spans_batch(cases.MIXED)
    seen: list[torch.Tensor] = []

    def copy_pool(layer: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            seen.append(tensors["pool"].cpu())

    step.run(batch, copy_pool)
    expected = cases.reference_run(batch, before, lambda b, t: cases.run_layer(b, SHAPE, t))
    assert len(seen) == 1
    cases.assert_close(seen[0][: cases.NUM_BLOCKS], expected["pool"][: cases.NUM_BLOCKS], torch.bfloat16, "pool")


def test_largest_logits(backend: FlashInferBackend) -> None:
    logits = torch.zeros(3, 50_000)
    logits[0, 40_000] = logits[0, 49_999] = 5.0
    logits[2, 7], logits[2, 9] = float("nan"), 9.0
    indices, largest = backend.argmax(logits.to(backend.device.device))
    assert indices[:2] == [40_000, 0] and largest[:2] == [5.0, 0.0] and largest[2] != largest[2]


def test_a_pool_whose_blocks_lie_beyond_4_gib(library: Any) -> None:
    """Addresses of blocks need more than 32 bits, strides do not."""
    layout = KVLayout(num_blocks=1200, num_layers=64, num_kv_heads=2, block_size=16, head_dim=128, dtype="bfloat16")
    assert layout.size_bytes > 2**32 * 2
    device = CudaDevice()
    backend = FlashInferBackend(library, device, block_size=16, scratch_block=1200, max_blocks_per_sequence=4)
    pool = torch.zeros(1201, *layout.shape_BLKCSD[1:], dtype=torch.bfloat16, device=device.device)
    query = torch.randn(1, 8 * 128).bfloat16()
    qkv, out = query.to(device.device), torch.zeros(1, 4 * 128, dtype=torch.bfloat16, device=device.device)
    batch = StepBatch(
        ids_T=torch.zeros(1, dtype=torch.int64),
        positions_T=torch.zeros(1, dtype=torch.int64),
        slots_T=torch.tensor([1199 * 16]),
        query_starts_S1=torch.tensor([0, 1], dtype=torch.int32),
        context_starts_S=torch.zeros(1, dtype=torch.int32),
        table_starts_S=torch.zeros(1, dtype=torch.int32),
        block_tables=torch.tensor([1199], dtype=torch.int32),
        rows_R=torch.zeros(1, dtype=torch.int64),
    )
    with backend.running(batch):
        backend.rotary_write(qkv, None, None, None, 1e-5, pool[:, 63])
        backend.attend(qkv, pool[:, 63], 128**-0.5, 0, out)
    # The one position that is seen gives its values, whatever its score.
    values = query.view(8, 128)[6:]
    assert torch.equal(out.cpu().view(4, 128), values.repeat_interleave(2, 0))
