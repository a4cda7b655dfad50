"""The layout of a flat space, one message, and the average of N ranks' messages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

import numpy as np

Arrays = list[np.ndarray]
Gradients = Sequence["np.ndarray | None"]


def size_of_blocks(shape: tuple[int, ...], most: int) -> int:
    """A table, which has more than 16 rows a column, has blocks of a row, of several where that makes no 128 elements,
    or else of the largest equal part of these: in whole 32s, and `most` at most."""
    if len(shape) != 2 or shape[1] == 0 or shape[0] <= 16 * shape[1]:
        return most
    rows = next(rows for rows in range(1, 129) if rows * shape[1] >= 128) * shape[1]
    return max((part for part in range(32, most + 1, 32) if rows % part == 0), default=most)


@dataclass(frozen=True)
class Layout:
    """Parameters start with a block of their own, whose last is as long as 32s have to be; chunks cut the space along
    its length, ranks cut each chunk, between blocks."""

    numels: tuple[int, ...]
    block_size: int = 2048
    ranks: int = 1
    chunks: int = 1
    block_sizes: tuple[int, ...] = ()  # of each parameter, where they differ

    @cached_property
    def lengths(self) -> list[int]:
        """The length of every block. A shard has one at least: empty ones of 32 follow where there are too few."""
        sizes = self.block_sizes or (self.block_size,) * len(self.numels)
        of_parameters = zip(self.numels, sizes, strict=True)
        places = ((numel, start, size) for numel, size in of_parameters for start in range(0, numel, size))
        lengths = [32 * math.ceil(min(size, numel - start) / 32) for numel, start, size in places]
        return lengths + [32] * (self.ranks * self.chunks - len(lengths))

    @property
    def size(self) -> int:
        return sum(self.lengths)

    @property
    def starts(self) -> list[int]:
        """The flat index of every parameter's first element."""
        return np.cumsum([0, *(32 * math.ceil(numel / 32) for numel in self.numels)])[:-1].tolist()

    @property
    def owner(self) -> np.ndarray:
        """The parameter of every flat index, -1 in padding."""
        owner = np.full(self.size, -1)
        for p, (start, numel) in enumerate(zip(self.starts, self.numels, strict=True)):
            owner[start : start + numel] = p
        return owner

    @property
    def valid(self) -> np.ndarray:
        return self.owner >= 0

    def flatten(self, arrays: Gradients, padding: float = 0.0) -> np.ndarray:
        """One flat array of a list; None counts as zero."""
        flat = np.full(self.size, padding, dtype=np.float64)
        for start, numel, array in zip(self.starts, self.numels, arrays, strict=True):
            flat[start : start + numel] = 0.0 if array is None else np.asarray(array, np.float64).ravel()
        return flat

    def unflatten(self, flat: np.ndarray) -> Arrays:
        pairs = zip(self.starts, self.numels, strict=True)
        return [flat[start : start + numel].copy() for start, numel in pairs]

    @cached_property
    def blocks_of_shards(self) -> list[tuple[int, int]]:
        """The first block of each shard, and the one after its last: the k-th cut comes after the blocks whose middles
        lie before k parts of all bytes, a block having a byte for 8 elements and 4 for its scale."""
        parts, sizes = self.ranks * self.chunks, [length // 8 + 4 for length in self.lengths]
        cuts = [0]
        for k in range(1, parts):
            target, before, block = Fraction(k * sum(sizes), parts), Fraction(0), 0
            while block < len(sizes) and before + Fraction(sizes[block], 2) < target:
                before, block = before + sizes[block], block + 1
            cuts.append(min(max(block, cuts[-1] + 1), len(sizes) - (parts - k)))
        return list(itertools.pairwise([*cuts, len(sizes)]))

    def shard(self, chunk: int, rank: int) -> slice:
        """The elements of chunk `chunk` that rank `rank` owns."""
        first, stop = self.blocks_of_shards[chunk * self.ranks + rank]
        return slice(sum(self.lengths[:first]), sum(self.lengths[:stop]))

    def part(self, chunk: int, index: int, of: int) -> slice:
        """The index-th of `of` slices of a chunk, each of equally many shards."""
        each = self.ranks // of
        return slice(self.shard(chunk, index * each).start, self.shard(chunk, index * each + each - 1).stop)

    def lengths_in(self, part: slice) -> list[int]:
        """The lengths of the blocks of some elements."""
        ends = np.cumsum([0, *self.lengths]).tolist()
        return self.lengths[ends.index(part.start) : ends.index(part.stop)]

    def of_blocks(self, flat: np.ndarray) -> Arrays:
        return [flat[block] for block in blocks(self.lengths)]

    def shards(self) -> list[slice]:
        return [self.shard(chunk, rank) for chunk in range(self.chunks) for rank in range(self.ranks)]


MOST = 2.0  # times the root mean square of a block: an unbiased scale is not larger


@dataclass(frozen=True)
class Message:
    """The compressed form of c: `scales` has one entry a block, or a single one (scale="tensor"); `lengths` are of what
    each is for."""

    c: np.ndarray
    bits: np.ndarray
    scales: np.ndarray
    valid: np.ndarray
    lengths: Sequence[int]

    @property
    def scale(self) -> np.ndarray:
        """What the sign of each element is multiplied by."""
        return np.repeat(self.scales, self.lengths)

    @property
    def decoded(self) -> np.ndarray:
        """scale * sigma(c), and 0 where nothing is valid."""
        return np.where(self.valid, np.where(self.bits, self.scale, -self.scale), 0.0)

    @property
    def error(self) -> np.ndarray:
        return np.where(self.valid, self.c - self.decoded, 0.0)

    def sure(self, tolerance: float | np.ndarray) -> np.ndarray:
        """Valid elements whose sign rounding of size `tolerance` cannot turn."""
        return self.valid & (np.abs(self.c) > tolerance)


def blocks(lengths: Sequence[int]) -> list[slice]:
    return [slice(a, b) for a, b in itertools.pairwise(np.cumsum([0, *lengths]).tolist())]


def sigma(c: np.ndarray) -> np.ndarray:
    """+1 where c >= 0 (so for -0.0), -1 elsewhere."""
    return np.where(c >= 0, 1.0, -1.0)


def magnitude(values: np.ndarray, norm: str) -> float:
    """The mean of |values| ("l1"), their root mean square ("l2"), or the sum of their squares over that of their sizes
    ("unbiased"), which is at most MOST times the root mean square; 0 where there is none."""
    if values.size == 0:
        return 0.0
    if norm == "l1":
        return float(np.abs(values).mean())
    rms = float(np.sqrt((values**2).mean()))
    if norm == "l2":
        return rms
    return min(float((values**2).sum() / np.abs(values).sum()), MOST * rms) if values.any() else 0.0


def compress(
    c: np.ndarray, valid: np.ndarray, *, lengths: Sequence[int], scale: str = "block", norm: str = "l1"
) -> Message:
    """One message, of blocks of these lengths; what is not valid counts for nothing."""
    c = np.where(valid, c, 0.0)
    lengths = [c.size] if scale == "tensor" else lengths
    found = [magnitude(c[block][valid[block]], norm) for block in blocks(lengths)]
    return Message(c, sigma(c) > 0, np.array(found), valid, lengths)


GROUP = 256  # elements of a block that share a scale, where an element has several bits
LEAST = 2.0**-100  # of the largest element of a group: below it all are 0


@dataclass(frozen=True)
class Codes(Message):
    """The compressed form of c with several bits an element: `bits` are whole numbers, `lengths` those of groups."""

    @property
    def decoded(self) -> np.ndarray:
        return self.bits * self.scale

    @property
    def error(self) -> np.ndarray:
        """Return what is left out, as it is kept, in 16 bits."""
        return rounded_to_bf16(self.c - self.decoded)

    def sure(self, tolerance: float | np.ndarray) -> np.ndarray:
        """Elements whose code rounding of size `tolerance` cannot change."""
        to_a_tie = 0.5 - np.abs(self.c / np.where(self.scale > 0, self.scale, 1.0) - self.bits)
        return to_a_tie * self.scale > tolerance


def groups(lengths: Sequence[int]) -> list[int]:
    """The lengths of the groups of blocks."""
    return [min(GROUP, length - start) for length in lengths for start in range(0, length, GROUP)]


def quantize(c: np.ndarray, valid: np.ndarray, *, lengths: Sequence[int], bits: int) -> Codes:
    """One message of blocks of these lengths: q = round(c / scale), scale = max |c| / (2^(bits - 1) - 1)."""
    c, most = np.where(valid, c, 0.0), 2 ** (bits - 1) - 1
    sizes = [np.abs(c[group]).max() for group in blocks(groups(lengths))]
    scales = np.array([size / most if size >= LEAST else 0.0 for size in sizes])
    each = np.repeat(scales, groups(lengths))
    codes = np.where(each > 0, np.rint(c / np.where(each > 0, each, 1.0)), 0.0)
    return Codes(c, codes, scales, valid, groups(lengths))


def rounded_to_bf16(values: np.ndarray) -> np.ndarray:
    """Round to 8 places, ties to even."""
    fraction, exponent = np.frexp(values)
    return np.ldexp(np.rint(fraction * 2**8) / 2**8, exponent)


def reformed(
    workers: Sequence[np.ndarray], server: np.ndarray, owner: np.ndarray, senders: tuple[int, int],
    kept: Sequence[Sequence[int]],
) -> Arrays:  # fmt: skip
    """What every rank of another group owes, one flat array each: e N' / N + N' E, where senders are N and N', of each
    rank of the group before in kept, which has served where it is the owner. Servers owe nothing any more."""
    before, now = senders
    owed = [now / before * e + now * np.where(owner == k, server, 0.0) for k, e in enumerate(workers)]
    return [sum((owed[k] for k in places), np.zeros(server.shape)) for places in kept]


@dataclass
class SimulatedAllReduce:
    """gather, average, scatter over N ranks, with every rank's worker and server residual between calls.

    `worker[i]` is rank i's residual over the whole space, as `server` is, each shard of which lives on the rank that
    owns it. `gathered[i]` and `scattered` list the last call's messages, one a shard, in the order of the flat space.
    `counted`: what takes part, if not all. `direct`: so many ranks, whose messages of whole chunks go to all; then a
    layout has one shard a chunk, the average is their mean, and there is no server. `bits`: of an element.
    """

    layout: Layout
    scale: str = "block"
    norm: str = "l1"
    counted: np.ndarray | None = None
    direct: int = 0
    bits: int = 1
    worker: Arrays = field(init=False)
    server: np.ndarray = field(init=False)
    gathered: list[list[Message]] = field(init=False, default_factory=list)
    scattered: list[Message] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.worker = [np.zeros(self.layout.size) for _ in range(self.direct or self.layout.ranks)]
        self.server = np.zeros(self.layout.size)

    def __call__(self, ys: Sequence[np.ndarray]) -> np.ndarray:
        """The average, as every rank receives it, of one flat array a rank."""
        result = np.zeros(self.layout.size)
        valid = self.layout.valid if self.counted is None else self.layout.valid & self.counted
        self.gathered, self.scattered = [[] for _ in ys], []
        of_means = "l2" if self.norm == "unbiased" else self.norm
        for shard in self.layout.shards():
            lengths = self.layout.lengths_in(shard)
            total = np.zeros(shard.stop - shard.start)
            for rank, y in enumerate(ys):
                message = self._message(y[shard] + self.worker[rank][shard], valid[shard], lengths, self.norm)
                self.worker[rank][shard] = message.error
                self.gathered[rank].append(message)
                total += message.decoded
            result[shard] = total / len(ys)
            if not self.direct:
                c = result[shard] + self.server[shard]
                reply = self._message(c, valid[shard], lengths, of_means)
                self.server[shard] = reply.error
                self.scattered.append(reply)
                result[shard] = reply.decoded
        return result

    def _message(self, c: np.ndarray, valid: np.ndarray, lengths: Sequence[int], norm: str) -> Message:
        if self.bits > 1:
            return quantize(c, valid, lengths=lengths, bits=self.bits)
        return compress(c, valid, lengths=lengths, scale=self.scale, norm=norm)
