"""Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

A number is a function of its key and counter alone. A token's draw is named by (seed, choice, position, draw), so it
is the same in whichever batch, on whichever worker and after whatever failure it is made.
"""

from __future__ import annotations

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
