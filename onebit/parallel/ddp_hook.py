"""A DistributedDataParallel communication hook for any optimizer: gradients averaged with 1 bit an element.

    state = onebit.OneBitState(model)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, onebit.onebit_hook)

With SGD this is 1-bit SGD with error feedback. Residuals belong to parameters, not to buckets, since DDP rebuilds its
buckets after the first iteration: then their means over the ranks move along, after an uncompressed all-reduce. DDP
calls the hook for one bucket after the other, in the same order on all ranks, and each call starts and ends its
collectives itself, so that their order is the same on all ranks too.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from onebit.collectives import CompressedAllReduce
from onebit.collectives.loading import ON_HOST, check_names, checked_bytes, checked_residual
from onebit.collectives.reply import AskedReply, check_reply
from onebit.collectives.topology import Topology
from onebit.kernels import streams
from onebit.kernels.data.layout import BLOCK_SIZE, check_block_size
from onebit.kernels.data.wire import Norm, check_scale
from onebit.parallel.unwrap import own_module
from onebit.warning import warn

Names = tuple[str, ...]


class OneBitState:
    """Residuals of a model's gradients on this rank.

    To save it, call `synchronize()` on every rank. Then `state_dict()` is the same on all of them, and loads on any
    number of ranks. A pickle holds `state_dict()`, to be loaded into a new `OneBitState`.

    Args:
        model: the module, before or after it is wrapped; its parameters' names are what a saved state is keyed by.
        process_group: the group that DDP has; None for the default group.
        norm, reply, block_size, node_group: as for `CompressedAllReduce`.
    """

    def __init__(
        self,
        model: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        norm: Norm = "l1",
        reply: AskedReply = "auto",
        block_size: int = BLOCK_SIZE,
        node_group: Any = None,
    ) -> None:
        check_block_size(block_size)
        check_reply(reply)
        check_scale("block", norm)
        self.process_group, self.node_group = process_group, node_group
        self._options: dict[str, Any] = {"block_size": block_size, "norm": norm, "reply": reply}
        self._topology: Topology | None = None
        self._side: streams.Stream | None = None
        self._reducers: dict[Names, CompressedAllReduce] = {}
        self._residuals: dict[str, Tensor] = {}  # of parameters without a reducer
        self._sent = 0
        self._parameters: dict[str, Tensor] = dict(own_module(model, "OneBitState").named_parameters())
        self._names: dict[Tensor, str] = {p: name for name, p in self._parameters.items()}

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank has sent in messages."""
        return self._sent + sum(r.wire_bytes for r in self._reducers.values())

    def reduce(self, parameters: list[Tensor], flat: Tensor) -> None:
        """Average a bucket in place over the ranks.

        Args:
            parameters: whose gradients the bucket has, one after the other.
            flat: the bucket.
        """
        names, numels = tuple(self._name(p) for p in parameters), [p.numel() for p in parameters]
        if names not in self._reducers:
            self._add(names, numels, flat.device)
        self._reducers[names](list(flat.split(numels)))

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

    @contextmanager
    def _before_side(self) -> Iterator[None]:
        """Order a GPU's side stream after this: what is done `beside` later, and what takes the memory of residuals,
        waits for what is done in here."""
        yield
        if self._side is not None:
            streams.join(self._side, streams.current(self._side.device))

    def synchronize(self) -> None:
        """Make the residuals the same on all ranks, their mean: later steps go on from it. A collective call."""
        with self._before_side():
            for reducer in self._reducers.values():
                reducer.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, without communication. Call `synchronize()` on every rank before.

        Returns:
            The residual of each parameter and the bytes that were sent. Residuals are left out, with a warning, if
            gradients were averaged since `synchronize()`: loading sets them to zero.
        """
        residuals = dict(self._residuals)
        synchronized = {names: reducer for names, reducer in self._reducers.items() if reducer.synchronized}
        with self._before_side():
            for names, reducer in synchronized.items():
                residuals |= self._residuals_of(names, reducer)
        if len(synchronized) < len(self._reducers):
            warn(
                "state_dict() of OneBitState leaves residuals out: each rank has its own since the last step. Call "
                "synchronize() on every rank before state_dict()"
            )
        return {"residuals": residuals, "sent": self.wire_bytes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the residuals that were saved, on any number of ranks and with any options. Every rank loads them.

        Args:
            state: what `state_dict()` returned.
        """
        check_names(state, ("residuals", "sent"), "OneBitState")
        residuals = state["residuals"]
        if not isinstance(residuals, Mapping):
            raise TypeError(f"residuals are a dict by parameter names, not a {type(residuals).__name__}")
        if unknown := residuals.keys() - self._parameters.keys():
            raise ValueError(f"the model has no parameter {unknown.pop()!r:.80}: the state is another model's")
        loaded = {
            name: checked_residual(value, self._parameters[name].shape, name) for name, value in residuals.items()
        }
        self._sent, self._residuals = checked_bytes(state["sent"]), loaded
        with self._before_side():
            for names, reducer in self._reducers.items():
                self._fill(reducer, names)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (self.state_dict(),)

    def _name(self, parameter: Tensor) -> str:
        if parameter not in self._names:
            raise ValueError(
                "a gradient belongs to a parameter that this OneBitState does not know: build it with the model that "
                "DistributedDataParallel wraps"
            )
        return self._names[parameter]

    def _add(self, names: Names, numels: list[int], device: torch.device) -> None:
        """A reducer for a new bucket, with the residuals its parameters had in others: the means over the ranks."""
        for key in [key for key in self._reducers if not set(key).isdisjoint(names)]:
            old = self._reducers.pop(key)
            old.synchronize()
            self._residuals |= self._residuals_of(key, old)
            self._sent += old.wire_bytes
        if self._topology is None:
            self._topology = Topology.of(self.process_group, self.node_group, device)
        self._reducers[names] = reducer = CompressedAllReduce(
            numels, device=device, chunks=1, process_group=self._topology, **self._options
        )
        self._fill(reducer, names)

    def _residuals_of(self, names: Names, reducer: CompressedAllReduce) -> dict[str, Tensor]:
        """Each parameter's, in its shape. A bucket has a parameter's elements in the order of its memory."""
        found = {}
        for name, own in zip(names, reducer.state_dict()["residual"], strict=True):
            found[name] = torch.zeros_like(self._parameters[name], **ON_HOST)
            _in_memory(found[name]).copy_(own)
        return found

    def _fill(self, reducer: CompressedAllReduce, names: Names) -> None:
        """Move residuals into a reducer; zero where there is none."""
        residual = []
        for name in names:
            own = torch.zeros_like(self._parameters[name], **ON_HOST)
            if name in self._residuals:
                own.copy_(self._residuals.pop(name))
            residual.append(_in_memory(own))
        reducer.load_state_dict({"residual": residual, "wire_bytes": 0})


def onebit_hook(state: OneBitState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients, in DDP's place. On a GPU in a stream of the state's own, beside backward.

    Args:
        state: what `register_comm_hook` was given.
        bucket: what DDP hands over.

    Returns:
        A future of the bucket with the means.
    """
    flat = bucket.buffer()
    with state.beside(flat.device):
        state.reduce(bucket.parameters(), flat)
        return local(bucket)


def local(bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The bucket as it is, with nothing more to wait for."""
    flat = bucket.buffer()
    future = streams.future(flat.device)
    future.set_result(flat)
    return future


def _in_memory(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
