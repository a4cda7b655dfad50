"""The examples run as their first line says, on ranks that have what torchrun gives them."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import runpy
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from onebit.collectives.store import tcp_store
from tests.ranks import run_ranks_once

FOLDER = Path(__file__).resolve().parent.parent / "examples"
NEEDS = {
    "hf_trainer.py": ["transformers"],
    "lightning_trainer.py": ["lightning"],
    "accelerate_loop.py": ["accelerate"],
    "trl_lora.py": ["trl", "peft"],
}
STEPS = {"elastic.py": 500}  # a person who pulls a cable needs more
TIMES = {"ddp.py": 8, "ddp_adamw.py": 6, "muon.py": 6}  # less is sent, full-precision steps counted; of others: 20


def start(rank: int, size: int, example: str, port: int, each: int, *arguments: str) -> str:
    """What an example prints and logs where torchrun has started `each` of it on every host."""
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank % each), "GROUP_RANK": str(rank // each)}
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(each), "GROUP_WORLD_SIZE": str(size // each)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    if torch.cuda.is_available():
        os.environ |= {"NCCL_HOSTID": f"r{rank}", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}
        os.environ |= {"NCCL_SOCKET_IFNAME": "lo"}
    sys.argv = [example, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        logging.basicConfig(level=logging.INFO, stream=printed)
        steps = STEPS.get(Path(example).name)
        main = runpy.run_path(example, run_name="short" if steps else "__main__")["main"]
        if steps:
            main(steps)
    return printed.getvalue()


def printed_by_rank_0(example: str, ranks: int, each: int, *arguments: str) -> str:
    store = tcp_store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_ranks_once(ranks, start, (str(FOLDER / example), store.port, each, *arguments))[0]


def run(example: str, ranks: int, each: int, *arguments: str) -> str:
    """It has learned, and sent so many times less than fp32."""
    printed = printed_by_rank_0(example, ranks, each, *arguments)
    ((loss, sent, dense),) = re.findall(r"loss ([\d.]+); sent ([\d,]+) bytes where a fp32 ring sends ([\d,]+)", printed)
    assert float(loss) < 0.15
    assert 0 < int(sent.replace(",", "")) < int(dense.replace(",", "")) / TIMES.get(example, 20)
    return printed


def skip_without_its_libraries(example: str) -> None:
    if lacks := [library for library in NEEDS.get(example, []) if find_spec(library) is None]:
        pytest.skip(f"needs {', '.join(lacks)}")


@pytest.mark.parametrize("example", sorted(path.name for path in FOLDER.glob("*.py") if path.name != "ddp.py"))
def test_an_example_runs(example: str) -> None:
    """It runs on two ranks; the one with shards on two nodes of two."""
    skip_without_its_libraries(example)
    ranks = 4 if example == "hsdp.py" else 2
    run(example, ranks, ranks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("example", sorted(path.name for path in FOLDER.glob("*.py") if path.name != "hsdp.py"))
def test_an_example_runs_on_a_gpu(example: str) -> None:
    """It runs on two ranks, each as if alone on its host: see tests/collectives/test_gpu.py."""
    skip_without_its_libraries(example)
    run(example, 2, 1)


def test_the_example_with_ddp_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    """A run with nothing to do says so, and how to start anew."""
    first = run("ddp.py", 2, 2, str(tmp_path))
    ended = printed_by_rank_0("ddp.py", 2, 2, str(tmp_path))
    assert f"the run in {tmp_path} is finished, after 300 steps: for a new one" in ended and "loss" not in ended
    shutil.rmtree(tmp_path / "step-000000300")
    again = run("ddp.py", 2, 2, str(tmp_path))
    assert "Stage 2 begins" in first and "Stage 2 begins" not in again
    assert first.rpartition("loss ")[2].split(";")[0] == again.rpartition("loss ")[2].split(";")[0]


def test_hosts_of_torchrun_are_nodes() -> None:
    """Two hosts of two ranks: the example with DDP has two levels, and says so. A rank sends half of what goes out:
    4 bytes an element in 25 steps, a bit and its share of a scale in 275."""
    printed = run("ddp.py", 4, 2)
    assert "2 nodes of 2 ranks" in printed
    (sent,) = re.findall(r"sent ([\d,]+) bytes", printed)
    assert int(sent.replace(",", "")) == pytest.approx(16_897 / 2 * (25 * 4 + 275 * 1.04 / 8), rel=0.03)
