"""scan: one read of the gradients before anything depends on them.

    flags[0] = 1 where |g'| is NaN, inf or beyond LARGEST, else as it was;   squares[b] = sum of g'^2 over block b

Bytes an element, fp32: reads g 4.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.gpu import tiles
from onebit.kernels.gpu.launch import TYPES, launch, span_arguments


@triton.jit
def _scan_block(g_base, g_valid, scale, flags, square, TILE: tl.constexpr, FULL: tl.constexpr):
    g = tiles.load_tile(g_base, g_valid, TILE, FULL) * scale
    if tl.max((tl.abs(g) <= tiles.LARGEST).to(tl.int32) ^ 1, axis=0) != 0:  # false for NaN
        tl.store(flags, 1)
    if square is not None:
        tl.store(square, tl.sum(g * g, axis=0))


@tiles.entry
def scan_kernel(
    owner, parameter_table, addresses, hyper, flags, squares, first_block, blocks,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, GRAD: tl.constexpr,
):  # fmt: skip
    for r in range(BLOCKS_PER_PROGRAM):
        block = tl.program_id(0) * BLOCKS_PER_PROGRAM + r
        if block < blocks:
            p, group, offset, valid = tiles.locate(first_block + block, owner, parameter_table, BLOCK)
            base, readable, aligned = tiles.pointer(addresses, p, offset, valid, GRAD, TILE)
            scale = tl.load(tiles.group_row(hyper, group) + tiles.H_GRAD_SCALE)
            square = None if squares is None else squares + block
            if aligned:
                _scan_block(base, readable, scale, flags, square, TILE, True)
            else:
                _scan_block(base, readable, scale, flags, square, TILE, False)


def scan(span: Span, grads: Pointers, hyper: Tensor, flags: Tensor, squares: Tensor | None = None) -> None:
    """`onebit.kernels.reference.scan` in one launch."""
    arguments = {
        **span_arguments(span, flags.device),
        "addresses": grads.addresses,
        "hyper": hyper,
        "flags": flags,
        "squares": squares,
        "GRAD": TYPES[grads.dtype],
    }
    launch(scan_kernel, span.count, arguments, flags, grads.dtype)
