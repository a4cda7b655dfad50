"""The compiled kernels, run by the emulator, in a process of its own, whose kernels are not interpreted.

`python -m tests.ptx` runs all variants in four orders; here are a few that have every kernel, with one warp and with
many, one program and several, tails and whole blocks, in the orders in which faults put into kernels are looked for.
"""

import os
import subprocess
import sys

from tests.limits import HUNG
from tests.ptx.cases import QUICK, WITH_ZEROS
from tests.ptx.mutants import ORDERS

LEAST = {**dict.fromkeys(QUICK, 50), **dict.fromkeys(WITH_ZEROS, 8), "all": 300}  # launches, by variants


def test_every_pass_is_right_in_every_order_and_nothing_races():
    """Nothing races even for a value that nothing uses."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ptx", "--quick", f"--orders={','.join(ORDERS)}", "--jobs=1"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HUNG)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    head, _, *rows = result.stdout.splitlines()
    assert f"{len(QUICK)} variants in the orders {', '.join(ORDERS)}" in head
    assert len(rows) == len(LEAST)
    for row, (name, least) in zip(rows, LEAST.items(), strict=True):
        kernels, instructions, unused, _, verdict = row.removeprefix(name).split()
        assert int(kernels) >= least and int(instructions.replace(",", "")) > 700 * least, row
        assert (unused, verdict) == ("0", "right"), row
