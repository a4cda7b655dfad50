"""The examples run as their first line says."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.limits import HUNG
from tests.ranks import run_ranks_once

ROOT = Path(__file__).resolve().parent.parent
NEEDS = {"hf_trainer.py": "transformers", "lightning_trainer.py": "lightning", "accelerate_loop.py": "accelerate"}


def start(rank: int, size: int, example: str, port: int) -> str:
    """What an example prints where torchrun has started so many of it."""
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    sys.argv = [example]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(example, run_name="__main__")
    return printed.getvalue()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def check(printed: str, times: int) -> None:
    """It has learned, and sent so many times less."""
    ((loss, sent, dense),) = re.findall(r"loss ([\d.]+); sent ([\d,]+) bytes where a fp32 ring sends ([\d,]+)", printed)
    assert float(loss) < 0.15
    assert 0 < int(sent.replace(",", "")) < int(dense.replace(",", "")) / times


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs(example: Path) -> None:
    """On two ranks; the one with shards on two nodes of two."""
    if find_spec(NEEDS.get(example.name, "torch")) is None:
        pytest.skip(f"needs {NEEDS[example.name]}")
    printed = run_ranks_once(4 if example.name == "hsdp.py" else 2, start, (str(example), free_port()))
    check(printed[0], 20)


@pytest.mark.slow
def test_hosts_of_torchrun_are_nodes(tmp_path: Path) -> None:
    """Two torchruns of two ranks each, as on two hosts: the example with DDP has two levels, and says so."""
    script = tmp_path / "train.py"
    script.write_text(
        "import logging, sys\n"
        "logging.basicConfig(level=logging.INFO)\n"
        f"sys.path.insert(0, {str(ROOT / 'examples')!r})\n"
        "from ddp_adam import main\n"
        "main()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
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
    assert "2 nodes of 2 ranks" in outputs[0][1]
    check(outputs[0][0], 40)
