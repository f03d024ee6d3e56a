"""A worker's KV pool in the simulator: real bytes, eight a token, whose content depends on everything before it.

A token's KV is a number derived from the KV of all tokens before it *as read through the block table*, the token and
its position. A wrong, stale or half-written block anywhere in the past therefore changes every later value and every
drawn token, whatever the chunking; and the right values can be computed without any pool (`ContextHash`).
"""

from __future__ import annotations

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


class KVMemory:
    """One worker life's pool: `num_blocks` blocks of `block_size` slots, initially filled with rubbish."""

    def __init__(self, num_blocks: int, block_size: int, rubbish: int) -> None:
        self.block_size = block_size
        self.block_size_bytes = block_size * SLOT_SIZE_BYTES
        self.data = bytearray((rubbish + 1).to_bytes(SLOT_SIZE_BYTES, "big") * (num_blocks * block_size))

    def block(self, block_id: int) -> bytes:
        start = block_id * self.block_size_bytes
        return bytes(self.data[start : start + self.block_size_bytes])

    def read(self, block_table: list[int], num_tokens: int) -> bytes:
        """The slots of the first `num_tokens` tokens of a sequence."""
        size, data = self.block_size_bytes, self.data
        num_blocks = -(-num_tokens // self.block_size)
        blocks = [data[block_id * size : (block_id + 1) * size] for block_id in block_table[:num_blocks]]
        return b"".join(blocks)[: num_tokens * SLOT_SIZE_BYTES]

    def write_slot(self, block_table: list[int], position: int, content: int) -> None:
        block_index, offset = divmod(position, self.block_size)
        start = (block_table[block_index] * self.block_size + offset) * SLOT_SIZE_BYTES
        self.data[start : start + SLOT_SIZE_BYTES] = content.to_bytes(SLOT_SIZE_BYTES, "big")
