"""A short run of three ranks, or of two nodes of two, that saves as it goes and, started again, goes on from there.

python -m torch.distributed.run --nproc-per-node 3 -m tests.faults.training FOLDER OneBitAdam --fault kill,4,1
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onebit
from onebit.collectives import CollectiveError
from tests.faults.striking import POINTS, Fault, Striking, strike_of
from tests.onebit.runs import Case, bits, take
from tests.ranks import group

SAVE_EVERY = 4
STRUCK = {1: 6, 2: 11}  # the step in which a fault of each stage strikes


def case_of(kind: str, reply: str | int, each: int = 1) -> Case:
    """Seven steps of stage 1, seven of stage 2."""
    options = {"freeze_step": 7, "chunks": 2, "check_every": 5, "reply": reply}
    return Case(kind, steps=14, options=options, groups=({}, {"lr": 2e-3}), each=each)


@dataclass(frozen=True)
class Raised:
    """The error of a survivor, and how long it waited in that step."""

    error: str
    seconds: float


def train(case: Case, transport: Striking, folder: Path) -> str:
    """Train from the last checkpoint to the end. Returns a digest of all that this rank then holds."""
    params, latest = case.parameters(), folder / "latest"
    done = int(latest.read_text()) if latest.exists() else 0
    if done:
        params = [nn.Parameter(torch.randn_like(p)) for p in params]
    optimizer, model = case.build(params, transport), nn.ParameterList(params)
    if done:
        onebit.load(folder / f"step-{done}", model, optimizer)
    for step in range(done + 1, case.steps + 1):
        transport.begin(step)
        take(case, transport.rank, optimizer, params, step=step)
        if step % SAVE_EVERY == 0:
            onebit.save(folder / f"step-{step}", model, optimizer)
            if transport.rank == 0:
                (folder / "latest.new").write_text(str(step))
                os.replace(folder / "latest.new", folder / "latest")
    optimizer.synchronize()
    return digest({"params": params, "state": optimizer.state_dict()})


def train_until_raised(case: Case, transport: Striking, folder: Path) -> Raised:
    try:
        train(case, transport, folder)
    except CollectiveError as error:
        return Raised(str(error), time.monotonic() - transport.began)
    return Raised("", 0.0)


def digest(state: Any) -> str:
    """Hash every key, number and bit."""

    def text(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{value.dtype} {tuple(value.shape)} {bits([value]).hex()}"
        if isinstance(value, dict):
            return text([(key, value[key]) for key in sorted(value, key=str)])
        return f"[{'; '.join(map(text, value))}]" if isinstance(value, (list, tuple)) else repr(value)

    return hashlib.sha256(text(state).encode()).hexdigest()


def undisturbed(rank: int, size: int, kind: str, reply: str | int, each: int, folder: str) -> str:
    """Train undisturbed, also from a checkpoint: the work of ranks of `tests.ranks`."""
    return train(case_of(kind, reply, each), Striking(group()), Path(folder))


def struck(rank: int, size: int, kind: str, folder: str, fault: Fault) -> Raised:
    case = case_of(kind, fault.at.reply, fault.at.each)
    return train_until_raised(case, striking(group(), rank, fault, Path(folder)), Path(folder))


def striking(ranks: Any, rank: int, fault: Fault, folder: Path) -> Striking:
    if rank != fault.victim:
        return Striking(ranks)
    return Striking(ranks, fault.at, STRUCK[fault.at.stage], strike_of(fault.how, folder))


def main() -> None:
    """One rank, started by torchrun or on a host of the network lab. The fault strikes at the first start alone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind")
    parser.add_argument("--reply", default=1)
    parser.add_argument("--fault", default="", help=f"how, number of the point (0 to {len(POINTS) - 1}), rank")
    options = parser.parse_args()
    torch.set_num_threads(1)
    store, rank, size = next(dist.rendezvous("env://"))
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    start = dist.PrefixStore(f"start {restarts}", store)  # torchrun's store still has the addresses of the dead
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), store=start, rank=rank, world_size=size)
    case = case_of(options.kind, options.reply)
    if options.fault and restarts == 0:
        how, point, victim = options.fault.split(",")
        fault = Fault(how, int(point), int(victim))
        transport = striking(dist.new_group(timeout=timedelta(seconds=fault.timeout)), rank, fault, options.folder)
        raised = train_until_raised(case, transport, options.folder)
        (options.folder / f"raised-{rank}").write_text(json.dumps(asdict(raised)))
        os._exit(1)  # as a trainer that lets the error end it, without a wait for those who are gone
    (options.folder / f"end-{rank}").write_text(train(case, Striking(dist.new_group()), options.folder))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
