"""Messages on the CPU, tile by tile: reading scales and bits, and encoding c into them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onebit.kernels.cpu.tiles import Scratch, Tile, clear_masked, clear_tails, count_live
from onebit.kernels.data.layout import Span
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Messages


class Packed:
    """Messages, tile by tile. A scale is multiplied by `factor`, a number or [blocks of the messages, 1]."""

    def __init__(self, messages: Messages, factor: float | Tensor = 1.0) -> None:
        scales = messages.scale_of_blocks()[:, None]
        if isinstance(factor, Tensor) or factor != 1:
            scales = scales * factor
        self._scales = scales.view(messages.rows, -1, 1).unbind(0)
        self._bits = list(messages.bits.numpy())

    def scales(self, tile: Tile, row: int | None = None) -> Tensor:
        """[count, 1]"""
        return self._scales[tile.row if row is None else row][tile.column : tile.column + tile.count]

    def bits(self, tile: Tile, row: int | None = None) -> npt.NDArray[np.uint8]:
        return self._bits[tile.row if row is None else row][tile.column : tile.column + tile.count].reshape(-1)


class Encoder:
    """c = y + e into bits, scales and residual. c is built where the residual lies."""

    def __init__(self, span: Span, residual: Residual, out: Messages, live: Tensor | None) -> None:
        self._residual, self._out, self._live = residual, out, live
        self._value = residual.value.view(span.count, -1)
        self._least = 1 if residual.scale is None else 0  # what a block's sum may be divided by, or added up to
        self._counts = self._counted(span.counts())
        self._bits, self._scales = list(out.bits.numpy()), out.scales[:, :, None].unbind(0)

    def left_out(self, tile: Tile, scratch: Scratch) -> Tensor:
        """e of a tile, to which the caller adds y in place. Overwrites scratch buffer 1."""
        e = tile.of(self._value)
        if self._residual.scale is not None:
            e.addcmul_(scratch.signs(1, tile, _packed(tile, e, scratch)), self._residual.scale[tile.row], value=-1)
        return e

    def encode(self, tile: Tile, c: Tensor, scratch: Scratch) -> None:
        """Write the bits and scale of c, and what they leave out. Overwrites scratch buffer 1."""
        live, buffer = tile.live(self._live), scratch.buffer(1, tile)
        clear_tails(tile, c)
        clear_masked(c, live, buffer)
        packed = _packed(tile, c, scratch)
        if live is not None:
            packed &= live.reshape(-1)
        here = slice(tile.column, tile.column + tile.count)
        self._bits[tile.row][here].reshape(-1)[:] = packed
        l1 = self._out.format.norm == "l1"
        magnitude = torch.abs(c, out=buffer) if l1 else torch.mul(c, c, out=buffer)
        total = magnitude.sum(1, keepdim=True)
        count = tile.of(self._counts) if live is None else self._counted(count_live(live))
        if self._residual.scale is not None:
            assert self._residual.partial is not None and self._residual.counted is not None
            tile.of(self._residual.partial).copy_(total.view(-1))
            tile.of(self._residual.counted).copy_(count.view(-1))
            return
        scale = torch.div(total, count, out=self._scales[tile.row][here])
        if not l1:
            scale.sqrt_()
        c.addcmul_(scratch.signs(1, tile, packed), scale, value=-1)
        clear_tails(tile, c)
        clear_masked(c, live, buffer)

    def _counted(self, counts: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.maximum(counts, self._least).astype(np.float32))[:, None]

    def finish(self) -> None:
        """With a tensor scale: each message's scale, from the sums and counts of its blocks."""
        if self._residual.scale is None:
            return
        assert self._residual.partial is not None and self._residual.counted is not None
        rows, blocks = self._out.rows, (self._residual.partial, self._residual.counted)
        total, count = (each.view(rows, -1).sum(1) for each in blocks)
        scale = total / count.clamp(min=1)
        if self._out.format.norm == "l2":
            scale.sqrt_()
        self._out.scales.copy_(scale[:, None])
        self._residual.scale.copy_(scale)


def _packed(tile: Tile, value: Tensor, scratch: Scratch) -> npt.NDArray[np.uint8]:
    """The bits of a tile: 1 where the value is at least 0, none past a block's valid count."""
    bits = np.greater_equal(value.numpy(), np.float32(0), out=scratch.truth(tile))
    clear_tails(tile, bits)
    return np.packbits(bits.reshape(-1), bitorder="little")
