"""A CPU pass, tile by tile: cutting a span, reaching parameters where they lie, scratch that stays in the cache."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onebit.kernels import tuning
from onebit.kernels.hyper import Hyper
from onebit.kernels.layout import Segment, Span
from onebit.kernels.pointers import Pointers
from onebit.kernels.wire import Messages

_BITS_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_SIGNS_OF_BYTE = np.where(_BITS_OF_BYTE == 1, np.float32(1), np.float32(-1))  # [256, 8]
_MASKS_OF_BYTE = -_BITS_OF_BYTE.astype(np.int32)  # [256, 8]: every bit of a word, or none
_COUNT_OF_BYTE = _BITS_OF_BYTE.sum(1)


@dataclass(frozen=True)
class Tile:
    """Blocks [first, first + count) of a span, which lie in message `row` from its block `column` on."""

    span: Span
    first: int
    row: int
    column: int
    counts: npt.NDArray[np.int64]  # valid elements of each block
    tails: tuple[int, ...]  # the blocks that are not full

    @property
    def count(self) -> int:
        return self.span.count

    def of(self, flat: Tensor) -> Tensor:
        """[count, block_size] of a state tensor of the whole span."""
        size = self.span.layout.block_size
        return flat.narrow(0, self.first * size, self.count * size).view(self.count, size)

    def live(self, mask: Tensor | None) -> npt.NDArray[np.uint8] | None:
        """[count, block_size / 8] of a packed mask of the whole span, its padding cleared."""
        if mask is None:
            return None
        size = self.span.layout.block_size
        live = mask.view(-1, size // 8)[self.first : self.first + self.count].numpy().copy()
        for row in self.tails:
            live[row] &= np.packbits(np.arange(size) < self.counts[row], bitorder="little")
        return live

    def scales(self, messages: Messages) -> Tensor:
        """[count, 1], or [1, 1] with a tensor scale"""
        if messages.format.scale == "tensor":
            return messages.scales[self.row, :, None]
        return messages.scales[self.row, self.column : self.column + self.count, None]

    def bits(self, messages: Messages, row: int | None = None) -> npt.NDArray[np.uint8]:
        row = self.row if row is None else row
        return messages.bits[row, self.column : self.column + self.count].numpy().reshape(-1)


class Scratch:
    """Room for a few tiles, reused from tile to tile."""

    def __init__(self, blocks: int, block_size: int, rooms: int) -> None:
        self._rooms = [torch.empty(blocks, block_size, dtype=torch.float32, device="cpu") for _ in range(rooms)]

    def room(self, index: int, tile: Tile) -> Tensor:
        """[count, block_size]"""
        return self._rooms[index][: tile.count]

    def signs(self, index: int, tile: Tile, bits: npt.NDArray[np.uint8]) -> Tensor:
        """+1 and -1 for a tile of packed bits."""
        out = self.room(index, tile)
        np.take(_SIGNS_OF_BYTE, bits, axis=0, out=out.numpy().reshape(-1, 8), mode="clip")
        return out


class Parameter:
    """fp32 x of one segment: the master copy, the parameter itself, or a copy to be stored back."""

    def __init__(self, tile: Tile, segment: Segment, params: Pointers, master: Tensor | None) -> None:
        self._home = segment_of(params, segment)
        if master is not None:
            self.value = cut(tile.of(master).view(-1), segment)
        elif self._home is None:
            self.value = torch.zeros(segment.stop - segment.start, dtype=torch.float32, device="cpu")
        else:
            self.value = self._home.float()

    def store(self) -> None:
        if self._home is not None and self._home.data_ptr() != self.value.data_ptr():
            self._home.copy_(self.value)


def gather(tile: Tile, pointers: Pointers, out: Tensor, factors: Callable[[Segment], tuple[float, ...]]) -> None:
    """The tile's elements times their segment's factors, one after the other; zero where there are none."""
    flat, filled = out.view(-1), 0
    for s in tile.span.segments():
        if s.offset > filled:
            flat[filled : s.offset] = 0
        part, source = cut(flat, s), segment_of(pointers, s)
        filled = s.offset + s.stop - s.start
        if source is None:
            part.zero_()
            continue
        for factor in factors(s):
            if factor == 1:
                continue
            if source.dtype != torch.float32:
                source = part.copy_(source)
            source = torch.mul(source, factor, out=part)
        if source is not part:
            part.copy_(source)
    flat[filled:] = 0


def segment_of(pointers: Pointers, s: Segment) -> Tensor | None:
    tensor = pointers.tensors[s.parameter]
    return None if tensor is None else tensor.view(-1)[s.start : s.stop]


def cut(flat: Tensor, s: Segment) -> Tensor:
    """A segment's part of a tile."""
    return flat[s.offset : s.offset + s.stop - s.start]


