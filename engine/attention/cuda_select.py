"""Whether this machine can serve a model from a GPU, and the pool and backend that do."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from engine.attention.cuda_device import CudaDevice
from engine.attention.flashinfer import FlashInferBackend
from engine.attention.flashinfer_attention import DTYPES, HEAD_DIMS
from engine.attention.kv_cache import TORCH_DTYPES, KVCache, KVLayout

_LEAST_CAPABILITY = (8, 0)
"""Of the GPU: the first with tensor cores for bfloat16."""
_EXTRA = "baton-cluster[cuda]"


def why_not_cuda(layout: KVLayout) -> str | None:
    """Why a model with such a pool cannot be served from a GPU here; None if it can. Imports FlashInfer."""
    if TORCH_DTYPES[layout.dtype] not in DTYPES:
        return f"its kernels compute in bfloat16, not in {layout.dtype}"
    if layout.head_dim not in HEAD_DIMS:
        return f"its kernels take heads of {', '.join(map(str, HEAD_DIMS))} elements, not of {layout.head_dim}"
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA: install one that is, and {_EXTRA}"
        return "torch finds no GPU"
    capability = torch.cuda.get_device_capability()
    if capability < _LEAST_CAPABILITY:
        found, needed = (".".join(map(str, version)) for version in (capability, _LEAST_CAPABILITY))
        return f"the GPU has compute capability {found}, {needed} is needed"
    try:
        load_flashinfer()
    except (ImportError, OSError, RuntimeError) as error:
        return f"FlashInfer cannot be imported ({error}): install {_EXTRA}"
    return None


def open_cuda(layout: KVLayout, max_sequence_tokens: int) -> tuple[KVCache, FlashInferBackend]:
    """A pool in the GPU's memory, and the backend for it. `why_not_cuda` has found no reason against it.

    Raises ValueError if the pool does not fit.
    """
    device = CudaDevice()
    free_bytes, _ = torch.cuda.mem_get_info(device.device)
    if layout.size_bytes > free_bytes:
        free, needed = (f"{size_bytes / 2**30:.1f}GiB" for size_bytes in (free_bytes, layout.size_bytes))
        raise ValueError(f"num_blocks: a KV pool of {needed} is more than the {free} that the GPU has free")
    cache = KVCache.allocate(layout, device.device, num_scratch_blocks=1)
    backend = FlashInferBackend(
        load_flashinfer(),
        device,
        block_size=layout.block_size,
        scratch_block=layout.num_blocks,
        max_blocks_per_sequence=-(-max_sequence_tokens // layout.block_size),
    )
    return cache, backend


def load_flashinfer() -> ModuleType:
    """The module. Raises ImportError where it is missing, others where parts of it do not fit each other."""
    return importlib.import_module("flashinfer")
