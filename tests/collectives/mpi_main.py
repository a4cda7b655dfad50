"""The MPI side of test_mpi: run as `mpiexec -n 4 python -m mpi4py -m tests.collectives.mpi_main OUT`.

Each rank checks the transport and errors, rank 0 what ranks of nodes recorded. Rank 0 pickles to OUT what the test
compares with Gloo's ranks. Two levels are two nodes of two ranks, of which one's communicator has its ranks the other
way round: that must change nothing.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from mpi4py import MPI

from onebit.collectives import CollectiveError
from onebit.collectives.topology import Topology
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.mpi import MpiTransport
from tests import internals
from tests.checkpoints import Run
from tests.collectives import steps, work
from tests.collectives.steps import Case
from tests.onebit import runs

CASES = [
    Case((300, 63), 64, chunks=3, steps=20),
    Case((1000,), chunks=2, steps=10, scale="tensor", norm="l2"),
    Case((2049,), 2048, dtype="bfloat16"),
    Case((1,), 2048, steps=3),
    Case((300, 63), chunks=2, steps=4, bad=((2, 1, float("inf")),)),
]
OF_NODES = [
    Case((1000, 63), chunks=2, nodes=2),
    Case((300, 7), reply="direct", nodes=2),
    Case((300,), scale="tensor", nodes=2),
]
ADAM = runs.Case(steps=6, options={"freeze_step": 3, "chunks": 2})
PHASE = "the gather phase (all-to-all of chunk 0)"


def checked(comm: Any, case: Case, recorded: steps.Recorded) -> None:
    """Check against the simulation, on rank 0."""
    everyone = comm.gather(recorded)
    if everyone is not None:
        steps.check(case, everyone)


def numbers(comm: Any) -> list[steps.Recorded]:
    """Every case on all ranks, and one on the last ones alone."""
    mine = comm.Split(0 if comm.rank else 1)
    checked(mine, CASES[1], steps.record(CASES[1], mine.rank, mine))
    mine.Free()
    return [steps.record(case, comm.rank, comm) for case in CASES]


def optimizer(comm: Any, overlap: bool) -> list[Any]:
    """Both stages of 1-bit Adam: this rank's parameters at the end."""
    case = ADAM.but(options={**ADAM.options, "overlap": overlap})
    return [p.tolist() for p in Run(case, case.steps, comm.rank, comm).params]


def of_nodes(comm: Any) -> tuple[list[Any], list[list[bytes]]]:
    """This rank's place in its node, and what its parameters are after both stages, without overlap and with it."""
    node = comm.Split(comm.rank // 2, -comm.rank if comm.rank < 2 else comm.rank)
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED)  # this machine: all ranks are one node, so one level
    places = [node.rank, Topology.of(comm, node).node.rank, Topology.of(comm, shared).node is None]
    for case in OF_NODES:
        checked(comm, case, steps.record(case, comm.rank, None, all_reduce=case.all_reduce(comm, node_group=node)))
    return places, [[trained(comm, kind, overlap) for overlap in (False, True)] for kind in runs.OPTIMIZERS]


def trained(comm: Any, kind: str, overlap: bool) -> bytes:
    options = {"freeze_step": 3, "chunks": 2, "overlap": overlap}
    case = runs.Case(kind, ((7, 9), (33,), (130,), (400,)), options=options, each=2)
    run = Run(case, 8, comm.rank, comm)
    assert run.optimizer.compressing and internals.topology(run.optimizer).slices == 2
    return runs.bits(run.params)


def check_transport(comm: Any) -> None:
    """Check the collectives, and what a sum sends by its dtype's bytes: 7 elements are 4 shards of 2, and the sum of
    each goes to all."""
    transport = transport_for(comm)
    assert isinstance(transport, MpiTransport) and transport.name == "mpi"
    assert (transport.rank, transport.size) == (comm.rank, comm.size)
    assert MPI.Comm.Compare(transport.duplicate().communicator, comm) == MPI.CONGRUENT  # one of a thread's own
    work.check_collectives(transport)
    for dtype in (torch.bfloat16, torch.float32):
        with (
            patch.object(transport, "all_to_all", wraps=transport.all_to_all) as to_all,
            patch.object(transport, "all_gather", wraps=transport.all_gather) as gather,
        ):
            transport.all_sum(torch.ones(7, dtype=dtype), "counted")
        assert to_all.call_args.args[1].nbytes == 4 * gather.call_args.args[1].nbytes == 8 * dtype.itemsize


def check_refusals(comm: Any) -> None:
    """Rank 1 is refused if it wants another block_size, and a rank that is not in a communicator is."""
    case = Case((300,), 64 if comm.rank == 1 else 32)
    with pytest.raises(ValueError, match="the ranks do not agree: rank 1 has block_size 64 where rank 0 has 32"):
        case.all_reduce(comm)(torch.ones(300))
    mine = comm.Split(0 if comm.rank == 0 else MPI.UNDEFINED)
    with pytest.raises(ValueError, match="this rank is not in") if comm.rank else contextlib.nullcontext():
        transport_for(mine)


def check_absence(comm: Any) -> None:
    """Rank 0 comes late, when the others have given up."""
    transport = MpiTransport(comm, timeout=30 if comm.rank == 0 else 1)
    sent, out = (torch.zeros((comm.size, 64), dtype=torch.uint8) for _ in range(2))
    gave_up = comm.Dup()
    if comm.rank == 0:
        for rank in range(1, comm.size):
            gave_up.recv(source=rank)
    pending = transport.all_to_all(out, sent, PHASE)
    if comm.rank > 0:
        with pytest.raises(CollectiveError, match=f"{re.escape(PHASE)} did not end within 1 s"):
            pending.wait()
        gave_up.send(None, 0)
    comm.barrier()
    pending.wait()  # MPI still holds the buffers


def main() -> None:
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    check_transport(comm)
    own = {
        "numbers": numbers(comm),
        "optimizer": optimizer(comm, overlap=False),
        "overlap": optimizer(comm, overlap=True),
        "nodes": of_nodes(comm),
    }
    check_refusals(comm)
    check_absence(comm)
    everyone = comm.gather(own)
    if everyone is not None:
        Path(sys.argv[1]).write_bytes(pickle.dumps({name: [each[name] for each in everyone] for name in own}))


if __name__ == "__main__":
    main()
