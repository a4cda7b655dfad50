"""The ranks of a run of the convergence study: processes of this machine with a group over Gloo."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from perf.convergence.plan import Run
from perf.convergence.runs import Show, train
from perf.convergence.tasks import Prepared
from perf.lab.processes import RankFailed


def launch(run: Run, data: Path, show: Show) -> Mapping[str, Any]:
    """Train on ranks of their own; `data` is a file that torch.save made of Prepared's fields."""
    forking = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if forking else "spawn")
    if forking:
        context.set_forkserver_preload(["perf.convergence.launch", "onebit.kernels.cpu"])
    with tempfile.TemporaryDirectory(prefix="onebit-convergence-") as folder:
        ranks = {}
        try:
            for rank in range(run.ranks):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(rank, run, data, Path(folder, "store"), theirs))
                with _one_thread_each():
                    process.start()
                theirs.close()
                ranks[ours] = (rank, process)
            return _results(ranks, show)
        finally:
            for pipe, (_, process) in ranks.items():
                process.kill()
                process.join()
                pipe.close()


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """The environment of the server from which ranks are forked: read when torch is imported."""
    before = os.environ.copy()
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        os.environ.update(before)


def _results(ranks: Mapping[Any, tuple[int, Any]], show: Show) -> Mapping[str, Any]:
    """Rank 0's record, once all ranks are done. RankFailed where one is not."""
    found: dict[int, Any] = {}
    while len(found) < len(ranks):
        pipes: list[Any] = wait([pipe for pipe, (rank, _) in ranks.items() if rank not in found])
        for pipe in pipes:
            rank = ranks[pipe][0]
            try:
                what, value = pipe.recv()
            except EOFError:
                what, value = "error", "died"
            if what == "error":
                raise RankFailed(f"rank {rank}: {value}")
            if what == "progress":
                show(*value)
            else:
                found[rank] = value
    return found[0]


def _work(rank: int, run: Run, data: Path, store: Path, pipe: Connection) -> None:
    def show(step: int, loss: float) -> None:
        if rank == 0:
            pipe.send(("progress", (step, loss)))

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's
    threading.Thread(target=_end_with_driver, args=(pipe,), daemon=True).start()
    torch.set_num_threads(1)
    try:
        if loopback := [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]:
            os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]
        os.environ["ONEBIT_QUIET"] = "1"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=run.ranks)
        prepared = Prepared(**torch.load(data, mmap=True, weights_only=True))
        record = train(run, prepared, show)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send(("done", record))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


def _end_with_driver(pipe: Connection) -> None:
    try:
        pipe.recv()
    except (EOFError, OSError):
        os._exit(1)
