"""What a user reads of a run: how far it has come, what it has sent, whether compression pays."""

from __future__ import annotations

import torch

from onebit.optim.run import Run
from onebit.optim.setup import Setup
from onebit.parallel.overlap import Overlap
from onebit.report.diagnostics import diagnose
from onebit.report.pay_off import PayOff, Report


class Progress(torch.optim.Optimizer):
    """An optimizer that tells where a run stands. No member changes the run."""

    run: Run
    overlap: Overlap
    pay_off: PayOff
    averaged_in_backward: bool

    @property
    def setup(self) -> Setup:
        return self.run.setup

    @property
    def compressing(self) -> bool:
        """Return whether stage 2 has begun."""
        return self.run.state.stages.compressing

    @property
    def synchronized(self) -> bool:
        """Return whether all ranks have the same parameters. They do, but between two exchanges of 0/1 Adam's local
        steps."""
        return self.run.state.synchronized

    @property
    def skipped_steps(self) -> int:
        """Steps not taken since a gradient was not finite, and local ones that this rank left out in this process.
        Reading it waits for the device."""
        stages = self.run.state.stages
        return int(stages.counts[1] + stages.left_out)

    @property
    def tried_steps(self) -> int:
        """Steps taken, and those that all ranks skipped. They are the same on all ranks, as the place in the data has
        to be. A local step counts once, also if this rank left it out. Reading it waits for the device."""
        return int(self.run.state.stages.counts.sum())

    @property
    def steps(self) -> int:
        """Steps taken. Reading it waits for the device."""
        return int(self.run.state.stages.counts[0])

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank has sent in compressed messages."""
        return self.run.state.wire_bytes

    @property
    def freeze_ratio(self) -> float | None:
        """What the freeze rule compares, None while there is none. For Adam it is ||vhat||_1 over what it was a window
        earlier, for LAMB the share of elements whose coefficients were stable over a window."""
        return self.run.state.stages.rule.ratio

    def report(self) -> Report:
        """Report whether compression pays, since this process built the optimizer. The call waits for the device.

        Returns:
            The steps of each kind, their times, the bytes, and a verdict, to be printed.
        """
        return self.pay_off.report(self.run, self.averaged_in_backward, self.skipped_steps)

    def diagnostics(self) -> dict[str, dict[str, float]]:
        """Look at the state of each parameter. Cheap to call now and then; waits for the device.

        Returns:
            Norms of each parameter's variance and residuals, the mean scale of its messages, and for LAMB its
            coefficient and ratio, by the parameter's name.
        """
        self.overlap.check_at_rest("diagnostics")
        return diagnose(self.run)
