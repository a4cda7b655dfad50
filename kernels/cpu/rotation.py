"""A block rotated forth and back, in scratch memory: see `onebit.kernels.data.rotation`.

The stages within sixteen lanes shuffle them; the others, h = 16, 32, .., add and subtract whole lanes.
"""

from __future__ import annotations

from llvmlite import ir

from onebit.kernels.cpu.compile import routine, tile
from onebit.kernels.cpu.lanes import FLOATS, INT, LANES, WIDTH, WORDS, ZERO, intrinsic, where
from onebit.kernels.cpu.memory import bits_at, fill, load, store


def _stage(h):
    """(a, b) -> (a + b, a - b) for lanes h apart."""

    @intrinsic
    def mix(typing_context, value):
        def generate(context, builder, signature, arguments):
            x, lanes = arguments[0], range(WIDTH)
            other = builder.shuffle_vector(x, x, ir.Constant(WORDS, [ir.Constant(INT, i ^ h) for i in lanes]))
            signs = ir.Constant(WORDS, [ir.Constant(INT, -(2**31) if i & h else 0) for i in lanes])
            turned = builder.bitcast(builder.xor(builder.bitcast(x, WORDS), signs), FLOATS)  # -x where it is b
            return builder.fadd(other, turned)

        return LANES(LANES), generate

    return mix


_one, _two, _four, _eight = map(_stage, (1, 2, 4, 8))


@tile
def turned(flips, i, x):
    """D"""
    return where(bits_at(flips + i // 8), ZERO - x, x)


@tile
def _two_stages(at, h):
    """h and 2 h of four times sixteen lanes, h elements apart."""
    a, b, c, d = load(at), load(at + 4 * h), load(at + 8 * h), load(at + 12 * h)
    a, b, c, d = a + b, a - b, c + d, c - d
    store(at, a + c)
    store(at + 4 * h, b + d)
    store(at + 8 * h, a - c)
    store(at + 12 * h, b - d)


@routine
def mix(values, length):
    """H, in place, two stages at a time."""
    for i in range(0, length, 2 * WIDTH):
        a, b = load(values + 4 * i), load(values + 4 * (i + WIDTH))
        a, b = _eight(_four(_two(_one(a)))), _eight(_four(_two(_one(b))))
        store(values + 4 * i, a + b)
        store(values + 4 * (i + WIDTH), a - b)
    h = 2 * WIDTH
    while length % (4 * h) == 0:
        for start in range(0, length, 4 * h):
            for i in range(start, start + h, WIDTH):
                _two_stages(values + 4 * i, h)
        h = 4 * h
    if length % (2 * h) == 0:
        for start in range(0, length, 2 * h):
            for i in range(start, start + h, WIDTH):
                a, b = load(values + 4 * i), load(values + 4 * (i + h))
                store(values + 4 * i, a + b)
                store(values + 4 * (i + h), a - b)


@routine
def rotate(source, flips, n, length, target):
    """H D of a block's first n elements, and zeros after them, at another address."""
    for i in range(0, n, WIDTH):
        store(target + 4 * i, turned(flips, i, load(source + 4 * i)))
    fill(target + 4 * n, 0, 4 * (length - n))
    mix(target, length)


@routine
def rotate_back(values, flips, length):
    """D H, in place."""
    mix(values, length)
    for i in range(0, length, WIDTH):
        store(values + 4 * i, turned(flips, i, load(values + 4 * i)))
