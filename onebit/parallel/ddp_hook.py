"""A DistributedDataParallel communication hook for any optimizer: gradients averaged with 1 bit an element.

    state = onebit.OneBitState(model)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, onebit.onebit_hook)

With SGD this is 1-bit SGD with error feedback. Residuals belong to parameters, not to buckets, since DDP rebuilds its
buckets after the first iteration: they move along. DDP calls the hook for one bucket after the other, in the same order
on all ranks, and each call starts and ends its collectives itself, so that their order is the same on all ranks too.
"""

import itertools
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from onebit.collectives import CompressedAllReduce
from onebit.collectives.agreement import agree
from onebit.collectives.reply import AskedReply, check_reply, way_for
from onebit.collectives.topology import Topology
from onebit.collectives.transport import transport_for
from onebit.kernels import streams
from onebit.kernels.data.layout import BLOCK_SIZE, check_block_size
from onebit.kernels.data.wire import Norm, check_scale
from onebit.parallel.unwrap import own_module

Names = tuple[str, ...]


class OneBitState:
    """Residuals of a model's gradients on this rank.

    model: the module, before or after it is wrapped; its parameters' names are what a saved state is keyed by.
    reply: what comes back of every message, as for `onebit.collectives.CompressedAllReduce`.
    node_group: the ranks of this rank's node, as for `CompressedAllReduce`; None for one level. A collective call.
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
        self._loaded: list[dict[str, Any]] = []
        self._sent, self._agreed = 0, False
        self.bind(model)

    def bind(self, model: nn.Module, process_group: dist.ProcessGroup | None = None, node_group: Any = None) -> None:
        """Belong to this model: needed once after unpickling, when parameters are other objects."""
        self.process_group, self.node_group = process_group or self.process_group, node_group or self.node_group
        self._topology = None
        inner = own_module(model, "OneBitState")
        self._names: dict[Tensor, str] = {p: name for name, p in inner.named_parameters()}

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank has sent in messages."""
        return self._sent + sum(r.wire_bytes for r in self._reducers.values())

    def reduce(self, parameters: list[Tensor], flat: Tensor) -> None:
        """Average a bucket, the gradients of `parameters` one after the other, in place over the ranks."""
        names = tuple(self._name(p) for p in parameters)
        self._find_ranks(flat.device)
        if names not in self._reducers:
            if not self._agreed:
                self._agree(flat.device)
            self._restore(flat.device)
            self._add(names, [p.numel() for p in parameters], flat.device)
        self._reducers[names](list(flat.split([p.numel() for p in parameters])))

    @contextmanager
    def beside(self, flat: Tensor) -> Iterator[None]:
        """On a GPU: what is done to `flat` in here waits for the present stream, and not the other way round. DDP has
        the memory until it has waited for what the hook returns."""
        if not streams.has_streams(flat.device):
            yield
            return
        self._side = self._side or streams.new(flat.device)
        streams.join(self._side, streams.current(flat.device))
        with streams.within(self._side):
            yield

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, by parameter names; every rank saves its own."""
        buckets = [
            {"parameters": list(names), "numels": reducer.numels, **reducer.state_dict()}
            for names, reducer in self._reducers.items()
        ]
        return {**self._options, "sent": self._sent, "buckets": buckets + self._loaded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with residuals saved by the same rank of an equally large group. With nodes a collective call."""
        self._find_ranks(next(iter(self._names)).device)
        own = self._options
        if not {*own, "sent", "buckets"} <= state.keys():
            raise ValueError(f"not a state of OneBitState: it has {sorted(state)}")
        saved = {name: state[name] for name in own}
        check_reply(saved["reply"])
        if self._meaning(saved) != self._meaning(own):
            raise ValueError(
                f"the state was saved with {_arguments(saved)}; build OneBitState with the same, it has "
                f"{_arguments(own)}"
            )
        known = set(self._names.values())
        ranks = {bucket["rank"] for bucket in state["buckets"]} - {transport_for(self.process_group).rank}
        if ranks:
            raise ValueError(
                f"the state was saved by rank {ranks.pop()}: residuals are each rank's own. Save on every rank, and "
                f"load what the same rank saved"
            )
        unknown = {name for bucket in state["buckets"] for name in bucket["parameters"]} - known
        if unknown:
            raise ValueError(f"the model has no parameter {sorted(unknown)[0]!r}: the state is another model's")
        self._reducers, self._loaded, self._sent = {}, list(state["buckets"]), int(state["sent"])
        self._agreed = False

    def _meaning(self, options: dict[str, Any]) -> dict[str, Any]:
        """What options are on so many ranks."""
        assert self._topology is not None
        return {**options, "reply": way_for(options["reply"], self._topology.replicas.size)}

    def _find_ranks(self, device: torch.device) -> None:
        """Once, when all ranks come here."""
        if self._topology is None:
            self._topology = Topology.of(self.process_group, self.node_group, device)

    def __getstate__(self) -> dict[str, Any]:
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group, self.node_group, self._topology, self._side = None, None, None, None
        self._options = {name: state[name] for name in ("block_size", "norm", "reply")}
        self._names, self._reducers, self._loaded, self._sent = {}, {}, state["buckets"], state["sent"]
        self._agreed = False

    def _name(self, parameter: Tensor) -> str:
        if parameter not in self._names:
            raise ValueError(
                "a gradient belongs to a parameter that this OneBitState does not know: build it with the model that "
                "DistributedDataParallel wraps, or call state.bind(model) after unpickling"
            )
        return self._names[parameter]

    def _agree(self, device: torch.device) -> None:
        """Once: all ranks have loaded residuals of the same buckets, or none has. Moving them is a collective call."""
        loaded = [bucket["parameters"] for bucket in self._loaded]
        facts = {"loaded buckets": len(loaded), "checksum of loaded buckets": zlib.crc32(str(loaded).encode())}
        agree(transport_for(self.process_group), device, facts)
        self._agreed = True

    def _restore(self, device: torch.device) -> None:
        """Buckets of a loaded state become reducers; where DDP's differ now, the residuals move as they always do."""
        for bucket in self._loaded:
            reducer = self._reducer(bucket["numels"], device)
            reducer.load_state_dict({k: v for k, v in bucket.items() if k not in ("parameters", "numels")})
            self._reducers[tuple(bucket["parameters"])] = reducer
        self._loaded = []

    def _add(self, names: Names, numels: list[int], device: torch.device) -> None:
        """A reducer for a new bucket, with the residuals its parameters had in others."""
        if names in self._reducers:
            return
        reducer = self._reducer(numels, device)
        old = [key for key in self._reducers if not set(key).isdisjoint(names)]
        moved: dict[str, tuple[Tensor, Tensor]] = {}
        for key in old:
            moved |= _by_parameter(key, self._reducers[key])
        if moved:
            _put(reducer, [moved.get(name) for name in names])
        self._reducers[names] = reducer
        for key in old:
            left = [name for name in key if name not in names]
            gone = self._reducers.pop(key)
            self._sent += gone.wire_bytes
            if left:  # another new bucket will ask for them: keep them in a bucket of their own until then
                sizes = dict(zip(key, gone.numels, strict=True))
                rest = self._reducer([sizes[name] for name in left], device)
                _put(rest, [moved[name] for name in left])
                self._reducers[tuple(left)] = rest

    def _reducer(self, numels: list[int], device: torch.device) -> CompressedAllReduce:
        return CompressedAllReduce(numels, device=device, chunks=1, process_group=self._topology, **self._options)


