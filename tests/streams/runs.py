"""Scenarios run on the simulated device, whole or without one call, and what is wrong with them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Iterator
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

from tests.streams.device import NOWHERE, Site
from tests.streams.scenarios import RANKS, SCENARIOS
from tests.streams.simulated import simulated
from tests.streams.sites import Call

MEANT = {"doubled": "mul_ in main"}  # gradients that change while messages read them: these messages do not count
ELSEWHERE = {  # calls that no scenario comes to, and why
    "collectives/transport/mpi.py": "MPI",
    "collectives/transport/torch.py all_max": "Gloo",
    "collectives/transport/torch.py _to_pinned": "Gloo",
    "collectives/chunking.py _slowest": "for timing",
    "kernels/tuning/timing.py": "for timing",
    "onebit/cli/demo/ranks.py": "a process",
    "onebit/cli/paced_link.py": "a thread of the host",
    "collectives/hand_over.py": "a reform",
    "collectives/signs_of_life.py": "a thread of the host",
    "onebit/elastic/following.py": "a thread of the host",
    "onebit/optim/merging.py add_residual_shares": "a reform",
}


@contextlib.contextmanager
def ranks() -> Iterator[None]:
    """A world in which collectives can be simulated."""
    assert fake_pg is not None  # its import makes the backend known
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def faults_of(name: str, left_out: Site = NOWHERE) -> tuple[list[str], frozenset[Site]]:
    """Return a scenario's faults, and the calls that it comes to."""
    with (
        warnings.catch_warnings(),
        mock.patch.dict(os.environ, ONEBIT_QUIET="1"),
        mock.patch.object(logging.getLogger("onebit"), "level", logging.ERROR),
        simulated(left_out) as device,
    ):
        warnings.simplefilter("ignore")
        SCENARIOS[name](device)
    assert device.recorder.launches > 50
    found = [each for each in device.recorder.faults if MEANT.get(name, "\0") not in each]
    return found, frozenset(device.reached)


clean = functools.cache(faults_of)


def why_elsewhere(call: Call) -> str | None:
    return next((why for start, why in ELSEWHERE.items() if str(call).startswith(start)), None)


def come_to(call: Call) -> list[str]:
    """The scenarios that do."""
    return [name for name in SCENARIOS if call.site in clean(name)[1]]


def found_by(call: Call) -> tuple[str, str] | None:
    """The first scenario that has a fault without the call, and the fault."""
    for name in reversed(come_to(call)):  # the last ones are for what is rare
        if found := faults_of(name, call.site)[0]:
            return name, found[0]
    return None
