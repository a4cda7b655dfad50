"""What every training loop needs of an optimizer of onebit when it begins."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from onebit.optimizers.optimizer import OneBitOptimizer
from onebit.parallel.attach import attach
from onebit.warning import warn


def attach_if_distributed(model: nn.Module, optimizer: OneBitOptimizer) -> None:
    """Attach, unless one process is alone."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        attach(model, optimizer)


def warn_of_total(optimizer: OneBitOptimizer, total: float) -> None:
    """Warn where a run of so many steps is over before stage 2 begins."""
    rule, here = optimizer.run.state.stages.rule, optimizer.setup.topology.everyone
    earliest = 2 * rule.window if rule.freeze_step is None else rule.freeze_step
    if here.rank == 0 and not optimizer.compressing and earliest >= total:
        warn(
            f"this run has {total:g} steps, and stage 2 begins after step {earliest} at the earliest: nothing would be "
            f"compressed. Give freeze_step=N, 15 to 25 % of its steps, or take ZeroOneAdam"
        )
