"""A process group of torch.distributed as a transport: NCCL, or Gloo."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebit.collectives.transport.protocol import Transport, Work, collective_errors
from onebit.collectives.waits import waiting

SMALL = 2**16  # bytes of a message up to which Gloo's all-gather, size - 1 sends one after the other, waits for latency
_OUTSIDER = (
    "this rank is not in the process group it was given: only the group's members take part. Build the optimizer or "
    "the all-reduce on those ranks alone"
)


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
        if self.name == "gloo" and sent.nbytes <= SMALL and self.size > 2:
            return self._start(dist.all_to_all_single, out, sent.expand_as(out).contiguous(), phase)
        return self._start(_all_gather_single, out, sent, phase)

    def all_max(self, values: Tensor, phase: str) -> None:
        host = values.cpu() if self._staged(values) else values
        with collective_errors(phase, self.name), waiting(host.device):
            dist.all_reduce(host, dist.ReduceOp.MAX, group=self.group)
        if host is not values:
            values.copy_(host)

    def all_sum(self, values: Tensor, phase: str) -> Work:
        host = _to_pinned(values) if self._staged(values) else values
        with collective_errors(phase, self.name):
            work = dist.all_reduce(host, dist.ReduceOp.SUM, group=self.group, async_op=True)
        return TorchWork(work, phase, self.name, source=host, landing=host.view(-1), out=values)

    def duplicate(self) -> Transport:
        if self.group is dist.group.WORLD:
            return TorchTransport(dist.new_group(timeout=self._timeout, backend=self.name))
        return self._new_group(dist.get_process_group_ranks(self.group))

    def split(self, color: int) -> Transport:
        own = torch.tensor([[color]], dtype=torch.int64, device=self._device)
        colors = torch.empty((self.size, 8), dtype=torch.uint8, device=self._device)
        self.all_gather(colors, own.view(torch.uint8), "telling ranks apart (all-gather of one number)").wait()
        same = (colors.view(torch.int64).view(-1) == color).tolist()
        ranks = dist.get_process_group_ranks(self.group)
        return self._new_group([rank for rank, ours in zip(ranks, same, strict=True) if ours])

    def places(self, of: Transport) -> list[int]:
        if not isinstance(of, TorchTransport):
            raise TypeError(f"a group of torch.distributed can't be a part of ranks that communicate by {of.name}")
        theirs = dist.get_process_group_ranks(of.group)
        own = dist.get_process_group_ranks(self.group)
        if outside := set(own) - set(theirs):
            raise ValueError(f"its rank {min(outside)} of the world is not in process_group")
        return [theirs.index(rank) for rank in own]

    def _new_group(self, ranks: list[int]) -> Transport:
        """Made by its members alone, who all are in this group."""
        self._make_as_many_groups()
        return TorchTransport(dist.new_group(ranks, self._timeout, self.name, use_local_synchronization=True))

    def _make_as_many_groups(self) -> None:
        """Where only its members make a group, torch names it by how many groups a process has: the name on all ranks
        has to be the same, so those that have fewer make some of themselves alone."""
        groups = dist.distributed_c10d._world.pg_names
        most = torch.tensor([len(groups)], dtype=torch.int64, device=self._device)
        self.all_max(most, "counting process groups (all-reduce of one number)")
        while len(groups) < int(most):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)

    @property
    def _timeout(self) -> timedelta | None:
        """The group's own; None is torch's default."""
        group: Any = self.group
        return getattr(getattr(group._get_backend(self._device), "options", None), "_timeout", None)

    @property
    def _device(self) -> torch.device:
        """Of tensors that the group can send."""
        return torch.device("cuda" if self.name == "nccl" else "cpu")

    def _start(self, collective: Callable[..., Any], out: Tensor, sent: Tensor, phase: str) -> Work:
        landing, source = out.view(-1), sent.view(-1)
        if self._staged(out):
            landing, source = _pinned_like(landing), _to_pinned(source)
        with collective_errors(phase, self.name):
            work = collective(landing, source, group=self.group, async_op=True)
        return TorchWork(work, phase, self.name, source=source, landing=landing, out=out)

    def _staged(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and self.name == "gloo"


class TorchWork:
    """Holds what is on its way until it has arrived."""

    def __init__(self, work: Any, phase: str, name: str, source: Tensor, landing: Tensor, out: Tensor) -> None:
        self._work, self._phase, self._name = work, phase, name
        self._source, self._landing, self._out = source, landing, out

    def wait(self) -> None:
        with collective_errors(self._phase, self._name), waiting(self._out.device):
            self._work.wait()
        if self._landing.device != self._out.device:
            self._out.view(-1).copy_(self._landing, non_blocking=True)


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
