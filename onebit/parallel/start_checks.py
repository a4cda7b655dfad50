"""Before the first step, and the first one after a load: do all ranks have the same model and mean the same thing?"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onebit.checkpoint.restore import forget_residuals
from onebit.collectives.agreement import agree, agree_on_values, all_gather_values, checksums
from onebit.collectives.exchange import facts
from onebit.warning import warn

if TYPE_CHECKING:
    from onebit.optim.optimizer import OneBitOptimizer


def agree_on_start(optimizer: OneBitOptimizer) -> list[Callable[[], None]]:
    """A ValueError on all ranks that names who differs and in what, or what there is to tell when the step is over."""
    transport, device = optimizer._transport, optimizer._device
    if transport.size == 1:
        return []
    agree(transport, device, _facts(optimizer))
    everything = [p for space in optimizer._spaces for p in space.params]
    agree_on_values(transport, everything, lambda i: f"parameter {optimizer._name(everything[i])}")
    _agree_on_residuals(optimizer)
    if not optimizer._averaged_by_ddp and _all_have_the_same_gradients(optimizer) and transport.rank == 0:
        return [_tell_of_ddp]
    return []


def _facts(optimizer: OneBitOptimizer) -> dict[str, float | str]:
    numels = [n for space in optimizer._spaces for n in space.numels]
    o, groups = optimizer._options, optimizer.param_groups
    names = (
        "freeze_step", "freeze_threshold", "bias_correction", "dead", "variance_floor", "master_weights", "overlap",
        "check_every", "on_divergence",
    )  # fmt: skip
    return {
        **facts(numels, o.block_size, o.chunks, o.scale, o.norm),
        **{name: getattr(o, name) for name in names},
        **{name: _short([_number(g[name]) for g in groups]) for name in ("lr", "betas", "eps", "weight_decay")},
        **optimizer._facts(),
        "optimizer": type(optimizer).__name__,
        "gradient_dtype": str(o.gradient_dtype),
        "dtypes": " ".join(str(space.dtype) for space in optimizer._spaces),
        "freeze_window": optimizer._rule.window,
        "steps": optimizer._steps,
        "stage": 1 + optimizer.compressing,
    }


def _agree_on_residuals(optimizer: OneBitOptimizer) -> None:
    """Where one rank's checkpoint had none, all start from zero: the mean residual is that of all or of none."""
    missing = torch.tensor([int(optimizer._residuals_missing)], dtype=torch.int32, device=optimizer._device)
    optimizer._transport.all_max(missing, "comparing what the ranks have loaded (all-reduce of one number)")
    if int(missing) and not optimizer._residuals_missing:
        forget_residuals(optimizer)
    optimizer._residuals_missing = False


def _all_have_the_same_gradients(optimizer: OneBitOptimizer) -> bool:
    """Before any averaging: then DDP does it, would do it in stage 2 as well, and nothing would be saved."""
    grads = [p.grad for space in optimizer._spaces for p in space.params if p.grad is not None]
    own = checksums([torch.zeros(1, dtype=torch.int32, device=optimizer._device), *grads]).sum()[None]
    everyone = (
        all_gather_values(optimizer._transport, own, "comparing the ranks' gradients (all-gather)").view(-1).tolist()
    )
    return len(set(everyone)) == 1 and everyone[0] != 0


def _tell_of_ddp() -> None:
    warn(
        "all ranks have the same gradients already: is the model wrapped in DistributedDataParallel? Then call "
        "onebit.attach(model, optimizer), or DDP goes on averaging uncompressed and nothing is saved"
    )


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value


def _short(values: Sequence[Any]) -> str:
    text = str(values[0] if all(v == values[0] for v in values) else values)
    return text if len(text) <= 60 else f"{text[:40]}... (checksum {zlib.crc32(text.encode())})"
