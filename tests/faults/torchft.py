"""A replica is killed under torchft: how long until the others commit their next step: python -m tests.faults.torchft

torchft's own pattern (AdamW, gradients averaged by Manager.allreduce) and onebit.integrations.torchft, in turn, with
the same lighthouse. The seconds are those from the SIGKILL of one of three replicas to the end of the step that the
others take next.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from perf.train_step.torchft import manager_of
from tests.faults.training import case_of
from tests.ranks import run_ranks_once

PATIENCE = timedelta(seconds=60)
PATIENT = {"timeout": PATIENCE, "quorum_timeout": PATIENCE}
TIMES, STRUCK, VICTIM = 3, 9, 1


@contextmanager
def lighthouse(**options: Any) -> Iterator[str]:
    """Its address. The server is a thread of this process."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, **options)
    try:
        yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()


def wrapped(name: int, address: str, optimizer: Any, silent: float = 60.0, **options: Any) -> Any:
    from onebit.integrations.torchft import OptimizerWrapper, QuorumGroup

    group = QuorumGroup(timedelta(seconds=silent))
    return OptimizerWrapper(manager_of(name, address, group, **{**PATIENT, **options}), optimizer)


class Theirs:
    """torchft's example with AdamW."""

    def __init__(self, name: int, address: str, params: list[Any]) -> None:
        from torchft.optim import OptimizerWrapper
        from torchft.process_group import ProcessGroupGloo

        self.params, optimizer = params, torch.optim.AdamW(params)
        self.manager = manager_of(name, address, ProcessGroupGloo(PATIENCE), **PATIENT)
        self.wrapper = OptimizerWrapper(self.manager, optimizer)
        self.manager.register_state_dict_fn("optimizer", optimizer.load_state_dict, optimizer.state_dict)
        self.zero_grad = self.wrapper.zero_grad

    def step(self) -> None:
        for work in [self.manager.allreduce(p.grad) for p in self.params]:
            work.wait()
        self.wrapper.step()


def replica(rank: int, size: int, kind: str, address: str, folder: Path) -> float:
    warnings.simplefilter("ignore", UserWarning)
    case = case_of("OneBitAdam", 1)
    case = case.but(options={**case.options, "elastic": True}, shapes=((1000, 100),))
    params, killed = case.parameters(), folder / "killed"
    own = kind == "onebit"
    optimizer: Any = wrapped(rank, address, case.build(params)) if own else Theirs(rank, address, params)
    manager = optimizer.manager
    dist.barrier()
    optimizer.zero_grad()
    while True:
        if rank == VICTIM and manager.current_step() == STRUCK:
            killed.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        for p, g in zip(params, case.gradients(rank, 1), strict=True):
            p.grad = g
        before = manager.current_step()
        optimizer.step()
        if before >= STRUCK and manager.current_step() > before:
            seconds = time.monotonic() - float(killed.read_text())
            optimizer.zero_grad()  # all come here
            return seconds
        optimizer.zero_grad()


def main() -> int:
    for trial in range(TIMES):
        for kind in ("torchft", "onebit"):
            with tempfile.TemporaryDirectory() as folder, lighthouse() as address:
                found = run_ranks_once(3, replica, (kind, address, Path(folder)), expect_dead=(VICTIM,))
            seconds = max(each for each in found if each is not None)
            print(f"{trial + 1}/{TIMES} {kind}: next step committed {seconds:.2f} s after the kill", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
