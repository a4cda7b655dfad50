"""The gradients of a step: averaged or not, finite on all ranks or not, and what they are multiplied by when read.

g' = (clip / scale) g        scale: GradScaler's;  clip = min(1, max_norm / norm)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from onebit.collectives.averaging import average_, average_slices
from onebit.collectives.transport.protocol import Ranks, Transport
from onebit.kernels import passes
from onebit.kernels.data.hyper import COLUMNS, Hyper
from onebit.kernels.data.upload import Upload
from onebit.optim.flat_state import FlatState
from onebit.optim.param_groups import on_device
from onebit.optim.run import Run

_LR, _GRAD_SCALE = Hyper._fields.index("lr"), Hyper._fields.index("grad_scale")


class Versions(NamedTuple):
    """Gradients, held so that no other is mistaken for one of them, and how often each was changed."""

    of: list[Tensor | None]
    counts: list[int]


class Gradients:
    """What is known of the gradients as they are now. `reset` when they are used or dropped."""

    def __init__(self, device: torch.device) -> None:
        self.flags = torch.zeros(1, dtype=torch.int32, device=device)  # 1 where a step must not be taken
        self._hyper = HyperTable(device)
        self.reset()

    def reset(self) -> None:
        self.averaged_in_backward = False  # over all ranks that hold the same parameters
        self.node_mean: bool | None = None  # whether DDP's hook has averaged all of them over the node, if it was there
        self.ranks_agreed = False  # whether `flags` are those of all ranks
        self._checked: Versions | None = None
        self.max_norm: float | None = None  # to which a norm that is not known yet will be clipped
        self._clip: Tensor | None = None
        self.squares: Tensor | None = None  # their sum, fp64 [1], where they are clipped
        self._unscale: Tensor | None = None  # 1 / GradScaler's scale, fp32 [1], unless gradients are as they should be
        self._found_inf: Tensor | int | None = None  # by GradScaler, on this rank; the number 0 without any gradient
        self._averaged: dict[str, Versions] = {}  # what, and as it was then
        self._in_step = self._has_written = False  # whether a step is being taken, and `hyper` has its numbers

    def forget_clip(self) -> None:
        """Forget a clip: DDP's hook calls this in another backward pass, whose gradients may be the same tensors, of
        which DDP's buckets are."""
        self._checked, self.max_norm, self._clip, self.squares = None, None, None, None

    def clip_begins(self, states: Sequence[FlatState]) -> None:
        """Forget the clip of a batch that was dropped: gradients were written to since."""
        if not self.were_checked(states):
            self.forget_clip()

    def claim_node_mean(self, by_exchange: bool) -> bool:
        """Return to DDP's hook in stage 2, for each bucket, whether it is to average it over the node, which the step
        then leaves out. by_exchange: whether the exchange does it, chunk by chunk."""
        self.node_mean = self.node_mean is not False and not by_exchange
        return self.node_mean

    def set_scale(self, scale: Tensor | None, found_inf: Tensor | int | None, run: Run) -> None:
        """A step begins with what GradScaler has. What backward has averaged in stage 2 over ranks whose scales differ
        is divided by the mean of them on all."""
        self._unscale, self._found_inf, self._in_step, self._has_written = None, found_inf, True, False
        if scale is not None:
            scale, ranks = scale.detach().to(self.flags.device, torch.float64).view(1), run.setup.topology.data_parallel
            if self.averaged_in_backward and run.state.stages.compressing:
                scale = scale / ranks.size
                ranks.all_sum(scale, "averaging the scales of gradients (all-reduce of one number)").wait()
            self._unscale = scale.reciprocal().float()

    def write_hyper(self, run: Run, clipped: bool = True) -> Tensor:
        """Every group's numbers for the coming step, on the device; with what gradients are multiplied by."""
        if self._has_written and self._clip is None:
            return self._hyper.values
        self._has_written = self._in_step and self._clip is None
        step = run.state.stages.steps + 1 if run.needs_step_number else 1  # none of the numbers depends on it
        parts = [each for each in (self._unscale, self._clip if clipped else None) if each is not None]
        factor = torch.stack(parts).prod(0) if parts else None
        groups, late = run.setup.groups, run.state.late
        lrs = [group["lr"] for group in groups]
        for i, _ in late:
            lrs.append(groups[i]["lr"])
        return self._hyper.write(run.setup.hyper_rows(step, late), lrs, factor)

    @property
    def are_scaled(self) -> bool:
        """Return whether a GradScaler has a part in this step."""
        return self._unscale is not None or self._found_inf is not None

    @property
    def hyper(self) -> Tensor:
        """The numbers of param groups as they were written last."""
        return self._hyper.values

    def average(self, states: Sequence[FlatState], ranks: Ranks, wire_dtype: torch.dtype | None = None) -> None:
        """Average gradients in place, once. A missing gradient counts as zero."""
        if ranks.size == 1 or unchanged(self._averaged.get("whole"), states):
            return
        for state in states:
            grads = [g for g in state.stored(state.fill_missing_gradients()) if g is not None]
            average_(grads, ranks, self._unscale, wire_dtype=wire_dtype)
        self._averaged["whole"] = versions_of(states)

    def average_slices(self, states: Sequence[FlatState], node: Transport, wire_dtype: torch.dtype | None) -> None:
        """Average this rank's slices of gradients in place, once, over the ranks of the node. Other values stay its
        own."""
        before = self._averaged.get("slices")
        if self.node_mean or unchanged(before, states):
            return
        if unchanged(before, states, in_place=False):
            raise ValueError(
                "gradients were changed in place after clip_grad_norm_ had averaged them over the node: in this rank's "
                "slice they are the node's mean, elsewhere its own, and can't be averaged again. Change them before "
                "clip_grad_norm_"
            )
        for state in states:
            grads = state.lay_out_gradients()
            for chunk in range(state.layout.chunks):
                slices = state.layout.slices(chunk, node.size)
                average_slices(slices, grads, grads, node, self._unscale, wire_dtype=wire_dtype)
        self._averaged["slices"] = versions_of(states)

    def were_checked(self, states: Sequence[FlatState]) -> bool:
        """Return whether `check_finite` has looked at these very gradients."""
        return unchanged(self._checked, states)

    def check_finite(
        self,
        states: Sequence[FlatState],
        everyone: Ranks,
        hyper: Tensor,
        squares: Tensor | None = None,
        slices: int = 1,
        agree: bool = True,
    ) -> None:
        """Set `flags` if any gradient of any rank is not finite; add up this rank's squares, fp64 [1], if asked.

        slices: of so many this rank looks at its own alone, and others of its node at theirs; of what is not cut into
        slices each looks at the whole, and adds its share of the squares. agree: `flags` become those of all ranks;
        without, of this one alone.
        """
        if not unchanged(self._checked, states, in_place=False):
            self._clip = None  # it was made for others
        self.flags.zero_()
        if self._found_inf is not None:
            self.flags.add_((torch.as_tensor(self._found_inf, device=self.flags.device) > 0).view(1))
        for state in states:
            state.bind_tensors()
            is_cut = slices > 1 and state.slices > 1
            for span in state.slice_spans if is_cut else [state.layout.all()]:
                by_block = (
                    None if squares is None else torch.empty(span.count, dtype=torch.float32, device=state.device)
                )
                gradients = passes.Gradients(state.gradients, hyper, self.flags)
                state.backend.run(passes.Scan(span, gradients, by_block))
                if squares is not None and by_block is not None:
                    squares += by_block.sum(dtype=torch.float64) / (1 if is_cut else slices)
        if agree:
            everyone.all_max(self.flags, "agreeing on finite gradients (all-reduce of one number)")
        self.ranks_agreed = agree
        if squares is not None:  # a step uses them at once
            self._checked = versions_of(states)

    def clip_as_asked(self, run: Run) -> None:
        """Clip averaged gradients, which ranks have not agreed on before one died: the norm is known to each of
        them."""
        squares = torch.zeros(1, dtype=torch.float64, device=self.flags.device)
        hyper, asked = self.write_hyper(run, clipped=False), self.max_norm
        self.check_finite(run.state.states, run.setup.topology.everyone, hyper, squares, agree=False)
        if asked is not None and self._clip is None:
            self.clip(squares, squares, asked)

    def clip(self, squares: Tensor, of_mean: Tensor, max_norm: float) -> Tensor:
        """Clip by the norm of the gradients' mean, from its square and the `squares` of the gradients as they lie.
        Returns the norm with the clipping there was, before this one."""
        self.squares, norm = squares, of_mean.sqrt().float()
        before = torch.ones_like(norm) if self._clip is None else self._clip
        self._clip = before * (max_norm / (norm * before + 1e-6)).clamp(max=1.0)
        return norm * before


