"""Another set of ranks, without a restart: from N senders to the network to N', between two steps.

    e_i = e_i N' / N;    e_k[shard k] += N' E_k;    E = 0

The mean of e plus E stays what it was, less what lost ranks had. Nothing else changes: parameters, moments, messages
and counters are the same on all ranks already. A rank that stays builds the state that it has anew for the new group,
as a load does, and sends none of it. A rank that joins gets all but the residuals from a rank that stays, and owes
nothing.

Where messages of the old group are none of the new one (direct replies, or a scale a message), m goes into the
residuals of all ranks, times beta1: the next messages hold the same sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onebit.checkpoint import restore, schema
from onebit.checkpoint.names import rank_of, server_rank_of
from onebit.collectives.agreement import all_gather_json, listed, raise_on_all
from onebit.collectives.hand_over import receive_tensors, send_tensors
from onebit.collectives.topology import Topology
from onebit.elastic.halfway import Settlement, facts_of_step
from onebit.elastic.losses import warn_of_losses
from onebit.optim.param_groups import PROGRESS
from onebit.optim.snapshot import Snapshot
from onebit.optimizers.optimizer import OneBitOptimizer
from onebit.parallel.unwrap import own_optimizer
from onebit.parallel.watch import Watch

Saved = dict[Tensor, dict[str, Any]]

_LEAVING = "handing over residuals (send)"
_JOINING = "handing a state to a rank that joins (send)"
_COMPARING = "comparing how far the ranks are (all-gather)"


@torch.no_grad()
def reform(optimizer: torch.optim.Optimizer, process_group: Any, *, leaving: Sequence[int] = ()) -> None:
    """Go on with the ranks of `process_group`, between two steps. All of them call this; nothing is read from a disk.

        group = dist.new_group(ranks)                 # of those that are there now
        onebit.reform(optimizer, group)

    process_group: as an optimizer takes it. Nodes are found anew where the optimizer was built with
    node_group="auto"; where it was built with a group, give a Topology (`Topology.of(group, node_group)`).

    A rank that stays has the same parameters, moments, counters and learning rate as before, bit for bit, and sends
    none of them. A rank that joins has built a model and an optimizer with the same arguments, has taken no step and
    loaded nothing: that tells that the rank is new. The rank gets all of it from a rank that stays, parameters and the
    numbers of param groups too, but buffers of the model and schedulers: those are the caller's.

    Ranks of the old group that do not call this are lost, and with them what compression had left out there: a warning
    on the first rank says how much that is. leaving: ranks of the old group, by their numbers in it, that leave in good
    order. They call this too, with the same `leaving`, while all of the old group is there; their process_group is
    passed over. They hand what they owe to ranks that stay, and then take no more steps.

    DistributedDataParallel keeps its process group: drop the wrapped model, wrap `model.module` anew over the new
    group, and call `onebit.attach` again. The old wrapper must be gone before the next backward pass.

    A ValueError on all ranks says what does not fit, and the optimizer stays as it was: ranks that are at different
    steps, a new rank that has taken steps, parameters that are sharded (FSDP).
    """
    inner = own_optimizer(optimizer, "reform")
    _check(inner, leaving)
    own = _Own.of(inner)
    if leaving and not is_new(inner) and not own.hand_over(leaving):
        return
    topology = inner.rank_finder.topology_of(process_group)
    members = _compared(topology, own)
    stayers = [rank for rank, each in enumerate(members) if not each["new"]]
    settlement = Settlement(topology, members, stayers)
    if stayers and not is_new(inner):
        settlement.settle(inner)
        own.save()
    received = _joined(topology, own, stayers)
    failed: Exception | None = None
    groups: list[dict[str, Any]] = []
    snapshot = inner.current
    try:
        groups, snapshot = own.restored(topology, received)
    except (TypeError, ValueError) as error:
        failed = error
    raise_on_all(topology.everyone, inner.setup.device, failed, "another rank can't join: its error says why")
    if stayers:
        warn_of_losses(inner.setup, inner.current, topology, members[stayers[0]]["ranks"], [m["kept"] for m in members])
    if received is not None:
        received.put_parameters(inner, groups)
    own.go_on_between_exchanges(topology, snapshot, settlement.local_progress if stayers else [], received is not None)
    go_on_with(inner, topology, snapshot, max(each["reforms"] for each in members) + 1)
    if stayers and settlement.sync_is_due:
        inner.synchronize()


def is_new(inner: OneBitOptimizer) -> bool:
    """Whether a rank has begun no step and loaded nothing. Reading it waits for the device."""
    return not inner.current.ranks_agree and not bool(inner.current.stages.counts.any())


def go_on_with(inner: OneBitOptimizer, topology: Topology, snapshot: Snapshot, reforms: int) -> None:
    """From `snapshot`, with other ranks. They compare what they have with the coming step, as before the first one."""
    inner.rank_finder.go_on_with(topology)
    inner.setup, inner.reforms = replace(inner.setup, topology=topology), reforms
    inner.overlap.forget_ranks()
    inner.watch = Watch(inner.setup.options.check_every)
    inner.averaged_in_backward, inner.leave_out_buckets = False, lambda buckets: None
    inner.install(snapshot)


def _check(inner: OneBitOptimizer, leaving: Sequence[int]) -> None:
    inner.current.check_own_parameters("reform")
    inner.shown_state.check_loaded()
    inner.overlap.abandon()
    if inner.current.under_way is None:
        inner.catch_up()
    if leaving and inner.current.under_way is not None:
        raise ValueError(
            "reform with leaving= after a step that did not end: ranks leave in good order between two steps. Call "
            "reform on those that are left, without leaving="
        )
    if inner.setup.topology.shard is not None:
        raise ValueError(
            "reform with sharded parameters (FSDP) is not possible: the parts that a lost rank held are gone. Load the "
            "last checkpoint (onebit.load), on any number of ranks"
        )


@dataclass
class _Own:
    """What this rank has before."""

    inner: OneBitOptimizer
    saved: Saved
    numbers: dict[str, Any]
    kept: list[int]  # the places in the old group of those whose residuals this rank goes on with

    @classmethod
    def of(cls, inner: OneBitOptimizer) -> _Own:
        return cls(inner, {}, {}, [] if is_new(inner) else [inner.setup.topology.place])

    def save(self) -> None:
        """What it has now, beside what others have handed over."""
        setup, current = self.inner.setup, self.inner.current
        handed, self.numbers = self.saved, schema.progress(setup, current)
        self.saved = {p: {**own, **handed.get(p, {})} for p, own in schema.save(setup, current).items()}

    @property
    def facts(self) -> dict[str, Any]:
        topology = self.inner.setup.topology
        return {
            "new": is_new(self.inner),
            "kept": self.kept,
            "ranks": topology.nodes * topology.slices,
            "reforms": self.inner.reforms,
            **facts_of_step(self.inner),
        }

    def hand_over(self, leaving: Sequence[int]) -> bool:
        """From ranks that leave to ranks that stay, over the old group: whether this rank stays."""
        everyone, device = self.inner.setup.topology.everyone, self.inner.setup.device
        staying = sorted(set(range(everyone.size)) - set(leaving))
        if not staying or not set(leaving) <= set(range(everyone.size)):
            raise ValueError(
                f"leaving={list(leaving)}: these are ranks of the old group, which has {everyone.size}, and one "
                f"stays at least"
            )
        state = schema.save(self.inner.setup, self.inner.current)
        for j, rank in enumerate(sorted(leaving)):
            heir = staying[j % len(staying)]
            if everyone.rank == rank:
                residuals = {p: {n: v for n, v in own.items() if _is_residual(n)} for p, own in state.items()}
                _send(everyone, heir, {"place": self.kept[0]}, residuals, device, _LEAVING)
            elif everyone.rank == heir:
                value, states = _receive(everyone, rank, device, _LEAVING)
                self.kept.append(value["place"])
                for p, theirs in zip(state, states, strict=True):
                    self.saved.setdefault(p, {}).update(theirs)
        return everyone.rank in staying

    def restored(self, topology: Topology, received: _Received | None) -> tuple[list[dict[str, Any]], Snapshot]:
        """What each param group is updated with, and the state as the new ranks cut it."""
        inner = self.inner
        setup = replace(inner.setup, topology=topology)
        params = [p for group in setup.groups for p in group["params"]]
        keys = iter(range(len(params)))
        groups = [{**group, "params": [next(keys) for _ in group["params"]]} for group in setup.groups]
        state, numbers = self.saved, self.numbers
        if received is not None:
            state, numbers = received.state(setup.groups), received.value["numbers"]
            groups = [{**theirs, "params": own["params"]} for theirs, own in received.paired(groups)]
        groups[0][PROGRESS] = numbers
        saved = {i: state[p] for i, p in enumerate(params) if state.get(p)}
        state_dict = {"state": saved, "param_groups": groups}
        return restore.restored(setup, inner.current, state_dict, self.kept)

    def go_on_between_exchanges(self, topology: Topology, snapshot: Snapshot, progress: Any, joins: bool) -> None:
        """What a load has no use for: local steps since the last exchange, of which all have this progress, and what
        this process has counted."""
        inner = self.inner
        if not joins:
            snapshot.stages.go_on_counting(inner.current.stages)
        if any(taken for taken, *_ in progress):
            setup = replace(inner.setup, topology=topology)
            hyper = inner.gradients.write_hyper(setup, snapshot)
            snapshot.go_on_with_local_steps(
                setup, hyper, progress, None if inner.current.synchronized else inner.current
            )


def _compared(topology: Topology, own: _Own) -> list[dict[str, Any]]:
    """Facts of every rank of the new group. A ValueError on all of them where these don't belong to one run."""
    everyone = topology.everyone
    members = all_gather_json(everyone, own.inner.setup.device, own.facts, _COMPARING)
    stayers = [rank for rank, each in enumerate(members) if not each["new"]]
    for rank in stayers[1:]:
        first, each = members[stayers[0]], members[rank]
        for name, what in _SAME.items():
            if each[name] != first[name]:
                raise ValueError(
                    f"{listed([rank], everyone)} has {what} {each[name]}, and {listed(stayers[:1], everyone)} "
                    f"{first[name]}: they do not go on from one run. On a rank that joins build a new "
                    f"model and optimizer, take no step and load nothing"
                )
    kept = [place for each in members for place in each["kept"]]
    if len(set(kept)) < len(kept):
        raise ValueError(
            f"ranks say that they were {sorted(kept)} of one group: they do not belong to one run. On a rank that "
            f"joins build a new model and optimizer, take no step and load nothing"
        )
    return members


