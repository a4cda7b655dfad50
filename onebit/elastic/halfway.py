"""A step in which a rank died: all that are left come to the same step, before they go on.

A rank has ended an exchange only when every rank has sent all that it was to send, and the averages of full steps are
on every rank that agrees on their flags. So survivors are one exchange apart at most:

    some have ended the exchange     the others finish it: they get the replies from one that has, 1 bit an element
    none has ended the exchange      what messages have changed is taken back, and the caller repeats the step

A rank that has ended the exchange may have begun the next one, which no rank has ended: that is taken back. So no
parameters and moments have to be kept. What an exchange changes is kept where options say so (`Undo`).

The sync of local steps is a local step and an exchange. The step stays; the exchange is done again by the new group.
Between two exchanges nobody waits for others: a rank that is some local steps behind leaves these out.

A rank that has come to the same step is as after a reform that nobody asked for: where another rank dies meanwhile, the
next reform goes on from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onebit.collectives.hand_over import receive_tensors, send_tensors
from onebit.collectives.transport.protocol import Sender
from onebit.elastic.members import Members
from onebit.optim.steps import SyncStep
from onebit.optimizers.optimizer import OneBitOptimizer

_FINISHING = "handing over the replies of a step (send)"


@dataclass(frozen=True)
class Settlement(Members):
    """How ranks that stay come to the same step: the same on all."""

    @property
    def met(self) -> int:
        """The step of the last exchange that one of them has ended."""
        return max(self.rows[rank].met for rank in self.stayers)

    @property
    def ahead(self) -> int:
        """The first rank that has ended that exchange."""
        return next(rank for rank in self.stayers if self.rows[rank].met == self.met)

    @property
    def last(self) -> int:
        """The last step that one of them has taken, or skipped."""
        return max(self.rows[rank].attempts for rank in self.stayers)

    @property
    def sync_is_due(self) -> bool:
        """Return whether some have moved in a sync that none has ended."""
        return any(self.rows[rank].open and not self.finishes(rank) for rank in self.stayers)

    @property
    def local_progress(self) -> Any:
        """Progress of a rank that has taken most local steps."""
        whole = (self.rows[rank] for rank in self.stayers if not self.finishes(rank))
        return next(each.local for each in whole if each.attempts == self.last)

    @property
    def left_out(self) -> int:
        """How many local steps this rank leaves out."""
        rank = self.everyone.rank
        return self.last - (self.met if self.finishes(rank) else self.rows[rank].attempts)

    def finishes(self, rank: int) -> bool:
        """Return whether a rank has sent all of an exchange that others have ended."""
        own = self.rows[rank]
        return (own.under_way or own.has_averages) and own.met < self.met == own.attempts + (not own.open)

    def check(self) -> None:
        """A ValueError, the same on all ranks, where they can't go on from one run, or can't come to the same step."""
        super().check()
        for rank in self.stayers:
            own, name = self.rows[rank], self.name(rank)
            if self.finishes(rank):
                continue
            if not own.can_undo:
                raise ValueError(
                    f"a rank died while {name} exchanged messages of step {own.attempts + (not own.open)}, and {name} "
                    f"has kept nothing by which that could be taken back: what it owes is not known. Load the last "
                    f"checkpoint, and build the optimizer with elastic=True"
                )
            if own.met < self.met:
                ahead, theirs = self.name(self.ahead), self.rows[self.ahead]
                raise ValueError(
                    f"{name} has taken or skipped {own.attempts} steps, and {ahead} {theirs.attempts}, with the last "
                    f"exchange after step {own.met} and {theirs.met}: they do not go on from the same step of one run, "
                    f"or gradients of the last step were dropped (call reform before zero_grad). On a rank that joins "
                    f"build a new model and optimizer, take no step and load nothing"
                )
        talks = bool(self.joining) or any(map(self.finishes, self.stayers))
        if talks and not isinstance(self.everyone, Sender):
            raise ValueError(
                f"over {self.everyone.name} no rank can send to one other, as one that joins, or has to finish "
                f"a step, needs it: use a process group of torch.distributed"
            )

    def settle(self, inner: OneBitOptimizer) -> None:
        """Settle what was half done on a rank that stays."""
        everyone, run, coming = self.everyone, inner.run, inner.coming
        if self.rows[everyone.rank].under_way and not self.finishes(everyone.rank):
            run.take_back_exchanges()
            if isinstance(coming, SyncStep):  # its local step has ended
                inner.end_step(coming, inner.gradients.flags)
                inner.catch_up()
        for other in filter(self.finishes, self.stayers):
            if everyone.rank == self.ahead and self.rows[other].under_way:
                replies = [reducer.replies.buffer for reducer in run.state.reducers]
                send_tensors(everyone, other, None, replies, inner.setup.device, _FINISHING)
            elif everyone.rank == other:
                self._finish(inner)
        frozen = [self.rows[rank] for rank in self.stayers if self.rows[rank].compressing]
        if frozen and not inner.compressing:
            for tell in run.freeze(frozen[0].chunks):
                tell()
            inner.install(run)

    def _finish(self, inner: OneBitOptimizer) -> None:
        """The coming step, which other ranks have finished. This rank has sent all that it was to send."""
        run, gradients, step = inner.run, inner.gradients, inner.coming
        own, ahead = self.rows[self.everyone.rank], self.rows[self.ahead]
        if own.under_way:
            _, replies = receive_tensors(self.everyone, self.ahead, run.setup.device, _FINISHING)
            for reducer, buffer in zip(run.state.reducers, replies, strict=True):
                reducer.replies.buffer.copy_(buffer)
        if step is None:
            run.synchronize_local_steps(gradients.write_hyper(run), bound=False, arrived=True)
            return
        skipped, flags, under_way = ahead.skipped > own.skipped, gradients.flags, run.state.under_way
        if under_way is None:
            gradients.clip_as_asked(run)
        if not step.alone:
            flags.fill_(int(skipped))
        if under_way is None:
            step.move(gradients.write_hyper(run), flags)
        elif under_way.by_flags and skipped:
            run.take_back_exchanges()
        else:
            step.finish(gradients.write_hyper(run), flags)
        inner.end_step(step, flags)
        inner.catch_up()
