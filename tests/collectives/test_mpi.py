"""The same steps over MPI: bit for bit what Gloo's ranks get."""

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import Run
from tests.collectives import work
from tests.onebit.runs import same
from tests.ranks import group, run_ranks

mpi_main = pytest.importorskip("tests.collectives.mpi_main", reason="needs mpi4py", exc_type=ImportError)
ROOT = Path(__file__).resolve().parents[2]
SIZE = 4
SECONDS = 200  # on a machine that is full of other ranks

# Open MPI asks for these where it runs as root or on fewer cores than ranks; MPICH does not know them.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
BESIDE = str(Path(sys.executable).parent)  # this Python, else the system's
MPIEXEC = shutil.which("mpiexec", path=BESIDE) or shutil.which("mpiexec")
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(MPIEXEC is None, reason="needs mpiexec: pip install mpi4py mpich")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What mpi_main wrote, of every rank, under mpi4py's own main, which ends all ranks when one raises."""
    out = tmp_path_factory.mktemp("mpi") / "found"
    started = subprocess.Popen(
        [MPIEXEC, "-n", str(SIZE), sys.executable, "-m", "mpi4py", "-m", "tests.collectives.mpi_main", str(out)],
        cwd=ROOT, env=os.environ | OPEN_MPI | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = started.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    assert started.returncode == 0, output
    return pickle.loads(out.read_bytes())


def test_gloos_bytes(found):
    """The same cases over Gloo, which others compare with the simulation, give the same results and residuals."""
    for ours, theirs in zip(found["numbers"], run_ranks(SIZE, work.recorded_many, mpi_main.CASES), strict=True):
        for case, one, other in zip(mpi_main.CASES, ours, theirs, strict=True):
            assert one.result_bytes == other.result_bytes, case
            assert same(one.states[-1], other.states[-1]), case


def adam_over_gloo(rank, size):
    return [p.tolist() for p in Run(mpi_main.ADAM, mpi_main.ADAM.steps, rank, group()).params]


def test_the_optimizer_of_both_stages_without_overlap_and_with_it(found):
    """Sums of stage 1 are made in another order than Gloo's, so the last bits differ; between ranks none does."""
    first = found["optimizer"][0]
    assert found["optimizer"] == found["overlap"] == [first] * SIZE
    for ours, theirs in zip(first, run_ranks(SIZE, adam_over_gloo)[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_two_levels_whatever_the_order_of_a_nodes_ranks(found):
    """mpi_main has checked the numbers."""
    places, ends = zip(*found["nodes"], strict=True)
    assert list(places) == [[1, 0, True], [0, 1, True], [0, 0, True], [1, 1, True]]
    for kind in zip(*ends, strict=True):  # with overlap or without, on every rank
        assert {end for both in kind for end in both} == {kind[0][0]}
