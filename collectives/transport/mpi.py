"""MPI through mpi4py. Buffers are the host's; device buffers go as they are where the MPI says that it accepts them."""

from __future__ import annotations

import time
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from onebit.collectives.transport.protocol import CollectiveError, Done, Transport, Work
from onebit.collectives.waits import waiting
from onebit.kernels import streams

TIMEOUT = 1800.0  # seconds, as torch.distributed's


class MpiTransport:
    """A communicator of mpi4py. `timeout` seconds without an end are an error, as MPI itself has none."""

    name = "mpi"

    def __init__(self, communicator: Any = None, timeout: float = TIMEOUT) -> None:
        self.communicator = MPI.COMM_WORLD if communicator is None else communicator
        if self.communicator == MPI.COMM_NULL:
            raise ValueError(
                "this rank is not in the communicator it was given (it is COMM_NULL): build the optimizer or the "
                "all-reduce on the communicator's ranks alone"
            )
        self.rank, self.size = self.communicator.Get_rank(), self.communicator.Get_size()
        self.timeout = timeout
        self.cuda_aware = _accepts_cuda(self.communicator)

    def all_to_all(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        source, landing = self._send_buffer(sent), self._landing(out)
        request = self.communicator.Ialltoall(_spec(source), _spec(landing))
        return MpiWork(request, phase, self.timeout, source=source, landing=landing, out=out)

    def all_gather(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        source, landing = self._send_buffer(sent), self._landing(out)
        request = self.communicator.Iallgather(_spec(source), _spec(landing))
        return MpiWork(request, phase, self.timeout, source=source, landing=landing, out=out)

    def all_max(self, values: Tensor, phase: str) -> None:
        host = values.cpu()
        result = torch.empty_like(host)
        request = self.communicator.Iallreduce(host.numpy(), result.numpy(), op=MPI.MAX)
        MpiWork(request, phase, self.timeout, source=host, landing=result, out=values).wait()

    def all_sum(self, values: Tensor, phase: str) -> Work:
        """Rank k adds shard k and sends it to all: the same bits on each, which MPI's Allreduce does not promise, and
        16-bit values, which it can't add, travel as such."""
        host = values.to("cpu").view(-1)
        shards = host.new_zeros(self.size, -(-host.numel() // self.size))
        shards.view(-1)[: host.numel()] = host
        came = torch.empty_like(shards)
        self.all_to_all(came.view(torch.uint8), shards.view(torch.uint8), phase).wait()
        added_as = torch.float32 if values.dtype.itemsize == 2 else values.dtype
        own = came.sum(0, keepdim=True, dtype=added_as).to(values.dtype)
        self.all_gather(shards.view(torch.uint8), own.view(torch.uint8), phase).wait()
        values.copy_(shards.view(-1)[: host.numel()].view(values.shape))
        return Done()

    def duplicate(self) -> Transport:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ValueError(
                "this MPI does not let several threads communicate (it lacks MPI_THREAD_MULTIPLE): start it with that "
                "level of threads, or without overlap=True"
            )
        return MpiTransport(self.communicator.Dup(), self.timeout)

    def of_hosts(self) -> Transport:
        return self

    def world_rank(self, rank: int) -> int:
        return int(self.communicator.Get_group().Translate_ranks([rank], MPI.COMM_WORLD.Get_group())[0])

    def host_of(self, rank: int) -> str | None:
        return None

    def split(self, color: int) -> Transport:
        return MpiTransport(self.communicator.Split(color, self.rank), self.timeout)

    def ranks_in(self, of: Transport) -> list[int]:
        if not isinstance(of, MpiTransport):
            raise TypeError(f"a communicator of MPI can't be a part of ranks that communicate by {of.name}")
        own, theirs = self.communicator.Get_group(), of.communicator.Get_group()
        found = [int(rank) for rank in own.Translate_ranks(list(range(self.size)), theirs)]
        if MPI.UNDEFINED in found:
            raise ValueError(f"its rank {found.index(MPI.UNDEFINED)} is not in process_group")
        return found

    def _send_buffer(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor
        if self.cuda_aware:
            streams.wait_on_host(streams.current(tensor.device))  # MPI does not wait for streams
            return tensor
        return tensor.cpu()

    def _landing(self, out: Tensor) -> Tensor:
        return out if not out.is_cuda or self.cuda_aware else streams.pinned(out)


class MpiWork:
    """Holds what is on its way until it has arrived."""

    def __init__(self, request: Any, phase: str, timeout: float, source: Tensor, landing: Tensor, out: Tensor) -> None:
        self._request, self._phase, self._timeout = request, phase, timeout
        self._source, self._landing, self._out = source, landing, out

    def wait(self) -> None:
        with waiting(torch.device("cpu")):  # the host waits, wherever tensors are
            self._wait()
        if self._landing.data_ptr() != self._out.data_ptr():
            self._out.copy_(self._landing, non_blocking=True)

    def _wait(self) -> None:
        stop = time.monotonic() + self._timeout
        pause = 0.0
        while not self._request.Test():
            if time.monotonic() > stop:
                raise CollectiveError(
                    f"{self._phase} did not end within {self._timeout:.0f} s: a rank died or did not come (mpi). "
                    f"Restart the ranks from the last checkpoint"
                )
            time.sleep(pause)
            pause = min(1e-3, pause + 1e-5)  # leaves the core to the other ranks on a full machine


def _spec(tensor: Tensor) -> Any:
    """mpi4py reads device tensors by __cuda_array_interface__, host tensors as numpy arrays."""
    return [tensor if tensor.is_cuda else tensor.numpy(), MPI.BYTE]


def _accepts_cuda(communicator: Any) -> bool:
    """MPI 4.1 lists the kinds of memory that it accepts in a communicator's info."""
    info = communicator.Get_info()
    try:
        kinds = info.Get("mpi_memory_alloc_kinds") or ""
    finally:
        info.Free()
    return any(kind.split(":")[0] == "cuda" for kind in kinds.split(","))
