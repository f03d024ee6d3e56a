"""The pool of key/value blocks: one contiguous buffer, in host memory or a device's, and its layout as data.

Axes: B block, L layer, K key/value head, C key (0) or value (1), S slot in the block (one token), D head dimension.
The order [B, L, K, C, S, D] makes a block one run of bytes (pushing a whole block is one copy), and a layer of a
block, and a range of heads within that.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod

import torch

from engine.huge_pages import map_huge
from engine.model.config import DTYPE_SIZE_BYTES, DtypeName, ModelShape, kv_block_size_bytes

TORCH_DTYPES: dict[DtypeName, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PoolBuffer = bytearray | memoryview | mmap.mmap


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape of the pool, in elements, and its dtype."""

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: DtypeName

    @classmethod
    def for_model(cls, config: ModelShape, *, dtype: DtypeName, num_blocks: int, block_size: int) -> KVLayout:
        """Raises ValueError if `num_blocks` or `block_size` is not positive."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        kv_block_size_bytes(config, dtype, block_size)
        return cls(
            num_blocks=num_blocks,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            block_size=block_size,
            head_dim=config.head_dim,
            dtype=dtype,
        )

    @property
    def shape_BLKCSD(self) -> tuple[int, int, int, int, int, int]:
        return (self.num_blocks, self.num_layers, self.num_kv_heads, 2, self.block_size, self.head_dim)

    @property
    def block_size_bytes(self) -> int:
        elements = self.num_layers * self.num_kv_heads * 2 * self.block_size * self.head_dim
        return elements * DTYPE_SIZE_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        return self.num_blocks * self.block_size_bytes


class KVCache:
    """The pool's memory seen as a tensor. The memory may be the caller's: a memfd that other workers map.

    `pool_BLKCSD` may have blocks beyond the layout's, numbered on from those: a backend's scratch. The layers' views
    show them, the attribute of this name does not.
    """

    def __init__(self, layout: KVLayout, pool_BLKCSD: torch.Tensor) -> None:
        assert pool_BLKCSD.shape[1:] == layout.shape_BLKCSD[1:] and len(pool_BLKCSD) >= layout.num_blocks
        assert pool_BLKCSD.is_contiguous()
        self.layout = layout
        self.pool_BLKCSD = pool_BLKCSD[: layout.num_blocks]
        self._layers_BKCSD = [pool_BLKCSD[:, layer] for layer in range(layout.num_layers)]

    @classmethod
    def from_buffer(cls, buffer: PoolBuffer, layout: KVLayout) -> KVCache:
        """A pool over writable memory of the caller, which must outlive it. It is used as it is, not cleared.

        Raises ValueError if the buffer is read-only or smaller than the layout.
        """
        view = memoryview(buffer)
        if view.readonly:
            raise ValueError("buffer of the KV pool must be writable")
        if view.nbytes < layout.size_bytes:
            raise ValueError(f"buffer of the KV pool holds {view.nbytes} bytes, the layout needs {layout.size_bytes}")
        dtype = TORCH_DTYPES[layout.dtype]
        flat = torch.frombuffer(buffer, dtype=dtype, count=layout.size_bytes // DTYPE_SIZE_BYTES[layout.dtype])
        return cls(layout, flat.view(layout.shape_BLKCSD))

    @classmethod
    def allocate(cls, layout: KVLayout, device: torch.device | None = None, num_scratch_blocks: int = 0) -> KVCache:
        """A pool in memory of its own, cleared; of the host's, if no device is given."""
        shape = (layout.num_blocks + num_scratch_blocks, *layout.shape_BLKCSD[1:])
        dtype = TORCH_DTYPES[layout.dtype]
        if device is None or device.type == "cpu":
            memory = map_huge(prod(shape) * dtype.itemsize)
            return cls(layout, torch.frombuffer(memory, dtype=dtype).view(shape))
        return cls(layout, torch.zeros(shape, dtype=dtype, device=device))

    def layer_BKCSD(self, layer: int) -> torch.Tensor:
        """A view of one layer of every block."""
        return self._layers_BKCSD[layer]
