"""Two levels over MPI: run as `mpiexec -n 4 python -m mpi4py -m tests.collectives.mpi_two_levels OUT`.

Two nodes of two ranks. One node's communicator has its ranks the other way round, which must change nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from onebit.collectives.topology import Topology
from tests.collectives import steps
from tests.collectives.steps import Case

CASES = [
    Case((1000, 63), chunks=2, nodes=2),
    Case((300, 7), reply="direct", nodes=2),
    Case((300,), scale="tensor", reply=2, nodes=2),
]


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
    if comm.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
