"""DDP's hook for its optimizers: gradients are averaged in stage 1, left local, or to a node, in stage 2.

A bucket may have gradients of several optimizers, whose steps are of other kinds, and such that no optimizer of onebit
has: those DDP averages in every step, as without us.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from onebit.collectives.averaging import narrower
from onebit.collectives.transport.lent import lent
from onebit.collectives.transport.protocol import collective_errors
from onebit.collectives.transport.torch import TorchTransport
from onebit.optim.state import State
from onebit.optimizers.optimizer import OneBitOptimizer
from onebit.parallel.buckets import forget_used, leave_out_buckets
from onebit.parallel.hooks import leave_as_is

_AVERAGING = "averaging gradients while backward runs (all-reduce)"
_STATE = attrgetter("run.state")


class _Way(NamedTuple):
    """How gradients are averaged: over which ranks, and what travels."""

    group: dist.ProcessGroup
    wire: torch.dtype


class Attached:
    """What DDP hands to the hook: the optimizers, and whose parameters are whose. A copied or saved model has none of
    it, and averages as DDP does."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.group: dist.ProcessGroup = model.process_group
        self.optimizers: list[OneBitOptimizer] = []
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._owners: dict[Tensor, OneBitOptimizer] = {}
        self._owns_all = False  # whether every parameter that trains has an owner
        self._made_of: list[weakref.ref[State]] = []
        self._needless: dict[OneBitOptimizer, bool] = {}  # whose coming step has no use for buckets
        self._model = weakref.ref(model)
        self._have_stepped: set[OneBitOptimizer] = set()  # since all of them had
        skips = getattr(model, "skip_all_reduce_unused_params", False)
        self._may_be_skipped = set(self._parameters if skips else ())
        self._expected: set[Tensor] = set()  # what optimizers train, until it was seen in a bucket
        self._expected_of: Mapping[Tensor, OneBitOptimizer] = {}  # the owners that these are of

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def add(self, optimizer: OneBitOptimizer, names: Mapping[Tensor, str]) -> None:
        """names: of the model's parameters."""
        if optimizer in self.optimizers:
            raise ValueError("attach was called twice with this model and this optimizer: once is enough")
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad and p in self.owners:
                    raise ValueError(
                        f"an optimizer that was attached before holds {names[p]!r} too: both would average and move "
                        f"it. Give every parameter to one optimizer; to replace that one, wrap the model anew"
                    )
        self.optimizers.append(optimizer)
        optimizer.leave_out_buckets = partial(_leave_out, weakref.ref(self), weakref.ref(optimizer))
        self.leave_out(optimizer, False)

    @property
    def owners(self) -> Mapping[Tensor, OneBitOptimizer]:
        """The optimizer that has each parameter now."""
        now = list(map(_STATE, self.optimizers))
        if len(now) != len(self._made_of) or any(map(is_not, now, [made() for made in self._made_of])):
            of = ((own, state) for own in self.optimizers for state in own.run.state.states)
            self._owners = {p: own for own, state in of for p in state.params}
            self._owns_all = all(p in self._owners for p in self._parameters)
            self._made_of = [weakref.ref(each) for each in now]
        return self._owners

    def check_all_are_averaged(self, bucket: GradBucket) -> None:
        """Check the first backward pass since owners have changed: its buckets have all that DDP averages, and so all
        that optimizers train, or the pass ends with a ValueError."""
        if bucket.index() == 0 and self._expected_of is not self.owners:
            self._expected, self._expected_of = self.owners.keys() - self._may_be_skipped, self.owners
        if self._expected:
            self._expected.difference_update(bucket.parameters())
            if bucket.is_last():
                left_out = [own.setup.name_of(p) for p, own in self.owners.items() if p in self._expected]
                _when_ddp_has_ended(partial(refuse_left_out, left_out))

    def leave_out(self, optimizer: OneBitOptimizer, buckets: bool) -> None:
        """A step ends. Whether the coming backward pass is without buckets: where no optimizer needs them, nor DDP
        itself."""
        self._needless[optimizer] = buckets
        self._have_stepped.add(optimizer)
        if (model := self._model()) is not None:
            if self._have_stepped.issuperset(self.optimizers):
                forget_used(model)
                self._have_stepped.clear()
            everyone = buckets and all(self._needless.get(each, False) for each in self.optimizers)
            leave_out_buckets(model, everyone and len(self.owners) > 0 and self._owns_all)


def refuse_left_out(names: Sequence[str]) -> None:
    """names: of parameters that an optimizer trains, and DDP does not average."""
    if names:
        more = f" and {len(names) - 1} more" if names[1:] else ""
        raise ValueError(
            f"DDP does not average the gradient of parameter {names[0]}{more}, and every rank would move it by its "
            f"own: it was unfrozen, or given to the optimizer, after the model was wrapped, or DDP was told to ignore "
            f"it. Wrap the model anew, with this parameter in it, and attach again"
        )


