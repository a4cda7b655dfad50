"""A process group of torch.distributed as a transport: NCCL, or Gloo.

Gloo sends a message only when it knows that its receiver waits for it: half a round trip to say so, half a round trip
for the message. Of its collectives all-reduce and all-gather pass on from rank to rank what they have, which takes a
round trip for each rank, and two of its threads run all of them. So up to 16 ranks send messages on the CPU in pairs,
all at once, one round trip whatever their number, and half of one where `expect` was called in time.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import socket
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from onebit.collectives.signs_of_life import longest_silence
from onebit.collectives.transport.lent import lent
from onebit.collectives.transport.protocol import FACTS, Transport, Work, all_gather_values, collective_errors
from onebit.collectives.waits import waiting
from onebit.kernels import streams

SMALL = 2**16  # bytes up to which what Gloo passes on from rank to rank waits for latency
MOST_IN_PAIRS = 16  # ranks
_MAKING = "making a process group"
_OUTSIDER = (
    "this rank is not in the process group it was given: only the group's members take part. Build the optimizer or "
    "the all-reduce on those ranks alone"
)


class _Duplicates:
    """Groups of the same ranks that were made for threads of their own, each with a number."""

    def __init__(self) -> None:
        self.made = 0
        self.spare: dict[int, Any] = {}  # those that nobody uses any more


_DUPLICATES: WeakKeyDictionary[Any, dict[Any, _Duplicates]] = WeakKeyDictionary()  # by the world of their ranks
_KEPT = 62  # numbers that fit into an integer
_COUNTS_APART = torch.__version__ >= "2.14"
_BEYOND = 2**40  # what no process counts to
_made_by_members: deque[int] = deque([-1], maxlen=1)


class TorchTransport:
    """A process group of torch.distributed, with a backend for each type of device: Gloo, NCCL or both. CUDA tensors
    pass through pinned memory where only Gloo can take them."""

    def __init__(self, group: Any = None, of: _Duplicates | None = None, number: int = _KEPT) -> None:
        """`duplicate` gives `of` and `number` to the groups that it has made."""
        self._of, self._number = of or _Duplicates(), number
        self.group = group if group is not None else dist.group.WORLD
        if self.group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(_OUTSIDER)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError(_OUTSIDER)
        self.backends = backends_of(self.group)
        self.name = " and ".join(dict.fromkeys(self.backends.values()))
        self.members = dist.get_process_group_ranks(self.group)
        self._store = dist.distributed_c10d._get_default_store()
        self._store.set(_host_key(dist.get_rank()), socket.gethostname())
        self._one_rank_a_host_here = _one_rank_a_host()
        self.one_rank_a_host: bool | None = None  # of all ranks, once they were asked
        self.expected: dict[int, tuple[Tensor, list[Any]]] = {}  # by address: receives that have started

    def all_to_all(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        if self._in_pairs(out):
            tag = _tag("all", phase)
            return self._exchange(out, list(sent), self._receive(out, tag, phase), tag, phase)
        return self._start(dist.all_to_all_single, out, sent, phase)

    def all_gather(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        if self._gathers_in_pairs(out):
            early, tag = self.expected.pop(out.data_ptr(), None), _tag("one", phase)
            receives = self._receive(out, tag, phase) if early is None else early[1]
            return self._exchange(out, [sent[0]] * self.size, receives, tag, phase)
        if self._in_one_round(sent):
            return self._start(dist.all_to_all_single, out, sent.expand_as(out).contiguous(), phase)
        return self._start(_all_gather_single, out, sent, phase)

    def expect(self, out: Tensor, phase: str) -> None:
        if self._gathers_in_pairs(out) and out.data_ptr() not in self.expected:
            self.expected[out.data_ptr()] = out, self._receive(out, _tag("one", phase), phase)

    def all_max(self, values: Tensor, phase: str) -> None:
        if self._in_one_round(values):
            everyone = torch.empty((self.size, values.nbytes), dtype=torch.uint8, device=values.device)
            self.all_gather(everyone, values.reshape(-1).view(torch.uint8)[None], phase).wait()
            values.copy_(everyone.view(values.dtype).amax(0).view(values.shape))
            return
        host = values.cpu() if self._staged(values) else values
        with collective_errors(phase, self.name), waiting(host.device):
            dist.all_reduce(lent(host), dist.ReduceOp.MAX, group=self.group)
        if host is not values:
            values.copy_(host)

    def all_sum(self, values: Tensor, phase: str) -> Work:
        host = _to_pinned(values) if self._staged(values) else values
        with collective_errors(phase, self.name):
            work = dist.all_reduce(lent(host), dist.ReduceOp.SUM, group=self.group, async_op=True)
        return TorchWork([work], phase, self.name, host, host.view(-1), values)

    def send(self, values: Tensor, to: int, phase: str) -> Work:
        host = _to_pinned(values) if self._staged(values) else values
        with collective_errors(phase, self.name):
            work = dist.isend(host, self.members[to], self.group, _tag("send", phase))
        return TorchWork([work], phase, self.name, host, values, values)

    def receive(self, out: Tensor, source: int, phase: str) -> Work:
        landing = streams.pinned(out) if self._staged(out) else out
        with collective_errors(phase, self.name):
            work = dist.irecv(landing, self.members[source], self.group, _tag("send", phase))
        return TorchWork([work], phase, self.name, landing, landing.view(-1), out)

    def duplicate(self) -> Transport:
        own = self._duplicates
        free = sum(1 << number for number in own.spare)
        phase = "looking for a group that nobody uses any more (all-gather of one number)"
        common = functools.reduce(operator.and_, self._everyones(free, phase))
        if common:  # dropped on all ranks, on each when it has collected its garbage
            number = (common & -common).bit_length() - 1
            return self._transport_of(own.spare.pop(number), of=own, number=number)
        number, own.made = own.made, own.made + 1
        if self.group is dist.group.WORLD:
            return self._transport_of(self._made(None, self._kind), of=own, number=number)
        return self._new_group(self.members, of=own, number=number)

    def close(self) -> None:
        """Give a duplicate that nobody uses any more back: the next one of the same ranks takes its group."""
        if self._number < _KEPT:
            self._of.spare[self._number] = self.group

    @property
    def _duplicates(self) -> _Duplicates:
        of_world = _DUPLICATES.setdefault(dist.group.WORLD, {})
        return of_world.setdefault((tuple(self.members), self._kind), _Duplicates())

    def of_hosts(self) -> Transport:
        return self if "cpu" in self.backends else self._new_group(self.members, "cpu:gloo")

    def world_rank(self, rank: int) -> int:
        return self.members[rank]

    def host_of(self, rank: int) -> str | None:
        with contextlib.suppress(RuntimeError):  # the process that keeps the store may be gone
            key = _host_key(self.members[rank])
            if self._store.check([key]) and (host := self._store.get(key).decode()) != socket.gethostname():
                return host
        return None

    def split(self, color: int) -> Transport:
        colors = self._everyones(color, "telling ranks apart (all-gather of one number)")
        return self._new_group([rank for rank, its in zip(self.members, colors, strict=True) if its == color])

    def _everyones(self, number: int, phase: str) -> list[int]:
        """The number that each rank gives."""
        own = torch.tensor([number], dtype=torch.int64, device=self._device)
        return all_gather_values(self, own, phase).view(-1).tolist()

    def ranks_in(self, of: Transport) -> list[int]:
        if not isinstance(of, TorchTransport):
            raise TypeError(f"a group of torch.distributed can't be a part of ranks that communicate by {of.name}")
        if outside := set(self.members) - set(of.members):
            raise ValueError(f"its rank {min(outside)} of the world is not in process_group")
        return [of.members.index(rank) for rank in self.members]

    def _new_group(self, ranks: list[int], kind: str | None = None, **as_duplicate: Any) -> Transport:
        """Made by its members alone, who all are in this group."""
        with self._named_alike(), _without_bound_device():
            made = self._made(ranks, kind or self._kind, use_local_synchronization=True)
        return self._transport_of(made, **as_duplicate)

    def _transport_of(self, made: Any, **as_duplicate: Any) -> Transport:
        transport = TorchTransport(made, **as_duplicate)
        transport.one_rank_a_host = self.one_rank_a_host
        return transport

    def _made(self, ranks: list[int] | None, kind: str, **how: Any) -> Any:
        """Make a group with this group's timeout. All have come here together: a rank that a Heartbeat would count as
        gone is not waited for."""
        patience = longest_silence()
        with collective_errors(_MAKING, self.name):
            made = dist.new_group(ranks, patience or self._timeout, kind, **how)
        if patience and self._timeout:
            dist.distributed_c10d._set_pg_timeout(self._timeout, made)
        return made

    @contextlib.contextmanager
    def _named_alike(self) -> Iterator[None]:
        """Give a group that only its members make the same name on all ranks: torch names it by how many groups a
        process has made. Until torch 2.13 those that have made fewer make some of themselves alone. Later ones count
        this group, too, and name those of all ranks by the same count: it stays, and this group has another."""
        world = dist.distributed_c10d._world
        most = max(self._everyones(_groups_made(), "counting process groups (all-gather of one number)"))
        if not _COUNTS_APART:
            while _groups_made() < most:
                with _without_bound_device():
                    dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
            yield
            return
        own, world.group_count = world.group_count, _BEYOND + most
        try:
            yield
        finally:
            world.group_count = own
            _made_by_members.append(most)

    @property
    def _timeout(self) -> timedelta | None:
        """The group's own; None is torch's default."""
        group: Any = self.group
        return getattr(getattr(group._get_backend(self._device), "options", None), "_timeout", None)

    @property
    def _device(self) -> torch.device:
        """The device of tensors that the group can send."""
        return torch.device("cpu" if "cpu" in self.backends else next(iter(self.backends)))

    @property
    def _kind(self) -> str:
        """What makes another group of the same backends."""
        return ",".join(f"{device}:{backend}" for device, backend in self.backends.items())

    def _backend(self, tensor: Tensor) -> str:
        """What sends a tensor, or its copy in pinned memory."""
        kind = tensor.device.type
        if kind not in self.backends and not (kind == "cuda" and "cpu" in self.backends):
            raise ValueError(
                f"the process group sends {' and '.join(self.backends)} tensors, by {self.name}, and this one is on "
                f"{tensor.device}: call init_process_group with a backend for them, 'gloo' for the CPU"
            )
        return self.backends.get(kind) or self.backends["cpu"]

    def _start(self, collective: Callable[..., Any], out: Tensor, sent: Tensor, phase: str) -> Work:
        landing, source = out.view(-1), sent.view(-1)
        if self._staged(out):
            landing, source = streams.pinned(landing), _to_pinned(source)
        with collective_errors(phase, self.name):
            work = collective(lent(landing), lent(source), group=self.group, async_op=True)
        return TorchWork([work], phase, self.name, source, landing, out)

    def _in_one_round(self, sent: Tensor) -> bool:
        """Return whether Gloo would pass this on from rank to rank while its bytes count for nothing, or, of two ranks,
        take it for a part of what DDP sends."""
        return self._backend(sent) == "gloo" and self.size > 1 and sent.nbytes <= SMALL

    def _in_pairs(self, out: Tensor) -> bool:
        return self._backend(out) == "gloo" and 1 < self.size <= MOST_IN_PAIRS and not out.is_cuda

    def _gathers_in_pairs(self, out: Tensor) -> bool:
        """Return whether an all-gather goes in pairs. If ranks share a host, Gloo's ring carries a large message over a
        link once, and pairs do once a rank."""
        return self._in_pairs(out) and (self.size == 2 or out[0].nbytes <= SMALL or self._all_alone_on_hosts())

    def _all_alone_on_hosts(self) -> bool:
        """Return whether each host has one rank, by what the launchers of all ranks say. The first time a collective
        call, for ranks of several launchers may be told otherwise."""
        if self.one_rank_a_host is None:
            phase = "asking whether each host has one rank (all-gather of one number)"
            self.one_rank_a_host = all(self._everyones(int(self._one_rank_a_host_here), phase))
        return self.one_rank_a_host

    def _receive(self, out: Tensor, tag: int, phase: str) -> list[Any]:
        """Row k of `out` from rank k."""
        with collective_errors(phase, self.name):
            return [dist.irecv(out[k], self.members[k], self.group, tag) for k in self._others]

    def _exchange(self, out: Tensor, rows: list[Tensor], receives: list[Any], tag: int, phase: str) -> Work:
        """Row k of `rows` to rank k."""
        out[self.rank].copy_(rows[self.rank])
        with collective_errors(phase, self.name):
            sends = [dist.isend(rows[k], self.members[k], self.group, tag) for k in self._others]
        return TorchWork([*receives, *sends], phase, self.name, rows, out, out)

    @cached_property
    def _others(self) -> list[int]:
        """The next rank first: no two ranks begin with the same one."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def _staged(self, tensor: Tensor) -> bool:
        return self._backend(tensor) == "gloo" and tensor.is_cuda


