"""Races: two accesses of one place by two warps, one of them a store, that nothing orders.

What orders is written down as vector clocks, a component a warp. A barrier joins the clocks of a program's warps. An
atomic that releases adds its warp's clock to that of its address, one that acquires takes it over. Between two of these
a warp is in one segment; every access is kept with its segment and compared when the launch has ended. So a race is
found whether or not the order of this run made it harmful. Two atomics do not race. Nor do two warps that hold copies
of a value, and store it to shared memory by the same instruction: Triton lets them, where a tensor has fewer elements
than a program has threads.

A load in a race may be one whose value nothing uses, such as that of a thread past the end of a block. A second run
shows whether: there it is given anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tests.ptx.memory import SHARED, Part, Region

Lanes = np.ndarray


class Access(NamedTuple):
    segment: int
    instruction: int
    writes: bool
    atomic: bool
    repeats: bool  # a store of what is there already


@dataclass(frozen=True)
class Conflict:
    """Two accesses that nothing orders, and the bytes of a region that both have."""

    region: str
    one: Access
    other: Access
    between: str  # "warps" of a program, or "programs"
    places: tuple[int, ...]

    def told(self, texts: Sequence[str]) -> str:
        """texts: of the instructions."""
        pair = sorted(texts[each.instruction] for each in (self.one, self.other))
        return f"race between {self.between} for {self.region}: {'   |   '.join(pair)}"

    @property
    def load(self) -> Access | None:
        """The one that only reads, if the other one stores."""
        return next((each for each in (self.one, self.other) if not each.writes), None)


Doubted = dict[tuple[int, int, str], Lanes]  # by segment, instruction and region: bytes whose value may be another


class Recorder:
    """Clocks and accesses of one launch."""

    def __init__(self, programs: int, warps: int, doubted: Doubted | None = None) -> None:
        self.doubted, self.random = doubted or {}, np.random.default_rng(0)
        self.warps_of_program = warps
        self.clocks = np.eye(programs * warps, dtype=np.int32)  # [warps, warps]
        self.locks: dict[int, Lanes] = {}
        self.owners: list[int] = []
        self.vectors: list[Lanes] = []
        self.segments = [0] * len(self.clocks)
        self.numbers: dict[Access, int] = {}
        self.found: dict[Region, list[tuple[Lanes, int, int]]] = defaultdict(list)
        for warp in range(len(self.clocks)):
            self._enter(warp)

    def _enter(self, warp: int) -> None:
        self.segments[warp] = len(self.owners)
        self.owners.append(warp)
        self.vectors.append(self.clocks[warp].copy())

    def access(
        self, warp: int, instruction: int, part: Part, size: int, *, writes: bool, atomic: bool = False,
        repeats: bool = False,
    ) -> None:  # fmt: skip
        key = Access(self.segments[warp], instruction, writes, atomic, repeats)
        number = self.numbers.setdefault(key, len(self.numbers))
        self.found[part.region].append((part.offsets, size, number))

    def store(self, warp: int, instruction: int, part: Part, values: Lanes) -> None:
        """Before values, [lanes, count], are stored."""
        same = (part.region.load(part.offsets, values.itemsize, values.shape[1]) == values).all(axis=1)
        for repeats in (False, True):
            some = Part(part.region, part.lanes[same == repeats], part.offsets[same == repeats])
            if len(some.lanes):
                size = values.itemsize * values.shape[1]
                self.access(warp, instruction, some, size, writes=True, repeats=repeats)

    def barrier(self, warps: Sequence[int]) -> None:
        """Of the warps of one program."""
        joined = self.clocks[warps].max(axis=0)
        for warp in warps:
            self._advance(warp, joined)

    def synchronize(self, warp: int, address: int, *, acquires: bool, releases: bool) -> None:
        """By an atomic."""
        lock = self.locks.get(address)
        if acquires and lock is not None:
            self.clocks[warp] = np.maximum(self.clocks[warp], lock)
        if releases:
            self.locks[address] = self.clocks[warp].copy() if lock is None else np.maximum(lock, self.clocks[warp])
        if acquires or releases:
            self._advance(warp, self.clocks[warp])

    def _advance(self, warp: int, clock: Lanes) -> None:
        self.clocks[warp] = clock
        self.clocks[warp, warp] += 1
        self._enter(warp)

    def loaded(self, warp: int, instruction: int, part: Part, values: Lanes) -> Lanes:
        """What is loaded: [lanes, count]. Where it is in doubt, anything."""
        key = (self.segments[warp], instruction, part.region.name)
        if key not in self.doubted:
            return values
        size = values.itemsize * values.shape[1]
        doubted = np.isin(part.offsets[:, None] + np.arange(size), self.doubted[key]).any(axis=1)
        anything = self.random.integers(0, 256, (len(values), size), dtype=np.uint8).view(values.dtype)
        return np.where(doubted[:, None], anything, values)

    def conflicts(self) -> list[Conflict]:
        accesses, owners = list(self.numbers), np.array(self.owners)
        found: dict[tuple[str, Access, Access], list[int]] = defaultdict(list)
        for region, events in self.found.items():
            for numbers, places in _disputed(events, accesses, owners).items():
                for one, other in self._unordered([accesses[i] for i in numbers]):
                    copies = one.instruction == other.instruction and (one.repeats or other.repeats)
                    if not (copies and region.name == SHARED):
                        found[region.name, one, other] += places
        return [
            Conflict(region, one, other, self._between(one, other), tuple(places))
            for (region, one, other), places in found.items()
        ]

    def _between(self, one: Access, other: Access) -> str:
        programs = {self.owners[each.segment] // self.warps_of_program for each in (one, other)}
        return "warps" if len(programs) == 1 else "programs"

    def _unordered(self, accesses: list[Access]) -> Iterator[tuple[Access, Access]]:
        """Pairs of which neither happens before the other."""
        segments = [each.segment for each in accesses]
        owners = np.array([self.owners[s] for s in segments])
        vectors = np.stack([self.vectors[s] for s in segments])
        own = vectors[np.arange(len(segments)), owners]
        before = own[:, None] <= vectors[:, owners].T  # [i, j]: i's segment had ended when j's began, or is j's warp's
        writes, atomic = (np.array([getattr(a, name) for a in accesses]) for name in ("writes", "atomic"))
        racing = ~before & ~before.T & (writes[:, None] | writes) & ~(atomic[:, None] & atomic)
        for i, j in np.argwhere(np.triu(racing)):
            yield accesses[i], accesses[j]


def _disputed(
    events: list[tuple[Lanes, int, int]], accesses: list[Access], owners: Lanes
) -> dict[tuple[int, ...], list[int]]:
    """The bytes of a region by their accesses' numbers: those that more than one warp has had, and stored to.

    A place is as many bytes as the narrowest access of the region.
    """
    place = min(size for _, size, _ in events)
    counts = np.concatenate([np.full(len(offsets), size // place) for offsets, size, _ in events])
    starts = np.concatenate([offsets for offsets, _, _ in events]) // place
    numbers = np.concatenate([np.full(len(offsets), number) for offsets, _, number in events])
    steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    pairs = np.unique((np.repeat(starts, counts) + steps) * len(accesses) + np.repeat(numbers, counts))
    places, numbers = np.divmod(pairs, len(accesses))
    heads = np.flatnonzero(np.concatenate(([True], places[1:] != places[:-1])))
    warps = owners[[a.segment for a in accesses]][numbers]
    writes = np.array([a.writes for a in accesses])[numbers]
    several = np.minimum.reduceat(warps, heads) != np.maximum.reduceat(warps, heads)
    disputed = np.flatnonzero(several & np.logical_or.reduceat(writes, heads))
    ends = np.append(heads[1:], len(pairs))
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i in disputed:
        first = int(places[heads[i]]) * place
        found[tuple(numbers[heads[i] : ends[i]].tolist())] += range(first, first + place)
    return found
