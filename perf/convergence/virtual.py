"""Ranks of one process: a thread each, whose collectives are copies between tensors of the same memory.

They run the real passes and send the real messages, so that 32 ranks fit a machine of two cores. A sum is that of rank
0, rank 1, ... in this order.

On a GPU the threads have one stream in common, torch's default one. What a rank hands over is in the stream before it
comes to the meeting, and what the others read of it goes into the stream after the meeting: the device does both in
this order, and no event has to say so.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from onebit.collectives.transport import Done, LocalTransport, Transport, Work
from perf.lab.processes import RankFailed

Result = TypeVar("Result")
HUNG = 900.0  # seconds that a rank waits for the others


class _Meeting:
    """A place for ranks to hand tensors to each other: all come before one reads, all have read before one goes on."""

    def __init__(self, size: int, turns: bool) -> None:
        self.barrier = threading.Barrier(size, timeout=HUNG)
        self.handed: list[Tensor] = [torch.empty(0)] * size
        self._turn = threading.Lock() if turns else None

    def turn(self) -> AbstractContextManager[object]:
        """What a rank holds while it computes, if ranks take turns."""
        return self._turn or nullcontext()

    def wait_for_all(self) -> None:
        if self._turn is None:
            self.barrier.wait()
            return
        self._turn.release()
        try:
            self.barrier.wait()
        finally:
            self._turn.acquire()


class VirtualRank(LocalTransport):
    name = "virtual"

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting

    def all_to_all(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        return self._exchange(sent, lambda handed: torch.stack([rows[self.rank] for rows in handed], out=out))

    def all_gather(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        return self._exchange(sent, lambda handed: torch.cat(list(handed), out=out))

    def all_max(self, values: Tensor, phase: str) -> None:
        self._exchange(values.clone(), lambda handed: values.copy_(torch.stack(list(handed)).amax(0)))

    def all_sum(self, values: Tensor, phase: str) -> Work:
        return self._exchange(values.clone(), lambda handed: values.copy_(sum(handed[1:], start=handed[0])))

    def duplicate(self) -> Transport:
        raise NotImplementedError("virtual ranks have one order of collectives: no overlap")

    def split(self, color: int) -> Transport:
        raise NotImplementedError("virtual ranks are one group: no two levels")

    def wait_for_all(self) -> None:
        self._meeting.wait_for_all()

    def _exchange(self, sent: Tensor, read: Callable[[Sequence[Tensor]], object]) -> Work:
        self._meeting.handed[self.rank] = sent
        self.wait_for_all()
        read(self._meeting.handed)
        self.wait_for_all()
        return Done()


def run_ranks(size: int, work: Callable[[VirtualRank], Result], turns: bool = False) -> list[Result]:
    """What `work` returned on each rank. RankFailed where one fails or leaves the others waiting: all end.

    turns: one rank computes at a time, from one collective to its next.
    """
    meeting = _Meeting(size, turns)
    results: dict[int, Result] = {}
    failed: list[str] = []

    def run(rank: int) -> None:
        try:
            with meeting.turn():
                results[rank] = work(VirtualRank(rank, size, meeting))
        except threading.BrokenBarrierError:
            pass  # another rank's error says why
        except BaseException:
            failed.append(f"rank {rank}: {traceback.format_exc()}")
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C
        meeting.barrier.abort()
        raise
    if len(results) < size:
        raise RankFailed("\n".join(failed) or "ranks did not come to the same collectives")
    return [results[rank] for rank in range(size)]


@contextmanager
def one_thread_a_rank() -> Iterator[None]:
    """A context in which torch computes in the thread that calls it, and optimizers log nothing."""
    threads, quiet = torch.get_num_threads(), os.environ.get("ONEBIT_QUIET")
    torch.set_num_threads(1)
    os.environ["ONEBIT_QUIET"] = "1"
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.environ.pop("ONEBIT_QUIET")
        if quiet is not None:
            os.environ["ONEBIT_QUIET"] = quiet
