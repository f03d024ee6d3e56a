"""Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

A number is a function of its key and counter alone. A token's draw is named by (seed, choice, position, draw), so it
is the same in whichever batch, on whichever worker and after whatever failure it is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_NUM_ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words for a counter of four and a key of two 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product_0, product_1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (product_1 >> 32) ^ c1 ^ k0, product_1 & _MASK, (product_0 >> 32) ^ c3 ^ k1, product_0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def uniform(*, seed: int, choice: int, position: int, draw: int = 0) -> float:
    """A number in [0, 1) with 53 random bits.

    Args:
        seed: 0 <= seed < 2**64, the request's.
        choice: which of the request's choices.
        position: index of the token in that choice's output.
        draw: tells apart several draws for one token.
    """
    words = philox4x32((position & _MASK, choice & _MASK, draw & _MASK, 0), (seed & _MASK, seed >> 32))
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)) * 2.0**-53


def uniforms(*, seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """`uniform` for many tokens at once, each with `draw` 0."""
    mask, half = np.uint64(_MASK), np.uint64(32)
    multiplier_0, multiplier_1 = np.uint64(_MULTIPLIER_0), np.uint64(_MULTIPLIER_1)
    key = np.array(seeds, dtype=np.uint64)
    k0, k1 = key & mask, key >> half
    c0 = np.array(positions, dtype=np.uint64) & mask
    c1 = np.array(choices, dtype=np.uint64) & mask
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    for _ in range(_NUM_ROUNDS):
        product_0, product_1 = multiplier_0 * c0, multiplier_1 * c2
        c0, c1 = (product_1 >> half) ^ c1 ^ k0, product_1 & mask
        c2, c3 = (product_0 >> half) ^ c3 ^ k1, product_0 & mask
        k0, k1 = (k0 + np.uint64(_WEYL_0)) & mask, (k1 + np.uint64(_WEYL_1)) & mask
    high, low = (c0 >> np.uint64(5)).astype(np.float64), (c1 >> np.uint64(6)).astype(np.float64)
    return (high * 2.0**26 + low) * 2.0**-53
