"""Moving bytes between ranks: torch.distributed and MPI behind one small protocol.

Two collectives carry a chunk: an all-to-all (row k of what is sent goes to rank k) and an all-gather. They start when
called and end in `Work.wait`; on CUDA with NCCL, wait makes the current stream wait, not the host. Every rank must
start the same collectives in the same order, from one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_OUTSIDER = (
    "this rank is not in the process group it was given: only the group's members take part. Build the optimizer or "
    "the all-reduce on those ranks alone"
)


class CollectiveError(RuntimeError):
    """A collective did not end: a rank died, never came, or the network failed."""


class Work(Protocol):
    def wait(self) -> None: ...


class Transport(Protocol):
    """A group of ranks. Messages are contiguous uint8 tensors [size, nbytes]."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def name(self) -> str:
        """Names the kind of network for the tuner's cache: nccl, gloo, mpi."""
        ...

    def all_to_all(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        """out[i] = what rank i has as sent[rank]"""
        ...

    def all_gather(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        """out[i] = what rank i has as `sent` [1, nbytes]"""
        ...

    def all_max(self, values: Tensor, phase: str) -> None:
        """values = the elementwise maximum over ranks. Waits as `Work.wait` does."""
        ...

    def all_sum(self, values: Tensor, phase: str) -> Work:
        """values = the elementwise sum over ranks, the same bit for bit on each"""
        ...

    def duplicate(self) -> Transport:
        """The same ranks with an order of collectives of its own, for another thread: a collective call."""
        ...


class Done:
    """Work that is over."""

    def wait(self) -> None:
        return None


class LocalTransport:
    """One rank, no network."""

    rank, size, name = 0, 1, "local"

    def all_to_all(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        out.copy_(sent)
        return Done()

    def all_gather(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        out.copy_(sent)
        return Done()

    def all_max(self, values: Tensor, phase: str) -> None:
        return None

    def all_sum(self, values: Tensor, phase: str) -> Work:
        return Done()

    def duplicate(self) -> Transport:
        return self


class TorchTransport:
    """A process group of torch.distributed: NCCL, or Gloo. CUDA tensors over Gloo pass through pinned memory."""

    def __init__(self, group: Any = None) -> None:
        self.group = group if group is not None else dist.group.WORLD
        if self.group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(_OUTSIDER)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError(_OUTSIDER)
        self.name = str(dist.get_backend(self.group))

    def all_to_all(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        return self._start(dist.all_to_all_single, out, sent, phase)

    def all_gather(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        return self._start(_all_gather_single, out, sent, phase)

    def all_max(self, values: Tensor, phase: str) -> None:
        host = values.cpu() if self._staged(values) else values
        with described(phase, self.name):
            dist.all_reduce(host, dist.ReduceOp.MAX, group=self.group)
        if host is not values:
            values.copy_(host)

    def all_sum(self, values: Tensor, phase: str) -> Work:
        host = _to_pinned(values) if self._staged(values) else values
        with described(phase, self.name):
            work = dist.all_reduce(host, dist.ReduceOp.SUM, group=self.group, async_op=True)
        return TorchWork(work, phase, self.name, host, host.view(-1), values)

    def duplicate(self) -> Transport:
        if self.group is dist.group.WORLD:
            return TorchTransport(dist.new_group(timeout=self._timeout, backend=self.name))
        self._know_as_many_groups()
        ranks = dist.get_process_group_ranks(self.group)
        return TorchTransport(dist.new_group(ranks, self._timeout, self.name, use_local_synchronization=True))

    def _know_as_many_groups(self) -> None:
        """Where only its members make a group, torch names it by how many groups a process knows: the name on all
        ranks has to be the same, so those that know fewer make some of themselves alone."""
        known = dist.distributed_c10d._world.pg_names
        device = torch.device("cuda" if self.name == "nccl" else "cpu")
        most = torch.tensor([len(known)], dtype=torch.int64, device=device)
        self.all_max(most, "counting process groups (all-reduce of one number)")
        while len(known) < int(most):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)

    @property
    def _timeout(self) -> timedelta | None:
        """The group's own; None is torch's default."""
        kind = torch.device("cuda" if self.name == "nccl" else "cpu")
        group: Any = self.group
        return getattr(getattr(group._get_backend(kind), "options", None), "_timeout", None)

    def _start(self, collective: Callable[..., Any], out: Tensor, sent: Tensor, phase: str) -> Work:
        landing, source = out.view(-1), sent.view(-1)
        if self._staged(out):
            landing, source = _pinned_like(landing), _to_pinned(source)
        with described(phase, self.name):
            work = collective(landing, source, group=self.group, async_op=True)
        return TorchWork(work, phase, self.name, source, landing, out)

    def _staged(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and self.name == "gloo"


class TorchWork:
    """Holds what is on its way until it has arrived."""

    def __init__(self, work: Any, phase: str, name: str, source: Tensor, landing: Tensor, out: Tensor) -> None:
        self._work, self._phase, self._name = work, phase, name
        self._source, self._landing, self._out = source, landing, out

    def wait(self) -> None:
        with described(self._phase, self._name):
            self._work.wait()
        if self._landing.device != self._out.device:
            self._out.view(-1).copy_(self._landing, non_blocking=True)


class described:
    """Turns a backend's error into one that names the phase."""

    def __init__(self, phase: str, name: str) -> None:
        self._phase, self._name = phase, name

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, (CollectiveError, torch.OutOfMemoryError)):
            if "No backend type" in str(error):
                raise ValueError(
                    f"{self._phase} is not possible: the process group has no backend for these tensors' device "
                    f"({_first_line(error)}). Use device='cuda' with NCCL, or a group with Gloo for CPU tensors"
                ) from error
            raise CollectiveError(
                f"{self._phase} did not end: a rank died, did not come within the group's timeout, or the network "
                f"failed ({self._name}: {_first_line(error)}). Restart the ranks from the last "
                f"checkpoint; this group can't be used any more"
            ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def transport_for(group: Any = None) -> Transport:
    """The transport of a process group, an mpi4py communicator, a transport, or None: torch's default group if
    there is one, else this process alone.
    """
    if group is None:
        return TorchTransport() if dist.is_available() and dist.is_initialized() else LocalTransport()
    if isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER:
        return TorchTransport(group)
    if all(hasattr(group, name) for name in ("all_to_all", "all_gather", "all_max")):
        return group
    if hasattr(group, "Ialltoall"):
        from onebit.collectives.mpi import MpiTransport

        return MpiTransport(group)
    raise TypeError(
        f"can't communicate over a {type(group).__name__}: pass a torch.distributed process group (dist.new_group), "
        f"an mpi4py communicator, or None for the default group"
    )


def _all_gather_single(out: Tensor, sent: Tensor, **options: Any) -> Any:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, sent, **options)


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)


def _to_pinned(tensor: Tensor) -> Tensor:
    """A copy in pinned memory. The host waits for this tensor's stream, since Gloo reads at once."""
    host = _pinned_like(tensor)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host