def onebit_hook(state: OneBitState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP calls for each bucket of gradients. On a GPU in a stream of the state's own, beside backward."""
    flat = bucket.buffer()
    with state.beside(flat):
        state.reduce(bucket.parameters(), flat)
        return local(bucket)


def local(bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The bucket as it is, with nothing more to wait for."""
    flat = bucket.buffer()
    future = streams.future(flat.device)
    future.set_result(flat)
    return future


def _arguments(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _cuts(reducer: CompressedAllReduce) -> list[slice]:
    """Where each parameter's blocks lie in a flat buffer."""
    layout = reducer.prepare().layout
    return [
        slice(a, b) for a, b in itertools.pairwise([*layout.offset.tolist(), int(layout.starts[layout.used_blocks])])
    ]


def _by_parameter(names: Names, reducer: CompressedAllReduce) -> dict[str, tuple[Tensor, Tensor]]:
    """Each parameter's residual on this rank (node, with two levels), and its servers', gathered from all ranks."""
    worker, server = reducer.prepare().gathered_residual(), reducer.prepare().gathered_server_residual()
    server = torch.zeros_like(worker) if server is None else server
    return {name: (worker[cut], server[cut]) for name, cut in zip(names, _cuts(reducer), strict=True)}


def _put(reducer: CompressedAllReduce, residuals: Iterable[tuple[Tensor, Tensor] | None]) -> None:
    """Set each parameter's residuals; None leaves zeros."""
    exchange = reducer.prepare()
    worker, server = torch.zeros((2, exchange.layout.elements), dtype=torch.float32, device=exchange.device)
    for cut, pair in zip(_cuts(reducer), residuals, strict=True):
        if pair is not None:
            worker[cut], server[cut] = pair
    for chunk in exchange.chunks:
        chunk.residual.value.copy_(chunk.slice.of(worker))
        if chunk.server is not None:
            chunk.server.residual.value.copy_(chunk.server.shard.of(server))
