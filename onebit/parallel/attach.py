"""DDP hands gradient communication to the optimizer: averaged in stage 1, left local, or to a node, in stage 2."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from onebit.collectives.averaging import narrower
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.torch import TorchTransport
from onebit.optim.optimizer import OneBitOptimizer
from onebit.parallel.ddp_hook import local


def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Register the optimizer with a model wrapped in DistributedDataParallel, once, before the first backward pass.

    Stage 1 averages gradients as DDP does without it, in `gradient_dtype` where that is given; in stage 2 they stay
    local, or are averaged over the ranks of a node alone, and the optimizer averages momentum.
    """
    inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps
    if not isinstance(inner, OneBitOptimizer):
        raise TypeError(f"attach needs an optimizer of onebit, such as OneBitAdam; this is a {type(inner).__name__}")
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"attach needs a model wrapped in DistributedDataParallel, this is a {type(model).__name__}. Without DDP "
            f"there is nothing to attach: the optimizer averages gradients itself"
        )
    inner.find_ranks()
    theirs, ours = transport_for(model.process_group), inner.setup.topology.everyone
    if (theirs.rank, theirs.size) != (ours.rank, ours.size):
        raise ValueError(
            f"the model's process group has {theirs.size} ranks (this is rank {theirs.rank}), the optimizer's "
            f"{ours.size} (rank {ours.rank}): pass process_group= to the optimizer, the same as to DDP"
        )
    names = {p: name for name, p in model.module.named_parameters() if p.requires_grad}
    known = {p for group in inner.param_groups for p in group["params"]}
    lacking = [name for p, name in names.items() if p not in known]
    if lacking:
        more = f" and {len(lacking) - 1} more" if lacking[1:] else ""
        raise ValueError(
            f"the optimizer does not hold {lacking[0]!r}{more} of the model: in stage 2 nobody would average these "
            f"gradients. Give the optimizer all parameters that require a gradient, or set requires_grad=False before "
            f"wrapping"
        )
    foreign = [inner.setup.name_of(p) for p in known if p.requires_grad and p not in names]
    if foreign:
        raise ValueError(
            f"the model does not hold parameter {foreign[0]} of the optimizer: DDP would not average its gradient. "
            f"Give the optimizer this model's parameters alone, and others one of their own"
        )
    model.register_comm_hook(_Attached(inner, model.process_group), _hook)
    inner.averaged_by_ddp = True
    inner.overlap.set_model(model)
    inner.setup.names.update(names)


_NARROW = {torch.float16: fp16_compress_hook, torch.bfloat16: bf16_compress_hook}


@dataclass(frozen=True)
class _Attached:
    """What DDP hands to the hook."""

    optimizer: OneBitOptimizer
    process_group: dist.ProcessGroup


def _hook(state: _Attached, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP calls for each bucket of gradients. The first one of a backward pass begins the step."""
    with torch.no_grad():
        state.optimizer.begin_step()
    group: Any = state.process_group
    if state.optimizer.compressing:
        node = state.optimizer.setup.topology.node
        if not isinstance(node, TorchTransport) or not state.optimizer.takes_node_mean():
            return local(bucket)
        group = node.group
    own = bucket.buffer().dtype
    wire = narrower(own, state.optimizer.setup.options.gradient_dtype if group.size() > 1 else None)
    average = allreduce_hook if wire == own else _NARROW[wire]
    return average(group, bucket)
