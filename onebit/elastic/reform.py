"""Another set of ranks, without a restart: from N senders to the network to N', between two steps.

    e_i = e_i N' / N;    e_k[shard k] += N' E_k;    E = 0

The mean of e plus E stays what it was, less what lost ranks had. Nothing else changes: parameters, moments and counters
are the same on all ranks already. A rank that stays builds the state that it has anew for the new group, as a load
does, and sends none of it. A rank that joins gets all but the residuals from a rank that stays, and owes nothing.

As after a load, no message has m: the next step takes it from "exp_avg".

What a rank owes follows from its own e, E and N alone. So ranks of which some have gone on, and others have not, since
a rank died within a reform, can go on together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onebit.checkpoint import restore, schema
from onebit.collectives.agreement import NODES, agree, gathered, raise_on_all
from onebit.collectives.topology import Topology
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.protocol import CollectiveError
from onebit.elastic.halfway import Settlement
from onebit.elastic.losses import warn_of_losses
from onebit.elastic.members import Member, Members, is_new
from onebit.elastic.moving import Saved, Shared, receive_shares, send_shares
from onebit.kernels.log import tell
from onebit.optim import facts, merging
from onebit.optim.run import Run
from onebit.optimizers.optimizer import OneBitOptimizer
from onebit.parallel.unwrap import own_optimizer
from onebit.parallel.watch import Watch

_COMPARING = "comparing how far the ranks are (all-gather)"
_LEAVING = "comparing whether ranks can leave (all-gather)"
_FOLLOWING = "comparing what ranks have that followed (all-gather)"
_BUILDING = "comparing whether all can go on (all-gather)"


@torch.no_grad()
def reform(optimizer: torch.optim.Optimizer, process_group: Any, *, leaving: Sequence[int] = ()) -> None:
    """Go on with the ranks of `process_group`, between two steps. All of them call this; nothing is read from a disk.

        group = dist.new_group(ranks)                 # of those that are there now
        onebit.reform(optimizer, group)

    A rank that stays has the same parameters, moments, counters and learning rate as before, bit for bit, and sends
    none of them. A rank that joins has built a model and an optimizer with the same arguments, has taken no step and
    loaded nothing: that tells that the rank is new. The rank gets all of it from a rank that stays, parameters and the
    numbers of param groups too, but buffers of the model and schedulers: those are the caller's.

    Ranks of the old group that do not call this are lost, and with them what compression had left out there: a warning
    on the first rank says how much that is. Ranks that leave in good order call this too, while all of the old group is
    there; their process_group is passed over. They hand what they owe to ranks that stay, and then take no more steps.

    DistributedDataParallel keeps its process group: drop the wrapped model, wrap `model.module` anew over the new
    group, and call `onebit.attach` again. The old wrapper must be gone before the next backward pass.

    An error on all ranks says what does not fit, and on which rank: ranks that are at different steps, a new rank with
    another model, parameters that are sharded (FSDP). The optimizer stays as it was. Where another rank dies meanwhile
    (CollectiveError), some ranks may have gone on and others not: call this again, with those that are left.

    Args:
        optimizer: one of onebit, wrapped or not.
        process_group: as an optimizer takes it. Nodes are found anew if the optimizer was built with node_group="auto";
            if it was built with a group, give a Topology (`Topology.of(group, node_group)`).
        leaving: ranks of the old group, by their numbers in it, that leave in good order: the same on all ranks of the
            old group. A rank that joins gives none.
    """
    start, inner = time.monotonic(), own_optimizer(optimizer, "reform")
    inner.overlap.abandon()
    if inner.giver is not None:
        inner.giver.end(those_without_state=True)  # else they would wait for a step, and the ranks here for them
    inner.move_with_parameters()
    own = _Own(inner, [] if is_new(inner) else [inner.setup.topology.residual_index])
    if leaving and own.everyone.rank in leaving:
        own.leave(leaving)
        return
    everyone = process_group.everyone if isinstance(process_group, Topology) else transport_for(process_group)
    with own.others_know():
        rows = gathered(everyone, inner.setup.device, lambda: own.come(process_group, leaving), _COMPARING)
        members = Settlement(everyone, [Member(**row) for row in rows])
        nodes = inner.rank_finder.how_nodes_are_found(process_group)
        common = {NODES: nodes, **facts.of_model(inner.setup), **facts.of_options(inner.setup)}
        agree(everyone, inner.setup.device, common)
        members.check()
        topology, before = inner.rank_finder.topology_of(process_group), inner.run.state
        own.go_on(members, topology)
    if members.stayers:
        if members.sync_is_due:
            inner.end_local_steps()
        inner.pay_off.ranks_changed(before, members.left, len(members.joining), time.monotonic() - start)


@dataclass
class _Own:
    """What this rank has before."""

    inner: OneBitOptimizer
    kept: list[int]  # the places in the old group of those whose residuals this rank goes on with
    shares: dict[Tensor, Tensor] = field(default_factory=dict)  # what this rank goes on with of them
    saved: Saved = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    awaited: bool = False  # whether ranks that leave wait to hear that others have gone on

    def __post_init__(self) -> None:
        self.everyone, self.device = self.inner.setup.topology.everyone, self.inner.setup.device  # of the old group

    def come(self, process_group: Any, leaving: Sequence[int]) -> dict[str, Any]:
        """All that can be wrong on this rank alone, and what others have to know of it."""
        if leaving:
            self._hand_over(leaving)
        self._check()
        self.inner.rank_finder.how_nodes_are_found(process_group)
        return asdict(Member.of(self.inner, self.kept))

    def leave(self, leaving: Sequence[int]) -> None:
        """Leave in good order: others have what this rank owes."""
        with self.others_know():
            self._hand_over(leaving)
            if self.inner.giver is not None:
                self.inner.giver.end()

    @contextmanager
    def others_know(self) -> Iterator[None]:
        """Ranks that leave hear whether those that stay have gone on: if not, they still have what they owe."""
        try:
            yield
        except Exception as error:
            if self.awaited:
                with suppress(CollectiveError):
                    raise_on_all(self.everyone, self.device, error, "")
            raise
        if self.awaited:
            why = "a rank that stays could not go on, its error says why: no rank has left. Call reform again"
            raise_on_all(self.everyone, self.device, None, why)

    def go_on(self, members: Settlement, topology: Topology) -> None:
        """All fits, on all ranks."""
        inner, stays = self.inner, not members.rows[members.everyone.rank].new
        if stays:
            members.settle(inner)
            self._save(members)
        received = self._get_states(members)
        built: list[tuple[Sequence[dict[str, Any]], Run]] = []
        build = partial(self._built, topology, received)
        gathered(members.everyone, self.device, lambda: built.append(build()), _BUILDING)
        ((groups, run),) = built
        merging.add_residual_shares(run.state, self.shares)
        if members.stayers:
            warn_of_losses(inner.run, members)
        if received is not None:
            received.put_parameters(inner, groups)
        if stays:
            run.state.stages.go_on_counting(inner.run.state.stages, members.left_out)
        if members.stayers:
            self._go_on_between_exchanges(run, members.local_progress)
        before = {"ranks": members.ranks_before, "kept": members.kept[members.everyone.rank]} if members.stayers else {}
        inner.before_reform = {**before, "attempts": int(run.state.stages.counts.sum())}
        inner.reforms = members.reforms + 1
        use_ranks(inner, run, members.overlap)

    def _check(self) -> None:
        inner = self.inner
        inner.run.check_own_parameters("reform")
        if inner.run.state.under_way is None:
            inner.run.check_whole("reform")
            inner.catch_up()
        if inner.setup.topology.shard is not None:
            raise ValueError(
                "reform with sharded parameters (FSDP) is not possible: the parts that a lost rank held are gone. Load "
                "the last checkpoint (onebit.load), on any number of ranks"
            )

    def _hand_over(self, leaving: Sequence[int]) -> None:
        """Send what leaving ranks owe to ranks that stay, over the old group. Before the first step nobody owes
        anything."""
        everyone, staying = self.everyone, sorted(set(range(self.everyone.size)) - set(leaving))
        if not set(leaving) < set(range(everyone.size)):
            raise ValueError(
                f"leaving={list(leaving)}: these are ranks of the old group, which has {everyone.size}, and one stays "
                f"at least"
            )
        if is_new(self.inner):
            return
        gathered(everyone, self.device, self._check_between_steps, _LEAVING)
        self.awaited = True
        shares = self._shares()
        for j, rank in enumerate(sorted(leaving)):
            heir = staying[j % len(staying)]
            if everyone.rank == rank:
                send_shares(everyone, heir, self.kept[0], list(shares.values()), self.device)
            elif everyone.rank == heir:
                place, theirs = receive_shares(everyone, rank, self.device)
                self.kept.append(place)
                for p, more in zip(shares, theirs, strict=True):
                    self.shares[p] = self.shares[p] + more if p in self.shares else more

    def _check_between_steps(self) -> None:
        self._check()
        if self.inner.run.state.under_way is not None:
            raise ValueError(
                "reform with leaving= after a step that did not end: ranks leave in good order between two steps. Call "
                "reform on those that are left, without leaving="
            )

    def _shares(self) -> dict[Tensor, Tensor]:
        """Those of this rank itself."""
        found = merging.residual_shares(self.inner.setup, self.inner.run.state)
        if self.inner.run.state.momentum_at == "exp_avg":
            self.inner.begun = False  # the coming step puts m where it reads it once more, should ranks not change
        return found

    def _save(self, members: Settlement) -> None:
        """What this rank has now, beside what others have handed over."""
        run = self.inner.run
        for p, share in self._shares().items():
            self.shares[p] = self.shares[p] + share if p in self.shares else share
        self.saved, self.numbers = schema.save(run, residuals=False), schema.progress(run)
        self.numbers["steps"] += members.left_out
        self.numbers["mean_norm"] = members.rows[members.stayers[0]].mean_norm  # a step may have ended on some alone
        for own in self.saved.values():
            own["step"] += members.left_out

    def _get_states(self, members: Members) -> Shared | None:
        """What a rank that joins gets from a rank that stays, or has by following."""
        everyone, (received, behind) = members.everyone, self._followed(members)
        for j, rank in enumerate(behind):
            giver = members.stayers[j % len(members.stayers)]
            if everyone.rank == giver:
                self._shared().send(everyone, rank, self.device)
            elif everyone.rank == rank:
                received = Shared.receive(everyone, giver, self.device)
        return received

    def _followed(self, members: Members) -> tuple[Shared | None, list[int]]:
        """What this rank has by following, and the ranks that join and do not have the others' bits."""
        inner, me = self.inner, members.everyone.rank
        if not any(members.rows[rank].follows for rank in members.joining):
            if inner.giver is not None:
                inner.giver.parameters_changed()  # those that follow get the state anew, and join another time
            return None, members.joining
        if inner.giver is not None:
            inner.giver.end()
        followed, why = None, None
        if inner.follower is not None:
            followed, why, inner.follower = inner.follower.end(), inner.follower.why_not, None

        def digest() -> str:
            mine = self._shared() if me == members.stayers[0] else followed
            return "" if mine is None else mine.digest

        digests = gathered(members.everyone, self.device, digest, _FOLLOWING)
        behind = [rank for rank in members.joining if digests[rank] != digests[members.stayers[0]]]
        if me in behind and why is not None:
            tell("reform: the whole state is sent: what was followed is not the others' (%s)", why or "other bits")
        return None if me in behind else followed, behind

    def _shared(self) -> Shared:
        return Shared.of(self.inner, self.saved, self.numbers)

    def _built(self, topology: Topology, received: Shared | None) -> tuple[Sequence[dict[str, Any]], Run]:
        """What each param group is updated with, and the state as the new ranks cut it."""
        setup = replace(self.inner.setup, topology=topology)
        for p, share in self.shares.items():
            if not bool(share.isfinite().all()):
                raise ValueError(
                    f"the residual of parameter {setup.name_of(p)} is not finite, as no run leaves it: the state "
                    f"is damaged. Load the last checkpoint"
                )
        if received is not None:
            found = received.restored(setup)
        else:
            found = restore.restored(setup, self.saved, self.numbers, setup.groups)
        return found.options, found.run()

    def _go_on_between_exchanges(self, run: Run, progress: Any) -> None:
        """What a load has no use for: local steps since the last exchange, of which all have this progress."""
        if any(taken for taken, *_ in progress):
            before = self.inner.run.state
            hyper = self.inner.gradients.write_hyper(run)
            run.continue_local_steps(hyper, progress, None if before.synchronized else before)


def use_ranks(inner: OneBitOptimizer, run: Run, overlap: bool) -> None:
    """Go on with `run`. Ranks compare what they have with the coming step, as before the first one.
    overlap: whether all want it."""
    inner.rank_finder.go_on_with(run.setup.topology)
    inner.overlap.go_on_with_others(overlap)
    inner.watch = Watch(inner.setup.options.check_every)
    inner.averaged_in_backward, inner.leave_out_buckets = False, lambda buckets: None
    inner.install(run)
