"""The compiled kernels, run by the emulator, in processes of their own, whose kernels are not interpreted.

`python -m tests.ptx` runs all variants; here are a few that have every kernel, with one warp and with many, one program
and several, tails and whole blocks.
"""

import os
import subprocess
import sys

import pytest

from tests.limits import HUNG
from tests.ptx.cases import QUICK

LEAST = {**dict.fromkeys(QUICK, 100), "zeros and a flag": 40}  # launches, by variants


@pytest.mark.parametrize("name", LEAST)
def test_every_pass_is_right_in_every_order_and_nothing_races(name):
    """Not even for a value that nothing uses."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ptx", "--only", name]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HUNG)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    head, *_, total = result.stdout.splitlines()
    assert "variants in the orders forward, backward, odd, random" in head
    _, kernels, instructions, unused, _, verdict = total.split()
    assert int(kernels) > LEAST[name] and int(instructions.replace(",", "")) > 700 * LEAST[name]
    assert (unused, verdict) == ("0", "right")
