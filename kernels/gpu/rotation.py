"""A tile rotated forth and back: see `onebit.kernels.data.rotation`. A stage takes elements apart by a place in their
index, which the compiler does by shuffles within a warp, and through shared memory beyond it."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from onebit.kernels.data import rotation

FACTOR, ADDEND, SHIFT, LOW = (tl.constexpr(x) for x in (rotation.FACTOR, rotation.ADDEND, rotation.SHIFT, rotation.LOW))
SECOND_FACTOR, SECOND_SHIFT, PLACE = (
    tl.constexpr(x) for x in (rotation.SECOND_FACTOR, rotation.SECOND_SHIFT, rotation.PLACE)
)
STAGES = tl.constexpr(14)  # of the largest block


@triton.jit
def turn(x, TILE: tl.constexpr):
    """D"""
    hashed = tl.arange(0, TILE) * FACTOR + ADDEND
    hashed = ((hashed ^ (hashed >> SHIFT)) & LOW) * SECOND_FACTOR
    flip = ((hashed ^ (hashed >> SECOND_SHIFT)) >> PLACE) & 1
    return tl.where(flip != 0, 0 - x, x)


@triton.jit
def mix(x, length, TILE: tl.constexpr):
    """H, of a block's elements; those past it stay among themselves."""
    for i in tl.static_range(STAGES):
        if (2 << i) <= TILE:
            pairs = tl.permute(tl.reshape(x, (TILE >> (i + 1), 2, 1 << i)), (0, 2, 1))
            first, second = tl.split(pairs)
            mixed = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
            x = tl.where(length % (2 << i) == 0, tl.reshape(mixed, (TILE,)), x)
    return x


@triton.jit
def rotate(x, length, TILE: tl.constexpr):
    return mix(turn(x, TILE), length, TILE)


@triton.jit
def rotate_back(x, length, TILE: tl.constexpr):
    return turn(mix(x, length, TILE), TILE)
