"""The 64-bit checksum that proves a block arrived as it was: fast enough to be summed while copying.

Definition, all arithmetic modulo 2**64. The bytes are read as little-endian 64-bit words w[0], w[1], ..., the last
one filled up with zero bytes. Each word gets a key from its place and is mixed with it:

    k[i] = 0xD1B54A32D192ED03 + i * 0x9E3779B97F4A7C15
    v[i] = w[i] ^ k[i]
    m[i] = v[i] + (v[i] mod 2**32) * (v[i] >> 32)

(the product of the halves is the step of NH, Black et al., UMAC, CRYPTO 1999). The sum of all m[i], with
`size_bytes * 0xC2B2AE3D27D4EB4F` XORed into it, goes through the finaliser of MurmurHash3:

    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCD;  h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53;  h = h ^ (h >> 33)

Any single flipped bit changes the sum: it changes m[i] by +-2**b * (hi + 1) or +-2**b * (lo + 2**32), neither of which
is 0 modulo 2**64. Other damage passes with a chance of about 2**-64. It is no defence against an adversary.

Test vectors: b"" -> 0x0; b"\\x00" -> 0x8778edd0e570ada7; b"Baton" -> 0xa35461050a15acc6;
bytes(range(256)) * 64 -> 0xe0058a20ebf2f6fb.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv_transfer.native_library import NativeLibrary, load

KEY_START = np.uint64(0xD1B54A32D192ED03)
KEY_STEP = np.uint64(0x9E3779B97F4A7C15)
LENGTH_FACTOR = 0xC2B2AE3D27D4EB4F
FALLBACK_PIECE_WORDS = 32_768
"""How many words numpy mixes at once: temporaries stay in the cache."""

_MASK = (1 << 64) - 1

Memory = npt.NDArray[np.uint8]


def as_memory(buffer: object) -> Memory:
    """A flat view of bytes of anything with the buffer protocol; it keeps the buffer exported while it lives."""
    return np.frombuffer(buffer, dtype=np.uint8)  # type: ignore[call-overload, no-any-return]


def checksum(data: bytes | bytearray | memoryview | Memory) -> int:
    """Of all of `data` (contiguous)."""
    memory = as_memory(data)
    return checksums(memory, [(0, memory.size)])[0]


def checksums(memory: Memory, ranges: Sequence[tuple[int, int]], library: NativeLibrary | None = None) -> list[int]:
    """One checksum a range (offset, size) in bytes of `memory`, in one native call that releases the GIL.

    Raises: ValueError for a range outside of memory.
    """
    for offset_bytes, size_bytes in ranges:
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > memory.size:
            raise ValueError(f"ranges: {size_bytes} bytes at {offset_bytes} of {memory.size}")
    native = library or load()
    if native is None:
        return [fallback_checksum(memory[offset : offset + size]) for offset, size in ranges]
    return native.checksums(memory, ranges)


def fallback_checksum(memory: Memory) -> int:
    """The same without the native library, some 20 times slower."""
    whole = memory.size // 8 * 8
    words = memory[:whole].view("<u8") if memory.flags.c_contiguous else memory[:whole].copy().view("<u8")
    total = 0
    for start in range(0, words.size, FALLBACK_PIECE_WORDS):
        total += _mixed_sum(words[start : start + FALLBACK_PIECE_WORDS], start)
    if whole < memory.size:
        last = int.from_bytes(memory[whole:].tobytes(), "little")
        total += _mixed_sum(np.array([last], dtype=np.uint64), words.size)
    return _finish(total & _MASK, memory.size)


def _mixed_sum(words: npt.NDArray[np.uint64], first_word: int) -> int:
    keys = np.arange(first_word, first_word + words.size, dtype=np.uint64)
    keys *= KEY_STEP
    keys += KEY_START
    keys ^= words
    high = keys >> np.uint64(32)
    high *= keys & np.uint64(0xFFFFFFFF)
    high += keys
    return int(high.sum(dtype=np.uint64))


def _finish(total: int, size_bytes: int) -> int:
    total ^= size_bytes * LENGTH_FACTOR & _MASK
    total = (total ^ (total >> 33)) * 0xFF51AFD7ED558CCD & _MASK
    total = (total ^ (total >> 33)) * 0xC4CEB9FE1A85EC53 & _MASK
    return total ^ (total >> 33)
