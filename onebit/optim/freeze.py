"""The end of stage 1, and what is kept of its variance.

    freeze_step = t          after t steps
    freeze_step = FreezeRule(threshold, D)     after the first step t >= 2 D with min(r, 1/r) >= threshold,
                             r = ||vhat_t||_1 / ||vhat_(t-D)||_1,  D = 1 / (1 - beta2) where None is given
    freeze_step = "auto"     FreezeRule()

1-bit Adam (Tang et al. 2021), section 7.1, gives r >= threshold, which a variance that still grows from zero meets at
once. LAMB has a rule of its own (onebit.optim.lamb).

    d = 1 / (sqrt(vhat_T) + eps)        vhat_T at least variance_floor of its parameter's mean
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onebit.kernels.data.checks import is_finite, is_whole
from onebit.kernels.data.hyper import Hyper
from onebit.kernels.data.pieces import count_nonzero, in_pieces, total
from onebit.kernels.log import tell
from onebit.optim.fields import JOINED, VARIANCE
from onebit.optim.flat_state import FlatState
from onebit.warning import warn

AddParts = Callable[[Tensor], Tensor]
ZeroVariance = Literal["floor", "hold"]
MOST_STEPS = 2**31


@dataclass(frozen=True)
class FreezeRule:
    """Ends stage 1 when what it compares has hardly changed over a window.

    Args:
        threshold: how close to 1 the ratio has to be.
        window: steps between what is compared; None takes 1 / (1 - beta2).
    """

    threshold: float = 0.96
    window: int | None = None

    def __post_init__(self) -> None:
        if not is_finite(self.threshold) or not 0 < self.threshold < 1:
            raise ValueError(
                f"FreezeRule: threshold={self.threshold!r}: it bounds the ratio of two variances from below and must "
                f"lie between 0 and 1; the papers use 0.96"
            )
        if self.window is not None and not is_whole(self.window, least=1, most=MOST_STEPS):
            raise ValueError(
                f"FreezeRule: window={self.window!r}: it is the number of steps between the two variances that are "
                f"compared, 1 or more; None takes 1 / (1 - beta2)"
            )
        object.__setattr__(self, "threshold", float(self.threshold))  # NumPy's numbers become Python's
        object.__setattr__(self, "window", None if self.window is None else int(self.window))


class StageRule:
    """Compares numbers of a step with those of `window` steps before. They are the same on every rank, and so is the
    decision."""

    what = ""

    def __init__(self, freeze_step: int | None, threshold: float, window: int, comparisons: int) -> None:
        """freeze_step: None where the comparison decides. comparisons: how often numbers are kept in a window."""
        self.freeze_step, self.threshold, self.window = freeze_step, threshold, window
        self._stride = -(-window // comparisons)
        self._trace: deque[list[float]] = deque(maxlen=-(-window // self._stride) + 1)
        self.ratio: float | None = None

    def measure(self, states: Sequence[FlatState], groups: int) -> list[Tensor]:
        """The numbers of a step: fp64, on the device."""
        return []

    def add(self, step: int, numbers: Sequence[float], beta2s: Sequence[float]) -> None:
        """What `measure` found after step `step`. beta2 is 0 where the variance is not bias-corrected."""

    def _compare(self, now: Sequence[float], before: Sequence[float]) -> float | None:
        """The ratio that tells whether stage 1 may end, if there is one."""
        return None

    def _stable(self, ratio: float) -> bool:
        return False

    def due(self, step: int) -> bool:
        """Return whether stage 1 ends after step `step`, the last one added."""
        if self.freeze_step is not None:
            return step >= self.freeze_step
        return step >= 2 * self.window and self.ratio is not None and self._stable(self.ratio)

    def state(self) -> list[list[float]]:
        return list(self._trace)

    def restore(self, trace: Sequence[Sequence[float]]) -> None:
        self._trace.clear()
        self._trace.extend(map(list, trace))
        self._update_ratio()

    def _keep(self, step: int, values: list[float]) -> None:
        if step % self._stride == 0:
            if self._trace and len(self._trace[-1]) != len(values):  # parameters were added
                self._trace.clear()
            self._trace.append(values)
            self._update_ratio()

    def _update_ratio(self) -> None:
        full = len(self._trace) == self._trace.maxlen
        self.ratio = self._compare(self._trace[-1], self._trace[0]) if full else None


class FixedStep(StageRule):
    """The rule of an algorithm without a rule of its own: stage 1 ends after `freeze_step` steps."""

    def __init__(self, freeze_step: int | None, window: int) -> None:
        if freeze_step is None:
            raise ValueError('freeze_step="auto": this optimizer has no rule for it. Pass the number of steps')
        super().__init__(freeze_step, 0.0, window, comparisons=1)


class VarianceRule(StageRule):
    """1-bit Adam's: the size of the variance."""

    def __init__(self, freeze_step: int | None, threshold: float, window: int) -> None:
        super().__init__(freeze_step, threshold, window, comparisons=window)
        self.what = f"the variance's ratio (stage 2 begins within {1 - threshold:.4g} of 1)"

    def measure(self, states: Sequence[FlatState], groups: int) -> list[Tensor]:
        """The sum of v, a number a flat state and param group."""
        parts = [state.scratch["sums"][first:stop] for state in states for first, stop in state.group_blocks(groups)]
        return [states[0].add_parts(torch.stack([part.sum(dtype=torch.float64) for part in parts]))]

    def add(self, step: int, numbers: Sequence[float], beta2s: Sequence[float]) -> None:
        debias = [1 - beta2**step for beta2 in beta2s]
        self._keep(step, [sum(v / debias[i % len(beta2s)] for i, v in enumerate(numbers))])

    def _compare(self, now: Sequence[float], before: Sequence[float]) -> float | None:
        return now[0] / before[0] if before[0] > 0 else None

    def _stable(self, ratio: float) -> bool:
        return ratio > 0 and min(ratio, 1 / ratio) >= self.threshold


