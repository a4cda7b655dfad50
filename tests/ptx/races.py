"""Races: two accesses of one place by two warps, one of them a store, that nothing orders.

What orders is written down as vector clocks, a component a warp. A barrier joins the clocks of a program's warps. An
atomic that acquires and releases takes over the clock of its address, and adds its lane's to that: the other lanes of
its warp take part where they meet that lane. Between two of these a lane is in one segment; every access is kept with
its segment and compared when the launch has ended. So a race is found whether or not the order of this run made it
harmful. Two atomics do not race. In shared memory the lanes of a warp race, too, in an epoch: from one meeting, at a
barrier of the warp or the program, to the next. In global memory they count as one. Nor do two warps that hold copies
of a value, and store it to shared memory by the same instruction: Triton lets them, where a tensor has fewer elements
than a program has threads.

A load in a race may be one whose value nothing uses, such as that of a thread past the end of a block. A second run
shows whether: there it is given anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tests.ptx.memory import SHARED, Part, Region
from tests.ptx.places import Access, Event, Places

Lanes = np.ndarray
EVERY = np.arange(32)


@dataclass(frozen=True)
class Conflict:
    """Two accesses that nothing orders, and the bytes of a region that both have."""

    region: str
    one: Access
    other: Access
    between: str  # "lanes" of a warp, "warps" of a program, or "programs"
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
    """Clocks and accesses of one launch. `segments`: which one each lane is in. `own`: each warp's own clock. `met`:
    what that was when its lanes met. `touched`: which lanes have had memory since."""

    def __init__(self, programs: int, warps: int, doubted: Doubted | None = None) -> None:
        count = programs * warps
        self.doubted, self.random = doubted or {}, np.random.default_rng(0)
        self.warps_of_program = warps
        self.own, self.met = np.ones(count, np.int32), np.zeros(count, np.int32)
        self.locks: dict[int, Lanes] = {}
        self.owners: list[int] = []
        self.vectors: list[Lanes] = []  # [warps] of each segment
        self.segments, self.touched = np.zeros((count, 32), np.int64), np.zeros((count, 32), bool)
        self.epochs, self.latest = list(range(count)), count
        self.numbers: dict[Access, int] = {}
        self.found: dict[Region, list[Event]] = defaultdict(list)
        for warp in range(count):
            self._enter(warp, EVERY, np.zeros(count, np.int32))

    def _enter(self, warp: int, lanes: Lanes, clock: Lanes) -> None:
        """A new segment of some lanes of a warp."""
        self.segments[warp, lanes] = len(self.owners)
        self.owners.append(warp)
        self.vectors.append(clock.copy())
        self.vectors[-1][warp] = self.own[warp]

    def access(
        self, warp: int, instruction: int, part: Part, size: int, *, writes: bool, atomic: bool = False,
        repeats: bool = False,
    ) -> None:  # fmt: skip
        segments = self.segments[warp][part.lanes]
        if not atomic:
            self.touched[warp, part.lanes] = True
        for segment in segments[:1] if (segments == segments[0]).all() else np.unique(segments):
            key = Access(int(segment), self.epochs[warp], instruction, writes, atomic, repeats)
            number, those = self.numbers.setdefault(key, len(self.numbers)), segments == segment
            self.found[part.region].append(Event(part.offsets[those], part.lanes[those], size, number))

    def store(self, warp: int, instruction: int, part: Part, values: Lanes) -> None:
        """Record a store before its values, [lanes, count], are there."""
        same = (part.region.load(part.offsets, values.itemsize, values.shape[1]) == values).all(axis=1)
        for repeats in (False, True):
            some = Part(part.region, part.lanes[same == repeats], part.offsets[same == repeats])
            if len(some.lanes):
                size = values.itemsize * values.shape[1]
                self.access(warp, instruction, some, size, writes=True, repeats=repeats)

    def barrier(self, warps: Sequence[int]) -> None:
        """Record a barrier of all lanes of some warps: those of one program, or one warp."""
        joined = np.max([self.vectors[segment] for segment in np.unique(self.segments[warps])], axis=0)
        for warp in warps:
            self.met[warp] = self.own[warp]
            self.own[warp] += 1
            self._enter(warp, EVERY, joined)
            self.touched[warp] = False
            self.epochs[warp], self.latest = self.latest, self.latest + 1

    def synchronize(self, warp: int, lane: int, address: int) -> None:
        """Record an atomic of one lane. What other lanes of its warp do is ordered with that where they meet."""
        own = self.vectors[self.segments[warp, lane]]
        lock = self.locks.get(address, np.zeros_like(own))
        clock = np.maximum(own, lock)
        given = clock.copy()
        if np.delete(self.touched[warp], lane).any():
            given[warp] = self.met[warp]
        self.locks[address] = np.maximum(lock, given)
        self.own[warp] += 1
        for segment in np.unique(np.delete(self.segments[warp], lane)):
            self._enter(warp, self.segments[warp] == segment, self.vectors[segment])
        self._enter(warp, lane == EVERY, clock)

    def loaded(self, warp: int, instruction: int, part: Part, values: Lanes) -> Lanes:
        """What is loaded: [lanes, count]. Where it is in doubt, anything."""
        size, segments = values.itemsize * values.shape[1], self.segments[warp][part.lanes]
        doubted = np.zeros(len(values), bool)
        for segment in np.unique(segments) if self.doubted else ():
            places = self.doubted.get((int(segment), instruction, part.region.name), ())
            doubted |= (segments == segment) & np.isin(part.offsets[:, None] + np.arange(size), places).any(axis=1)
        if not doubted.any():
            return values
        anything = self.random.integers(0, 256, (len(values), size), dtype=np.uint8).view(values.dtype)
        return np.where(doubted[:, None], anything, values)

    def conflicts(self) -> list[Conflict]:
        accesses, owners = list(self.numbers), np.array(self.owners)
        found: dict[tuple[str, str, Access, Access], list[int]] = defaultdict(list)
        for region, events in self.found.items():
            touched = Places.of(events, accesses)
            for numbers, places in touched.of_warps(owners).items():
                for one, other in self._unordered([accesses[i] for i in numbers]):
                    if not _are_copies(region, one, other):
                        found[region.name, self._between(one, other), one, other] += places
            for (one, other), places in touched.of_lanes().items() if region.name == SHARED else ():
                if not _are_copies(region, one, other):
                    found[region.name, "lanes", one, other] += places
        return [Conflict(region, one, other, between, tuple(at)) for (region, between, one, other), at in found.items()]

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


def _are_copies(region: Region, one: Access, other: Access) -> bool:
    """Return whether the later of two stores by one instruction has stored to shared memory what was there already."""
    return region.name == SHARED and one.instruction == other.instruction and other.repeats
