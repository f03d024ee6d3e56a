"""Paged attention through FlashInfer's wrappers (Ye et al. 2025, "FlashInfer"), over the pool's own layout.

A layer of the pool, [block, head, key or value, slot, dim], is handed over as two views [block, head, slot, dim], keys
and values: the layout that FlashInfer calls HND. They are not contiguous, and need not be: its kernels address the
cache by strides, which must be the same for both (they are) and 1 in the last axis. So nothing is copied.

A wrapper is planned on the host once a step, for all layers of one shape; then it runs in each of them. Two kinds:
- of any step, by the prefill wrapper: queries of any number a sequence, decode rows among them;
- of a decode batch that is recorded, by the decode wrapper in its mode for CUDA graphs: it keeps what its kernels read
  (block tables, schedule) at fixed addresses, and planning rewrites it there, so that a replay sees the new step.

Both are given the kernel "fa2", which needs tensor cores (compute capability 8.0), takes any number of query heads a
key/value head, and computes in 16-bit factors with float32 sums. FlashInfer's own choice by device might not take these
strides. Written against flashinfer-python 0.6.18 to 0.7.4; not yet run on a GPU.

Axes as in `engine.attention.base`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.cuda_batches import PagedTables
from engine.attention.cuda_device import CudaDevice

HEAD_DIMS = (64, 128, 256)
"""Those that FlashInfer's rotary and attention kernels are built for."""
DTYPES = (torch.bfloat16, torch.float16)
_WORKSPACE_SIZE_BYTES = 384 * 2**20
"""For partial results where a long context is split between processors: its largest use is 16 query heads a key/value
head of 128 elements, on 132 processors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What a wrapper is planned for. `window` as in `Backend.attend`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scale: float
    window: int


class PagedAttention:
    """FlashInfer's wrappers, one for each shape and size of recorded batch, and the buffers they share.

    Args:
        library: the module `flashinfer`, which has no type stubs.
        max_graph_rows: sequences of the largest batch that is recorded.
        max_blocks_per_sequence: length of the longest block table.
    """

    def __init__(self, library: Any, device: CudaDevice, *, max_graph_rows: int, max_blocks_per_sequence: int) -> None:
        self._library = library
        self._device = device
        self._workspace = torch.zeros(_WORKSPACE_SIZE_BYTES, dtype=torch.uint8, device=device.device)
        # One set for all recordings: planning fills it before each replay, and replays do not overlap.
        self._block_starts = self._graph_buffer(max_graph_rows + 1)
        self._last_block_tokens = self._graph_buffer(max_graph_rows)
        self._blocks = self._graph_buffer(max_graph_rows * max_blocks_per_sequence)
        self._wrappers: dict[tuple[AttentionShape, int | None], Any] = {}
        self._shapes: list[AttentionShape] = []
        self._planned: dict[AttentionShape, Any] = {}
        self._tables: PagedTables | None = None
        self._graph_rows: int | None = None

    def begin_step(self, tables: PagedTables, graph_rows: int | None) -> None:
        """Plan for every shape met so far. `graph_rows` is the number of sequences if the step is recorded, or will be.

        Copies from the host are queued, not finished.
        """
        self._tables, self._graph_rows = tables, graph_rows
        self._planned.clear()
        for shape in self._shapes:
            self._planned[shape] = self._plan(shape)

    def run(self, q_THD: torch.Tensor, layer_BKCSD: torch.Tensor, shape: AttentionShape, out_THD: torch.Tensor) -> None:
        """Attention of all the step's queries over one layer."""
        wrapper = self._planned.get(shape)
        if wrapper is None:
            wrapper = self._first_plan(shape)
        wrapper.run(q_THD, (layer_BKCSD[:, :, 0], layer_BKCSD[:, :, 1]), out=out_THD)

    def _first_plan(self, shape: AttentionShape) -> Any:
        if shape.head_dim not in HEAD_DIMS or shape.dtype not in DTYPES:
            raise ValueError(f"no CUDA attention for heads of {shape.head_dim} elements in {shape.dtype}")
        self._shapes.append(shape)
        wrapper = self._planned[shape] = self._plan(shape)
        # The step's copies were marked before this one was queued, so the next step would not wait for it.
        self._device.synchronize()
        return wrapper

    def _plan(self, shape: AttentionShape) -> Any:
        assert self._tables is not None, "no step has begun"
        tables = self._tables
        wrapper = self._wrapper(shape)
        context = (tables.block_starts_S1, tables.blocks, tables.last_block_tokens_S)
        sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size)
        options = {
            # FlashInfer counts the positions to the left of a token, without the token itself.
            "window_left": shape.window - 1 if shape.window else -1,
            "sm_scale": shape.scale,
            "q_data_type": shape.dtype,
            "kv_data_type": shape.dtype,
        }
        if self._graph_rows is None:
            wrapper.plan(tables.query_starts_S1, *context, *sizes, causal=True, **options)
        else:
            wrapper.plan(*context, *sizes, **options)
        return wrapper

    def _wrapper(self, shape: AttentionShape) -> Any:
        key = shape, self._graph_rows
        if key not in self._wrappers:
            self._wrappers[key] = self._new_wrapper(self._graph_rows)
        return self._wrappers[key]

    def _new_wrapper(self, graph_rows: int | None) -> Any:
        if graph_rows is None:
            return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND", backend="fa2")
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=self._block_starts[: graph_rows + 1],
            paged_kv_indices_buffer=self._blocks,
            paged_kv_last_page_len_buffer=self._last_block_tokens[:graph_rows],
            backend="fa2",
        )

    def _graph_buffer(self, num_elements: int) -> torch.Tensor:
        return torch.zeros(num_elements, dtype=torch.int32, device=self._device.device)
