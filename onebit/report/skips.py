"""Steps that are left out again and again: whose gradients are not finite. A rank that is broken looks healthy to the
others, which train no further, and so do their losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from onebit.collectives.agreement import listed
from onebit.collectives.transport.protocol import all_gather_values
from onebit.kernels.data.hyper import LARGEST, Hyper
from onebit.kernels.streams import capturing
from onebit.optim.flat_state import FlatState
from onebit.optim.options import LARGEST_FLOAT
from onebit.optim.run import Run
from onebit.optim.setup import Setup
from onebit.warning import warn

WARNED_AFTER = (3, 10, 100, 1000)  # steps in a row
SHORTENED_FOR = 100  # steps in a row, before that is told
_LOOK = "its gradients are not finite. Look at its data and loss"
_GROWTH = (
    f"{SHORTENED_FOR} steps in a row were made shorter for most parameters (update_limit): gradients have grown since "
    f"the variance was last updated, and steps would be too long. Training goes on with steps about as long as "
    f"AdamW's. Clip gradients (optimizer.clip_grad_norm_), or freeze later; ZeroOneAdam without var_freeze_step goes "
    f"on updating its variance"
)


def warnings_of_skips(run: Run, hyper: Tensor) -> list[Callable[[], None]]:
    """What is due when the step is over, of what is read one step late, with the gradients of this one: which rank it
    is shows in them. hyper: with which they were looked at."""
    setup, stages, due = run.setup, run.state.stages, []
    usual = WARNED_AFTER[0] > max(stages.skipped_in_a_row, stages.left_out_in_a_row, stages.shortened_in_a_row)
    if usual or capturing(setup.device):
        return []
    if stages.skipped_in_a_row in WARNED_AFTER:
        due += _of_skipped(setup, run.state.states, hyper, stages.skipped_in_a_row)
    if stages.left_out_in_a_row in WARNED_AFTER:
        due.append(partial(warn, f"this rank has left out {stages.left_out_in_a_row} local steps in a row: {_LOOK}"))
    if stages.shortened_in_a_row == SHORTENED_FOR and setup.topology.everyone.rank == 0:
        due.append(partial(warn, _GROWTH))
    return due


def _of_skipped(setup: Setup, states: Sequence[FlatState], hyper: Tensor, in_a_row: int) -> list[Callable[[], None]]:
    """Warn after so many skipped steps in a row. A collective call, in which the host waits for the device."""
    grads = [(p, g) for state in states for p, g in zip(state.params, state.gradients_now(), strict=True)]
    sizes = [0.0 if g is None or not g.numel() else float(torch.linalg.vector_norm(g, torch.inf)) for _, g in grads]
    factors = hyper[:, Hyper._fields.index("grad_scale")].tolist()
    read = [size * factors[g] for size, g in zip(sizes, (g for state in states for g in state.groups), strict=True)]
    of_both = ((sizes, LARGEST_FLOAT), (read, LARGEST))
    own = [next((i for i, size in enumerate(each) if not size <= most), -1) for each, most in of_both]
    everyone, phase = setup.topology.everyone, "looking for gradients that are not finite (all-gather of two numbers)"
    first = torch.tensor(own, dtype=torch.int64, device=setup.device)
    not_finite, too_large = all_gather_values(everyone, first, phase).T.tolist()
    what, found = ("not finite", not_finite) if max(not_finite) >= 0 else ("beyond 2^40", too_large)
    ranks = [rank for rank, index in enumerate(found) if index >= 0]
    if everyone.rank > 0 or not ranks:
        return []
    name, who = setup.name_of(grads[found[ranks[0]]][0]), listed(ranks, everyone)
    if len(ranks) == everyone.size > 1:
        who = "every rank, and where gradients are averaged one rank is enough"
    text = (
        f"{in_a_row} steps in a row were skipped: gradients are {what} on {who}; the first is that of {name}. As "
        f"long as this lasts no parameter moves. Look at that rank's data and loss, and with fp16 at GradScaler's scale"
    )
    return [partial(warn, text)]
