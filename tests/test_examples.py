"""The examples run as their first line says."""

import os
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.limits import HUNG

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs(example):
    """On two ranks; the one with shards on two nodes of two."""
    others = {"hf_trainer.py": "transformers", "lightning_trainer.py": "lightning", "accelerate_loop.py": "accelerate"}
    if (package := others.get(example.name)) and find_spec(package) is None:
        pytest.skip(f"needs {package}")
    ranks = "4" if example.name == "hsdp.py" else "2"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, str(example)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(3):
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HUNG, cwd=ROOT)
        if "terminate called without an active exception" not in result.stderr:
            break  # else Gloo's threads met the interpreter's end, after the work was done: PyTorch's issue 190489
    assert result.returncode == 0, result.stderr[-3000:]
    loss, sent, dense = re.findall(
        r"loss ([\d.]+); sent ([\d,]+) bytes where a fp32 ring sends ([\d,]+)", result.stdout
    )[0]
    assert float(loss) < 0.15
    assert 0 < int(sent.replace(",", "")) < int(dense.replace(",", "")) / 20


@pytest.mark.slow
def test_hosts_of_torchrun_are_nodes(tmp_path):
    """Two torchruns of two ranks each, as on two hosts: the example with DDP has two levels, and says so."""
    script = tmp_path / "train.py"
    script.write_text(
        "import logging, sys\n"
        "logging.basicConfig(level=logging.INFO)\n"
        f"sys.path.insert(0, {str(ROOT / 'examples')!r})\n"
        "from ddp_adam import main\n"
        "main()\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    hosts = [
        subprocess.Popen(
            [*command, "--node-rank", str(host), str(script)],
            env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for host in (0, 1)
    ]  # fmt: skip
    try:
        outputs = [host.communicate(timeout=HUNG) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], outputs[0][1][-3000:]
    out, log = outputs[0]
    assert "2 nodes of 2 ranks" in log
    loss, sent, dense = re.findall(r"loss ([\d.]+); sent ([\d,]+) bytes where a fp32 ring sends ([\d,]+)", out)[0]
    assert float(loss) < 0.15
    assert 0 < int(sent.replace(",", "")) < int(dense.replace(",", "")) / 40
