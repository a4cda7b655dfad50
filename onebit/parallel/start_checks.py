"""Before the first step, and the first one after a load: do all ranks have the same model and mean the same thing?"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onebit.collectives.agreement import agree, agree_on_values, checksums
from onebit.collectives.exchange import facts
from onebit.collectives.transport.protocol import all_gather_values
from onebit.optim import masks
from onebit.optim.param_groups import COMPRESS
from onebit.optim.run import Run
from onebit.report.pay_off import CALL_ATTACH
from onebit.warning import warn

_BY_DDP = (
    "all ranks have the same gradients before the optimizer has averaged any: is the model wrapped in "
    f"DistributedDataParallel? Then it goes on averaging uncompressed, and no time is gained: {CALL_ATTACH}"
)


def start(run: Run, *, averaged_in_backward: bool) -> list[Callable[[], None]]:
    """What to warn of when the step is over."""
    state, stages = run.state, run.state.stages
    first = stages.steps == 0 and not stages.compressing  # parameters may have been loaded or broadcast since
    for each in state.states:
        if first or not each.master_is_current:
            each.copy_parameters_to_master()
    due = _agree(run, averaged_in_backward)
    state.ranks_agree = True
    if first and run.setup.topology.everyone.rank == 0:
        due.append(stages.warn_of_short_runs)
    return due


def _agree(run: Run, averaged_in_backward: bool) -> list[Callable[[], None]]:
    """A ValueError on all ranks that names who differs and in what, or what to warn of."""
    setup, transport = run.setup, run.setup.topology.data_parallel
    if setup.topology.shard is not None:  # whose ranks have parts of other sizes
        sizes = ("elements", "checksum of sizes", "masks")
        common = {name: value for name, value in _facts(run).items() if name not in sizes}
        agree(setup.topology.everyone, setup.device, common)
    if setup.topology.everyone.size == 1:
        return []
    failed = None
    try:
        agree(transport, setup.device, _facts(run))
        params = [p for state in run.state.states for p in state.params]
        values = [p for part in run.state.parts for p in part.parameters_at_last_sync()]
        if params:
            agree_on_values(transport, values, lambda i: f"parameter {setup.name_of(params[i])}")
    except ValueError as error:
        failed = error
    others = "the replicas of another part of the parameters do not agree: their error says in what"
    setup.topology.raise_together(failed, setup.device, others)
    run.state.ddp_averages = not averaged_in_backward and _all_have_the_same_gradients(run)
    return [partial(warn, _BY_DDP)] if run.state.ddp_averages and transport.rank == 0 else []


def _facts(run: Run) -> dict[str, float | str]:
    setup = run.setup
    numels = [n for state in run.state.states for n in state.numels]
    orders = [(p, order) for state in run.state.states for p, order in zip(state.params, state.orders, strict=True)]
    permuted = [f"parameter {setup.name_of(p)} {order}" for p, order in orders if order is not None]
    o, groups = setup.options, setup.groups
    rule = f"FreezeRule(threshold={o.freeze_rule.threshold}, window={run.state.stages.rule.window})"
    names = (
        "bias_correction", "zero_variance", "variance_floor", "update_limit",
        "master_weights", "overlap", "check_every",
    )  # fmt: skip
    of_groups = ("lr", "betas", "eps", "weight_decay", COMPRESS)
    return {
        **facts(
            numels,
            o.block_size,
            o.chunks,
            o.scale,
            setup.norm,
            setup.exchange_class.reply_option,
            setup.topology.node is not None,
        ),
        **{name: getattr(o, name) for name in names},
        **{name: _short([_number(g[name]) for g in groups]) for name in of_groups},
        **setup.algorithm.settings(),
        "optimizer": setup.name,
        "gradient_dtype": str(o.gradient_dtype),
        "masks": masks.checksum(run.state.states),
        "memory order": _short([", ".join(permuted) or "contiguous"]),
        "dtypes": " ".join(str(state.dtype) for state in run.state.states),
        "freeze_step": rule if o.fixed_freeze_step is None else o.fixed_freeze_step,
        "steps": run.state.stages.steps,
        "stage": 1 + run.state.stages.compressing,
    }


def _all_have_the_same_gradients(run: Run) -> bool:
    """Before any averaging: then DDP does it, would do it in stage 2 as well, and nothing would be saved."""
    setup, grads = run.setup, [grad for state in run.state.states for grad in state.gradients_now() if grad is not None]
    own = checksums([torch.zeros(1, dtype=torch.int32, device=setup.device), *grads]).sum()[None]
    found = all_gather_values(setup.topology.data_parallel, own, "comparing the ranks' gradients (all-gather)")
    return bool((found == found[0]).all() and found[0] != 0)


def _number(value: Any) -> Any:
    """Also of each of two betas."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_number, value))
    return float(value) if isinstance(value, Tensor) else value


def _short(values: Sequence[Any]) -> str:
    text = str(values[0] if all(v == values[0] for v in values) else values)
    return text if len(text) <= 60 else f"{text[:40]}... (checksum {zlib.crc32(text.encode())})"
