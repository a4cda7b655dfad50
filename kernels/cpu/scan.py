"""scan for CPU tensors."""

from __future__ import annotations

from torch import Tensor

from onebit.kernels.cpu.tiles import Scratch, Tile, for_tiles, groups_of, scaled, sum_squares
from onebit.kernels.data.hyper import LARGEST
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers


def scan(span: Span, grads: Pointers, hyper: Tensor, flags: Tensor, squares: Tensor | None = None) -> None:
    """`onebit.kernels.reference.scan` in tiles."""
    groups = groups_of(hyper)
    if squares is not None:
        squares.zero_()

    def work(tile: Tile, scratch: Scratch) -> None:
        for s in tile.segments:
            g = scaled(grads, s, scratch.buffer(0, tile), groups[s.group].grad_scale)
            if g is None:
                continue
            if squares is not None:
                sum_squares(tile, s, g, squares)
            elif not _finite(g):
                flags[0] = 1
        # No element is larger than a block's norm: where this one is far from the limit, no element is looked at.
        if squares is not None and not float(tile.of(squares).sum()) <= LARGEST:
            for s in tile.segments:
                g = scaled(grads, s, scratch.buffer(0, tile), groups[s.group].grad_scale)
                if g is not None and not _finite(g):
                    flags[0] = 1

    for_tiles(span, span.count, 1, work)


def _finite(g: Tensor) -> bool:
    return all(abs(float(x)) <= LARGEST for x in g.aminmax())
