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

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch, torch.distributed as dist
model = torch.nn.Linear(40, 30)
{ten_lines}
for step in range(7):
    optimizer.zero_grad()
    ddp(torch.randn(8, 40)).square().mean().backward()
    optimizer.step()
print("compressing", optimizer.compressing, dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.netlab
def test_the_readmes_command_starts_on_both(nodes: NetworkLab, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    lines = re.search(r"## Ten lines\n\n```python\n(.*?)```", readme, re.S)
    assert lines
    (command,) = re.findall(r"# (GLOO\S+ torchrun .*) train.py", lines[1])
    assert command in (ROOT / "docs" / "usage.md").read_text()
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(ten_lines=lines[1]))
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
        assert process.returncode == 0 and "compressing True 2" in text, text
    (line,) = re.findall(r"`(onebit: Stage 2 begins after step \d+)`", readme)
    assert line in printed[0]
