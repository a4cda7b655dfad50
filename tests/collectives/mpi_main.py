"""The MPI side of test_mpi: run as `mpiexec -n 4 python -m mpi4py -m tests.collectives.mpi_main OUT`.

Rank 0 checks what ranks of nodes recorded, and pickles to OUT what the test compares with Gloo's ranks. Two levels are
two nodes of two ranks, of which one's communicator has its ranks the other way round: that must change nothing.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from onebit.collectives.topology import Topology
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.mpi import MpiTransport
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
    """Against the simulation, on rank 0."""
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
    assert run.optimizer.compressing and run.optimizer.setup.topology.slices == 2
    return runs.bits(run.params)


def refusals(comm: Any) -> list[str]:
    """The errors where rank 1 wants another block_size, and where only rank 0 is in a communicator."""
    errors: list[str] = []
    with work.error_of(errors):
        Case((300,), 64 if comm.rank == 1 else 32).all_reduce(comm)(torch.ones(300))
    mine = comm.Split(0 if comm.rank == 0 else MPI.UNDEFINED)
    with work.error_of(errors):
        transport_for(mine)
    return errors


def absence(comm: Any) -> str:
    """Rank 0 comes late, when the others have given up: their error."""
    transport = MpiTransport(comm, timeout=30 if comm.rank == 0 else 1)
    sent, out = (torch.zeros((comm.size, 64), dtype=torch.uint8) for _ in range(2))
    gave_up, errors = comm.Dup(), []
    if comm.rank == 0:
        for rank in range(1, comm.size):
            gave_up.recv(source=rank)
    pending = transport.all_to_all(out, sent, PHASE)
    with work.error_of(errors):
        pending.wait()
    if errors:
        gave_up.send(None, 0)
    comm.barrier()
    pending.wait()  # MPI still holds the buffers
    return "".join(errors)


def bytes_of_sum(transport: Any, dtype: torch.dtype) -> int:
    """What this rank hands to MPI for the sum of 7 elements."""
    counting = work.Watched(transport)
    type(transport).all_sum(counting, torch.ones(7, dtype=dtype), "counted")
    return counting.sent


def main() -> None:
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    transport = transport_for(comm)
    assert MPI.Comm.Compare(transport.duplicate().communicator, comm) == MPI.CONGRUENT  # one of a thread's own
    own = {
        "transport": f"{type(transport).__name__} {transport.rank} of {transport.size} {transport.name}",
        "collectives": work.collectives_over(transport),
        "bytes": [bytes_of_sum(transport, dtype) for dtype in (torch.bfloat16, torch.float32)],
        "numbers": numbers(comm),
        "optimizer": optimizer(comm, overlap=False),
        "overlap": optimizer(comm, overlap=True),
        "nodes": of_nodes(comm),
        "refusals": refusals(comm),
        "absence": absence(comm),
    }
    everyone = comm.gather(own)
    if everyone is not None:
        Path(sys.argv[1]).write_bytes(pickle.dumps({name: [each[name] for each in everyone] for name in own}))


if __name__ == "__main__":
    main()
