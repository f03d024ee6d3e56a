"""BLAKE2b written out from RFC 7693, without hashlib: what the block hash's test vectors are computed with.

Only what those need: no key, no salt, a digest of up to 64 bytes, and a personalisation of up to 16 bytes.
"""

from __future__ import annotations

import struct

_MASK = 2**64 - 1
_BLOCK_BYTES = 128
_IV = (
    0x6A09E667F3BCC908,
    0xBB67AE8584CAA73B,
    0x3C6EF372FE94F82B,
    0xA54FF53A5F1D36F1,
    0x510E527FADE682D1,
    0x9B05688C2B3E6C1F,
    0x1F83D9ABFB41BD6B,
    0x5BE0CD19137E2179,
)
_SIGMA = (
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
    (14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3),
    (11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4),
    (7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8),
    (9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13),
    (2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9),
    (12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11),
    (13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10),
    (6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5),
    (10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0),
)
_NUM_ROUNDS = 12
# The columns, then the diagonals, of the 4 x 4 matrix of words.
_QUARTERS = (
    (0, 4, 8, 12),
    (1, 5, 9, 13),
    (2, 6, 10, 14),
    (3, 7, 11, 15),
    (0, 5, 10, 15),
    (1, 6, 11, 12),
    (2, 7, 8, 13),
    (3, 4, 9, 14),
)


def blake2b(data: bytes, *, digest_size: int, person: bytes = b"") -> bytes:
    """The digest of `data`."""
    parameters = struct.pack("<BBBBIQBB14x16x16s", digest_size, 0, 1, 1, 0, 0, 0, 0, person)
    state = [iv ^ word for iv, word in zip(_IV, struct.unpack("<8Q", parameters), strict=True)]
    # The last block is padded with zeros; there is one even where there is no data.
    starts = range(0, max(len(data), 1), _BLOCK_BYTES)
    for start in starts:
        block = data[start : start + _BLOCK_BYTES]
        num_bytes = start + len(block)
        _compress(state, block.ljust(_BLOCK_BYTES, b"\0"), num_bytes, is_last=start == starts[-1])
    return struct.pack("<8Q", *state)[:digest_size]


def _compress(state: list[int], block: bytes, num_bytes: int, *, is_last: bool) -> None:
    words = struct.unpack("<16Q", block)
    v = [*state, *_IV]
    v[12] ^= num_bytes & _MASK
    v[13] ^= num_bytes >> 64
    if is_last:
        v[14] ^= _MASK
    for number in range(_NUM_ROUNDS):
        sigma = _SIGMA[number % len(_SIGMA)]
        for index, quarter in enumerate(_QUARTERS):
            _mix(v, quarter, words[sigma[2 * index]], words[sigma[2 * index + 1]])
    for index in range(8):
        state[index] ^= v[index] ^ v[index + 8]


def _mix(v: list[int], quarter: tuple[int, int, int, int], x: int, y: int) -> None:
    a, b, c, d = quarter
    for word, turn_d, turn_b in ((x, 32, 24), (y, 16, 63)):
        v[a] = (v[a] + v[b] + word) & _MASK
        v[d] = _rotated(v[d] ^ v[a], turn_d)
        v[c] = (v[c] + v[d]) & _MASK
        v[b] = _rotated(v[b] ^ v[c], turn_b)


def _rotated(word: int, num_bits: int) -> int:
    return (word >> num_bits | word << (64 - num_bits)) & _MASK
