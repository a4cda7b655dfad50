"""The README's command on two hosts, of network namespaces: as Debian's, they call themselves 127.0.1.1."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from perf.lab.network import INTERFACE, NetworkLab
from tests import forked
from tests.limits import HUNG
from tests.test_package import ROOT, TRAIN, ten_lines


@pytest.mark.netlab
def test_the_readmes_command_starts_on_both(nodes: NetworkLab, tmp_path: Path) -> None:
    (command,) = re.findall(r"# (GLOO\S+ torchrun .*) train.py", ten_lines())
    assert command in (ROOT / "docs" / "usage.md").read_text()
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(ten_lines=ten_lines()))
    command = command.replace("eth0", INTERFACE).replace("ADDRESS", nodes.address(0))
    variables, _, command = command.partition(" torchrun ")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= dict(each.split("=") for each in variables.split())
    started = []
    for host, name in enumerate(nodes.namespaces):
        own = shlex.split(command.replace("--node-rank 0", f"--node-rank {host}"))
        torchrun = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", *own, script]
        started.append(forked.Popen(torchrun, environment, cwd=str(tmp_path)))
    try:
        statuses = [process.wait(HUNG) for process in started]
        printed = [process.stdout.read() for process in started]
        if statuses != [0, 0]:
            pytest.fail(f"torchrun ended with {statuses}\n" + "\n".join(printed))  # whole: an assertion's text is cut
    finally:
        for process in started:
            process.kill()
    assert all("ranks: 2" in text for text in printed), printed
    (line,) = re.findall(r"`(onebit: Stage 2 begins after step \d+)`", (ROOT / "README.md").read_text())
    assert line in printed[0]
