"""Running a CPU pass tile by tile: cutting a span, the parameters' parts of a tile, scratch that stays in the cache.

A tile costs some twenty calls of a microsecond or two beside its sweeps, so what is the same for all tiles of a pass
is made before the first, and what is the same in every step is made once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onebit.kernels.data.hyper import Hyper
from onebit.kernels.data.layout import Layout, Segment, Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import Messages
from onebit.kernels.tuning import tuner

_BITS_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_SIGNS_OF_BYTE = np.where(_BITS_OF_BYTE == 1, np.float32(1), np.float32(-1))  # [256, 8]
_FLOATS_OF_BYTE = _BITS_OF_BYTE.astype(np.float32)  # [256, 8]
_MASKS_OF_BYTE = -_BITS_OF_BYTE.astype(np.int32)  # [256, 8]: every bit of a word, or none
_COUNT_OF_BYTE = _BITS_OF_BYTE.sum(1)


@dataclass(slots=True)
class Tile:
    """Blocks [first, stop) of a span, which lie in message `row` from its block `column` on."""

    block_size: int
    first: int
    stop: int
    count: int
    row: int
    column: int
    counts: npt.NDArray[np.int64]  # valid elements of each block
    tails: tuple[int, ...]  # the blocks that are not full
    segments: list[Segment]

    def of(self, rows: Tensor) -> Tensor:
        """This tile's rows of what has one row a block of the whole span."""
        return rows[self.first : self.stop]

    def cut(self, flat: Tensor, s: Segment) -> Tensor:
        """A segment's part of a state tensor of the whole span."""
        return flat.narrow(0, self.first * self.block_size + s.offset, s.stop - s.start)

    def live(self, mask: Tensor | None) -> npt.NDArray[np.uint8] | None:
        """[count, block_size / 8] of a packed mask of the whole span, its padding cleared."""
        if mask is None:
            return None
        size = self.block_size
        live = self.of(mask.view(-1, size // 8)).numpy().copy()
        for row in self.tails:
            live[row] &= np.packbits(np.arange(size) < self.counts[row], bitorder="little")
        return live


class Scratch:
    """Buffers of a tile each, reused from tile to tile."""

    def __init__(self, blocks: int, block_size: int, buffers: int) -> None:
        self._blocks = blocks
        self._buffers = [torch.empty(blocks, block_size, dtype=torch.float32, device="cpu") for _ in range(buffers)]
        self._words = [buffer.numpy().reshape(-1, 8) for buffer in self._buffers]
        self._truth = np.empty((blocks, block_size), dtype=np.bool_)

    def buffer(self, index: int, tile: Tile) -> Tensor:
        """[count, block_size]"""
        buffer = self._buffers[index]
        return buffer if tile.count == self._blocks else buffer[: tile.count]

    def truth(self, tile: Tile) -> npt.NDArray[np.bool_]:
        """bool [count, block_size]"""
        return self._truth[: tile.count]

    def signs(self, index: int, tile: Tile, bits: npt.NDArray[np.uint8]) -> Tensor:
        """+1 and -1 for a tile of packed bits."""
        _SIGNS_OF_BYTE.take(bits, axis=0, out=self._words[index][: len(bits)], mode="clip")
        return self.buffer(index, tile)

    def floats(self, index: int, tile: Tile, bits: npt.NDArray[np.uint8]) -> Tensor:
        """1 and 0 for a tile of packed bits."""
        _FLOATS_OF_BYTE.take(bits, axis=0, out=self._words[index][: len(bits)], mode="clip")
        return self.buffer(index, tile)


class Parameter:
    """fp32 x of one segment: the master copy, the parameter itself, or a copy to be stored back."""

    def __init__(self, tile: Tile, segment: Segment, params: Pointers, master: Tensor | None) -> None:
        self._home = segment_of(params, segment)
        if master is not None:
            self.value = tile.cut(master, segment)
        elif self._home is None:
            self.value = torch.zeros(segment.stop - segment.start, dtype=torch.float32, device="cpu")
        else:
            self.value = self._home.float()

    def store(self) -> None:
        if self._home is not None and self._home.data_ptr() != self.value.data_ptr():
            self._home.copy_(self.value)


def scaled(pointers: Pointers, s: Segment, buffer: Tensor, *factors: float) -> Tensor | None:
    """A segment times its factors, one after the other, in fp32: the tensor itself where that changes nothing, else
    the segment's part of `buffer`. None where there is no tensor.
    """
    source = segment_of(pointers, s)
    if source is None:
        return None
    if source.dtype != torch.float32:
        source = cut(buffer, s).copy_(source)
    for factor in factors:
        if factor != 1:
            source = torch.mul(source, factor, out=cut(buffer, s))
    return source


def segment_of(pointers: Pointers, s: Segment) -> Tensor | None:
    tensor = pointers.tensors[s.parameter]
    return None if tensor is None else tensor.view(-1)[s.start : s.stop]


def cut(buffer: Tensor, s: Segment) -> Tensor:
    """A segment's part of a tile."""
    flat, numel = buffer.view(-1), s.stop - s.start
    return flat if numel == buffer.numel() else flat[s.offset : s.offset + numel]


def pieces(tile: Tile, s: Segment, value: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """A segment's elements as blocks, with their rows in the tile: [full blocks, block_size], then [1, rest]."""
    size = tile.block_size
    first, full = s.offset // size, len(value) // size
    if full:
        yield slice(first, first + full), value[: full * size].view(full, size)
    if len(value) > full * size:
        yield slice(first + full, first + full + 1), value[full * size :].view(1, -1)


def sum_squares(tile: Tile, s: Segment, value: Tensor, out: Tensor) -> None:
    """out[b] = sum of the squares of a segment's block b; `out` has one element a block of the span."""
    for rows, part in pieces(tile, s, value):
        tile.of(out)[rows] = torch.linalg.vector_norm(part, 2, 1).square_()


def clear_tails(tile: Tile, value: Tensor | npt.NDArray[np.bool_]) -> None:
    """Set padding to 0."""
    for row in tile.tails:
        value[row, int(tile.counts[row]) :] = 0


def clear_masked(value: Tensor, live: npt.NDArray[np.uint8] | None, buffer: Tensor) -> None:
    """Set `value` to 0 where `live` has no bit. `buffer` is overwritten."""
    if live is not None:
        np.take(_MASKS_OF_BYTE, live.reshape(-1), axis=0, out=buffer.numpy().view(np.int32).reshape(-1, 8), mode="clip")
        value.view(torch.int32).bitwise_and_(buffer.view(torch.int32))


def count_live(live: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """How many bits each block has."""
    return _COUNT_OF_BYTE[live].sum(1, dtype=np.int64)


def sum_blocks(tile: Tile, rows: Tensor, out: Tensor) -> None:
    value = tile.of(rows)
    torch.sum(value, 1, out=tile.of(out))
    for row in tile.tails:
        out[tile.first + row] = value[row, : int(tile.counts[row])].sum()


def per_block(span: Span, groups: list[Hyper], name: str) -> float | Tensor:
    """A hyper-parameter for a span: a number, or [blocks, 1] where its groups differ."""
    values = [getattr(h, name) for h in groups]
    if len(set(values)) == 1:
        return values[0]
    return of_owner(span, torch.tensor(values, dtype=torch.float32, device="cpu")[torch.from_numpy(span.layout.group)])


def of_owner(span: Span, values: Tensor) -> Tensor:
    """[blocks, 1]: one value a parameter, given to its blocks."""
    return values[torch.from_numpy(span.layout.owner(span.first, span.count))][:, None]


def of_tile(tile: Tile, value: float | Tensor) -> float | Tensor:
    """A tile's part of a result of `per_block`."""
    return tile.of(value) if isinstance(value, Tensor) else value


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
    buffers: int,
    work: Callable[[Tile, Scratch], None],
    accepted: Messages | None = None,
) -> None:
    """Run `work` on every tile. Each lies in one message; tiles of messages flagged in `accepted` are skipped."""
    most = min(max(1, tuner.cpu_tile() // span.layout.block_size), shard_blocks)
    skipped = [False] * (span.count // shard_blocks) if accepted is None else (accepted.flags != 0).tolist()
    scratch = Scratch(most, span.layout.block_size, buffers)
    for tile in _tiles(span, shard_blocks, most):
        if not skipped[tile.row]:
            work(tile, scratch)


_cut: WeakKeyDictionary[Layout, dict[tuple[int, ...], list[Tile]]] = WeakKeyDictionary()


def _tiles(span: Span, shard_blocks: int, most: int) -> list[Tile]:
    """A span in tiles of at most `most` blocks; cut once, since every step goes over the same spans."""
    known = _cut.setdefault(span.layout, {})
    key = (span.first, span.count, shard_blocks, most)
    if key not in known:
        counts = span.counts()
        partial = np.nonzero(counts < span.layout.block_size)[0].tolist()
        firsts = (f for row in range(0, span.count, shard_blocks) for f in range(row, row + shard_blocks, most))
        known[key] = [_tile(span, first, shard_blocks, most, counts, partial) for first in firsts]
    return known[key]


def _tile(
    span: Span, first: int, shard_blocks: int, most: int, counts: npt.NDArray[np.int64], partial: list[int]
) -> Tile:
    row, column = divmod(first, shard_blocks)
    count = min(most, shard_blocks - column)
    stop = first + count
    tails = tuple(b - first for b in partial[bisect_left(partial, first) : bisect_left(partial, stop)])
    segments = list(span.blocks(first, count).segments())
    return Tile(span.layout.block_size, first, stop, count, row, column, counts[first:stop], tails, segments)
