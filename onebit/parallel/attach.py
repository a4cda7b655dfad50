"""DDP or FSDP hand gradient communication to the optimizer: averaged in stage 1, local, or a node's, in stage 2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from onebit.collectives.averaging import average_
from onebit.collectives.transport import transport_for
from onebit.kernels import streams
from onebit.kernels.log import tell
from onebit.optim.eager import eager
from onebit.optim.sharding import is_sharded
from onebit.optimizers.optimizer import OneBitOptimizer
from onebit.parallel.attached import Attached, hook_of_ddp, refuse_left_out
from onebit.parallel.buckets import keep_buffers_the_same
from onebit.parallel.hooks import register
from onebit.parallel.unwrap import ddp_of, own_optimizer


def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Register the optimizer with a model in DistributedDataParallel or FSDP2, once, before the first backward pass.

    Stage 1 averages gradients as DDP does without it, in `gradient_dtype` where that is given; in stage 2 they stay
    local, or are averaged over the ranks of a node alone, and the optimizer averages momentum.

    A model in DDP takes several optimizers, a call each. What none of them has DDP averages in every step.

    Args:
        model: what DDP or `fully_shard` has wrapped; it may be compiled or wrapped further.
        optimizer: one of onebit, wrapped or not.
    """
    if isinstance(model, torch.optim.Optimizer):
        raise TypeError("attach takes the model first, then the optimizer: onebit.attach(model, optimizer)")
    inner = own_optimizer(optimizer, "attach")
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach needs a model, a torch.nn.Module; this is a {type(model).__name__}")
    if any(is_sharded(p) for p in model.parameters()):
        _attach_to_fsdp(model, inner)
    elif (found := ddp_of(model)) is not None:
        _attach_to_ddp(*found, inner)
    else:
        raise TypeError(
            f"attach needs a model wrapped in DistributedDataParallel, or by fully_shard, this is a "
            f"{type(model).__name__}. Without them there is nothing to attach: the optimizer averages gradients itself"
        )


def _attach_to_fsdp(model: nn.Module, inner: OneBitOptimizer) -> None:
    """FSDP2 averages over the ranks that hold the parts; what comes out is averaged over the replicas in its hook,
    while backward still runs. Where a module takes no hook the optimizer does it, in `step`.

    FSDP reduces the gradients that are there: replicas have to use the same parameters in a step.
    """
    if inner.setup.topology.shard is None:
        raise ValueError(
            "the model is sharded and the optimizer's parameters are not: call fully_shard first, then build the "
            "optimizer with model.parameters()"
        )

    names, device = _same_parameters(model, inner, "FSDP"), inner.setup.device
    of_user: streams.Stream | None = None

    @eager
    def find_stream(module: nn.Module | None = None, inputs: Any = None) -> None:
        """The forward pass, and so the step, is in the current stream."""
        nonlocal of_user
        of_user = streams.current(device) if streams.has_streams(device) else None

    @torch.no_grad()
    def hook(reduced: Tensor) -> None:
        with streams.within(of_user):  # FSDP calls it in a stream of its own, and state belongs to that of the step
            if not inner.begun:
                inner.begin_step()
        if streams.has_streams(device):  # FSDP made it in a third one, and lets go of it when it was read in this one
            streams.keep(reduced, streams.current(device))
        if inner.run.kind() == "full":
            setup = inner.setup
            average_([reduced], setup.topology.replicas, wire_dtype=setup.options.gradient_dtype)
            inner.gradients.averaged_in_backward = True

    taken: list[Any] = []
    sharded: list[Any] = [module for module in model.modules() if hasattr(module, "unshard")]
    find_stream()
    model.register_forward_pre_hook(find_stream)
    try:
        for module in sharded:
            module.set_all_reduce_hook(hook)
            taken.append(module)
        inner.averaged_in_backward = True
        inner.setup.names.update(names)
    except (ValueError, AttributeError) as refused:  # a torch that has no such hook
        for module in taken:
            module.set_all_reduce_hook(lambda reduced: None)  # left to the optimizer
        tell("gradients are averaged in step, not while backward runs: %s", refused)


def _same_parameters(model: nn.Module, inner: OneBitOptimizer, wrapper: str) -> dict[Tensor, str]:
    """The names of the model's parameters: the optimizer has those that train and no others, or a ValueError. What it
    lacks of a model in DDP averages."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    known = {p for group in inner.param_groups for p in group["params"]}
    lacking = [name for p, name in names.items() if p.requires_grad and p not in known]
    if lacking and wrapper != "DDP":
        more = f" and {len(lacking) - 1} more" if lacking[1:] else ""
        raise ValueError(
            f"the optimizer does not hold {lacking[0]!r}{more} of the model: in stage 2 nobody would average these "
            f"gradients. Give the optimizer all parameters that require a gradient, or set requires_grad=False before "
            f"wrapping"
        )
    foreign = [inner.setup.name_of(p) for p in known if p.requires_grad and p not in names]
    if foreign:
        raise ValueError(
            f"the model does not hold parameter {foreign[0]} of the optimizer: {wrapper} would not average its "
            f"gradient. Give the optimizer this model's parameters alone, and others one of their own"
        )
    return names


def _attach_to_ddp(ddp: DistributedDataParallel, module: nn.Module, inner: OneBitOptimizer) -> None:
    inner.find_ranks()
    theirs, ours = transport_for(ddp.process_group), inner.setup.topology.everyone
    if (theirs.rank, theirs.size) != (ours.rank, ours.size):
        raise ValueError(
            f"the model's process group has {theirs.size} ranks (this is rank {theirs.rank}), the optimizer's "
            f"{ours.size} (rank {ours.rank}): pass process_group= to the optimizer, the same as to DDP"
        )
    names = _same_parameters(module, inner, "DDP")
    inner.setup.names.update(names)
    _refuse_ignored(ddp, inner)
    attached = next((state for _, state in ddp._comm_hooks if isinstance(state, Attached)), None)
    if attached is None:
        attached = _register(ddp)
    attached.add(inner, names)
    inner.averaged_in_backward, inner.run.state.ddp_averages = True, False
    inner.overlap.set_model(ddp)


def _refuse_ignored(ddp: DistributedDataParallel, inner: OneBitOptimizer) -> None:
    """Refuse parameters that DDP ignores. If a torch has no such list, the first backward pass finds them."""
    kept = getattr(ddp, "_module_parameters", None)
    if kept is not None:
        averaged = set(kept)
        trained = [p for group in inner.param_groups for p in group["params"] if p.requires_grad]
        refuse_left_out([inner.setup.name_of(p) for p in trained if p not in averaged])


def _register(ddp: DistributedDataParallel) -> Attached:
    attached = Attached(ddp)
    register(ddp, attached, hook_of_ddp)
    ddp.register_forward_pre_hook(_refuse_join)
    ddp.register_forward_hook(keep_buffers_the_same)
    return attached


def _refuse_join(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Refuse DDP's `join` before its first collective, on every rank that has a batch."""
    config = model._join_config if isinstance(model, DistributedDataParallel) else None
    if config is not None and config.enable and not config.throw_on_early_termination:
        raise ValueError(
            "the model is within join(), where a rank that has run out of batches repeats DDP's collectives for the "
            "others: those of the optimizer it does not repeat, and they would wait for ever. Give all ranks equally "
            "many batches (drop_last=True, DistributedSampler), or take join(throw_on_early_termination=True), which "
            "ends the loop on all ranks when the first runs out"
        )
