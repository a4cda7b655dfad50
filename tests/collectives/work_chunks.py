"""What ranks do for the tests of chunks="auto": they measure against a clock that is given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from onebit.collectives import chunking
from onebit.collectives.topology import Topology
from onebit.collectives.transport import transport_for
from onebit.kernels.tuning import tuner
from tests.collectives import steps
from tests.collectives.steps import Case, Recorded
from tests.collectives.work import Watched
from tests.ranks import group


@contextmanager
def cache_folder(folder: str) -> Iterator[None]:
    """A rank's cache, as a process that has read nothing yet sees it."""
    before = os.environ.get("ONEBIT_CACHE_DIR", "")
    os.environ["ONEBIT_CACHE_DIR"] = folder
    tuner.forget()
    try:
        yield
    finally:
        os.environ["ONEBIT_CACHE_DIR"] = before
        tuner.forget()


class Clock:
    """Gives the seconds of each number of chunks in turn, however long it really takes."""

    def __init__(self, seconds: list[float]) -> None:
        ends = [t for s in seconds for t in [0.0, s] * RUNS]
        self.readings = iter(ends)

    def perf_counter(self) -> float:
        return next(self.readings)


RUNS = 3  # timed for each number of chunks


@dataclass
class Choice:
    """The chunks of one object, how often the candidates were measured for it, and the phases of its collectives."""

    chunks: int
    measured: int
    phases: list[str]


@contextmanager
def measuring(seconds: list[float]) -> Iterator[list[list[int]]]:
    """Replace the clock, and note the options of every measurement."""
    measured: list[list[int]] = []
    real, clock = chunking.measure_chunks, chunking.time

    def measure(*args: Any, **kwargs: Any) -> dict[int, float]:
        measured.append(list(kwargs["options"]))
        chunking.time = Clock(seconds)
        try:
            return real(*args, **kwargs)
        finally:
            chunking.time = clock

    chunking.measure_chunks = measure
    try:
        yield measured
    finally:
        chunking.measure_chunks = real


@contextmanager
def small_models_up_to(elements: int) -> Iterator[None]:
    """Models of so many elements take one chunk, for their flags."""
    before, chunking.MOST_ELEMENTS = chunking.MOST_ELEMENTS, elements
    try:
        yield
    finally:
        chunking.MOST_ELEMENTS = before


def choices(
    rank: int,
    size: int,
    cases: list[Case],
    folders: list[str],
    seconds: list[list[float]],
    fresh: bool = False,
    small: int = 0,
) -> list[Choice]:
    """Choose for one case after the other; `fresh`: as processes of their own."""
    made = []
    with cache_folder(folders[rank]), measuring(seconds[rank]) as measured, small_models_up_to(small):
        for case in cases:
            transport = Watched(transport_for(group()))
            all_reduce = case.all_reduce(transport)
            before = len(measured)
            made.append(Choice(all_reduce.prepare().layout.chunks, len(measured) - before, transport.events))
            if fresh:
                tuner.forget()
    return made


def choices_on_hosts(
    rank: int, size: int, cases: list[Case], folders: list[str], seconds: list[list[float]], hosts: list[int]
) -> list[Choice]:
    """The same on hosts with these numbers, a rank each, as torchrun gives them."""
    with patch.dict(os.environ, {"GROUP_RANK": str(hosts[rank])}):
        return choices(rank, size, cases, folders, seconds)


def loaded_alone(rank: int, size: int, case: Case, who: int) -> tuple[int, int, bool] | None:
    """Rank `who` loads a state into an object that would measure: no other rank takes part."""
    saved = case.all_reduce(group())
    steps.record(case, rank, group(), all_reduce=saved)
    if rank != who:
        return None
    with measuring([]) as measured:
        loaded = replace(case, chunks="auto").all_reduce(group())
        loaded.load_state_dict(saved.state_dict())
        return loaded.chunks, len(measured), steps.same_state(steps.state_of(saved), steps.state_of(loaded))


def really_measured(
    rank: int, size: int, case: Case, folder: str
) -> tuple[list[int], list[tuple[int, float]], Recorded]:
    """Nothing replaced: what `onebit tune` shows, then a run that chooses by itself."""
    seen: list[tuple[int, float]] = []
    with cache_folder(folder), small_models_up_to(0):
        topology, numel = Topology.of(group()), sum(case.numels)
        options = chunking.candidates(numel, size, case.block_size)
        seconds = chunking.measure_chunks(
            topology,
            numel,
            torch.device("cpu"),
            scale=case.scale,
            norm=case.norm,
            block_size=case.block_size,
            options=options,
            progress=lambda chunks, s: seen.append((chunks, s)),
        )
        assert list(seconds.items()) == seen
        return options, seen, steps.record(case, rank, group())
