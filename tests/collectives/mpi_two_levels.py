"""Two levels over MPI: run as `mpiexec -n 4 python -m mpi4py -m tests.collectives.mpi_two_levels OUT`.

Two nodes of two ranks. One node's communicator has its ranks the other way round, which must change nothing.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from onebit.collectives.topology import Topology
from tests.collectives import steps
from tests.collectives.steps import Case
from tests.onebit import runs

CASES = [
    Case((1000, 63), chunks=2, nodes=2),
    Case((300, 7), reply="direct", nodes=2),
    Case((300,), scale="tensor", reply=2, nodes=2),
]


def trained(comm: Any, kind: str) -> list[str]:
    """What a rank's parameters are after both stages, without overlap and with it."""
    ends = []
    for overlap in (False, True):
        options = {"freeze_step": 3, "chunks": 2, "overlap": overlap}
        case = runs.Case(kind, ((7, 9), (33,), (130,), (400,)), options=options, each=2)
        params = case.parameters()
        optimizer = case.build(params, comm)
        runs.run(case, comm.rank, optimizer, params, 1, 8)
        assert optimizer.compressing and optimizer.setup.topology.slices == 2
        ends.append(hashlib.sha256(runs.bits(params)).hexdigest())
    return ends


def main() -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    node = comm.Split(comm.rank // 2, -comm.rank if comm.rank < 2 else comm.rank)
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED)  # this machine: all ranks are one node, so one level
    found: dict[str, Any] = {
        "node": comm.gather([node.rank, Topology.of(comm, node).node.rank, Topology.of(comm, shared).node is None])
    }
    for case in CASES:
        recorded = comm.gather(steps.record(case, comm.rank, None, all_reduce=case.all_reduce(comm, node_group=node)))
        if recorded is not None:
            steps.check(case, recorded)
    found["optimizers"] = [comm.gather(trained(comm, kind)) for kind in runs.OPTIMIZERS]
    if comm.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
