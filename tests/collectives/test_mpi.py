"""The same steps over MPI: against the simulation, and bit for bit what Gloo's ranks get."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.collectives import mpi_main, work
from tests.collectives.test_transport import check_collectives
from tests.onebit.runs import run
from tests.ranks import group, run_ranks

ROOT = Path(__file__).resolve().parents[2]
SIZE = 3
SECONDS = 200  # on a machine that is full of other ranks
MAIN, TWO_LEVELS = "tests.collectives.mpi_main", "tests.collectives.mpi_two_levels"

# Open MPI asks for these where it runs as root or on fewer cores than ranks; MPICH does not know them.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def mpiexec() -> str | None:
    """The one installed beside this Python, else the system's."""
    beside = Path(sys.executable).parent
    return shutil.which("mpiexec", path=str(beside)) or shutil.which("mpiexec")


pytestmark = [
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("mpi4py") is None or mpiexec() is None,
        reason="needs mpi4py and mpiexec: pip install mpi4py mpich",
    ),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What mpi_main wrote."""
    return written(MAIN, SIZE, tmp_path_factory.mktemp("mpi") / "found.json")


def written(module, size, out):
    """What a module wrote that so many ranks ran, under mpi4py's own main, which ends all ranks when one raises."""
    command = [mpiexec(), "-n", str(size), sys.executable, "-m", "mpi4py", "-m", module, str(out)]
    started = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | OPEN_MPI | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = started.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    assert started.returncode == 0, output
    return json.loads(out.read_text())


def test_a_communicator_gets_the_transport_of_mpi(found):
    assert found["transport"] == [f"MpiTransport {rank} of {SIZE} mpi" for rank in range(SIZE)]


def test_collectives(found):
    for rank, answer in enumerate(found["collectives"]):
        check_collectives(rank, SIZE, answer)


def test_a_sum_sends_its_dtypes_bytes(found):
    """7 elements are 3 shards of 3; of both messages two thirds are for others."""
    assert found["bytes"] == [[2 * 12, 2 * 24]] * SIZE


@pytest.mark.parametrize("name", mpi_main.CASES)
def test_the_simulation_and_gloos_bytes(found, name):
    """mpi_main has checked the numbers; here the same case over Gloo gives the same results and residuals."""
    recorded = run_ranks(SIZE, work.recorded, mpi_main.CASES[name])
    assert found["numbers"][name] == [mpi_main.digest(r) for r in recorded]


def adam_over_gloo(rank, size):
    params = mpi_main.ADAM.parameters()
    run(mpi_main.ADAM, rank, mpi_main.ADAM.build(params, group()), params, first=1, last=mpi_main.ADAM.steps)
    return [p.tolist() for p in params]


def test_the_optimizer_of_both_stages(found):
    """Sums of stage 1 are made in another order than Gloo's, so the last bits differ; between ranks none does."""
    first, *others = found["optimizer"]
    assert others == [first] * (SIZE - 1)
    for ours, theirs in zip(first, run_ranks(SIZE, adam_over_gloo)[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_overlap_communicates_from_a_thread(found):
    assert found["overlap"] == found["optimizer"]


def test_a_rank_that_means_something_else(found):
    for (error,) in found["disagreement"]:
        assert error.startswith("ValueError: the ranks do not agree: rank 1 has block_size 64 where rank 0 has 32")


def test_a_rank_in_no_communicator(found):
    first, *members = found["outsider"]
    assert members == [[], []]
    assert first and first[0].startswith("ValueError: this rank is not in"), first


def test_a_rank_that_does_not_come_in_time(found):
    first, *others = found["absence"]
    assert first == ""
    for error in others:
        assert error.startswith("the gather phase (all-to-all of chunk 0) did not end within 1 s"), error
        assert error.endswith("[True]")


def test_two_levels_whatever_the_order_of_a_nodes_ranks(tmp_path):
    """mpi_two_levels has checked the numbers."""
    found = written(TWO_LEVELS, 4, tmp_path / "found.json")
    assert found["node"] == [[1, 0, True], [0, 1, True], [0, 0, True], [1, 1, True]]
    for ranks in found["optimizers"]:  # with overlap or without, on every rank
        assert {end for ends in ranks for end in ends} == {ranks[0][0]}
