"""Gradients averaged with 1, 4 or 8 bits an element, for any optimizer.

    compression = onebit.compress_gradients(ddp, bits=4)

What compression leaves out is kept on both sides and sent with the next step's gradients. Residuals belong to
parameters, not to buckets: where DDP rebuilds its buckets, after its first iteration, they move along, a server's to
the rank that serves the parameter then, so that no bit depends on the buckets. DDP calls the hook for one bucket after
the other, in the same order on all ranks, and each call starts and ends its collectives itself, so that their order is
the same on all ranks too.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from onebit.collectives import CompressedAllReduce
from onebit.collectives.agreement import NODES, agree
from onebit.collectives.averaging import average_
from onebit.collectives.loading import ON_HOST, check_names, checked_count, checked_residual
from onebit.collectives.reply import AskedReply, check_reply
from onebit.collectives.topology import Topology
from onebit.kernels import streams
from onebit.kernels.data.layout import Layout
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import Bits, check_bits
from onebit.kernels.log import tell
from onebit.optim.eager import eager
from onebit.optim.memory_order import as_stored, in_shape, order_of
from onebit.optim.sharding import as_whole, local, part_of, shard_group
from onebit.parallel.hooks import leave_as_is, register
from onebit.parallel.unwrap import ddp_of, own_module
from onebit.report.pay_off import PayOff, Report
from onebit.warning import warn

UNCOMPRESSED = 4  # first steps of a run, which say how long a step takes without compression
Names = tuple[str, ...]


def compress_gradients(
    model: nn.Module,
    bits: Bits = 4,
    *,
    process_group: Any = None,
    node_group: Any = None,
    reply: AskedReply = "auto",
) -> "Compression":
    """Average a model's gradients with few bits an element, under any optimizer.

    Call it when the model has all its parameters, before the first backward pass. Gradients of a model in
    DistributedDataParallel are averaged while backward runs. With any other, one that `fully_shard` has sharded
    included, call what is returned after backward and before clipping: `compression()`.

    The first 4 steps of a run are averaged uncompressed, and timed, for `report()`.

    Args:
        model: the model, wrapped or not.
        bits: of an element on the wire. 8 ends at the loss of uncompressed gradients, 4 nearly; 1 is for SGD alone.
        process_group: the group to average over; None for DDP's, or the default group. With `fully_shard` the replicas:
            mesh.get_group("replicate").
        node_group: two levels, as for `CompressedAllReduce`.
        reply: as for `CompressedAllReduce`.

    Returns:
        What keeps the residuals, for `synchronize()`, `state_dict()` and `report()`.
    """
    inner = own_module(model, "compress_gradients")
    ddp, _ = ddp_of(model) or (None, inner)
    if ddp is None:
        return Compression(inner, bits, process_group, node_group, reply)
    compression = Compression(inner, bits, process_group or ddp.process_group, node_group, reply)
    register(ddp, compression, average_bucket)
    compression.in_backward = True
    return compression


class Compression:
    """Averages a model's gradients, and keeps what compression has left out. `compress_gradients` makes it.

    To save it, call `synchronize()` on every rank. Then `state_dict()` is the same on all of them, and loads on any
    number of ranks. A copied or saved model has none of it, and averages as DDP does.

    Args:
        model, bits, process_group, node_group, reply: as for `compress_gradients`.
    """

    def __init__(self, model: nn.Module, bits: Bits, process_group: Any, node_group: Any, reply: AskedReply) -> None:
        check_bits(bits)
        check_reply(reply)
        self.bits, self.in_backward = bits, False
        self._groups, self._reply = (process_group, node_group), reply
        self._model, self._parameters = model, dict(model.named_parameters())
        if not self._parameters:
            raise ValueError("compress_gradients needs a model with parameters: this one has none")
        self._names: dict[Tensor, str] = {p: name for name, p in self._parameters.items()}
        self._topology: Topology | None = None
        shards = shard_group([{"params": [*self._parameters.values()]}])
        if shards is not None:
            self._topology = Topology.of_shards(process_group, shards)
        self._side: streams.Stream | None = None
        self._reducers: dict[Names, CompressedAllReduce] = {}
        self._residuals: dict[str, Tensor] = {}  # of parameters without a reducer, in the order of their memory
        self._served: dict[str, Tensor] = {}  # E of those, where ranks have residuals of their own
        self._sent = self._before = 0  # bytes of reducers that there were; of them, those before a load
        self._steps, self._agreed = 0, False  # steps of the run; whether the ranks were found to do the same
        self._pay_off: PayOff | None = None

    @eager
    def __call__(self) -> None:
        """Average the gradients that backward has left, in place. A collective call.

        A parameter without a gradient counts as one with zeros. Where a gradient is not finite on any rank all of its
        dtype are NaN on every rank: `GradScaler` and `clip_grad_norm_` see that, and their residuals stay as they were.
        """
        if self.in_backward:
            raise RuntimeError("DistributedDataParallel has averaged the gradients in backward: leave this call out")
        gradients = {self._name(p): _gradient(p) for p in self._model.parameters() if p.requires_grad}
        for dtype in dict.fromkeys(g.dtype for g in gradients.values()):
            own = {name: g for name, g in gradients.items() if g.dtype == dtype}
            self._average(tuple(own), list(own.values()))
        self._step_ended()

    def average_bucket(self, bucket: GradBucket) -> None:
        """Average a bucket of DDP's in place."""
        parameters, flat = bucket.parameters(), bucket.buffer()
        dtype, numels = parameters[0].dtype, [p.numel() for p in parameters]  # DDP has complex numbers as real ones
        tensors = flat.view(dtype).split(numels) if flat.layout is torch.strided else [flat]  # which are refused
        self._average(tuple(map(self._name, parameters)), list(tensors))
        if bucket.is_last():
            self._step_ended()

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        """Enter the side stream of a GPU: what is done in here waits for the present stream, and not the other way
        round. DDP has a bucket's memory until it has waited for what the hook returns."""
        if not streams.has_streams(device):
            yield
            return
        self._side = self._side or streams.new(device)
        streams.join(self._side, streams.current(device))
        with streams.within(self._side):
            yield

    @property
    def compressing(self) -> bool:
        """Tell whether the gradients of the coming step are compressed. Those of a run's first steps are not."""
        return self._steps >= UNCOMPRESSED

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank has sent in messages."""
        return self._sent + sum(r.wire_bytes for r in self._reducers.values())

    def report(self) -> Report:
        """Tell whether it pays.

        Returns:
            How long steps take with compression and without, and what was sent: as an optimizer's `report()`.
        """
        gradients = [local(p) for p in self._parameters.values() if p.requires_grad]
        sent = self.wire_bytes - self._before
        return self._timed().report_on_gradients(gradients, self._found(), sent, self.bits)

    def synchronize(self) -> None:
        """Make the residuals the same on all ranks, their mean: later steps go on from it. A collective call."""
        with self._before_side():
            for reducer in self._reducers.values():
                reducer.synchronize()
            for name, served in self._served.items():
                average_([self._residuals[name]], self._everyone())
                self._residuals[name].add_(served)
            self._served.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, without communication. Call `synchronize()` on every rank before.

        Returns:
            The residual of each parameter, in its shape, the bytes that were sent, and the steps of the run. Residuals
            are zero, with a warning, if gradients were averaged since `synchronize()`.
        """
        own = {n: self._zeros(n) for n, p in self._parameters.items() if p.requires_grad or n in self._residuals}
        own |= {name: value for name, value in self._residuals.items() if name not in self._served}
        synchronized = {names: reducer for names, reducer in self._reducers.items() if reducer.synchronized}
        with self._before_side():
            for names, reducer in synchronized.items():
                own |= zip(names, reducer.state_dict()["residual"], strict=True)
        if self._served or len(synchronized) < len(self._reducers):
            warn(
                "state_dict() of compressed gradients has residuals of zero: each rank has its own since the last "
                "step. Call synchronize() on every rank before state_dict()"
            )
        whole = {name: as_whole(self._in_shape(name, value), self._parameters[name]) for name, value in own.items()}
        return {"residuals": whole, "sent": self.wire_bytes, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the residuals that were saved, on any number of ranks and with any options. Every rank loads them.

        Args:
            state: what `state_dict()` returned.
        """
        check_names(state, ("residuals", "sent", "steps"), "compressed gradients")
        residuals = state["residuals"]
        if not isinstance(residuals, Mapping):
            raise TypeError(f"residuals are a dict by parameter names, not a {type(residuals).__name__}")
        if unknown := residuals.keys() - self._parameters.keys():
            raise ValueError(f"the model has no parameter {unknown.pop()!r:.80}: the state is another model's")
        loaded = {}
        for name, value in residuals.items():
            parameter = self._parameters[name]
            part = checked_residual(part_of(value, parameter), local(parameter).shape, name)
            loaded[name] = self._in_memory(name, part)
        sent, steps = (checked_count(state[name], name) for name in ("sent", "steps"))
        self._sent, self._before, self._steps, self._residuals = sent, sent, steps, loaded
        self._served.clear()
        with self._before_side():
            for names, reducer in self._reducers.items():
                self._fill(reducer, names)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def _name(self, parameter: Tensor) -> str:
        if parameter not in self._names:
            raise ValueError(
                "a gradient belongs to a parameter that the model did not have when compress_gradients was called: "
                "call it when the model has all its parameters, after fully_shard and all else that replaces them"
            )
        return self._names[parameter]

    def _found(self) -> Topology:
        if self._topology is None:
            self._topology = Topology.of(*self._groups, next(iter(self._parameters.values())).device)
        return self._topology

    def _everyone(self) -> Any:
        """The ranks that hold the same parameters."""
        return self._found().data_parallel

    def _average(self, names: Names, tensors: list[Tensor]) -> None:
        """Average tensors in place, the gradients of these parameters."""
        if not self._agreed:
            self._agree(tensors[0].device)
        if not self.compressing:
            Pointers.to(Layout([t.numel() for t in tensors]), tensors, "gradient")  # which later steps can read
            average_(tensors, self._everyone())
            return
        if names not in self._reducers:
            self._add(names, tensors)
        self._reducers[names](tensors)

    def _agree(self, device: torch.device) -> None:
        """Compare once what the ranks average, and how. A difference is a ValueError on all of them."""
        trained = [f"{name} {tuple(p.shape)}" for name, p in self._parameters.items() if p.requires_grad]
        facts: dict[str, float | str] = {
            "options": f"bits={self.bits}, reply={self._reply!r}",
            "checksum of parameters with gradients": zlib.crc32(" ".join(trained).encode()),
            "uncompressed steps to go (does every rank load the state?)": max(0, UNCOMPRESSED - self._steps),
            NODES: "none" if self._found().node is None else "given",
        }
        agree(self._everyone(), device, facts)
        self._agreed = True

    def _step_ended(self) -> None:
        """Count a step, and tell once whether it pays."""
        compressed, self._steps = self.compressing, self._steps + 1
        due = self._timed().step_ended("1 bit" if compressed else "uncompressed")
        if due and self._found().everyone.rank == 0:
            tell("%s", self.report())

    def _timed(self) -> PayOff:
        if self._pay_off is None:
            self._pay_off = PayOff(next(iter(self._parameters.values())).device)
        return self._pay_off

    def _add(self, names: Names, tensors: Sequence[Tensor]) -> None:
        """A reducer for a new bucket, with the residuals that its parameters had in others."""
        for key in [key for key in self._reducers if not set(key).isdisjoint(names)]:
            old = self._reducers.pop(key)
            own, served = old.residuals()
            self._residuals |= {name: e.to(**ON_HOST, copy=True) for name, e in zip(key, own, strict=True)}
            self._served |= zip(key, served, strict=True)
            self._sent += old.wire_bytes
        self._reducers[names] = reducer = CompressedAllReduce(
            [t.numel() for t in tensors],
            device=tensors[0].device,
            bits=self.bits,
            reply=self._reply,
            chunks=1 if self.in_backward else "auto",
            process_group=self._found(),
        )
        self._fill(reducer, names)

    @contextmanager
    def _before_side(self) -> Iterator[None]:
        """Order a GPU's side stream after this: what is done `beside` later, and what takes the memory of residuals,
        waits for what is done in here."""
        yield
        if self._side is not None:
            streams.join(self._side, streams.current(self._side.device))

    def _fill(self, reducer: CompressedAllReduce, names: Names) -> None:
        """Move residuals into a reducer; zero where there is none."""
        zeros = {name: self._zeros(name) for name in names}
        of_ranks = not self._served.keys().isdisjoint(names)
        own, served = ([of.pop(name, zeros[name]) for name in names] for of in (self._residuals, self._served))
        reducer.load_state_dict({"residual": own, "wire_bytes": 0})
        if of_ranks:
            reducer.load_residuals(own, served)

    def _zeros(self, name: str) -> Tensor:
        return torch.zeros(local(self._parameters[name]).numel(), **ON_HOST)

    def _in_shape(self, name: str, flat: Tensor) -> Tensor:
        """Elements that lie as the parameter's do, in its shape."""
        own = local(self._parameters[name])
        return in_shape(flat, own.shape, order_of(own))

    def _in_memory(self, name: str, value: Tensor) -> Tensor:
        """Elements of the parameter's shape, in the order of its memory."""
        return as_stored(value, order_of(local(self._parameters[name]))).reshape(-1)


@eager
def average_bucket(compression: Compression, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients, in DDP's place. On a GPU in a stream of its own, beside backward."""
    with compression.beside(bucket.buffer().device):
        compression.average_bucket(bucket)
        return leave_as_is(bucket)


def _gradient(parameter: Tensor) -> Tensor:
    """The elements of this rank's gradient in the order of the parameter's memory. Zeros where there is none."""
    own = local(parameter)
    if parameter.grad is None:
        parameter.grad = as_whole(torch.zeros_like(own), parameter)
    grad = local(parameter.grad)
    if grad.layout is not torch.strided:
        return grad  # which is refused
    order = order_of(own)
    if not as_stored(grad, order).is_contiguous():
        grad = torch.empty_like(own).copy_(grad)
        parameter.grad = as_whole(grad, parameter)
    return as_stored(grad, order).view(-1)
