"""A worker's KV pool in the simulator: real bytes, eight a token and layer, that depend on everything before them.

A token's KV is a number derived from the KV of all tokens before it *as read through the block table*, the token and
its position. A wrong, stale or half-written block anywhere in the past therefore changes every later value and every
drawn token, whatever the chunking; and the right values can be computed without any pool (`ContextHash`).
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.tiers import BlockCopy
from kv_transfer.protocol.layout import KVLayout, LayerGroup

SLOT_SIZE_BYTES = 8
PRIME = 2**64 - 59
"""The largest 64-bit prime: every value fits a slot."""

_MIX_TOKEN = 0x9E3779B97F4A7C15
_MIX_POSITION = 0xC2B2AE3D27D4EB4F
_SLOT_SHIFT = 2**64 % PRIME


def mix(value: int, salt: int) -> int:
    """A number below PRIME that depends on every bit of both (cubing is a bijection for neither, but scrambles)."""
    mixed = (value ^ (salt * _MIX_TOKEN + _MIX_POSITION)) % PRIME
    return (mixed * mixed % PRIME * mixed + salt + 1) % PRIME


class ContextHash:
    """Digest of the KV of the first `num_tokens` tokens, extended token by token."""

    __slots__ = ("num_tokens", "value")

    def __init__(self, content: bytes = b"") -> None:
        """`content`: the slots of the tokens so far, in token order."""
        self.value = int.from_bytes(content, "big") % PRIME
        self.num_tokens = len(content) // SLOT_SIZE_BYTES

    def append(self, token_id: int) -> int:
        """Takes one more token and returns its slot's content."""
        content = mix(self.value, token_id * _MIX_POSITION + self.num_tokens)
        self.value = (self.value * _SLOT_SHIFT + content) % PRIME
        self.num_tokens += 1
        return content


def checksum(content: bytes | bytearray) -> int:
    """64-bit sum of a block's bytes, as the push protocol ships it."""
    return mix(int.from_bytes(content, "big") % PRIME, len(content))


def kv_layout(num_layers: int, block_size: int) -> KVLayout:
    """Of a pool whose every layer has SLOT_SIZE_BYTES a token."""
    group = LayerGroup(num_layers=num_layers, num_kv_heads=1, head_dim=1)
    layout = KVLayout(groups=(group,), block_size=block_size, dtype="float32")
    assert layout.token_size_bytes == num_layers * SLOT_SIZE_BYTES
    return layout


class KVMemory:
    """One worker life's pool: `num_blocks` blocks of `block_size` slots a layer, initially filled with rubbish.
    Below it is the host tier, of `num_host_blocks`.

    Layer l holds the token's number plus l, so that every layer has to be there, and in its own place.
    """

    def __init__(
        self, num_blocks: int, block_size: int, rubbish: int, num_layers: int = 1, num_host_blocks: int = 0
    ) -> None:
        self.block_size = block_size
        self.num_layers = num_layers
        self.layout = kv_layout(num_layers, block_size)
        self.block_size_bytes = self.layout.block_size_bytes
        self._layer_size_bytes = block_size * SLOT_SIZE_BYTES
        num_slots = num_blocks * num_layers * block_size
        self.data = bytearray((rubbish + 1).to_bytes(SLOT_SIZE_BYTES, "big") * num_slots)

        self._host_blocks = [self.block(0)] * num_host_blocks

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Between the pool and the host tier."""
        for copy in copies:
            if copy.is_load:
                start = copy.block_id * self.block_size_bytes
                self.data[start : start + self.block_size_bytes] = self._host_blocks[copy.slot]
            else:
                self._host_blocks[copy.slot] = self.block(copy.block_id)

    def host_block(self, slot: int) -> bytes:
        return self._host_blocks[slot]

    def put_host_block(self, slot: int, content: bytes) -> None:
        self._host_blocks[slot] = content

    def block(self, block_id: int, layers: range | None = None) -> bytes:
        """All layers of a block, or these."""
        start, size = self.layout.layers_slice(block_id, layers or range(self.num_layers))
        return bytes(self.data[start : start + size])

    def read(self, block_table: list[int], num_tokens: int) -> bytes:
        """What is read of the first `num_tokens` tokens of a sequence: their slots in the first layer, or something
        else if other layers do not say the same."""
        first = self._read_layer(block_table, num_tokens, 0)
        if self.num_layers == 1 or not num_tokens:
            return first
        expected = int.from_bytes(first, "big")
        num_bits = 8 * len(first)
        one_a_slot = ((1 << num_bits) - 1) // ((1 << 8 * SLOT_SIZE_BYTES) - 1)
        value = expected
        for layer in range(1, self.num_layers):
            expected += one_a_slot
            found = int.from_bytes(self._read_layer(block_table, num_tokens, layer), "big")
            value += layer * (found - expected)
        return (value % (1 << num_bits)).to_bytes(len(first), "big")

    def _read_layer(self, block_table: list[int], num_tokens: int, layer: int) -> bytes:
        size, data, offset = self.block_size_bytes, self.data, layer * self._layer_size_bytes
        starts = [block_id * size + offset for block_id in block_table[: -(-num_tokens // self.block_size)]]
        blocks = [data[start : start + self._layer_size_bytes] for start in starts]
        return b"".join(blocks)[: num_tokens * SLOT_SIZE_BYTES]

    def write_slot(self, block_table: list[int], position: int, content: int, layers: range) -> None:
        block_index, offset = divmod(position, self.block_size)
        block_start = block_table[block_index] * self.block_size_bytes + offset * SLOT_SIZE_BYTES
        for layer in layers:
            start = block_start + layer * self._layer_size_bytes
            self.data[start : start + SLOT_SIZE_BYTES] = (content + layer).to_bytes(SLOT_SIZE_BYTES, "big")
