"""The state of all ranks, beside what a training loop saves of one of them.

Such loops write `optimizer.state_dict()` of rank 0 and load it on every rank: in stage 2 the residuals of the others
are lost. So `onebit.save` writes all of them into a folder of the loop's checkpoint, and when the loop loads what it
has written itself, the optimizer's part of that folder is loaded in its place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onebit.checkpoint.files import MANIFEST
from onebit.checkpoint.ranks import CheckpointRanks
from onebit.checkpoint.save_load import optimizer_state, save
from onebit.optimizers.optimizer import OneBitOptimizer
from onebit.parallel.attach import attach
from onebit.warning import warn

FOLDER = "onebit"
"""What it is called in a checkpoint."""


class WholeState:
    """Of one optimizer and its model."""

    def __init__(self, model: nn.Module, optimizer: OneBitOptimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self._next: Path | None = None
        optimizer.register_load_state_dict_pre_hook(self._in_its_place)

    def save(self, folder: Path) -> None:
        """A collective call."""
        save(folder, self.model, self.optimizer)

    def expect(self, folder: Path) -> None:
        """Whatever the optimizer is to load next, it loads what is in `folder` instead: a collective call.

        Where nothing is there, it loads what it is given: then residuals start from zero, with a warning.
        """
        self.optimizer.find_ranks()
        there = CheckpointRanks(self.optimizer.setup).gathered(lambda: (folder / MANIFEST).is_file())
        self._next = folder if any(there) else None

    def cancel(self) -> None:
        """What is loaded next is loaded as it is."""
        self._next = None

    def _in_its_place(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Called by the optimizer with what it is to load; returns what it loads instead, if anything."""
        folder, self._next = self._next, None
        return None if folder is None else optimizer_state(folder, self.model, self.optimizer)


def attach_if_distributed(model: nn.Module, optimizer: OneBitOptimizer) -> None:
    """One process alone has nothing to attach."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        attach(model, optimizer)


def warn_of_total(optimizer: OneBitOptimizer, total: float) -> None:
    """Where a run of so many steps is over before stage 2 begins."""
    rule, here = optimizer.current.stages.rule, optimizer.setup.topology.everyone
    earliest = 2 * rule.window if rule.freeze_step is None else rule.freeze_step
    if here.rank == 0 and not optimizer.compressing and earliest >= total:
        warn(
            f"this run has {total:g} steps, and stage 2 begins after step {earliest} at the earliest: nothing would be "
            f"compressed. Give freeze_step=N, 15 to 25 % of its steps, or take ZeroOneAdam"
        )