def clear_tails(tile: Tile, value: Tensor | npt.NDArray[np.bool_]) -> None:
    for row in tile.tails:
        value[row, int(tile.counts[row]) :] = 0


def clear_dead(value: Tensor, live: npt.NDArray[np.uint8] | None, room: Tensor) -> None:
    """0 where `live` has no bit. `room` is overwritten."""
    if live is not None:
        np.take(_MASKS_OF_BYTE, live.reshape(-1), axis=0, out=room.numpy().view(np.int32).reshape(-1, 8), mode="clip")
        value.view(torch.int32).bitwise_and_(room.view(torch.int32))


def count_live(live: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """How many bits each block has."""
    return _COUNT_OF_BYTE[live].sum(1, dtype=np.int64)


def sum_blocks(tile: Tile, flat: Tensor, out: Tensor) -> None:
    value = tile.of(flat)
    torch.sum(value, 1, out=out[tile.first : tile.first + tile.count])
    for row in tile.tails:
        out[tile.first + row] = value[row, : int(tile.counts[row])].sum()


def per_block(tile: Tile, groups: list[Hyper], name: str) -> float | Tensor:
    """A hyper-parameter for a tile: a number, or [count, 1] where its blocks differ."""
    values = [getattr(h, name) for h in groups]
    if len(set(values)) == 1:
        return values[0]
    return of_owner(
        tile, torch.tensor(values, dtype=torch.float32, device="cpu")[torch.from_numpy(tile.span.layout.group)]
    )


def of_owner(tile: Tile, values: Tensor) -> Tensor:
    """[count, 1]: one value a parameter, given to its blocks."""
    return values[torch.from_numpy(tile.span.layout.owner(tile.span.first, tile.count))][:, None]


def per_parameter(span: Span, blocks: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """One value a parameter from one value a block of the whole layout; 0 for a parameter without elements."""
    layout = span.layout
    ends = [*layout.first[1:].tolist(), layout.used_blocks]
    parts = [blocks[a:b] for a, b in zip(layout.first.tolist(), ends, strict=True)]
    return torch.stack([reduce(part) if len(part) else blocks.new_zeros(()) for part in parts])


def groups_of(hyper: Tensor) -> list[Hyper]:
    return [Hyper(*row) for row in hyper.tolist()]


def for_tiles(
    span: Span,
    shard_blocks: int,
    rooms: int,
    work: Callable[[Tile, Scratch], None],
    accepted: Messages | None = None,
) -> None:
    """Run `work` on every tile. A tile lies in one message; those that `accepted` flags are passed over."""
    size, counts = span.layout.block_size, span.counts()
    most = min(max(1, tuning.cpu_tile() // size), shard_blocks)
    partial = np.nonzero(counts < size)[0].tolist()

    def one(row: int, column: int) -> Tile:
        first = row * shard_blocks + column
        stop = min(first + most, (row + 1) * shard_blocks)
        tails = partial[bisect_left(partial, first) : bisect_left(partial, stop)]
        return Tile(
            span.blocks(first, stop - first),
            first,
            row,
            column,
            counts[first:stop],
            tuple(b - first for b in tails),
        )

    tiles = [
        one(row, column)
        for row in range(span.count // shard_blocks)
        if accepted is None or int(accepted.flags[row]) == 0
        for column in range(0, shard_blocks, most)
    ]

    scratch = Scratch(most, size, rooms)
    for tile in tiles:
        work(tile, scratch)
