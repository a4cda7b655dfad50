"""What the host does in a step: counted in a process of its own, since the passes are compiled there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

LAUNCHES = {  # of passes in one chunk, with 8 ranks
    ("1-bit Adam", "1 bit"): 7,
    ("1-bit LAMB", "1 bit"): 8,
    ("0/1 Adam", "1 bit"): 7,
    ("0/1 Adam, local steps", "local"): 5,
}
MOST_OPERATIONS = 20  # of torch, in such a step


def test_the_passes_of_a_step_are_launched_once_whatever_the_number_of_parameters(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "perf.kernels.host_time", "--parameters", "3", "--steps", "60", "--out", tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:] if line.startswith("|")]
    found = {(optimizer, kind): (int(launches), float(operations)) for optimizer, kind, launches, operations, _ in rows}
    assert {each: found[each][0] for each in LAUNCHES} == LAUNCHES
    assert all(0 < found[each][1] <= MOST_OPERATIONS for each in LAUNCHES)
    assert all(float(us) > 0 for *_, us in rows)
    (path,) = tmp_path.iterdir()
    assert [row["launches"] for row in json.loads(path.read_text())["rows"]] == [int(row[2]) for row in rows]
