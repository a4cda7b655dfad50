"""A step in which a rank died: all that are left come to the same step, before they go on.

A rank has taken a step only when its exchange has ended. Then every rank has sent all that it was to send in that step,
and the averages of full steps are on every rank that agrees on their flags. So survivors are one step apart at most:

    some have taken the step     the others finish it: they get the replies from one that has, 1 bit an element
    none has taken the step      what messages have changed is taken back, and the caller repeats the step

A rank that has taken the step may have begun the next one, which no rank has taken: that is taken back. So no
parameters and moments have to be kept. What an exchange changes is kept where options say so (`Undo`).

The sync of local steps is a local step and an exchange. The step stays; the exchange is done again by the new group.
Between two exchanges nobody waits for others: a rank that is some local steps behind leaves these out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from onebit.collectives.agreement import listed
from onebit.collectives.hand_over import receive_tensors, send_tensors
from onebit.collectives.topology import Topology
from onebit.optim.steps import Step
from onebit.optimizers.optimizer import OneBitOptimizer

_FINISHING = "handing over the replies of a step (send)"


def facts_of_step(inner: OneBitOptimizer) -> dict[str, Any]:
    """Where this rank stands."""
    current, coming = inner.current, inner.coming
    counts, under_way = current.stages.counts.tolist(), current.under_way
    return {
        "attempts": sum(counts),
        "skipped": counts[1],
        "compressing": current.stages.compressing,
        "chunks": [state.layout.chunks for state in current.compressed],
        "local": current.local_progress,
        "under_way": under_way is not None,
        "can_undo": under_way is None or bool(under_way.undo),
        "has_averages": type(coming) is Step and inner.begun,
        "sync": under_way is not None and coming is not None and coming.alone,
    }


@dataclass
class Settlement:
    """How ranks that stay come to the same step: the same on all."""

    topology: Topology
    members: Sequence[dict[str, Any]]
    stayers: Sequence[int]

    @property
    def last(self) -> int:
        """The last step that one of them has taken, or skipped."""
        return max(self.members[rank]["attempts"] for rank in self.stayers)

    @property
    def sync_is_due(self) -> bool:
        """Whether some have moved in a sync that none has ended."""
        return any(self._of(rank)["sync"] and self._of(rank)["attempts"] == self.last for rank in self.stayers)

    @property
    def ahead(self) -> int:
        """The first rank that has taken the last step."""
        return next(rank for rank in self.stayers if self._of(rank)["attempts"] == self.last)

    @property
    def local_progress(self) -> Any:
        """Of the ranks that have taken most local steps."""
        with_sync = [rank for rank in self.stayers if self._of(rank)["sync"]]
        return self._of(with_sync[0] if self.sync_is_due else self.ahead)["local"]

    def settle(self, inner: OneBitOptimizer) -> None:
        """On a rank that stays. A ValueError on all of them where it is not possible; then nothing has changed."""
        for rank in self.stayers:
            self._check(inner, rank)
        rank, sync = self.topology.everyone.rank, self.sync_is_due
        own = self._of(rank)
        if own["under_way"] and not self._finishes(rank):
            inner.current.take_back_exchange()
            if own["sync"]:
                end_local_step(inner)
        for other in filter(self._finishes, self.stayers):
            if rank == self.ahead:
                self._send(inner, other)
            elif rank == other:
                self._finish(inner)
        own_last = own["attempts"] + (own["sync"] or self._finishes(rank))
        if own_last < self.last + sync:
            inner.current.stages.leave_out(self.last + sync - own_last)

    def _of(self, rank: int) -> dict[str, Any]:
        return self.members[rank]

    def _finishes(self, rank: int) -> bool:
        """Whether a rank has sent all of a step that others have taken."""
        own = self._of(rank)
        return own["attempts"] == self.last - 1 and (own["under_way"] or own["has_averages"])

    def _check(self, inner: OneBitOptimizer, rank: int) -> None:
        own, name, first = self._of(rank), self._name(rank), self._name(self.ahead)
        between = [each for each in self.stayers if self._is_between_steps(each)]
        if rank in between and self._taken(rank) != self._taken(between[0]):
            raise ValueError(
                f"a rank died in optimizer.synchronize(), which some ranks have ended and others have not "
                f"({self._name(between[0])}, {name}): load the last checkpoint"
            )
        kind = inner.setup.algorithm.kind
        missing = range(own["attempts"] + 1 + own["sync"], self.last + 1)
        if self._finishes(rank):
            return
        if not own["can_undo"]:
            raise ValueError(
                f"a rank died while {name} exchanged messages of step {own['attempts'] + 1}, and {name} has kept "
                f"nothing by which that could be taken back: what it owes is not known. Load the last checkpoint, and "
                f"build the optimizer with elastic=True"
            )
        if missing and not (own["compressing"] and all(kind(step) == "local" for step in missing)):
            raise ValueError(
                f"{name} has taken or skipped {own['attempts']} steps, and {first} {self.last}: they do not go on from "
                f"the same step of one run, or gradients of the last step were dropped (call reform before "
                f"zero_grad). On a rank that joins build a new model and optimizer, take no step and load nothing"
            )

    def _is_between_steps(self, rank: int) -> bool:
        return self._of(rank)["attempts"] == self.last and not self._of(rank)["sync"]

    def _taken(self, rank: int) -> list[int]:
        """Local steps since the last exchange, by the parts of the model."""
        return [taken for taken, *_ in self._of(rank)["local"]]

    def _name(self, rank: int) -> str:
        return listed([rank], self.topology.everyone)

    def _send(self, inner: OneBitOptimizer, to: int) -> None:
        if self._of(to)["under_way"]:
            replies = [reducer.replies.buffer for reducer in inner.current.reducers]
            send_tensors(self.topology.everyone, to, None, replies, inner.setup.device, _FINISHING)

    def _finish(self, inner: OneBitOptimizer) -> None:
        everyone, own, ahead = self.topology.everyone, self._of(self.topology.everyone.rank), self._of(self.ahead)
        if own["under_way"]:
            _, replies = receive_tensors(everyone, self.ahead, inner.setup.device, _FINISHING)
            for reducer, buffer in zip(inner.current.reducers, replies, strict=True):
                reducer.replies.buffer.copy_(buffer)
        finish_step(inner, skipped=ahead["skipped"] > own["skipped"])
        if ahead["compressing"] and not inner.compressing and inner.current.stages.freeze_is_due:
            chosen = replace(inner.setup.options, chunks=max(ahead["chunks"]))
            for tell in inner.current.freeze(replace(inner.setup, options=chosen)):
                tell()


def finish_step(inner: OneBitOptimizer, skipped: bool) -> None:
    """The coming step, which other ranks have finished. This rank has sent all that it was to send, and the replies, if
    there are any, are here."""
    step, setup, current, gradients = inner.coming, inner.setup, inner.current, inner.gradients
    assert step is not None
    flags, under_way = gradients.flags, current.under_way
    if not step.alone:
        flags.fill_(int(skipped))
    if under_way is not None and under_way.by_flags and skipped:
        current.take_back_exchange()
    elif under_way is not None:
        step.finish(gradients.write_hyper(setup, current), flags)
    else:
        gradients.clip_as_asked(setup, current)
        flags.fill_(int(skipped))
        step.move(gradients.write_hyper(setup, current), flags)
    inner.end_step(step, flags)
    inner.catch_up()


def end_local_step(inner: OneBitOptimizer) -> None:
    """Of a sync whose exchange did not end and has been taken back: the exchange is still due."""
    assert inner.coming is not None
    inner.end_step(inner.coming, inner.gradients.flags)
    inner.catch_up()
