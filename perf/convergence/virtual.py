"""Ranks of one process: a thread each, whose collectives are copies between tensors of the same memory.

They run the real passes and send the real messages, so that 32 ranks fit a machine of two cores. A sum is that of rank
0, rank 1, ... in this order.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from onebit.collectives.transport import Done, LocalTransport, Transport, Work
from perf.lab.processes import RankFailed

Result = TypeVar("Result")
HUNG = 900.0  # seconds that a rank waits for the others


class _Meeting:
    """Where ranks hand tensors to each other: all come before one reads, all have read before one goes on."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=HUNG)
        self.handed: list[Tensor] = [torch.empty(0)] * size


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
        self._meeting.barrier.wait()

    def _exchange(self, sent: Tensor, read: Callable[[Sequence[Tensor]], object]) -> Work:
        self._meeting.handed[self.rank] = sent
        self.wait_for_all()
        read(self._meeting.handed)
        self.wait_for_all()
        return Done()


def run_ranks(size: int, work: Callable[[VirtualRank], Result]) -> list[Result]:
    """What `work` returned on each rank. RankFailed where one fails or leaves the others waiting: all end."""
    meeting = _Meeting(size)
    results: dict[int, Result] = {}
    failed: list[str] = []

    def run(rank: int) -> None:
        try:
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
