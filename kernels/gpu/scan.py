"""scan: one read of the gradients before anything depends on them.

    flags[0] = 1 where |g'| is NaN, inf or beyond LARGEST, else as it was;   squares[b] = sum of g'^2 over block b

Bytes an element, fp32: reads g 4.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct

import triton.language as tl
from torch import Tensor

from onebit.kernels.data.hyper import LARGEST
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.gpu import tiles
from onebit.kernels.gpu.launch import TYPES, WIDE, launch, span_arguments

LARGEST_BITS = tl.constexpr(int.from_bytes(struct.pack("<f", LARGEST), "little"))
SAFE = tl.constexpr(LARGEST**2)  # a sum of squares up to here holds none of an element that is too large


@tiles.entry
def scan_kernel(
    block_table, parameter_table, addresses, hyper, flags, squares, first_block, first_word, blocks,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, GRAD: tl.constexpr, IN_A_ROW: tl.constexpr,
):  # fmt: skip
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, _, length = tiles.find(block_table, first_block + block, first_word)
            p, group, offset, valid = tiles.locate(row, length, parameter_table)
            base, readable, wide = tiles.pointer(addresses, p, offset, valid, GRAD, TILE)
            g = tiles.load_tile(base, readable, wide, TILE, IN_A_ROW)
            g = g * tl.load(tiles.group_row(hyper, group) + tiles.H_GRAD_SCALE)
            total = tl.sum(g * g, axis=0)
            if squares is not None:
                tl.store(squares + block, total)
            if (total <= SAFE) == 0:
                size = tl.abs(g).to(tl.int32, bitcast=True)  # in the order of the values, NaN above all
                if tl.max(size, axis=0) > LARGEST_BITS:
                    tl.atomic_xchg(flags, 1, sem="relaxed")  # several programs may


def scan(span: Span, grads: Pointers, hyper: Tensor, flags: Tensor, squares: Tensor | None = None) -> None:
    """`onebit.kernels.passes.Backend.scan` in one launch."""
    arguments = {
        **span_arguments(span, flags.device),
        "addresses": grads.addresses,
        "hyper": hyper,
        "flags": flags,
        "squares": squares,
        "GRAD": TYPES[grads.dtype],
        "IN_A_ROW": WIDE // grads.dtype.itemsize,
    }
    launch(scan_kernel, span.count, arguments, flags, grads.dtype)
