"""What norm="rotated" does with a block before its signs are taken, and after they have arrived.

    forth   z = H D c        back   c = D H z / n
    D       the sign of some elements is turned: which ones is a matter of their place in the block, and looks random
    H       (a, b) -> (a + b, a - b) for elements h apart, h = 1, 2, 4, .., as long as 2 h divides the block's length

n is the largest power of two that divides the length: of so many elements each of z is made. What has few large
elements becomes evenly distributed, so that one size stands for all of them (as in DRIVE, Vargaftik et al. 2021). H D
over n's root is a rotation. All sums are made in the order of h, on every device.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from onebit.kernels.data.layout import MOST_BLOCK_SIZE

# flips(i) is a bit of a hash whose every product stays below 2^31
FACTOR, ADDEND, SHIFT, LOW, SECOND_FACTOR, SECOND_SHIFT, PLACE = 40503, 12345, 5, 0xFFFF, 29989, 11, 7


def elements_mixed(length: int) -> int:
    """n"""
    return length & -length


@cache
def flips() -> np.ndarray:
    """bool, of every place in a block: whether its sign is turned."""
    x = np.arange(MOST_BLOCK_SIZE, dtype=np.int64) * FACTOR + ADDEND
    x = ((x ^ x >> SHIFT) & LOW) * SECOND_FACTOR
    found = ((x ^ x >> SECOND_SHIFT) >> PLACE) & 1 == 1
    found.flags.writeable = False
    return found


@cache
def packed_flips() -> np.ndarray:
    """uint8, a bit a place, as messages have theirs."""
    return np.packbits(flips(), bitorder="little")
