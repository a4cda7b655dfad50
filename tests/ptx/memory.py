"""The memory that a launch may touch: the bytes of the tensors that were passed, and each program's shared memory.

Nothing else is there: what lies beside a tensor, in the process' own memory, is a fault.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

Lanes = np.ndarray
ALIGN = 16
SHARED = "shared memory"
UNWRITTEN = 0xFF  # what shared memory holds at the start of a program: NaN as a float


class Fault(Exception):
    """What the memory model or the machine of a GPU does not allow."""


@dataclass(frozen=True)
class Part:
    """The lanes of an access that fall into one region, and where."""

    region: Region
    lanes: Lanes  # their numbers
    offsets: Lanes  # bytes from the region's start


class Region:
    """Some bytes, from an address on. Its views begin at a multiple of 16 at or before it."""

    def __init__(self, name: str, start: int, size: int, raw: Lanes | None = None) -> None:
        self.name, self.start, self.size = name, start, size
        self.end = start + size
        self.base = start - start % ALIGN
        room = -(-(self.end - self.base) // ALIGN) * ALIGN
        if raw is None:
            raw = np.ctypeslib.as_array((ctypes.c_uint8 * room).from_address(self.base))
        self.views = {width: raw.view(f"u{width}") for width in (1, 2, 4, 8)}
        self.stored: list[tuple[int, Lanes, Lanes]] = []  # width, places, what was there

    @classmethod
    def shared(cls, name: str, size: int) -> Region:
        """Fresh memory at address 0."""
        return cls(name, 0, size, np.full(-(-size // ALIGN) * ALIGN, UNWRITTEN, np.uint8))

    def load(self, offsets: Lanes, width: int, count: int) -> Lanes:
        """[lanes, count] values of `width` bytes."""
        return self.views[width][self._places(offsets, width, count)]

    def store(self, offsets: Lanes, values: Lanes) -> None:
        """values: [lanes, count]; lanes that write to one place have to agree."""
        width, count = values.itemsize, values.shape[1]
        places, view = self._places(offsets, width, count), self.views[width]
        self.stored.append((width, places, view[places]))
        view[places] = values
        if (view[places] != values).any():
            raise Fault(f"lanes of one warp store different values to one place of {self.name}")

    def _places(self, offsets: Lanes, width: int, count: int) -> Lanes:
        return ((offsets + (self.start - self.base)) // width)[:, None] + np.arange(count)


@dataclass(frozen=True)
class Written:
    """Values of `width` bytes at places of a region."""

    region: Region
    width: int
    places: Lanes
    values: Lanes

    def holds(self) -> bool:
        return np.array_equal(self.region.views[self.width][self.places], self.values)

    def redo(self) -> None:
        self.region.views[self.width][self.places] = self.values


class Memory:
    """Regions, none of which overlap."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self.regions = sorted((each for each in regions if each.size), key=lambda each: each.start)
        self.starts = [each.start for each in self.regions]
        for before, after in zip(self.regions, self.regions[1:], strict=False):
            if before.end > after.start:
                raise ValueError(f"{before.name} and {after.name} overlap")

    def written(self) -> list[Written]:
        """What is where something has been stored."""
        return [
            Written(region, width, places, region.views[width][places])
            for region in self.regions
            for width, places, _ in region.stored
        ]

    def undo(self) -> None:
        """Make all bytes as they were before the first store."""
        for region in self.regions:
            for width, places, before in reversed(region.stored):
                region.views[width][places] = before
            region.stored.clear()

    def parts(self, addresses: Lanes, size: int, lanes: Lanes) -> Iterator[Part]:
        """Find what `lanes` access, `size` bytes each, region by region; addresses: uint64 [32]."""
        wanted = addresses[lanes]
        if (wanted % np.uint64(size)).any():
            wrong = int(wanted[wanted % np.uint64(size) != 0][0])
            raise Fault(
                f"misaligned: {size} bytes at {wrong:#x}, which is {wrong % ALIGN} beyond a multiple of {ALIGN}"
            )
        while len(lanes):
            region = self._region(int(wanted[0]), size)
            inside = (wanted >= region.start) & (wanted + np.uint64(size) <= region.end)
            if inside.all():
                yield Part(region, lanes, (wanted - np.uint64(region.start)).astype(np.int64))
                return
            yield Part(region, lanes[inside], (wanted[inside] - np.uint64(region.start)).astype(np.int64))
            wanted, lanes = wanted[~inside], lanes[~inside]

    def _region(self, address: int, size: int) -> Region:
        place = bisect_right(self.starts, address) - 1
        nearest = self.regions[max(place, 0)]
        if place < 0 or address + size > nearest.end:
            where = f"{address - nearest.start} bytes from the start of {nearest.name}, which has {nearest.size}"
            raise Fault(f"out of bounds: {size} bytes at {address:#x}, {where}")
        return nearest