class HyperTable:
    """Every group's numbers on the device, written when they change."""

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros((0, COLUMNS), dtype=torch.float32, device=device)
        self._upload = Upload()
        self._scaled = False

    def write(self, hyper_rows: list[Hyper], lrs: Sequence[float | Tensor], factor: Tensor | None) -> Tensor:
        """`lrs` that are tensors on the device and `factor` stay there: the host reads neither."""
        if len(self.values) != len(hyper_rows):  # a group was added
            self.values = self.values.new_zeros((len(hyper_rows), COLUMNS))
        there = {i: lr for i, lr in enumerate(lrs) if on_device(lr)}
        for i in there:  # a rate that takes the place of one on the device is another number
            hyper_rows[i] = hyper_rows[i]._replace(lr=-math.inf)
        if not self._upload.write(hyper_rows, self.values) and self._scaled:
            self.values[:, _GRAD_SCALE].fill_(1)
        for i, lr in there.items():
            self.values[i, _LR] = lr.view(())
        if factor is not None:
            self.values[:, _GRAD_SCALE] = factor
        self._scaled = factor is not None
        return self.values


def versions_of(states: Sequence[FlatState]) -> Versions:
    """The versions of every gradient."""
    grads = [grad for state in states for grad in state.gradients_now()]
    return Versions(grads, [0 if g is None else g._version for g in grads])


def unchanged(before: Versions | None, states: Sequence[FlatState], in_place: bool = True) -> bool:
    """Return whether gradients are those of `before`; with `in_place`, and were not written to since."""
    if before is None:
        return False
    now = versions_of(states)
    same = len(before.of) == len(now.of) and all(map(is_, before.of, now.of))
    return same and (before.counts == now.counts or not in_place)
