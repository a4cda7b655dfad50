"""torchft: its quorum decides who is there, and an optimizer of onebit goes on with the ranks of every new quorum.

    group = QuorumGroup(timeout=timedelta(seconds=10))
    manager = torchft.Manager(group, load, save, min_replica_size=2, use_async_quorum=False)
    optimizer = OptimizerWrapper(manager, onebit.OneBitAdam(model.parameters(), elastic=True))

    optimizer.zero_grad()                        # a quorum; where it is another one, onebit.reform
    while manager.current_step() < total:
        loss(model, batch).backward()
        optimizer.step()                         # the exchange; an error is reported, and the step is not committed
        optimizer.zero_grad()

A replica group is one process, and the model is not wrapped: the optimizer averages. `load` and `save` are for what is
the caller's: buffers, schedulers, the place in the data. A replica that joins gets parameters and moments by `reform`,
and nobody's residuals.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from onebit.collectives import CollectiveError
from onebit.collectives.signs_of_life import end_all_waits
from onebit.elastic.moving import group_values
from onebit.elastic.reform import reform
from onebit.kernels.log import tell
from onebit.optim.state import State
from onebit.parallel.unwrap import own_optimizer

try:
    from torchft.manager import Manager
    from torchft.optim import OptimizerWrapper as TorchftWrapper
    from torchft.process_group import ProcessGroupWrapper
except ImportError as error:
    raise ImportError("onebit.integrations.torchft needs torchft 0.2: pip install 'torchft==0.2.0'") from error

if not hasattr(ProcessGroupWrapper, "configure"):
    raise ImportError(
        "onebit.integrations.torchft needs torchft 0.2, whose process groups have `configure`, and this is another "
        "version: pip install 'torchft==0.2.0'"
    )


class QuorumGroup(ProcessGroupWrapper):
    """What a Manager takes as its process group: with every quorum a new default process group, of Gloo, over the
    store of the quorum.

    timeout: seconds after which a silent replica is an error. A process that ended is known at once.
    """

    quorum = 0
    """Its number."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        end_all_waits()  # a survivor may wait for this one
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=self._timeout)
        self.quorum = self._quorum_id
        return dist.group.WORLD

    def getBackendName(self) -> str:
        return "onebit-gloo"


class OptimizerWrapper(TorchftWrapper):
    """torchft's face of an optimizer, for one of onebit.

    Unlike torchft's own, `step` takes the step, and then the vote: a step of which the exchange has failed is taken
    back, or finished, by `reform` in the next quorum. So `zero_grad` comes after `step`, never between `backward` and
    `step`, and once before the first step.

    With fewer replicas than the Manager's min_replica_size no step is taken: `zero_grad` waits until others come.
    """

    def __init__(self, manager: Manager, optimizer: torch.optim.Optimizer) -> None:
        self._inner = own_optimizer(optimizer, "OptimizerWrapper")
        self._group: Any = getattr(manager, "_pg")  # noqa: B009 - torchft has no other names for these
        self._least: int = getattr(manager, "_min_replica_size")  # noqa: B009
        is_async: bool = getattr(manager, "_use_async_quorum")  # noqa: B009
        self._reformed: int | None = None  # the quorum whose ranks the optimizer has
        self._heals = False
        if not isinstance(self._group, QuorumGroup):
            raise TypeError(
                f"OptimizerWrapper needs a Manager of a QuorumGroup, and this one has a {type(self._group).__name__}: "
                f"give Manager(pg=onebit.integrations.torchft.QuorumGroup(timeout))"
            )
        if is_async:
            raise ValueError(
                "with an asynchronous quorum replicas would change within a step: give Manager(use_async_quorum=False)"
            )
        if getattr(manager, "_group_world_size") != 1:  # noqa: B009
            raise ValueError(
                "a replica group of several processes is not possible: start a torchrun with --nproc-per-node 1 for "
                "every process, each with a replica_id of its own"
            )
        super().__init__(manager, optimizer)
        manager.register_state_dict_fn("onebit", self._heal, lambda: (self._reformed, group_values(self._inner)))
        optimizer.register_load_state_dict_pre_hook(self._refuse_a_peers_state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        while not self._has_quorum():
            end_all_waits()
            self.manager.should_commit()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        assert closure is None, "optimizers that use closures are not supported"
        if self.manager.errored() is None:
            try:
                self.optim.step()
            except CollectiveError as error:
                self.manager.report_error(error)
        if self.manager.errored() is not None:
            end_all_waits()
        self.manager.should_commit()

    def _has_quorum(self) -> bool:
        """Return whether all have come to the same step, and are enough to go on."""
        manager = self.manager
        self._heals = True
        try:
            manager.start_quorum()
        finally:
            self._heals = False
        if manager.errored() is not None:
            return False
        if (there := dist.get_world_size()) < self._least:
            tell("%d replicas can't go on without others: min_replica_size is %d", there, self._least)
            with contextlib.suppress(RuntimeError):  # one that has left is missing from the next quorum
                dist.barrier()  # before the vote, after which nobody gives its state to one that is behind
            return False
        if manager.num_participants() != there:
            raise ValueError("all replicas take part in a step: give Manager(world_size_mode=WorldSizeMode.DYNAMIC)")
        if self._reformed != self._group.quorum:
            try:
                reform(self.optim, dist.group.WORLD)
            except CollectiveError as error:
                manager.report_error(error)
                return False
            self._reformed = self._group.quorum
        return True

    def _refuse_a_peers_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        if self._heals:
            raise ValueError(
                "the Manager's state_dict has the state of an optimizer of onebit, with which a replica that joins is "
                "not new any more: leave it out, and the parameters too. Such a replica gets them by itself"
            )

    def _heal(self, of_others: tuple[int, list[dict[str, Any]]]) -> None:
        """Take over the others' state: torchft calls this on a replica that is behind. If others have gone on without
        this one, all that it had counts as lost: it joins as a new one. If it was among them it has a step to
        finish, and learning rates change after it."""
        reformed, groups = of_others
        inner = self._inner
        if reformed != self._reformed:
            inner.overlap.abandon()
            inner.install(replace(inner.run, state=State.of(inner.setup)))
            inner.reforms, inner.before_reform = 0, {}
        else:
            for group, new in zip(inner.param_groups, groups, strict=True):
                group.update(new)
