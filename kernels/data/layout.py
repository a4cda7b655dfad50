"""Blocks: how parameters of any size share one flat index space.

A parameter has ceil(numel / block_size) blocks of its own, one after the other. The last is as long as it needs to be,
in whole words of 32 elements, so that a parameter of 10 elements takes 32 and not block_size. Some parameters have
shorter blocks (`block_size_of`):

    starts[b], starts[b + 1]     where block b lies in the flat space
    count(b) = clip(numel[p] - (starts[b] - offset[p]), 0, length(b))     its valid elements, p being its parameter

The space is cut between blocks into ranks * chunks shards, whose messages are as equally long as blocks allow: shard s
is blocks [shards[s], shards[s + 1]). Rank k owns the k-th shard of every chunk. Each shard has a block at least: where
there are too few, empty ones follow the last. Where parameters and their blocks lie does not depend on the cut.

Offsets are int64 throughout: a parameter may hold more than 2^31 elements.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onebit.kernels.data.checks import is_whole

BLOCK_SIZE = 2048
MOST_BLOCK_SIZE = 8192
WORD = 32  # elements: what the length of a block is a multiple of
TABLE = 16  # a matrix of more than so many times as many rows as columns is a table
LEAST_OF_TABLE = 128  # elements of a table's block: a scale is 32 bits
MOST_ELEMENTS = 2**35  # words are counted in int32
MOST_BLOCKS = 2**28  # of which each has a row of 32 bytes
MOST_RANKS = 2**20
MOST_CHUNKS = 4096  # each has a block a rank at least, and messages of its own
SCALE_BYTES = 4


class Block(NamedTuple):
    """A row of the table of blocks that kernels read, int32."""

    owner: int  # the parameter
    start: int  # in the flat space, in words
    words: int
    shard: int
    block_in_shard: int
    word: int  # in the shard
    of_shard: int  # how many blocks the shard has
    spare: int  # a row is 32 bytes


@dataclass(frozen=True)
class BlockTable:
    """The layout as kernels read it: one row a block, and one a parameter."""

    blocks: Tensor  # int32 [blocks, 8]: see Block
    parameters: Tensor  # int64 [parameters, 3]: first element, numel, group
    first_blocks: Tensor  # int64 [parameters + 1]: the first block of each, and the end of the last one's

    @property
    def owner(self) -> Tensor:
        """int64 [blocks]: the parameter of each block."""
        return self.blocks[:, Block._fields.index("owner")].long()


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
        block_sizes: Sequence[int] | None = None,
        ranks: int = 1,
        chunks: int = 1,
    ) -> None:
        """block_sizes: of each parameter, where some have shorter blocks than block_size."""
        check_block_size(block_size)
        if len(numels) == 0:
            raise ValueError("the layout got no parameters: pass at least one tensor to compress or optimize")
        if not all(map(is_whole, (ranks, chunks, *numels))):
            raise TypeError(f"ranks={ranks!r:.80}, chunks={chunks!r:.80} and every numel must be whole numbers")
        if sum(numels) > MOST_ELEMENTS or ranks > MOST_RANKS or max(sum(numels) // block_size, ranks) > MOST_BLOCKS:
            raise ValueError(
                f"{sum(numels)} elements in blocks of {block_size} on {ranks} ranks: no machine has memory for so many"
            )
        if min(numels) < 0:
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
        self.block_sizes = np.asarray(block_sizes or [block_size] * len(numels), dtype=np.int64)
        self._counts = -(-self.numel // self.block_sizes)  # of each parameter, its blocks
        ends = np.cumsum(self._counts)
        self.first = np.concatenate(([0], ends[:-1])).astype(np.int64)
        self.used_blocks = int(ends[-1])
        self.blocks, lengths = self._lengths()
        self.starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        self.offset = self.starts[self.first]
        self.shards = self._shards()
        self.shard_blocks = int(np.diff(self.shards).max())
        self._offsets: list[int] = self.offset.tolist()
        self._sizes: list[int] = self.numel.tolist()
        self._groups: list[int] = self.group.tolist()
        self._tables: dict[torch.device, BlockTable] = {}
        self.arguments: dict[tuple[int, int, torch.device], dict[str, Any]] = {}  # of spans, as far as made

    def _lengths(self) -> tuple[int, npt.NDArray[np.int64]]:
        """How many blocks there are, and of each how many elements it has room for."""
        blocks = max(self.used_blocks, self.ranks * self.chunks)
        lengths = np.full(blocks, WORD, dtype=np.int64)
        lengths[: self.used_blocks] = np.repeat(self.block_sizes, self._counts)
        has_any = self.numel > 0
        last = (self.first + self._counts - 1)[has_any]
        rest = (self.numel[has_any] - 1) % self.block_sizes[has_any] + 1
        lengths[last] = -(-rest // WORD) * WORD
        return blocks, lengths

    def _shards(self) -> npt.NDArray[np.int64]:
        """The first block of each shard, and the end of the last: the cuts that are nearest to equal bytes."""
        parts = self.ranks * self.chunks
        ends = self.starts // 8 + SCALE_BYTES * np.arange(self.blocks + 1)
        twice_middle, twice_all = ends[:-1] + ends[1:], 2 * int(ends[-1])
        k, (whole, rest) = np.arange(parts + 1), divmod(twice_all, parts)
        targets = whole * k - (-rest * k) // parts  # k parts of all, rounded up, without a product that overflows
        cuts = np.concatenate(([0], np.searchsorted(twice_middle, targets[1:-1]), [self.blocks]))
        return np.minimum(np.maximum.accumulate(cuts - k) + k, self.blocks - parts + k).astype(np.int64)

    @property
    def parameters(self) -> int:
        return len(self.numel)

    @property
    def elements(self) -> int:
        """Length of a flat state buffer, padding included."""
        return int(self.starts[-1])

    @cached_property
    def fingerprint(self) -> int:
        """A checksum of the parameters' sizes and how they are cut into blocks, to compare between ranks."""
        cut = np.asarray([self.block_size, self.ranks, self.chunks], dtype=np.int64)
        return zlib.crc32(self.sizes, zlib.crc32(cut.tobytes()))

    @property
    def sizes(self) -> bytes:
        """The parameters' sizes, and those of their blocks."""
        return self.numel.tobytes() + self.block_sizes.tobytes()

    def owner(self, first: int = 0, count: int | None = None) -> npt.NDArray[np.int64]:
        """The parameter of each block. Padding at the end belongs to the last one, with no valid element."""
        stop = self.blocks if count is None else first + count
        return np.searchsorted(self.first, np.arange(first, stop), side="right") - 1

    def lengths(self, first: int = 0, count: int | None = None) -> npt.NDArray[np.int64]:
        """Elements that each block has room for."""
        stop = self.blocks if count is None else first + count
        return np.diff(self.starts[first : stop + 1])

    def counts(self, first: int = 0, count: int | None = None) -> npt.NDArray[np.int64]:
        """Valid elements of each block."""
        owner, lengths = self.owner(first, count), self.lengths(first, count)
        offset = self.starts[first : first + len(owner)] - self.offset[owner]
        return np.clip(self.numel[owner] - offset, 0, lengths)

    def segments(self, first: int, count: int) -> Iterator[Segment]:
        """The parameters' elements that lie in blocks [first, first + count); offsets are from the first of these."""
        start, stop = int(self.starts[first]), int(self.starts[first + count])
        for p in range(max(0, bisect_right(self._offsets, start) - 1), self.parameters):
            offset, numel = self._offsets[p], self._sizes[p]
            if offset >= stop:
                return
            begin, end = max(0, start - offset), min(numel, stop - offset)
            if begin < end:
                yield Segment(p, self._groups[p], begin, end, offset - start + begin)

    def blocks_of(self, parameter: int) -> slice:
        """The blocks of a parameter."""
        last = parameter + 1 == self.parameters
        return slice(int(self.first[parameter]), self.used_blocks if last else int(self.first[parameter + 1]))

    def table(self, device: torch.device) -> BlockTable:
        """The layout on a device, made on first use."""
        if device not in self._tables:
            parameters = torch.from_numpy(np.stack((self.offset, self.numel, self.group), axis=1))
            shard = self.shard_of_blocks
            first, blocks = self.shards[shard], np.arange(self.blocks)
            columns = {
                "owner": self.owner(),
                "start": self.starts[:-1] // WORD,
                "words": self.lengths() // WORD,
                "shard": shard,
                "block_in_shard": blocks - first,
                "word": (self.starts[:-1] - self.starts[first]) // WORD,
                "of_shard": np.diff(self.shards)[shard],
                "spare": np.zeros_like(blocks),
            }
            table = torch.from_numpy(np.stack([columns[name] for name in Block._fields], axis=1).astype(np.int32))
            first_blocks = torch.from_numpy(np.append(self.first, self.used_blocks))
            self._tables[device] = BlockTable(table.to(device), parameters.to(device), first_blocks.to(device))
        return self._tables[device]

    def make_arguments(self, first: int, count: int, device: torch.device) -> dict[str, Any]:
        """What kernels read of the blocks of a span, by name."""
        table = self.table(device)
        made = self.arguments[first, count, device] = {
            "block_table": table.blocks,
            "parameter_table": table.parameters,
            "first_blocks": table.first_blocks,
            "parameters": self.parameters,
            "first_block": first,
            "first_word": int(self.starts[first]) // WORD,
            "first_shard": int(self.shard_of_blocks[first]),
            "blocks": count,
            "block_size": self.block_size,
            "tile": 1 << (self.block_size - 1).bit_length(),  # the next power of 2
        }
        return made

    @cached_property
    def shard_of_blocks(self) -> npt.NDArray[np.int64]:
        return np.searchsorted(self.shards, np.arange(self.blocks), side="right") - 1

    def all(self) -> Span:
        return self._whole

    @cached_property
    def _whole(self) -> Span:
        return Span(self, 0, self.blocks)

    def chunk(self, index: int) -> Span:
        return self.of_shards(index * self.ranks, self.ranks)

    def shard(self, chunk: int, rank: int) -> Span:
        return self.part(chunk, rank, self.ranks)

    def part(self, chunk: int, index: int, of: int) -> Span:
        """The index-th of `of` parts of a chunk, with equally many shards; `of` divides `ranks`."""
        count = self.ranks // of
        return self.of_shards((chunk * of + index) * count, count)

    def of_shards(self, first: int, count: int) -> Span:
        """Shards [first, first + count)."""
        start = int(self.shards[first])
        return Span(self, start, int(self.shards[first + count]) - start)

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

    @cached_property
    def start(self) -> int:
        """Its first element in the flat space."""
        return int(self.layout.starts[self.first])

    @cached_property
    def elements(self) -> int:
        return int(self.layout.starts[self.first + self.count]) - self.start

    @property
    def first_shard(self) -> int:
        return int(self.layout.shard_of_blocks[self.first])

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """What kernels read of these blocks, by name."""
        found = self.layout.arguments.get((self.first, self.count, device))
        return self.layout.make_arguments(self.first, self.count, device) if found is None else found

    def shards(self) -> list[Span]:
        """Those that it consists of."""
        last = int(self.layout.shard_of_blocks[self.first + self.count - 1])
        return [self.layout.of_shards(s, 1) for s in range(self.first_shard, last + 1)]

    def of(self, flat: Tensor) -> Tensor:
        """This span's part of a flat state buffer."""
        return flat.narrow(0, self.start, self.elements)

    def of_bits(self, packed: Tensor) -> Tensor:
        """This span's part of a buffer with one bit an element."""
        return packed.narrow(0, self.start // 8, self.elements // 8)

    def counts(self) -> npt.NDArray[np.int64]:
        return self.layout.counts(self.first, self.count)

    def lengths(self) -> npt.NDArray[np.int64]:
        return self.layout.lengths(self.first, self.count)

    def blocks(self, first: int, count: int) -> Span:
        """Blocks [first, first + count) of this span."""
        return Span(self.layout, self.first + first, count)

    def of_parameter(self, index: int) -> Iterator[tuple[slice, int]]:
        """The elements of one parameter that lie in this span, if any do, and where in the span they start."""
        first, numel = int(self.layout.offset[index]), int(self.layout.numel[index])
        begin, end = max(0, self.start - first), min(numel, self.start + self.elements - first)
        if begin < end:
            yield slice(begin, end), first - self.start + begin

    def segments(self) -> Iterator[Segment]:
        """The parameters' elements that lie in this span, in order; padding is in none of them."""
        return self.layout.segments(self.first, self.count)


def block_size_of(shape: Sequence[int], most: int) -> int:
    """Return how long a parameter's blocks are. Those of a table are rows, several where rows are short, or equal parts
    of a row. A row of an embedding has gradients as large as its token is frequent: with one scale for both, rare
    tokens would move much too far."""
    if len(shape) != 2 or not 0 < TABLE * shape[1] < shape[0]:
        return most
    length = shape[1] * -(-LEAST_OF_TABLE // shape[1])
    parts = range(-(-length // most), length // WORD + 1)
    return next((length // n for n in parts if length % (n * WORD) == 0), most)


def check_block_size(block_size: int) -> None:
    if not isinstance(block_size, int) or not WORD <= block_size <= MOST_BLOCK_SIZE or block_size % WORD:
        raise ValueError(
            f"block_size must be a multiple of 32 (bits are packed in 32-bit words) and at most {MOST_BLOCK_SIZE} "
            f"(a GPU keeps a block in registers); got {block_size!r}. {BLOCK_SIZE} is usual"
        )
