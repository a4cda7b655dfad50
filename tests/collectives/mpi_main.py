"""The MPI side of test_mpi: run as `mpiexec -n 4 python -m mpi4py -m tests.collectives.mpi_main OUT`.

Rank 0 checks what the ranks recorded and writes to OUT, as JSON, what the test compares with Gloo's ranks. Two levels
are two nodes of two ranks, of which one's communicator has its ranks the other way round: that must change nothing.
"""

from __future__ import annotations

import hashlib
import json
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

CASES = {
    "block": Case((300, 63), 64, chunks=3, steps=20),
    "tensor": Case((1000,), chunks=2, steps=10, scale="tensor", norm="l2"),
    "bf16": Case((2049,), 2048, dtype="bfloat16"),
    "one": Case((1,), 2048, steps=3),
    "not finite": Case((300, 63), chunks=2, steps=4, bad=((2, 1, float("inf")),)),
}
OF_NODES = [
    Case((1000, 63), chunks=2, nodes=2),
    Case((300, 7), reply="direct", nodes=2),
    Case((300,), scale="tensor", reply=2, nodes=2),
]
ADAM = runs.Case(steps=6, options={"freeze_step": 3, "chunks": 2})
PHASE = "the gather phase (all-to-all of chunk 0)"


def digest(recorded: steps.Recorded) -> str:
    """Of every result and the last state."""
    state = [value.tobytes() for _, value in sorted(recorded.states[-1].items()) if hasattr(value, "tobytes")]
    return hashlib.sha256(b"".join([recorded.result_bytes, *state])).hexdigest()


def checked(comm: Any, case: Case, recorded: steps.Recorded) -> list[str]:
    """Against the simulation, on rank 0."""
    everyone = comm.gather(recorded)
    if everyone is None:
        return []
    if not case.bad:
        steps.check(case, everyone)
    return [digest(each) for each in everyone]


def numbers(comm: Any) -> dict[str, list[str]]:
    """Every case on all ranks, and one on the last ones alone."""
    found = {name: checked(comm, case, steps.record(case, comm.rank, comm)) for name, case in CASES.items()}
    mine = comm.Split(0 if comm.rank else 1)
    checked(mine, CASES["tensor"], steps.record(CASES["tensor"], mine.rank, mine))
    mine.Free()
    return found


def optimizer(comm: Any, overlap: bool = False) -> list[Any]:
    """Both stages of 1-bit Adam: each rank's parameters at the end."""
    case = ADAM.but(options={**ADAM.options, "overlap": overlap})
    return comm.gather([p.tolist() for p in Run(case, case.steps, comm.rank, comm).params])


def of_nodes(comm: Any) -> list[list[Any]]:
    """Places of the ranks in their nodes, and what their parameters are after both stages, with overlap and without."""
    node = comm.Split(comm.rank // 2, -comm.rank if comm.rank < 2 else comm.rank)
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED)  # this machine: all ranks are one node, so one level
    places = [node.rank, Topology.of(comm, node).node.rank, Topology.of(comm, shared).node is None]
    for case in OF_NODES:
        checked(comm, case, steps.record(case, comm.rank, None, all_reduce=case.all_reduce(comm, node_group=node)))
    ends = [[trained(comm, kind, overlap) for overlap in (False, True)] for kind in runs.OPTIMIZERS]
    return comm.gather([places, ends])


def trained(comm: Any, kind: str, overlap: bool) -> str:
    options = {"freeze_step": 3, "chunks": 2, "overlap": overlap}
    case = runs.Case(kind, ((7, 9), (33,), (130,), (400,)), options=options, each=2)
    run = Run(case, 8, comm.rank, comm)
    assert run.optimizer.compressing and run.optimizer.setup.topology.slices == 2
    return hashlib.sha256(runs.bits(run.params)).hexdigest()


def refusals(comm: Any) -> list[list[str]]:
    """The errors of every rank where rank 1 wants another block_size, and where only rank 0 is in a communicator."""
    errors: list[str] = []
    with work.error_of(errors):
        Case((300,), 64 if comm.rank == 1 else 32).all_reduce(comm)(torch.ones(300))
    mine = comm.Split(0 if comm.rank == 0 else MPI.UNDEFINED)
    with work.error_of(errors):
        transport_for(mine)
    return comm.gather(errors)


def absence(comm: Any) -> list[str]:
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
    return comm.gather("".join(errors))


def bytes_of_sums(transport: Any) -> list[list[int]]:
    """What this rank hands to MPI for the sum of 7 elements of 2, and of 4 bytes."""
    counting = work.Watched(transport)
    counts = []
    for dtype in (torch.bfloat16, torch.float32):
        counting.sent = 0
        type(transport).all_sum(counting, torch.ones(7, dtype=dtype), "counted")
        counts.append(counting.sent)
    return transport.communicator.gather(counts)


def main() -> None:
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    transport = transport_for(comm)
    assert MPI.Comm.Compare(transport.duplicate().communicator, comm) == MPI.CONGRUENT  # one of a thread's own
    found = {
        "transport": comm.gather(f"{type(transport).__name__} {transport.rank} of {transport.size} {transport.name}"),
        "collectives": comm.gather(work.collectives_over(transport)),
        "bytes": bytes_of_sums(transport),
        "numbers": numbers(comm),
        "optimizer": optimizer(comm),
        "overlap": optimizer(comm, overlap=True),
        "nodes": of_nodes(comm),
        "refusals": refusals(comm),
        "absence": absence(comm),
    }
    if comm.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
