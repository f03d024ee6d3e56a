"""These tests need a GPU that FlashInfer's kernels run on; elsewhere each is skipped, and says why."""

from __future__ import annotations

from typing import Any

import pytest

from engine.attention.cuda_select import load_flashinfer, why_not_cuda
from engine.attention.kv_cache import KVLayout

_NEEDED = KVLayout(num_blocks=1, num_layers=1, num_kv_heads=1, block_size=16, head_dim=64, dtype="bfloat16")


@pytest.fixture(scope="session")
def library() -> Any:
    """The module `flashinfer`."""
    reason = why_not_cuda(_NEEDED)
    if reason is not None:
        pytest.skip(f"no GPU to test: {reason}")
    return load_flashinfer()


@pytest.fixture(autouse=True)
def gpu(library: Any) -> None:
    """Every test of this folder, whether it uses the library itself or not."""
