"""The README's command on two hosts, of network namespaces: as Debian's, they call themselves 127.0.1.1."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from perf.lab.network import INTERFACE, NetworkLab
from tests.limits import HUNG
from tests.test_package import ROOT, TRAIN, ten_lines


@pytest.mark.netlab
def test_the_readmes_command_starts_on_both(nodes: NetworkLab, tmp_path: Path) -> None:
    (command,) = re.findall(r"# (GLOO\S+ torchrun .*) train.py", ten_lines())
    assert command in (ROOT / "docs" / "usage.md").read_text()
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(ten_lines=ten_lines()))
    command = command.replace("eth0", INTERFACE).replace("ADDRESS", nodes.address(0))
    command = command.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, "env", *shlex.split(command.replace("--node-rank 0", f"--node-rank {host}")),
             str(script)],
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for host, name in enumerate(nodes.namespaces)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=HUNG)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, printed, strict=True):
        assert process.returncode == 0 and "ranks: 2" in text, text
    (line,) = re.findall(r"`(onebit: Stage 2 begins after step \d+)`", (ROOT / "README.md").read_text())
    assert line in printed[0]
