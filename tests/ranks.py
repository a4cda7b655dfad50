"""Ranks for tests: processes on this machine, joined by Gloo over loopback, that do what a test hands them.

    run_ranks(3, work, a, b)          [work(0, 3, a, b), work(1, 3, a, b), work(2, 3, a, b)], a rank each
    run_ranks_once(3, work, (a, b))   the same in fresh processes, where ranks may die; their group of three is WORLD

`work` is a module's function: it travels by name. `group()` is the process group of the ranks that work. Eight ranks
serve every call of `run_ranks`; fewer than eight are a sub-group. Whatever a rank raises comes back as a RanksError
with its traceback, and the next call gets new ranks. Every rank ends when the process that started it ends, however
it ends. Ranks are forked from a server that has imported torch and loaded the compiled loops once.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from onebit.collectives.store import tcp_store
from tests import reach
from tests.internals import let_groups_share_a_loop
from tests.limits import HUNG

SIZES = (1, 2, 3, 4, 8)
MOST = max(SIZES)
GROUP_TIMEOUT = 120.0  # seconds that a collective waits
START_TIMEOUT = 240.0
PRELOADED = (
    "torch._dynamo",
    "onebit",
    "onebit.kernels.cpu",
    "tests.ranks",
    "tests.onebit.runs",
    "tests.warm",
)  # what takes a rank seconds
FORKS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # to look for a GPU in a process that ranks are forked from is no harm
GRACE = 3.0  # what the others get to answer once a rank has failed

_pool: Ranks | None = None
_groups: dict[int, dist.ProcessGroup] = {}
_size = 0


class RanksError(AssertionError):
    """What went wrong on which rank."""


def group(size: int = 0) -> dist.ProcessGroup:
    """The process group of the ranks that `work` runs on, or of the first `size` of them."""
    return _groups[size or _size]


def run_ranks(size: int, work: Callable[..., Any], *args: Any, timeout: float = HUNG) -> list[Any]:
    """What `work(rank, size, *args)` returns on each of `size` ranks, in the order of ranks."""
    global _pool
    if size not in SIZES:
        raise ValueError(f"ranks come in groups of {SIZES}, not {size}; use run_ranks_once")
    if _pool is None:
        _pool = Ranks(MOST, SIZES)
        atexit.register(_pool.close)
    try:
        return _pool.run(size, work, args, timeout)
    except BaseException:
        atexit.unregister(_pool.close)
        _pool.close()
        _pool = None
        raise


def run_ranks_once(
    size: int,
    work: Callable[..., Any],
    args: tuple[Any, ...] = (),
    *,
    timeout: float = HUNG,
    group_timeout: float = GROUP_TIMEOUT,
    expect_dead: Collection[int] = (),
) -> list[Any]:
    """`run_ranks` with ranks of its own. Those in `expect_dead` must not answer: they die or never return."""
    ranks = Ranks(size, (size,), group_timeout)
    try:
        return ranks.run(size, work, args, timeout, expect_dead)
    finally:
        ranks.close()


class Ranks:
    """`size` processes in one torch.distributed world, with a group of the first n for every n of `groups`."""

    def __init__(self, size: int, groups: Collection[int], group_timeout: float = GROUP_TIMEOUT) -> None:
        forking = "forkserver" in multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if forking else "spawn")
        if forking:
            context.set_forkserver_preload(PRELOADED)
        else:  # ranks find the machine code in the cache
            importlib.import_module("tests.warm")
        self.store = tcp_store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        try:
            with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", **FORKS}):  # read when the server imports torch
                for rank in range(size):
                    ours, theirs = context.Pipe()
                    task = (rank, size, tuple(groups), self.store.port, group_timeout, theirs)
                    process = context.Process(target=_serve, args=task, daemon=True, name=f"rank {rank} of {size}")
                    process.start()
                    theirs.close()
                    self.pipes.append(ours)
                    self.processes.append(process)
            self._answers(size, START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    def run(
        self,
        size: int,
        work: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float,
        expect_dead: Collection[int] = (),
    ) -> list[Any]:
        task = pickle.dumps((size, work, args, reach.this_test()))
        for pipe in self.pipes[:size]:
            pipe.send_bytes(task)
        return self._answers(size, timeout, expect_dead)

    def close(self) -> None:
        """End every rank, whatever it is doing."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(5)
        for pipe in self.pipes:
            pipe.close()

    def _answers(self, size: int, timeout: float, expect_dead: Collection[int] = ()) -> list[Any]:
        stop = time.monotonic() + timeout
        results: list[Any] = [None] * size
        failures: dict[int, str] = {}
        awaited = {pipe: rank for rank, pipe in enumerate(self.pipes[:size])}
        while set(awaited.values()) - set(expect_dead) and (left := stop - time.monotonic()) > 0:
            for pipe in wait(list(awaited), left):
                rank = awaited.pop(pipe)
                failure, results[rank] = self._answer(rank, pipe)
                if rank in expect_dead:
                    failure = None if failure == "died" else f"was to die and answered {failure or results[rank]!r}"
                if failure is not None:
                    failures[rank] = failure
                    stop = min(stop, time.monotonic() + GRACE)
        late = sorted(set(awaited.values()) - set(expect_dead))
        self._show_stacks(late)
        failures |= dict.fromkeys(late, "gave no answer in time; its stack is in the captured stderr")
        if failures:
            raise RanksError("\n".join(f"rank {rank} of {size} {text}" for rank, text in sorted(failures.items())))
        return results

    def _answer(self, rank: int, pipe: Connection) -> tuple[str | None, Any]:
        try:
            good, value = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return "died", None
        return (None, value) if good else (f"failed:\n{value}", None)

    def _show_stacks(self, ranks: list[int]) -> None:
        if ranks and hasattr(signal, "SIGUSR1"):
            for rank in ranks:
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.2)


def _serve(rank: int, size: int, sizes: tuple[int, ...], port: int, group_timeout: float, pipe: Connection) -> None:
    """A rank's life: join the others, then answer one task after the other until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, whose end ends this process
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    torch.set_num_threads(1)
    tasks: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_listen, args=(pipe, tasks), daemon=True).start()
    _answer(pipe, lambda: _join(rank, size, sizes, port, timedelta(seconds=group_timeout)))
    while True:
        task = tasks.get()
        _answer(pipe, lambda task=task: _work(rank, task))


def _listen(pipe: Connection, tasks: queue.Queue[bytes]) -> None:
    """Receive tasks, and notice, while the rank works, that nobody waits for it any more."""
    try:
        while True:
            tasks.put(pipe.recv_bytes())
    finally:
        os._exit(1)


def _answer(pipe: Connection, produce: Callable[[], Any]) -> None:
    try:
        answer = pickle.dumps((True, produce()))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(answer)


def _join(rank: int, size: int, sizes: tuple[int, ...], port: int, timeout: timedelta) -> None:
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]
    let_groups_share_a_loop()
    store = tcp_store("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=START_TIMEOUT))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    for n in sizes:
        made = dist.group.WORLD if n == size else dist.new_group(range(n), timeout=timeout)
        if rank < n:
            _groups[n] = made


def _work(rank: int, task: bytes) -> Any:
    global _size
    _size, work, args, test = pickle.loads(task)
    with reach.recording(test):
        return work(rank, _size, *args)
