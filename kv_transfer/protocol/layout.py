"""Where a KV pool keeps what: the layout that both workers of a pair must share, as data.

A pool is `num_blocks` blocks of `block_size_bytes`, one after the other. Within a block the axes are
`[layer, kv_head, 2, token, head_dim]` (2 = K then V), group after group for models whose layers differ: a block is
contiguous, so is a (block, layer) slice, and so is a range of heads within it.
"""

from __future__ import annotations

from dataclasses import dataclass

AXIS_ORDER = "block,layer,kv_head,kv,token,head_dim"

DTYPE_SIZE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Consecutive layers with the same heads. `window` is the attention window in tokens (None = all of the past)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, is {getattr(self, name)}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window: must be at least 1 or None, is {self.window}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    groups: tuple[LayerGroup, ...]
    block_size: int
    dtype: str

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("groups: at least one group of layers is needed")
        if self.block_size < 1:
            raise ValueError(f"block_size: must be at least 1 token, is {self.block_size}")
        if self.dtype not in DTYPE_SIZE_BYTES:
            raise ValueError(f"dtype: must be one of {', '.join(DTYPE_SIZE_BYTES)}, is {self.dtype!r}")

    @property
    def num_layers(self) -> int:
        return sum(group.num_layers for group in self.groups)

    @property
    def dtype_size_bytes(self) -> int:
        return DTYPE_SIZE_BYTES[self.dtype]

    @property
    def token_size_bytes(self) -> int:
        """One token's KV over all layers."""
        return sum(g.num_layers * g.num_kv_heads * g.head_dim for g in self.groups) * 2 * self.dtype_size_bytes

    @property
    def block_size_bytes(self) -> int:
        return self.token_size_bytes * self.block_size

    def pool_size_bytes(self, num_blocks: int) -> int:
        return num_blocks * self.block_size_bytes

    def block_offset_bytes(self, block_id: int) -> int:
        return block_id * self.block_size_bytes

    def head_size_bytes(self, group: LayerGroup) -> int:
        """K and V of one head of one layer for a block's tokens."""
        return 2 * self.block_size * group.head_dim * self.dtype_size_bytes

    def layer_slice(self, block_id: int, layer: int) -> tuple[int, int]:
        """(offset, size) in bytes of one layer of one block."""
        return self.head_slice(block_id, layer, 0, self._group_of(layer)[0].num_kv_heads)

    def layers_slice(self, block_id: int, layers: range) -> tuple[int, int]:
        """(offset, size) in bytes of consecutive layers of one block. Raises: ValueError for ones it does not have."""
        if not layers or layers.step != 1:
            raise ValueError(f"layers: {layers} is not a range of consecutive layers")
        start_bytes, _ = self.layer_slice(block_id, layers[0])
        last_bytes, last_size_bytes = self.layer_slice(block_id, layers[-1])
        return start_bytes, last_bytes + last_size_bytes - start_bytes

    def head_slice(self, block_id: int, layer: int, first_head: int, num_heads: int) -> tuple[int, int]:
        """(offset, size) in bytes of `num_heads` KV heads from `first_head` of one layer of one block."""
        group, offset_bytes = self._group_of(layer)
        if first_head < 0 or num_heads < 1 or first_head + num_heads > group.num_kv_heads:
            raise ValueError(f"num_heads: heads {first_head}..{first_head + num_heads - 1} of {group.num_kv_heads}")
        head_size_bytes = self.head_size_bytes(group)
        start_bytes = self.block_offset_bytes(block_id) + offset_bytes + first_head * head_size_bytes
        return start_bytes, num_heads * head_size_bytes

    def compatibility(self) -> str:
        """One line that is equal for two layouts exactly when whole blocks can be copied between them."""
        groups = ";".join(f"{g.num_layers}x{g.num_kv_heads}x{g.head_dim}w{g.window or 0}" for g in self.groups)
        return f"kv1 {AXIS_ORDER} {self.dtype} block={self.block_size} {groups}"

    def _group_of(self, layer: int) -> tuple[LayerGroup, int]:
        """The layer's group and the layer's offset within a block in bytes."""
        offset_bytes, rest = 0, layer
        for group in self.groups:
            layer_size_bytes = group.num_kv_heads * self.head_size_bytes(group)
            if 0 <= rest < group.num_layers:
                return group, offset_bytes + rest * layer_size_bytes
            offset_bytes += group.num_layers * layer_size_bytes
            rest -= group.num_layers
        raise ValueError(f"layer: {layer} of {self.num_layers}")
