"""Blocks: how parameters of any size share one flat index space.

Every parameter starts on a block boundary, so a block belongs to one parameter:

    parameter p covers blocks [first[p], first[p] + ceil(numel[p] / block_size))
    count(b) = clip(numel[p] - (b - first[p]) * block_size, 0, block_size)      valid elements of block b

The blocks are padded to a multiple of ranks * chunks. Chunk j is the j-th part of the space; rank k owns the
k-th shard of every chunk, `shard_blocks` blocks each. Offsets are int64 throughout: a parameter may hold more
than 2^31 elements.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onebit.kernels.data.checks import is_whole

BLOCK_SIZE = 2048
MOST_BLOCK_SIZE = 16384
MOST_ELEMENTS = 2**50
MOST_RANKS = 2**20
MOST_CHUNKS = 4096  # each is padded to a block a rank, and has messages of its own


@dataclass(frozen=True)
class BlockTable:
    """The layout as kernels read it: the parameter of each block, and one row a parameter."""

    owner: Tensor  # int32 [blocks]
    parameters: Tensor  # int64 [parameters, 3]: first block, numel, group


class Segment(NamedTuple):
    """The elements [start, stop) of a parameter, at `offset` of the span they were asked for."""

    parameter: int
    group: int
    start: int
    stop: int
    offset: int


class Layout:
    """The place of each parameter's elements in blocks, for `ranks` shards and `chunks` pipeline stages."""

    def __init__(
        self,
        numels: Sequence[int],
        *,
        groups: Sequence[int] | None = None,
        block_size: int = BLOCK_SIZE,
        ranks: int = 1,
        chunks: int = 1,
    ) -> None:
        check_block_size(block_size)
        if len(numels) == 0:
            raise ValueError("the layout got no parameters: pass at least one tensor to compress or optimize")
        if not all(is_whole(n) for n in (ranks, chunks, *numels)):
            raise TypeError(f"ranks={ranks!r:.80}, chunks={chunks!r:.80} and every numel must be whole numbers")
        if sum(numels) > MOST_ELEMENTS or ranks > MOST_RANKS:
            raise ValueError(f"{sum(numels)} elements on {ranks} ranks: no machine has memory for so many")
        if any(n < 0 for n in numels):
            raise ValueError(f"a parameter cannot hold {min(numels)} elements: numel must be 0 or more")
        if ranks < 1 or chunks < 1:
            raise ValueError(f"ranks and chunks must be at least 1, got ranks={ranks} and chunks={chunks}")
        if chunks > MOST_CHUNKS:
            raise ValueError(f"chunks={chunks}: a pipeline has at most {MOST_CHUNKS} stages, and a few are best")
        if groups is not None and len(groups) != len(numels):
            raise ValueError(f"got {len(groups)} group indices for {len(numels)} parameters: pass one for each")
        self.block_size, self.ranks, self.chunks = block_size, int(ranks), int(chunks)
        self.numel = np.asarray(numels, dtype=np.int64)
        self.group = np.asarray(groups if groups is not None else [0] * len(numels), dtype=np.int64)
        ends = np.cumsum(-(-self.numel // block_size))
        self.first = np.concatenate(([0], ends[:-1])).astype(np.int64)
        self.used_blocks = int(ends[-1])
        parts = ranks * chunks
        self.shard_blocks = max(1, -(-self.used_blocks // parts))
        self.blocks = self.shard_blocks * parts
        self._starts: list[int] = self.first.tolist()
        self._sizes: list[int] = self.numel.tolist()
        self._groups: list[int] = self.group.tolist()
        self._tables: dict[torch.device, BlockTable] = {}

    @property
    def parameters(self) -> int:
        return len(self.numel)

    @property
    def elements(self) -> int:
        """Length of a flat state buffer, padding included."""
        return self.blocks * self.block_size

    @cached_property
    def fingerprint(self) -> int:
        """A checksum of the parameters' sizes and how they are cut into blocks, to compare between ranks."""
        cut = np.asarray([self.block_size, self.ranks, self.chunks], dtype=np.int64)
        return zlib.crc32(self.numel.tobytes(), zlib.crc32(cut.tobytes()))

    def owner(self, first: int = 0, count: int | None = None) -> npt.NDArray[np.int64]:
        """The parameter of each block. Padding at the end belongs to the last one, with no valid element."""
        stop = self.blocks if count is None else first + count
        return np.searchsorted(self.first, np.arange(first, stop), side="right") - 1

    def counts(self, first: int = 0, count: int | None = None) -> npt.NDArray[np.int64]:
        """Valid elements of each block."""
        owner = self.owner(first, count)
        offset = (np.arange(first, first + len(owner)) - self.first[owner]) * self.block_size
        return np.clip(self.numel[owner] - offset, 0, self.block_size)

    def segments(self, first: int, count: int) -> Iterator[Segment]:
        """The parameters' elements that lie in blocks [first, first + count); offsets are from the first of these."""
        size, stop = self.block_size, first + count
        for p in range(bisect_right(self._starts, first) - 1, self.parameters):
            start, numel = self._starts[p], self._sizes[p]
            if start >= stop:
                return
            begin, end = max(0, (first - start) * size), min(numel, (stop - start) * size)
            if begin < end:
                yield Segment(p, self._groups[p], begin, end, (start - first) * size + begin)

    def table(self, device: torch.device) -> BlockTable:
        """The layout on a device, made on first use."""
        if device not in self._tables:
            parameters = torch.from_numpy(np.stack((self.first, self.numel, self.group), axis=1))
            owner = torch.from_numpy(self.owner().astype(np.int32))
            self._tables[device] = BlockTable(owner.to(device), parameters.to(device))
        return self._tables[device]

    def all(self) -> Span:
        return Span(self, 0, self.blocks)

    def chunk(self, index: int) -> Span:
        count = self.shard_blocks * self.ranks
        return Span(self, index * count, count)

    def shard(self, chunk: int, rank: int) -> Span:
        return self.part(chunk, rank, self.ranks)

    def part(self, chunk: int, index: int, of: int) -> Span:
        """The index-th of `of` equal parts of a chunk; `of` divides `ranks`."""
        count = self.shard_blocks * (self.ranks // of)
        return Span(self, (chunk * of + index) * count, count)

    def slices(self, chunk: int, of: int) -> list[Span]:
        """All `of` parts of a chunk."""
        return [self.part(chunk, index, of) for index in range(of)]

    def parts(self, index: int, of: int) -> list[Span]:
        """That part of every chunk."""
        return [self.part(chunk, index, of) for chunk in range(self.chunks)]


@dataclass(frozen=True)
class Span:
    """Consecutive blocks that one pass works on. State tensors given with a span hold just its elements."""

    layout: Layout
    first: int
    count: int

    @property
    def elements(self) -> int:
        return self.count * self.layout.block_size

    def of(self, flat: Tensor) -> Tensor:
        """This span's part of a flat state buffer."""
        return flat.narrow(0, self.first * self.layout.block_size, self.elements)

    def counts(self) -> npt.NDArray[np.int64]:
        return self.layout.counts(self.first, self.count)

    def blocks(self, first: int, count: int) -> Span:
        """Blocks [first, first + count) of this span."""
        return Span(self.layout, self.first + first, count)

    def of_parameter(self, index: int) -> Iterator[tuple[slice, int]]:
        """The elements of one parameter that lie in this span, if any do, and where in the span they start."""
        layout, size = self.layout, self.layout.block_size
        first, numel = int(layout.first[index]), int(layout.numel[index])
        start, stop = max(0, (self.first - first) * size), min(numel, (self.first + self.count - first) * size)
        if start < stop:
            yield slice(start, stop), (first - self.first) * size + start

    def segments(self) -> Iterator[Segment]:
        """The parameters' elements that lie in this span, in order; padding is in none of them."""
        return self.layout.segments(self.first, self.count)


def check_block_size(block_size: int) -> None:
    if not isinstance(block_size, int) or not 32 <= block_size <= MOST_BLOCK_SIZE or block_size % 32:
        raise ValueError(
            f"block_size must be a multiple of 32 (bits are packed in 32-bit words) and at most {MOST_BLOCK_SIZE} "
            f"(a GPU keeps a block in registers); got {block_size!r}. {BLOCK_SIZE} is usual"
        )
