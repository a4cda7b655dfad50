"""Which step a run has come to, and when its stage 2 begins. The host learns of a step when the next one comes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from onebit.kernels import streams
from onebit.kernels.log import tell, to_log
from onebit.kernels.streams import capturing
from onebit.optim.flat_state import FlatState
from onebit.optim.freeze import StageRule
from onebit.optim.limit import UpdateLimit

MOST_SHORTENED = 0.5  # of the elements, of a step that need not be told of


class AsyncReadback:
    """Numbers that a step leaves on the device and the host reads when the next step comes.

    By then they have arrived, or arrive while the device has the next backward pass to do: it never runs dry.
    """

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._arrived: streams.Event | None = None

    def start(self, values: Tensor) -> None:
        """values: that nobody writes to any more."""
        if streams.has_streams(values.device):
            self._host = streams.pinned(values)
            self._host.copy_(values, non_blocking=True)
            self._arrived = streams.mark(values.device)
        else:
            self._host, self._arrived = values, None

    def finish(self) -> list[float] | None:
        """What was started since the last call, if anything was."""
        if self._host is None:
            return None
        if self._arrived is not None:
            streams.wait_on_host(self._arrived)
        host, self._host = self._host, None
        return host.tolist()


class Stages:
    """Counts steps taken and skipped on the device, and asks the freeze rule when stage 1 ends."""

    def __init__(
        self, rule: StageRule, device: torch.device, *, steps: int = 0, skipped: int = 0, compressing: bool = False
    ) -> None:
        self.rule, self.compressing = rule, compressing
        self.steps = steps  # taken, as far as the host knows: all but the last one
        self._numbers = torch.tensor([steps, skipped, 0], dtype=torch.int64, device=device)
        self.counts = self._numbers[:2]  # steps taken and skipped
        self.left_out = self._numbers[2:]  # local steps, by this rank alone
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self._readback = AsyncReadback()
        self.steps_before, self.skipped_before = steps, skipped  # of what was loaded
        self._known = (skipped, 0)  # what was skipped and left out, as far as the host knows
        self.skipped_in_a_row = 0  # up to the last step, since a load or a change of ranks: the same on all
        self.left_out_in_a_row = 0  # by this rank
        self._limited = 0  # elements that the last step had a limit for
        self.shortened_in_a_row = 0  # steps that most parameters were to be moved too far by

    def go_on_counting(self, before: Stages, left_out: int) -> None:
        """Take over, in the same process, what is not saved with a state, and of a rank alone. left_out: local steps
        that other ranks have taken, and this one has not."""
        self.left_out.copy_(before.left_out + left_out)
        self._known = before._known
        self.steps_before, self.skipped_before = before.steps_before, before.skipped_before
        self.left_out_in_a_row, self.shortened_in_a_row = before.left_out_in_a_row, before.shortened_in_a_row

    @property
    def freeze_is_due(self) -> bool:
        """Return whether stage 2 begins with the coming step."""
        return not self.compressing and self.rule.due(self.steps)

    @property
    def skipped_as_known(self) -> int:
        """Steps skipped, and local ones that this rank left out: without those of the last step."""
        return sum(self._known)

    def count(
        self,
        flags: Tensor,
        states: Sequence[FlatState],
        groups: int,
        *,
        alone: bool = False,
        limits: Sequence[UpdateLimit] = (),
    ) -> None:
        """A step ends: taken where flags, int32 [1], is 0, else skipped; where ranks moved alone, taken in any case.
        limits: of the step."""
        if alone:
            self.counts[:1].add_(1)
            self.left_out.add_(flags)
        else:
            self.counts.index_add_(0, flags, self._one)
        if not capturing(flags.device):
            numbers, self._limited = [self._numbers], 0
            for limit in limits:
                numbers.append(limit.shortened)
                self._limited += limit.elements
            if self._measures:
                numbers += self.rule.measure(states, groups)
            self._readback.start(torch.cat(numbers))

    def read_last_step(self, beta2s: Sequence[float]) -> bool:
        """Return whether the last step was taken. False if no step is left to read. beta2s: 0 without bias
        correction."""
        numbers = self._readback.finish()
        if numbers is None:
            return False
        before, (skipped, left_out) = self.steps, self._known
        self.steps, *now = map(int, numbers[:3])
        if self._limited:
            most = MOST_SHORTENED * self._limited
            self.shortened_in_a_row = self.shortened_in_a_row + 1 if sum(numbers[3:]) > most else 0
        self._known = (now[0], now[1])
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if now[0] > skipped else 0
        self.left_out_in_a_row = self.left_out_in_a_row + 1 if now[1] > left_out else 0
        if self.steps == before:
            return False
        if self._measures:
            self.rule.add(self.steps, numbers[3:], beta2s)
        return True

    def warn_of_short_runs(self) -> None:
        """Warn with the first step if stage 1 ends by itself, and not soon."""
        if self._measures:
            to_log(
                logging.WARNING,
                "stage 1 ends by itself, after step %d at the earliest. A run of fewer steps never compresses: give it "
                "freeze_step=N, 15 to 25 %% of its steps, or ZeroOneAdam, which needs none",
                2 * self.rule.window,
            )

    def log_progress(self) -> None:
        """Every window, so that a run too short for "auto" does not stay in stage 1 unnoticed."""
        rule = self.rule
        if self._measures and self.steps % rule.window == 0:
            ratio = "not known yet" if rule.ratio is None else f"{rule.ratio:.4f}"
            tell("step %d, stage 1: %s over %d steps is %s", self.steps, rule.what, rule.window, ratio)

    @property
    def _measures(self) -> bool:
        return self.rule.freeze_step is None and not self.compressing