class TorchWork:
    """Holds what is on its way until it has arrived: from `sources` to `landing`, and then to `out`."""

    def __init__(self, works: list[Any], phase: str, name: str, sources: Any, landing: Tensor, out: Tensor) -> None:
        self._works, self._phase, self._name = works, phase, name
        self._sources, self._landing, self._out = sources, landing, out

    def wait(self) -> None:
        with collective_errors(self._phase, self._name), waiting(self._out.device):
            for work in self._works:
                work.wait()
        self._works = []  # which have tensors
        if self._landing.device != self._out.device:
            self._out.view(-1).copy_(self._landing, non_blocking=True)


def _host_key(rank: int) -> str:
    return f"onebit/host of rank {rank}"


@functools.cache
def _tag(to: str, phase: str) -> int:
    """Return the tag of messages in pairs: receives of each are in the order of sends. A rank that is in another phase
    sends nothing that would be taken for this one's: of another length, it would end the process."""
    phase = FACTS if phase.endswith(FACTS) else phase
    return zlib.crc32(f"{to} {phase}".encode()) & 0x7FFFFFFF


def backends_of(group: Any) -> dict[str, str]:
    """The backend of each type of device. A group made without one has what torch finds: Gloo for the CPU, NCCL for
    CUDA."""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend.lower() for device, backend in pairs}


@contextlib.contextmanager
def _without_bound_device() -> Iterator[None]:
    """Unbind the world's device meanwhile. After init_process_group(device_id=...) torch would split the world's
    communicator, for which it waits for ranks that are no members and make no group."""
    world: Any = dist.group.WORLD
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


def _groups_made() -> int:
    """That this process is in; from 2.14 on, one more than the last number of one that its members alone have made."""
    return _made_by_members[-1] + 1 if _COUNTS_APART else len(dist.distributed_c10d._world.pg_names)


def _one_rank_a_host() -> bool:
    """Return whether torchrun's variables say that each host has one rank; without them, it is False."""
    hosts = os.environ.get("GROUP_WORLD_SIZE")
    return hosts is not None and hosts == os.environ.get("WORLD_SIZE")


def _all_gather_single(out: Tensor, sent: Tensor, **options: Any) -> Any:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, sent, **options)


def _to_pinned(tensor: Tensor) -> Tensor:
    """A copy in pinned memory. The host waits for this tensor's stream, since Gloo reads at once."""
    host = streams.pinned(tensor)
    host.copy_(tensor, non_blocking=True)
    streams.wait_on_host(streams.current(tensor.device))
    return host
