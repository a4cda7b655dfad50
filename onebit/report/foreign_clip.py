"""torch.nn.utils.clip_grad_norm_ in a compressed step: there gradients are a rank's own, and so would be the factor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import is_

from onebit.optim.gradients import Gradients, Versions, versions_of
from onebit.optim.run import Run
from onebit.warning import warn

_TEXT = (
    "all gradients were changed in place between backward and step, as torch.nn.utils.clip_grad_norm_ does. In stage 2 "
    "they are this rank's own, and each rank would clip by another norm: call optimizer.clip_grad_norm_(max_norm) "
    "instead. If something else changes them, and on purpose, nothing is wrong"
)


class ForeignClip:
    """Looks at one compressed step: how often gradients were written to at the end of backward, and when it begins.

    The first one in a process is the only one: later backward passes leave DDP's buckets out, and its hook.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._after_backward: Versions | None = None

    def backward_ended(self, run: Run) -> None:
        if run.kind() == "1 bit":
            self._after_backward = versions_of(run.state.states)

    def warnings(self, run: Run, gradients: Gradients) -> list[Callable[[], None]]:
        """Return what rank 0 warns of when the step is over."""
        before, self._after_backward = self._after_backward, None
        if before is None or gradients.max_norm is not None or gradients.are_scaled:
            return []
        self.is_over = True
        now = versions_of(run.state.states)
        if len(before.of) != len(now.of) or not all(map(is_, before.of, now.of)):
            return []
        counts = zip(now.of, before.counts, now.counts, strict=True)
        were_changed = [then != first for grad, first, then in counts if grad is not None]
        if not were_changed or not all(were_changed):
            return []
        return [partial(warn, _TEXT)] if run.setup.topology.everyone.rank == 0 else []