def check_variance(states: Sequence[FlatState], steps: int) -> None:
    """A ValueError where there is no variance to freeze."""
    there = torch.stack([(state["exp_avg_sq"].max() > 0).double() for state in states])
    if not float(states[0].add_parts(there).sum()) > 0:
        remedy = (
            "All gradients so far were 0: look at the loss, or choose a later freeze_step, or var_freeze_step"
            if steps
            else "Load the state of a prior run (load_state_dict takes torch.optim.AdamW's), or give stage 1 some "
            "steps: freeze_step=1 or more"
        )
        raise ValueError(
            f"stage 2 is to begin after {steps} steps, and there is no variance to freeze: every second moment is 0. "
            f"{remedy}"
        )


def correct_joined_(state: FlatState, rows: Sequence[Hyper], steps: int) -> None:
    """Correct v, at the freeze after so many steps, of parameters that were added later, whose weights add up to less:
    vhat is made of it as of that of the others. rows: each param group's numbers; bias2 is 1 without bias
    correction."""
    for i, before in enumerate(state[JOINED.name].tolist()):
        h = rows[state.groups[i]]
        if 0 < before < steps and h.bias2 > 1:
            state.view(VARIANCE.name, i).div_(h.bias2**2 * (1 - h.beta2 ** (steps - before)))
    state.remove(JOINED.name)


def raise_to_floor_(v: Tensor, floor: float, add_parts: AddParts) -> Tensor:
    """v = max(v, floor mean(v)) in place where v is not 0, the mean over those of the whole parameter.

    An element shares its block's scale: with a variance far below the others' its steps would be the others' signs,
    magnified by its own d. Embeddings of rare words are such; exact zeros are `zero_variance`'s.
    """
    if floor:
        nonzero, of_all = _whole(add_parts, count_nonzero(v), total(v))
        lowest = floor * of_all / max(nonzero, 1)
        for piece in in_pieces(v):
            piece.masked_fill_((piece > 0) & (piece < lowest), lowest)
    return v


def _whole(add_parts: AddParts, *values: Tensor) -> list[float]:
    """Numbers of this rank's part of a parameter, added up over all parts."""
    return add_parts(torch.stack([value.double() for value in values])).tolist()


def variance_to_denominator_(
    v: Tensor, h: Hyper, zero_variance: ZeroVariance, add_parts: AddParts, fixed: Tensor | None = None
) -> int:
    """v = 1 / (sqrt(v) bias2 + eps) in place, bias2 = 1 / sqrt(1 - beta2^t); how many elements had no variance.

    Those get the value of the mean of the others ("floor"), or 0, with which they never move ("hold"). They are held
    too where a parameter has no other element to take a mean of. fixed: int64, elements without variance that get 0 in
    any case, and are not counted.
    """
    there = count_nonzero(v)
    without = v.numel() - there - (0 if fixed is None else len(fixed))
    count, others, of_all = _whole(add_parts, without, there, total(v))
    substitute = 0.0
    if zero_variance == "floor" and count and others:
        substitute = 1 / ((of_all / others) ** 0.5 * h.bias2 + h.eps)
    for piece in in_pieces(v):
        zero = piece == 0
        piece.sqrt_().mul_(h.bias2).add_(h.eps).reciprocal_().masked_fill_(zero, substitute)
    if fixed is not None:
        v.view(-1).index_fill_(0, fixed, 0)
    return int(count)


def report_freeze(
    step: int, at_once: bool, without: Sequence[tuple[str, int, int]], zero_variance: ZeroVariance, ddp_averages: bool
) -> None:
    """at_once: with the first step after a load. without: of each parameter with elements that had no variance its
    name, their number, and its size."""
    if at_once:
        tell("No step of stage 1 is left: the state that was loaded has %d steps, more than freeze_step", step)
    beside = ", beside the gradients that DistributedDataParallel averages: onebit.attach was not called"
    tell("Stage 2 begins after step %d: compressed steps send 1 bit an element%s", step, beside if ddp_averages else "")
    warn_of_zeros("at the freeze", without, zero_variance)


def warn_of_zeros(when: str, without: Sequence[tuple[str, int, int]], zero_variance: ZeroVariance) -> None:
    if without:
        listed = ", ".join(f"{name} ({count} of {numel})" for name, count, numel in without[:8])
        more = f" and {len(without) - 8} more" if len(without) > 8 else ""
        held = [name for name, count, numel in without if count == numel or zero_variance == "hold"]
        what = "they use the mean variance of their parameter's other elements"
        if len(held) == len(without):
            what = "they will not move any more"
        elif held:
            what += f"; where there are none ({', '.join(held[:8])}), they will not move"
        warn(f"elements without a variance {when}: {listed}{more}; {what}")
