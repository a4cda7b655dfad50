"""A process ends in good order while a thread of Gloo has not let go of a collective's tensors yet."""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.collectives.transport import lent
from onebit.collectives.transport import torch as transports
from tests.limits import HUNG
from tests.onebit.runs import on_ranks
from tests.ranks import group
from tests.test_package import ROOT

# Rank 0's thread is the last to let go, since rank 1 comes late, and is slow. Rank 0 ends meanwhile.
SCRIPT = """
import os, sys, threading, time, weakref
import torch, torch.distributed as dist
from onebit.collectives.transport.lent import lent

def slowly(_):
    begun.set()
    time.sleep(0.5)

def reduce():
    own = lent(torch.ones(3))
    known.append(weakref.ref(own, slowly))
    dist.all_reduce(own, async_op=True)

begun, known, child = threading.Event(), [], os.fork()
rank = int(child == 0)
dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(sys.argv[1], 2))
if rank == 0:
    reduce()
    print("let go of in time:", begun.wait(60), flush=True)
else:
    time.sleep(0.5)
    dist.all_reduce(torch.ones(3))
"""


def test_python_ends_after_the_threads_that_have_tensors(tmp_path: Path) -> None:
    """They are not met by its end, which aborts the process."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "store")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HUNG)
    assert (done.returncode, done.stdout) == (0, "let go of in time: True\n"), done


@on_ranks(1)
def test_what_threads_get_is_lent(rank: int) -> None:
    """All-reduces of DDP's hook and of the transport, and what does not go in pairs."""
    lends: list[str] = []

    def checked(name: str):
        collective = getattr(dist, name)

        def call(*tensors: torch.Tensor, **options):
            assert all(id(each) in lent.held for each in tensors if isinstance(each, torch.Tensor))
            lends.append(name)
            return collective(*tensors, **options)

        return call

    row, transport = torch.arange(4.0)[None], transports.TorchTransport(group())
    ddp = DistributedDataParallel(nn.Linear(3, 2), process_group=group())
    onebit.attach(ddp, onebit.OneBitAdam(ddp.parameters(), freeze_step=9, process_group=group()))
    names = ("all_reduce", "all_to_all_single", "all_gather_into_tensor", "all_gather_single")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            if hasattr(dist, name):
                patch.setattr(dist, name, checked(name))
        ddp(torch.ones(1, 3)).sum().backward()
        transport.all_max(row, "a test")
        transport.all_sum(row, "a test").wait()
        for act in (transport.all_to_all, transport.all_gather):
            out = torch.zeros_like(row)
            act(out, row, "a test").wait()
            assert out.equal(row)
    assert lends[-4:-1] == ["all_reduce", "all_reduce", "all_to_all_single"] and len(lends) >= 5, lends


def test_what_is_never_let_go_of_is_waited_for_no_longer_than_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(lent, "LONGEST", 0.02)
    monkeypatch.setattr(time, "sleep", slept.append)
    own = lent.lent(torch.ones(2))
    lent.wait_for_threads()
    assert slept
    del own
    slept.clear()
    gc.collect()
    lent.wait_for_threads()
    assert not slept
