"""What ranks do for the tests of failures: they die, stay away, or disagree."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass

import torch

from onebit.collectives import CollectiveError, CompressedAllReduce
from onebit.collectives.transport import transport_for
from tests.collectives import steps
from tests.collectives.steps import Case
from tests.collectives.work import Watched
from tests.ranks import group


@dataclass
class Outcome:
    """How a rank's run ended: the error ("" if none), and the seconds from what went wrong to it."""

    error: str
    seconds: float
    steps: int


def run_until_error(rank: int, size: int, case: Case, who: int, phase: str, how: str) -> Outcome:
    """Steps until an error. Rank `who` dies, or stays away, where `phase` would start for the second time."""
    met = []

    def hook(name: str) -> None:
        met.append(phase in name)
        if rank == who and sum(met) == 2 and met[-1]:
            time.sleep(0.5)  # the others have finished what came before
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)

    all_reduce = case.all_reduce(Watched(transport_for(group()), hook=hook))
    return _until_error(rank, case, all_reduce)


def run_until_killed(rank: int, size: int, case: Case, who: int, after: float) -> Outcome:
    """Rank `who` is killed at no particular moment, some seconds after its first step."""
    kill = threading.Timer(after, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def hook(phase: str) -> None:
        if rank == who and "scatter" in phase and kill.ident is None:
            kill.start()

    return _until_error(rank, case, case.all_reduce(Watched(transport_for(group()), hook=hook)))


def _until_error(rank: int, case: Case, all_reduce: CompressedAllReduce) -> Outcome:
    for step in range(case.steps):
        tensors, start = case.inputs(rank, step), time.monotonic()
        try:
            all_reduce(tensors)
        except CollectiveError as error:
            return Outcome(str(error), time.monotonic() - start, step)
    return Outcome("", 0.0, case.steps)


def disagree(rank: int, size: int, cases: dict[int, Case]) -> tuple[str, bool]:
    """Ranks in `cases` want something else than the rest (-1). The error; and the group still works afterwards."""
    case = cases.get(rank, cases[-1])
    tensors = case.inputs(rank, 0)
    kept = [t.clone() for t in tensors]
    error = ""
    try:
        case.all_reduce(group())(tensors)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    untouched = all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))
    if error.startswith("ValueError"):
        steps.record(cases[-1], rank, group())
    return error, untouched


def agreed_again(rank: int, size: int, case: Case) -> list[str]:
    """The phases of two calls."""
    transport = Watched(transport_for(group()))
    all_reduce = case.all_reduce(transport)
    for step in range(2):
        all_reduce(case.inputs(rank, step))
    return [event for event in transport.events if "start comparing" in event]


def never_come(rank: int, size: int, case: Case, who: int) -> Outcome:
    """Rank `who` joins the group and does nothing."""
    if rank == who:
        time.sleep(3600)
    return _until_error(rank, case, case.all_reduce(group()))
