"""Collectives as NCCL's, of ranks that all do what this one does.

They run in a stream of their group: it waits for what the current stream has to do at the call, and `work.wait()` makes
the current stream wait for it. Until then the work holds its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.streams.device import Device, Result
from tests.streams.hosts import take_over
from tests.streams.recorder import Stream


class Group:
    """NCCL's work."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._streams: dict[Any, Stream] = {}

    def run(self, name: str, change: Callable[[], None], reads: list[Tensor], writes: list[Tensor], **of: Any) -> Any:
        group = of.get("group") or dist.group.WORLD
        if self.device.capturing and group not in self._streams:
            self.device.recorder.faults[f"a group is used for the first time in a capture, by {name}"] = None
        stream = self._streams.setdefault(group, self.device.new(name="collectives"))
        take_over(stream.clock, self.device.recorder.current.clock)
        self.device.launch(name, reads, writes, stream)
        with self.device.see(unseen=True):
            change()
        work = Work(self.device, stream, [*reads, *writes])
        if of.get("async_op"):
            return work
        take_over(self.device.recorder.current.clock, stream.clock)
        return None

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        def change() -> None:
            if op == dist.ReduceOp.SUM:
                tensor.mul_(dist.get_world_size(group))

        return self.run("all_reduce", change, [], [tensor], group=group, async_op=async_op)

    def all_gather(self, out: Tensor, sent: Tensor, group: Any = None, async_op: bool = False) -> Any:
        def change() -> None:
            out.view(-1, sent.numel()).copy_(sent.view(1, -1).expand(out.numel() // sent.numel(), -1))

        return self.run("all_gather", change, [sent], [out], group=group, async_op=async_op)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        """FSDP names the tensors as torch does."""

        def change() -> None:
            own = input.view(dist.get_world_size(group), -1)[dist.get_rank(group)]
            output.view(-1).copy_(own if op != dist.ReduceOp.SUM else own * dist.get_world_size(group))

        return self.run("reduce_scatter", change, [input], [output], group=group, async_op=async_op)

    def all_to_all(self, out: Tensor, sent: Tensor, group: Any = None, async_op: bool = False) -> Any:
        def change() -> None:
            rank, size = dist.get_rank(group), dist.get_world_size(group)
            out.view(size, -1).copy_(sent.view(size, -1)[rank].expand(size, -1))

        return self.run("all_to_all", change, [sent], [out], group=group, async_op=async_op)


class Work:
    def __init__(self, device: Device, stream: Stream, held: list[Tensor]) -> None:
        self._device, self._stream, self._clock, self._fixed = device, stream, dict(stream.clock), held

    def wait(self) -> None:
        if self._device.counts():
            take_over(self._device.recorder.current.clock, self._clock)
            self._fixed = []

    def get_future(self) -> Result:
        future = Result(self._device)
        self._device.keep_all(self._fixed, self._stream)  # NCCL lets go of them when the collective has ended
        future.set_result(self._fixed)
        future.clock = self._clock
        return future
