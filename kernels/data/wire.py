"""The bytes of a message. Every byte offset is computed in this file.

A message carries one shard of one chunk from one rank to another:

    header   4 x uint32    magic, flags, fingerprint of the format, blocks
    scales   fp32          one a block (scale="block"), or one (scale="tensor"); padded to 16 bytes
    bits     uint8         block_size / 8 bytes a block, as numpy.packbits(..., bitorder="little") lays them out

An element decodes to +scale where its bit is 1 and to -scale elsewhere, or to the mean of that over the messages that
its block is in (`Messages.copies`): one where a rank has averaged the shard, one a rank where every rank's message goes
to all. Bits past a block's valid count are 0.

With 2 bits an element a block has two scales, the mean sizes of its small and of its large elements, and twice as many
bytes of bits: the signs of all, then for all whether they are large: more than ABOVE times the block's mean size.
Words are little-endian. With blocks of 2048 a message costs 1 + 1/64 bit an element and at most 28 bytes, twice that
with 2 bits.

The length of a message follows from its format alone, and no byte of it is used as an address or a count: no content
can make a reader access memory elsewhere. In host memory headers are checked (2 us for 8 messages), which finds what is
no message of this exchange; on a GPU the host would have to wait for the device, so they are not. Scales and bits are
not checked anywhere: that they arrive as they were sent is left to the transport (TCP, InfiniBand and NVLink carry
checksums).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from onebit.kernels.data.checks import is_one_of
from onebit.kernels.data.layout import BLOCK_SIZE, Layout

Scale = Literal["block", "tensor"]
Norm = Literal["l1", "l2"]
Bits = Literal[1, 2]

MAGIC = 0x02424231  # "1BB", or "2BB" with 2 bits, and the version of this layout
ABOVE = 1.23  # times the mean size of a block: a larger element is one of the large ones
NONFINITE = 1  # a flag: the sender found inf or NaN; no rank may use this step's messages
_ALIGN = 16
_HEADER_WORDS = 4
FLAGS_WORD = 1
WORTH_SMALLER_BLOCKS = 2**16  # bytes


class MessageError(RuntimeError):
    """The bytes received are not a message of this exchange."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def bytes_of_blocks(numels: Sequence[int], block_size: int) -> int:
    """Bits and scales of all blocks of these parameters, one bit an element and a scale a block."""
    one = Format(block_size, 1)
    return sum(-(-n // block_size) for n in numels) * (one.block_bytes + 4 * one.scales)


def fitting_block_size(numels: Sequence[int]) -> int:
    """BLOCK_SIZE, or where parameters are so small that their padding is worth it, what makes the fewest bytes."""
    sizes = [size for k in range(5, 12) if (size := 2**k) <= BLOCK_SIZE]
    best = min(reversed(sizes), key=lambda size: bytes_of_blocks(numels, size))
    usual, least = bytes_of_blocks(numels, BLOCK_SIZE), bytes_of_blocks(numels, best)
    return best if usual > least + max(WORTH_SMALLER_BLOCKS, least // 4) else BLOCK_SIZE


@dataclass(frozen=True)
class Format:
    """The shape of a message, equal on all ranks of a group."""

    block_size: int
    shard_blocks: int
    scale: Scale = "block"
    norm: Norm = "l1"
    layout_fingerprint: int = 0
    bits: Bits = 1  # an element

    def __post_init__(self) -> None:
        if not is_one_of(self.scale, get_args(Scale)):
            raise ValueError(f"scale must be one of {get_args(Scale)}, got {self.scale!r:.80}")
        if not is_one_of(self.norm, get_args(Norm)):
            raise ValueError(f"norm must be one of {get_args(Norm)}, got {self.norm!r:.80}")

    @classmethod
    def of(cls, layout: Layout, scale: Scale = "block", norm: Norm = "l1") -> Format:
        return cls(layout.block_size, layout.shard_blocks, scale, norm, layout.fingerprint)

    def with_bits(self, bits: Bits) -> Format:
        """The same blocks in so many bits an element. With 2 every block has its own mean sizes, whatever `scale` and
        `norm` are."""
        if bits == self.bits:
            return self
        return Format(self.block_size, self.shard_blocks, layout_fingerprint=self.layout_fingerprint, bits=bits)

    @property
    def scales(self) -> int:
        """Scales in one message."""
        return self.shard_blocks * self.bits if self.scale == "block" else 1

    @property
    def block_bytes(self) -> int:
        """Of a block's bits."""
        return self.bits * self.block_size // 8

    @property
    def scales_offset(self) -> int:
        return 4 * _HEADER_WORDS

    @property
    def bits_offset(self) -> int:
        return self.scales_offset + _aligned(4 * self.scales)

    @property
    def nbytes(self) -> int:
        return self.bits_offset + _aligned(self.shard_blocks * self.block_bytes)

    @cached_property
    def fingerprint(self) -> int:
        text = f"{self.block_size} {self.shard_blocks} {self.scale} {self.norm} {self.layout_fingerprint}"
        text += "" if self.bits == 1 else f" {self.bits}"
        return zlib.crc32(text.encode()) & 0x7FFFFFFF

    @property
    def header(self) -> tuple[int, int, int, int]:
        """The header words of every message of this format, with no flag set."""
        return (MAGIC + self.bits - 1, 0, self.fingerprint, self.shard_blocks)

    def empty(self, rows: int, device: torch.device | str = "cpu", copies: int = 1) -> Messages:
        """Uninitialized memory for `rows` messages."""
        return Messages(torch.empty((rows, self.nbytes), dtype=torch.uint8, device=device), self, copies)


@dataclass(frozen=True)
class Messages:
    """Messages of one format, one a row, with a typed view of each part.

    With `copies` each block is in so many messages, which follow one another: row k copies + i is the i-th of those
    that hold blocks [k shard_blocks, (k + 1) shard_blocks), and their mean is what the block stands for.
    """

    buffer: Tensor  # uint8 [rows, nbytes]
    format: Format
    copies: int = 1

    @property
    def rows(self) -> int:
        return self.buffer.shape[0]

    @cached_property
    def header(self) -> Tensor:
        """int32 [rows, 4]"""
        return self.buffer[:, : self.format.scales_offset].view(torch.int32)

    @cached_property
    def scales(self) -> Tensor:
        """fp32 [rows, shard_blocks] or [rows, 1]; with 2 bits [rows, 2 shard_blocks], each block's two in a row"""
        start = self.format.scales_offset
        return self.buffer[:, start : start + 4 * self.format.scales].view(torch.float32)

    @cached_property
    def bits(self) -> Tensor:
        """uint8 [rows, shard_blocks, block_bytes]"""
        start, width = self.format.bits_offset, self.format.block_bytes
        flat = self.buffer[:, start : start + self.format.shard_blocks * width]
        return flat.unflatten(1, (self.format.shard_blocks, width))

    @property
    def flags(self) -> Tensor:
        """int32 [rows]"""
        return self.header[:, FLAGS_WORD]

    def check(self, phase: str) -> None:
        """Raise a MessageError if a row (row i is rank i's) is not a message of this format. No check on a GPU."""
        if self.buffer.device.type != "cpu":
            return
        for rank, (magic, flags, fingerprint, blocks) in enumerate(self.header.tolist()):
            if (magic, 0, fingerprint, blocks) != self.format.header or flags not in (0, NONFINITE):
                raise MessageError(
                    f"{phase}: what came from rank {rank} is no message of this exchange (its header is {magic:#x}, "
                    f"{flags}, {fingerprint}, {blocks}; expected {self.format.header[0]:#x}, 0 or {NONFINITE}, "
                    f"{self.format.fingerprint}, {self.format.shard_blocks}): it was damaged on the way, or the rank "
                    f"runs another onebit. Restart the ranks from the last checkpoint"
                )

    def scale_of_blocks(self) -> Tensor:
        """fp32 [rows * shard_blocks]: the scale that decodes each block; with 2 bits [rows * shard_blocks, 2]."""
        if self.format.bits == 2:
            return self.scales.reshape(-1, 2)
        return self.scales.expand(self.rows, self.format.shard_blocks).reshape(-1)

    def slice(self, first: int, rows: int) -> Messages:
        return Messages(self.buffer[first : first + rows], self.format, self.copies)
