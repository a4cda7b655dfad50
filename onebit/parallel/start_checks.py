"""Checks before the first step, and the first one after a load: all ranks have the same model and mean the same
thing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from onebit.collectives.agreement import NODES, agree, agree_on_values, checksums
from onebit.collectives.transport.protocol import all_gather_values
from onebit.optim import facts
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
    common = {
        NODES: "none" if setup.topology.node is None else "given",
        **facts.of_model(setup), **facts.of_options(setup), **facts.of_groups(setup), **facts.of_progress(run.state),
    }  # fmt: skip
    if setup.topology.shard is not None:
        agree(setup.topology.everyone, setup.device, {k: v for k, v in common.items() if k != facts.MASKS})
    if setup.topology.everyone.size == 1:
        return []
    failed = None
    try:
        agree(transport, setup.device, common)
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


def _all_have_the_same_gradients(run: Run) -> bool:
    """Return whether gradients are the same before any averaging: then DDP does it, would do it in stage 2 as well, and
    nothing would be saved."""
    setup, grads = run.setup, [grad for state in run.state.states for grad in state.gradients_now() if grad is not None]
    own = checksums([torch.zeros(1, dtype=torch.int32, device=setup.device), *grads]).sum()[None]
    found = all_gather_values(setup.topology.data_parallel, own, "comparing the ranks' gradients (all-gather)")
    return bool((found == found[0]).all() and found[0] != 0)