def _when_ddp_has_ended(call: Callable[[], None]) -> None:
    """Its reducer, left in the middle of a pass, would disturb those of a model that is wrapped anew. What it does at
    the end it queues only after its last bucket: hence twice."""
    queue: Any = torch.autograd.Variable._execution_engine.queue_callback
    queue(partial(queue, call))


def _leave_out(attached: weakref.ref[Attached], optimizer: weakref.ref[OneBitOptimizer], buckets: bool) -> None:
    """What an optimizer calls: it keeps no model and no other optimizer alive."""
    state, own = attached(), optimizer()
    if state is not None and own is not None:
        state.leave_out(own, buckets)


def hook_of_ddp(state: Attached, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP calls for each bucket of gradients. The first one of a backward pass begins the step."""
    with torch.no_grad():
        for optimizer in filter(_trains, state.optimizers):
            if not optimizer.begun:
                optimizer.begin_step()
            elif bucket.index() == 0:
                optimizer.gradients.forget_clip()
            if bucket.index() == 0 and optimizer.foreign_clip is not None:
                _when_ddp_has_ended(partial(optimizer.foreign_clip.backward_ended, optimizer.run))
    state.check_all_are_averaged(bucket)
    own = bucket.buffer().dtype
    owners = list(map(state.owners.get, bucket.parameters()))
    ways = {owner: _way(state, owner, own) for owner in dict.fromkeys(owners)}
    if len(set(ways.values())) == 1:
        way = ways[owners[0]]
        if way is None:
            return leave_as_is(bucket)
        return _with_help(partial(_average, {way: [bucket.buffer()]}, bucket))
    parts: dict[_Way | None, list[Tensor]] = {}
    for owner, grad in zip(owners, bucket.gradients(), strict=True):
        parts.setdefault(ways[owner], []).append(grad)
    return _with_help(partial(_average, {way: g for way, g in parts.items() if way is not None}, bucket))


def _with_help(average: Callable[[], torch.futures.Future[Tensor]]) -> torch.futures.Future[Tensor]:
    """Say what may be wrong where DDP's all-reduce does not end: its error has a socket's words."""
    with collective_errors(_AVERAGING, "torch.distributed"):
        return average().then(_average_or_help)


def _average_or_help(done: torch.futures.Future[Tensor]) -> Tensor:
    with collective_errors(_AVERAGING, "torch.distributed"):
        return done.value()


def _trains(optimizer: OneBitOptimizer) -> bool:
    """Tell whether a backward pass is this optimizer's: not while all of its parameters are frozen, as in another's."""
    return any(p.requires_grad for group in optimizer.param_groups for p in group["params"])


def _way(state: Attached, owner: OneBitOptimizer | None, own: torch.dtype) -> _Way | None:
    """Choose how an optimizer's gradients are averaged; None: they stay as they are. Those of nobody are averaged as
    DDP does."""
    group: Any = state.group
    if owner is None:
        return _Way(group, own)
    if not _trains(owner):
        return None
    kind = owner.run.kind()
    if kind != "full":
        node, by_exchange = owner.setup.topology.node, owner.overlap.on and kind == "1 bit"
        if not isinstance(node, TorchTransport) or not owner.gradients.claim_node_mean(by_exchange):
            return None
        group = node.group
    else:
        owner.gradients.averaged_in_backward = True
    return _Way(group, narrower(own, owner.setup.options.gradient_dtype if group.size() > 1 else None))


@torch.no_grad()
def _average(parts: Mapping[_Way, list[Tensor]], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average the parts of a bucket, each in a message of its own, all but the last waited for here."""
    buffer, futures = bucket.buffer(), []
    for (group, wire), grads in parts.items():
        flat = buffer if grads[0] is buffer else torch.cat([grad.reshape(-1) for grad in grads])
        message = flat.to(wire).div_(group.size())
        sent = dist.all_reduce(lent(message), group=group, async_op=True)
        assert sent is not None
        futures.append(sent.get_future().then(partial(_put_back, grads, buffer)))
    for future in futures[:-1]:
        future.wait()
    return futures[-1]


@torch.no_grad()
def _put_back(grads: Sequence[Tensor], buffer: Tensor, done: torch.futures.Future[Any]) -> Tensor:
    mean = done.value()[0]
    if mean.layout is not torch.strided:  # alone in its bucket
        return buffer.copy_(mean)
    for grad, its in zip(grads, mean.split([grad.numel() for grad in grads]), strict=True):
        if its.data_ptr() != grad.data_ptr():  # it was averaged where it lies
            grad.copy_(its.view_as(grad))
    return buffer
