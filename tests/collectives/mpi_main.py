"""The MPI side of test_mpi: run as `mpiexec -n N python -m mpi4py -m tests.collectives.mpi_main OUT`.

Rank 0 checks what the ranks recorded and writes to OUT, as JSON, what the test compares with Gloo's ranks.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from onebit.collectives import CollectiveError
from onebit.collectives.transport import transport_for
from tests.collectives import steps, work
from tests.collectives.steps import Case
from tests.onebit import runs
from tests.onebit.runs import run

CASES = {
    "block": Case((300, 63), 64, chunks=3, steps=60),
    "tensor": Case((1000,), chunks=2, steps=20, scale="tensor", norm="l2"),
    "bf16": Case((2049,), 2048, dtype="bfloat16"),
    "one": Case((1,), 2048, steps=3),
    "not finite": Case((300, 63), chunks=2, steps=4, bad=((2, 1, float("inf")),)),
}
ADAM = runs.Case(steps=6, options={"freeze_step": 3, "chunks": 2})
PHASE = "the gather phase (all-to-all of chunk 0)"


def digest(recorded: steps.Recorded) -> str:
    """Of every result and the last state."""
    parts = [recorded.result_bytes] + [state.tobytes() for state in arrays(recorded.states[-1])]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def arrays(state: dict[str, Any]) -> list[Any]:
    return [value for _, value in sorted(state.items()) if hasattr(value, "tobytes")]


def numbers(comm: Any) -> dict[str, list[str]]:
    """Every case against the simulation, on all ranks and on the last ones alone."""
    found = {}
    for name, case in CASES.items():
        recorded = comm.gather(steps.record(case, comm.rank, comm))
        if recorded is not None:
            if not case.bad:
                steps.check(case, recorded)
            found[name] = [digest(r) for r in recorded]
    mine = comm.Split(0 if comm.rank else 1)
    case = CASES["tensor"]
    recorded = mine.gather(steps.record(case, mine.rank, mine))
    if recorded is not None:
        steps.check(case, recorded)
    mine.Free()
    return found


def optimizer(comm: Any, overlap: bool = False) -> list[Any]:
    """Both stages of 1-bit Adam: each rank's parameters at the end."""
    case = ADAM.but(options={**ADAM.options, "overlap": overlap})
    params = case.parameters()
    run(case, comm.rank, case.build(params, comm), params, first=1, last=case.steps)
    return comm.gather([p.tolist() for p in params])


def disagreement(comm: Any) -> list[str]:
    """The error of every rank where rank 1 wants another block_size."""
    errors: list[str] = []
    with work.error_of(errors):
        Case((300,), 64 if comm.rank == 1 else 32).all_reduce(comm)(torch.ones(300))
    return comm.gather(errors)


def outsider(comm: Any) -> list[list[str]]:
    """The error of a rank that is in no communicator."""
    from mpi4py import MPI

    mine = comm.Split(0 if comm.rank else MPI.UNDEFINED)
    errors: list[str] = []
    with work.error_of(errors):
        transport_for(mine)
    if mine != MPI.COMM_NULL:
        mine.Free()
    return comm.gather(errors)


def absence(comm: Any) -> list[str]:
    """Rank 0 comes late; the error of the others, and whether it came in time."""
    from onebit.collectives.transport.mpi import MpiTransport

    transport = MpiTransport(comm, timeout=30 if comm.rank == 0 else 1)
    sent, out = (torch.zeros((comm.size, 64), dtype=torch.uint8) for _ in range(2))
    if comm.rank == 0:
        time.sleep(2.5)
    pending, start, text = transport.all_to_all(out, sent, PHASE), time.monotonic(), ""
    try:
        pending.wait()
    except CollectiveError as error:
        text = f"{error} [{time.monotonic() - start < 2.4}]"
    comm.barrier()
    pending.wait()  # MPI still holds the buffers
    return comm.gather(text)


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
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    transport = transport_for(comm)
    found = {
        "transport": comm.gather(f"{type(transport).__name__} {transport.rank} of {transport.size} {transport.name}"),
        "collectives": comm.gather(work.collectives_over(transport)),
        "bytes": bytes_of_sums(transport),
        "numbers": numbers(comm),
        "optimizer": optimizer(comm),
        "overlap": optimizer(comm, overlap=True),
        "disagreement": disagreement(comm),
        "outsider": outsider(comm),
        "absence": absence(comm),
    }
    if comm.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