_SAME = {"ranks": "been one of this many ranks:", "reforms": "gone on with other ranks this many times:"}


@dataclass
class _Received:
    """A rank's state, as a rank that joins got it."""

    value: Mapping[str, Any]
    states: list[dict[str, Tensor]]
    x: list[Tensor]

    def state(self, groups: Sequence[Mapping[str, Any]]) -> Saved:
        params = [p for group in groups for p in group["params"]]
        if [tuple(x.shape) for x in self.x] != [tuple(p.shape) for p in params]:
            raise ValueError(
                f"this rank has parameters of shapes {[tuple(p.shape) for p in params]!s:.200}, the run that the rank "
                f"joins {[tuple(x.shape) for x in self.x]!s:.200}: build the same model, in the same param groups"
            )
        return dict(zip(params, map(dict, self.states), strict=True))

    def paired(self, groups: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        theirs = self.value["groups"]
        if len(theirs) != len(groups):
            raise ValueError(
                f"this rank has {len(groups)} param groups, the run that it joins {len(theirs)}: build the optimizer "
                f"with the same arguments"
            )
        return list(zip(theirs, groups, strict=True))

    def put_parameters(self, inner: OneBitOptimizer, groups: Sequence[Mapping[str, Any]]) -> None:
        params = [p for group in inner.param_groups for p in group["params"]]
        for p, x in zip(params, self.x, strict=True):
            p.copy_(x)
        for group, new in zip(inner.param_groups, groups, strict=True):
            for name, value in new.items():
                if isinstance(group.get(name), Tensor):
                    group[name].copy_(torch.as_tensor(value))
                elif name != "params":
                    group[name] = value


def _joined(topology: Topology, own: _Own, stayers: Sequence[int]) -> _Received | None:
    """From a rank that stays to each rank that joins: what a rank that joins gets."""
    everyone, inner = topology.everyone, own.inner
    joining = [rank for rank in range(everyone.size) if rank not in stayers] if stayers else []
    received = None
    for j, rank in enumerate(joining):
        giver = stayers[j % len(stayers)]
        if everyone.rank == giver:
            _give(everyone, rank, own)
        elif everyone.rank == rank:
            value, states = _receive(everyone, giver, inner.setup.device, _JOINING)
            received = _Received(value, states, [each.pop("x") for each in states])
    return received


def _give(everyone: Any, rank: int, own: _Own) -> None:
    inner, current = own.inner, own.inner.current
    with current.keep_last_sync():
        state: Saved = {p: {"x": p.detach().clone()} for group in inner.param_groups for p in group["params"]}
    for p, saved in own.saved.items():
        state[p] |= {name: v for name, v in saved.items() if not _is_residual(name)}
    for p, last in current.masters_at_last_sync():
        state[p]["master"] = last
    groups = [
        {k: _number(v) for k, v in group.items() if k not in ("params", PROGRESS)} for group in inner.param_groups
    ]
    value = {"numbers": {**own.numbers, "wire_bytes": 0}, "groups": groups}
    _send(everyone, rank, value, state, inner.setup.device, _JOINING)


def _number(value: Any) -> Any:
    """As JSON can hold it."""
    if isinstance(value, (list, tuple)):
        return [_number(each) for each in value]
    return value.item() if hasattr(value, "item") else value


def _is_residual(name: str) -> bool:
    return rank_of(name) is not None or server_rank_of(name) is not None


def _send(ranks: Any, to: int, value: Any, state: Saved, device: torch.device, phase: str) -> None:
    names = [list(own) for own in state.values()]
    tensors = [v.detach().to(device) for own in state.values() for v in own.values()]
    send_tensors(ranks, to, {"value": value, "names": names}, tensors, device, phase)


def _receive(ranks: Any, source: int, device: torch.device, phase: str) -> tuple[Any, list[dict[str, Tensor]]]:
    found, tensors = receive_tensors(ranks, source, device, phase)
    each = iter(tensors)
    return found["value"], [{name: next(each) for name in names} for names in found["names"]]
