"""scan as a Triton kernel: one read of the gradients before anything depends on them. `onebit.kernels.passes` has the
equations and the bytes.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct

import triton.language as tl

from onebit.kernels import passes
from onebit.kernels.data.hyper import LARGEST
from onebit.kernels.gpu import tiles
from onebit.kernels.gpu.launch import one_launch

LARGEST_BITS = tl.constexpr(int.from_bytes(struct.pack("<f", LARGEST), "little"))
SAFE = tl.constexpr(LARGEST**2)  # a sum of squares up to here holds none of an element that is too large


@tiles.entry
def scan_kernel(
    block_table, parameter_table, grad, hyper, flags, squares, first_block, first_word, blocks,
    TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, GRAD_DTYPE: tl.constexpr,
):  # fmt: skip
    IN_A_ROW: tl.constexpr = tiles.WIDEST // GRAD_DTYPE.primitive_bitwidth
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            row, _, length = tiles.find(block_table, first_block + block, first_word)
            p, offset, valid, h = tiles.locate_with_hyper(row, length, parameter_table, hyper)
            base, readable, wide = tiles.pointer(grad, p, offset, valid, GRAD_DTYPE, TILE)
            g = tiles.load_tile(base, readable, wide, TILE, IN_A_ROW)
            g = g * tl.load(h + tiles.H_GRAD_SCALE)
            total = tl.sum(g * g, axis=0)
            if squares is not None:
                tl.store(squares + block, total)
            if (total <= SAFE) == 0:
                size = tl.abs(g).to(tl.int32, bitcast=True)  # in the order of the values, NaN above all
                if tl.max(size, axis=0) > LARGEST_BITS:
                    tl.atomic_xchg(flags, 1, sem="relaxed")  # several programs may


PASSES = {passes.Scan: one_launch(scan_kernel)}
