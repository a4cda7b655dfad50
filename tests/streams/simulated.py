"""The simulated device in the place of a GPU.

with simulated() as device:     what happens in here has streams
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from onebit.collectives.transport import torch as transport
from onebit.kernels import streams
from onebit.kernels.backends import load
from onebit.kernels.data.layout import Layout
from onebit.kernels.data.wire import Messages
from onebit.parallel.flight import Signal
from tests.streams.device import NOWHERE, Device, Result, Site
from tests.streams.hosts import take_over
from tests.streams.nccl import Group

NEW = ("all_gather_single",)  # not in every version of torch


@contextlib.contextmanager
def simulated(left_out: Site = NOWHERE) -> Iterator[Device]:
    """left_out: a call in the product that does nothing."""
    device = Device(left_out)
    group = Group(device)
    with contextlib.ExitStack() as patches:

        def put(owner: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(owner, name, value, create=name in NEW))

        for name in ("has_streams", "current", "new", "within", "choose_device", "mark", "wait_for", "join", "keep"):
            put(streams, name, getattr(device, name))
        for name in ("wait_on_host", "future", "pinned"):
            put(streams, name, getattr(device, name))
        put(torch.cuda, "is_current_stream_capturing", lambda: device.capturing)
        for name, seen in (("run", device.run_pass), ("restore", device.restore)):
            put(load("cpu"), name, functools.partial(seen, getattr(load("cpu"), name)))
        table = Layout.table

        def seen_table(layout: Layout, of: torch.device) -> Any:
            made = table(layout, of)
            device.keep_all(
                [made.blocks, made.parameters, made.first_blocks], device.recorder.part(made.blocks).memory.made_in
            )
            return made

        put(Layout, "table", seen_table)
        put(Messages, "check", lambda messages, phase: None)  # a GPU has no such check
        put(dist, "all_reduce", group.all_reduce)
        put(dist, "all_gather_single", group.all_gather)
        put(dist, "all_gather_into_tensor", group.all_gather)
        put(dist, "all_to_all_single", group.all_to_all)
        put(dist, "reduce_scatter_tensor", group.reduce_scatter)
        make = dist.new_group

        def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
            return make(ranks, backend="fake", **options)

        put(dist, "new_group", new_group)
        put(transport, "backends_of", lambda group: {"cpu": "nccl"})
        _watch_waits(device, put)
        patches.enter_context(device.recorder.hosts.watched(device.counts))
        patches.enter_context(device.watch())
        yield device
        gc.collect()
        device.recorder.close()


def _watch_waits(device: Device, put: Callable[[Any, str, Any], None]) -> None:
    """Work and signals; and DDP, which waits for what its hook returns."""
    wait, recorder = transport.TorchWork.wait, device.recorder

    def wait_for_work(work: Any) -> None:
        if device.counts():
            wait(work)

    def signalled(run: Callable[[Signal], None]) -> Callable[[Signal], None]:
        def signal(own: Signal) -> None:
            with contextlib.nullcontext() if device.counts() else device.without_effect():
                run(own)

        return signal

    put(Signal, "wait", signalled(Signal.wait))
    put(Signal, "mark", signalled(Signal.mark))
    put(transport.TorchWork, "wait", wait_for_work)
    register = DistributedDataParallel.register_comm_hook

    def register_hook(ddp: DistributedDataParallel, state: Any, hook: Callable[..., Any]) -> None:
        @functools.wraps(hook)
        def hooked(state: Any, bucket: Any) -> Any:
            returned: list[Result] = []

            def ddp_waits() -> None:  # its own callback comes after this one
                for each in returned:
                    take_over(recorder.current.clock, each.clock)

            torch.autograd.Variable._execution_engine.queue_callback(ddp_waits)
            returned.append(hook(state, bucket))
            return returned[0]

        register(ddp, state, hooked)

    put(DistributedDataParallel, "register_comm_hook", register_hook)
