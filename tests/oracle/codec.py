"""The layout of a flat space, one message in 1 bit or 2, and the average of N ranks' messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Arrays = list[np.ndarray]
Gradients = Sequence["np.ndarray | None"]


@dataclass(frozen=True)
class Layout:
    """Parameters start on block boundaries; chunks cut the space along its length, ranks cut each chunk."""

    numels: tuple[int, ...]
    block_size: int = 2048
    ranks: int = 1
    chunks: int = 1

    @property
    def used_blocks(self) -> int:
        return sum(-(-numel // self.block_size) for numel in self.numels)

    @property
    def blocks(self) -> int:
        """All blocks: the used ones, padded so that every shard has the same whole number, at least one."""
        shards = self.ranks * self.chunks
        return max(1, -(-self.used_blocks // shards)) * shards

    @property
    def size(self) -> int:
        return self.blocks * self.block_size

    @property
    def starts(self) -> list[int]:
        """The flat index of every parameter's first element."""
        starts, block = [], 0
        for numel in self.numels:
            starts.append(block * self.block_size)
            block += -(-numel // self.block_size)
        return starts

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

    def shard(self, chunk: int, rank: int) -> slice:
        """The elements of chunk `chunk` that rank `rank` owns."""
        length = self.size // (self.chunks * self.ranks)
        start = (chunk * self.ranks + rank) * length
        return slice(start, start + length)

    def shards(self) -> list[slice]:
        return [self.shard(chunk, rank) for chunk in range(self.chunks) for rank in range(self.ranks)]


ABOVE = 1.23  # times the mean size of a block: a larger element is large


@dataclass(frozen=True)
class Message:
    """The 1-bit form of c: scales has one entry a block, or a single one (scale="tensor").

    With 2 bits `large` says which elements are, and scales has two entries a block: the mean size of those that are
    not, and of those that are.
    """

    c: np.ndarray
    bits: np.ndarray
    scales: np.ndarray
    valid: np.ndarray
    large: np.ndarray | None = None

    @property
    def scale(self) -> np.ndarray:
        """What the sign of each element is multiplied by."""
        if self.large is None:
            return np.repeat(self.scales, self.c.size // max(self.scales.size, 1))
        small, large = np.repeat(self.scales, self.c.size // len(self.scales), axis=0).T
        return np.where(self.large, large, small)

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

    def unsure_blocks(self, tolerance: float | np.ndarray) -> np.ndarray:
        """Of every element, whether rounding of size `tolerance` can make one of its block large, or no longer large:
        both scales of that block are then others."""
        if self.large is None:
            return np.zeros(self.c.shape, bool)
        size, width = np.abs(self.c), self.c.size // len(self.scales)
        counts = np.maximum(self.valid.reshape(-1, width).sum(1), 1)
        least = ABOVE * np.repeat(np.where(self.valid, size, 0.0).reshape(-1, width).sum(1) / counts, width)
        close = self.valid & (np.abs(size - least) <= tolerance)
        return np.repeat(close.reshape(-1, width).any(1), width)


def sigma(c: np.ndarray) -> np.ndarray:
    """+1 where c >= 0 (so for -0.0), -1 elsewhere."""
    return np.where(c >= 0, 1.0, -1.0)


def magnitude(values: np.ndarray, norm: str) -> float:
    """The mean of |values| ("l1") or their root mean square ("l2"); 0 where there is none."""
    if values.size == 0:
        return 0.0
    if norm == "l1":
        return float(np.abs(values).mean())
    if norm == "l2":
        return float(np.sqrt((values**2).mean()))
    raise ValueError(norm)


def compress(
    c: np.ndarray,
    valid: np.ndarray | None = None,
    *,
    block_size: int,
    scale: str = "block",
    norm: str = "l1",
    counted: np.ndarray | None = None,
) -> Message:
    """Bits and scales of one message (whole blocks). `counted`: what enters a scale, if not all that is valid."""
    c = np.asarray(c, np.float64)
    valid = np.ones(c.shape, bool) if valid is None else valid
    counted = valid if counted is None else counted & valid
    if scale == "tensor":
        scales = [magnitude(c[counted], norm)]
    elif scale == "block":
        blocks = [slice(start, start + block_size) for start in range(0, c.size, block_size)]
        scales = [magnitude(c[block][counted[block]], norm) for block in blocks]
    else:
        raise ValueError(scale)
    return Message(c, sigma(c) > 0, np.array(scales), valid)


def compress_two_bits(
    c: np.ndarray, valid: np.ndarray | None = None, *, block_size: int, counted: np.ndarray | None = None
) -> Message:
    """A sign, and whether |c| is above ABOVE times the mean size of its block. What is not `counted` is in no mean."""
    c = np.asarray(c, np.float64)
    valid = np.ones(c.shape, bool) if valid is None else valid
    counted = valid if counted is None else counted & valid
    large, scales = np.zeros(c.shape, bool), []
    for start in range(0, c.size, block_size):
        block = slice(start, start + block_size)
        size, takes_part = np.abs(c[block]), counted[block]
        large[block] = takes_part & (size > ABOVE * magnitude(size[takes_part], "l1"))
        scales.append([magnitude(size[takes_part & ~large[block]], "l1"), magnitude(size[large[block]], "l1")])
    return Message(c, sigma(c) > 0, np.array(scales), counted, large)


def packed(bits: np.ndarray) -> np.ndarray:
    """The bytes of a message's bits."""
    return np.packbits(bits, bitorder="little")


@dataclass
class SimulatedAllReduce:
    """gather, average, scatter over N ranks, with every rank's worker and server residual between calls.

    `worker[i]` is rank i's residual over the whole space. `server` is the whole space too: each of its
    shards lives on the rank that owns it. `gathered[i]` and `scattered` list the last call's messages,
    one a shard, in the order of the flat space.

    reply_bits: of what a server sends.
    direct: so many ranks, whose messages of whole chunks go to all. The average is their mean; there is no server, the
    layout has one shard a chunk, and `scattered` stays empty.
    """

    layout: Layout
    scale: str = "block"
    norm: str = "l1"
    counted: np.ndarray | None = None
    direct: int = 0
    reply_bits: int = 1
    worker: Arrays = field(init=False)
    server: np.ndarray = field(init=False)
    gathered: list[list[Message]] = field(init=False, default_factory=list)
    scattered: list[Message] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.worker = [np.zeros(self.layout.size) for _ in range(self.direct or self.layout.ranks)]
        self.server = np.zeros(self.layout.size)

    def __call__(self, ys: Sequence[np.ndarray]) -> np.ndarray:
        """The average, as every rank receives it, of one flat array a rank."""
        valid, result = self.layout.valid, np.zeros(self.layout.size)
        self.gathered, self.scattered = [[] for _ in ys], []
        for shard in self.layout.shards():
            total = np.zeros(shard.stop - shard.start)
            for rank, y in enumerate(ys):
                message = self._compress(y[shard] + self.worker[rank][shard], valid[shard], shard)
                self.worker[rank][shard] = message.error
                self.gathered[rank].append(message)
                total += message.decoded
            if self.direct:
                result[shard] = total / len(ys)
                continue
            reply = self._compress(total / len(ys) + self.server[shard], valid[shard], shard, self.reply_bits)
            self.server[shard] = reply.error
            self.scattered.append(reply)
            result[shard] = reply.decoded
        return result

    def _compress(self, c: np.ndarray, valid: np.ndarray, shard: slice, bits: int = 1) -> Message:
        c, counted = np.where(valid, c, 0.0), None if self.counted is None else self.counted[shard]
        size = self.layout.block_size
        if bits == 2:
            return compress_two_bits(c, valid, block_size=size, counted=counted)
        return compress(c, valid, block_size=size, scale=self.scale, norm=self.norm, counted=counted)
