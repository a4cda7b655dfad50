"""The bytes of a message: how long its parts are, and where each part begins. The passes of `codec` and `codes` in
`onebit.kernels.cpu` and `onebit.kernels.gpu` find a block's scales and bits within the parts, pack and compute scales.

A message carries one shard of one chunk from one rank to another:

    header   4 x uint32    magic, flags, fingerprint of the format, most blocks of a shard
    scales   fp32          one a block (scale="block"), or one (scale="tensor"); padded to 16 bytes
    bits     uint8         of each block length * bits / 8 bytes, the first element in the lowest place

All messages of a format are as long as the longest. A shorter shard leaves bytes over, which hold no values.

With 1 bit an element decodes to +scale if its bit is 1, and to -scale otherwise. A block may be in several messages
(`Messages.senders`), one from each rank if every rank's message goes to all; then the element decodes to the mean over
these messages. Bits past a block's valid count are 0.

Three norms make the scale of a block c with n elements:

    l1          ||c||_1 / n, the mean size: the scale with the smallest error
    l2          ||c||_2 / sqrt(n), the root mean square
    unbiased    ||c||_2^2 / ||c||_1, at most MOST times the root mean square

With "unbiased" the part that a message leaves out is orthogonal to c (as in DRIVE, Vargaftik et al. 2021): all of c
arrives at once, with noise. With "l1" a message sends 2/3 of a normally distributed c, and later messages send the
rest. A block with few elements that are not 0 meets the bound of "unbiased": without the bound, all other elements
would move as far as these.

With 4 or 8 bits an element is a code q, a whole number in two's complement, and decodes to q times a scale. Every 256
elements of a block have a scale of their own: the largest |c| over the largest code, 7 or 127. A block has as many
scales as a whole one, 0 where a short one has no elements.

Words are little-endian. With blocks of 2048 a message costs 1 + 1/64 bit an element, at most 31 elements' bits and 4
bytes for each parameter's last block, and at most 40 bytes; with b bits b + 1/8 bit, and 32 bytes for a last block.

The length of a message follows from its format alone, and no byte of a message is an address or a count: no content
can make a reader access memory elsewhere. In host memory headers are checked (2 us for 8 messages), which finds a
message of another exchange. On a GPU headers are not checked, since the host would wait for the device. Scales and bits
are never checked: the transport guards them (TCP, InfiniBand and NVLink carry checksums).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from onebit.kernels.data.checks import is_one_of, is_whole
from onebit.kernels.data.layout import Layout, Span
from onebit.kernels.data.record import Record

Scale = Literal["block", "tensor"]
Norm = Literal["l1", "l2", "unbiased"]
Bits = Literal[1, 4, 8]  # an element

MAGIC = 0x01424231  # "1BB" and the version of this layout; "4BB" and "8BB" with so many bits
LEAST = 2.0**-100  # of the largest element of a group: the inverse of a scale below it would not be finite
GROUP = 256  # elements of a block that share a scale, where an element has several bits
MOST = 2.0  # times the root mean square of a block: the largest scale with norm="unbiased"
NORMS: dict[Norm, int] = {"l1": 0, "l2": 1, "unbiased": 2}  # as kernels have them
NONFINITE = 1  # a flag: the sender found inf or NaN; no rank may use this step's messages
ALIGN = 16
HEADER_WORDS = 4
FLAGS_WORD = 1


class MessageError(RuntimeError):
    """The bytes received are not a message of this exchange."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def bytes_of_message(scales: int, elements: int, bits: int = 1) -> int:
    return 4 * HEADER_WORDS + _aligned(4 * scales) + _aligned(elements // 8 * bits)


def largest_code(bits: int) -> int:
    """Return the largest code of so many bits. The least one is its opposite: messages of c and -c are opposite."""
    return 2 ** (bits - 1) - 1


def check_scale(scale: object, norm: object) -> None:
    if not is_one_of(scale, get_args(Scale)):
        raise ValueError(f"scale must be one of {get_args(Scale)}, got {scale!r:.80}")
    if not is_one_of(norm, get_args(Norm)):
        raise ValueError(f"norm must be one of {get_args(Norm)}, got {norm!r:.80}")
    if norm == "unbiased" and scale != "block":
        raise ValueError(
            'norm="unbiased" with scale="tensor": the largest parameters of a message would decide of its scale, and '
            'throw all others about. Pass scale="block", or norm="l1"'
        )


def check_bits(bits: object) -> None:
    if not (is_whole(bits) and bits in get_args(Bits)):
        raise ValueError(f"bits={bits!r:.80}: an element has 1, 4 or 8 in a message")


@dataclass(frozen=True)
class Format:
    """The shape of a message, equal on all ranks of a group."""

    layout: Layout
    scale: Scale = "block"
    norm: Norm = "l1"
    bits: Bits = 1

    def __post_init__(self) -> None:
        check_scale(self.scale, self.norm)
        check_bits(self.bits)
        if self.bits > 1 and (self.scale, self.norm) != ("block", "l1"):
            raise ValueError(
                f"scale={self.scale!r} and norm={self.norm!r} are of messages of 1 bit: with {self.bits} the largest "
                f"element of {GROUP} decides of their scale. Leave them out"
            )

    def of_means(self) -> Format:
        """The same blocks, for means of messages, which are compressed once more. The mean of a few signs is 0 in many
        places. An unbiased scale would move these as far as all others, and what is left out would grow: so there it is
        the root mean square."""
        return replace(self, norm="l2") if self.norm == "unbiased" else self

    @cached_property
    def groups(self) -> int:
        """The number of scales of a block."""
        return 1 if self.bits == 1 else -(-self.layout.block_size // GROUP)

    def scales(self, blocks: int) -> int:
        """The number of scales in the message of a shard of so many blocks."""
        return blocks * self.groups if self.scale == "block" else 1

    @cached_property
    def magic(self) -> int:
        return MAGIC - 1 + self.bits

    @property
    def residual_dtype(self) -> torch.dtype:
        """A code leaves out at most half a step, of which bf16 keeps 8 places more."""
        return torch.float32 if self.bits == 1 else torch.bfloat16

    @property
    def scales_offset(self) -> int:
        return 4 * HEADER_WORDS

    def bits_offset(self, blocks: int) -> int:
        """The byte at which the bits begin in the message of a shard of so many blocks."""
        return bytes_of_message(self.scales(blocks), 0)

    @cached_property
    def nbytes(self) -> int:
        layout = self.layout
        blocks, elements = np.diff(layout.shards).tolist(), np.diff(layout.starts[layout.shards]).tolist()
        return max(bytes_of_message(self.scales(b), n, self.bits) for b, n in zip(blocks, elements, strict=True))

    @cached_property
    def fingerprint(self) -> int:
        text = f"{self.layout.fingerprint} {self.scale} {self.norm} {self.bits}"
        return zlib.crc32(text.encode()) & 0x7FFFFFFF

    @property
    def header(self) -> tuple[int, int, int, int]:
        """The header words of every message of this format, with no flag set."""
        return (self.magic, 0, self.fingerprint, self.layout.shard_blocks)

    def empty(self, rows: int, device: torch.device | str = "cpu", senders: int = 1) -> Messages:
        """Uninitialized memory for `rows` messages."""
        return Messages(torch.empty((rows, self.nbytes), dtype=torch.uint8, device=device), self, senders)


@dataclass(frozen=True)
class Messages(Record):
    """Messages of one format, one a row, with a typed view of each part.

    Each block is in a message of each of `senders` ranks, which follow one another: row k senders + i is the i-th
    sender's of the k-th shard, and their mean is what its blocks stand for.
    """

    buffer: Tensor  # uint8 [rows, nbytes]
    format: Format
    senders: int = 1

    def arguments(self, name: str) -> dict[str, Any]:
        form = self.format
        return {
            name: self.buffer,
            f"{name}_bytes": form.nbytes,
            f"{name}_rows": len(self.buffer),
            f"{name}_senders": self.senders,
            f"{name}_tensor": form.scale == "tensor",
            f"{name}_norm": NORMS[form.norm],
            f"{name}_bits": form.bits,
            f"{name}_groups": form.groups,
            f"{name}_magic": form.magic,
            f"{name}_fingerprint": form.fingerprint,
            f"{name}_shard_blocks": form.layout.shard_blocks,
        }

    @property
    def rows(self) -> int:
        return self.buffer.shape[0]

    @cached_property
    def header(self) -> Tensor:
        """int32 [rows, 4]"""
        return self.buffer[:, : self.format.scales_offset].view(torch.int32)

    @property
    def payload(self) -> Tensor:
        """uint8 [rows, ..]: scales and bits"""
        return self.buffer[:, self.format.scales_offset :]

    def scales(self, row: int, shard: Span) -> Tensor:
        """fp32 [blocks * groups] or [1], of the message of a shard"""
        start, form = self.format.scales_offset, self.format
        return self.buffer[row, start : start + 4 * form.scales(shard.count)].view(torch.float32)

    def bits(self, row: int, shard: Span) -> Tensor:
        """uint8 [bytes], of the message of a shard"""
        start = self.format.bits_offset(shard.count)
        return self.buffer[row, start : start + shard.elements // 8 * self.format.bits]

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
                    f"{self.format.fingerprint}, {self.format.header[3]}): it was damaged on the way, or the rank "
                    f"runs another onebit. Restart the ranks from the last checkpoint"
                )

    def scales_of(self, span: Span) -> Tensor:
        """What decodes each block of the shards that these are messages of: fp32 [senders, blocks * groups]."""
        found = []
        for sender in range(self.senders):
            rows = [(k * self.senders + sender, shard) for k, shard in enumerate(span.shards())]
            each = self.format.groups
            found.append(torch.cat([self.scales(row, shard).expand(shard.count * each) for row, shard in rows]))
        return torch.stack(found)

    def bits_of(self, span: Span) -> Tensor:
        """Their bits, block after block: uint8 [senders, bytes]."""
        shards = span.shards()
        return torch.stack([
            torch.cat([self.bits(k * self.senders + sender, shard) for k, shard in enumerate(shards)])
            for sender in range(self.senders)
        ])  # fmt: skip

    def put(self, span: Span, bits: Tensor, scales: Tensor) -> None:
        """What `bits_of` and `scales_of` read. Of a message with one scale it is the first block's."""
        for k, shard in enumerate(span.shards()):
            first, at = shard.first - span.first, (shard.start - span.start) // 8
            for sender in range(self.senders):
                own, its_scales = (of(k * self.senders + sender, shard) for of in (self.bits, self.scales))
                own.copy_(bits[sender, at : at + len(own)])
                its_scales.copy_(scales[sender, first : first + len(its_scales)])

    def slice(self, first: int, rows: int) -> Messages:
        return Messages(self.buffer[first : first + rows], self.format, self.senders)
