"""Which bytes of a region several warps, or several lanes of a warp, have had, and by which accesses."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

Lanes = np.ndarray


class Access(NamedTuple):
    segment: int
    epoch: int
    instruction: int
    writes: bool
    atomic: bool
    repeats: bool  # a store of what is there already


class Event(NamedTuple):
    """What some lanes of an access have had: `size` bytes each, from `offsets` on."""

    offsets: Lanes
    lanes: Lanes
    size: int
    number: int  # of the access


@dataclass(frozen=True)
class Places:
    """Lane lanes[i] has had places[i] by access numbers[i]. A place is as many bytes as the narrowest access has."""

    accesses: list[Access]
    width: int
    places: Lanes
    numbers: Lanes
    lanes: Lanes

    @classmethod
    def of(cls, events: list[Event], accesses: list[Access]) -> Places:
        width = min(event.size for event in events)
        counts = np.concatenate([np.full(len(event.offsets), event.size // width) for event in events])
        starts = np.concatenate([event.offsets for event in events]) // width
        steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers = np.concatenate([np.full(len(event.offsets), event.number) for event in events])
        takers, most = numbers * 32 + np.concatenate([event.lanes for event in events]), 32 * len(accesses)
        found = np.unique((np.repeat(starts, counts) + steps) * most + np.repeat(takers, counts))
        return cls(accesses, width, found // most, *np.divmod(found % most, 32))

    def of_warps(self, owners: Lanes) -> dict[tuple[int, ...], list[int]]:
        """Bytes by their accesses' numbers: those that more than one warp has had. owners: warps of segments."""
        found: dict[tuple[int, ...], list[int]] = defaultdict(list)
        warps = owners[[each.segment for each in self.accesses]][self.numbers]
        for several in self._disputed(self.places, warps):
            found[tuple(np.unique(self.numbers[several]).tolist())] += self._bytes(several)
        return found

    def of_lanes(self) -> dict[tuple[Access, Access], list[int]]:
        """Bytes by two accesses, one of them a store, that two lanes of a warp have made in one epoch."""
        epochs = np.array([each.epoch for each in self.accesses])[self.numbers]
        keys = self.places * (epochs.max() + 1) + epochs
        order = np.argsort(keys, kind="stable")
        by_epoch = replace(self, places=self.places[order], numbers=self.numbers[order], lanes=self.lanes[order])
        return by_epoch._pairs(keys[order])

    def _pairs(self, keys: Lanes) -> dict[tuple[Access, Access], list[int]]:
        found: dict[tuple[Access, Access], list[int]] = defaultdict(list)
        for several in self._disputed(keys, self.lanes):
            numbers, lanes = self.numbers[several], self.lanes[several]
            for i, j in itertools.combinations(np.unique(numbers), 2):
                one, other = self.accesses[i], self.accesses[j]
                if np.unique(lanes[(numbers == i) | (numbers == j)]).size == 1 or (one.atomic and other.atomic):
                    continue
                if one.writes or other.writes:
                    found[one, other] += self._bytes(several)
        return found

    def _disputed(self, keys: Lanes, parties: Lanes) -> Iterator[slice]:
        """Equal keys, which are sorted, that more than one party has had, and stored to."""
        heads = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
        writes = np.array([each.writes for each in self.accesses])[self.numbers]
        several = np.minimum.reduceat(parties, heads) != np.maximum.reduceat(parties, heads)
        ends = np.append(heads[1:], len(keys))
        for i in np.flatnonzero(several & np.logical_or.reduceat(writes, heads)):
            yield slice(int(heads[i]), int(ends[i]))

    def _bytes(self, several: slice) -> range:
        first = int(self.places[several.start]) * self.width
        return range(first, first + self.width)
