"""The kinds of step: what each averages, how it moves, and what it counts.

    full     gradients are averaged over all ranks; every rank moves by the mean
    1 bit    messages of momentum are averaged; every rank moves by their mean
    local    every rank moves by its own gradient
    sync     the same, then an exchange after which all ranks have the same parameters

Parameters that are not compressed take full steps always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from onebit.optim import masks
from onebit.optim.algorithm import Kind, LocalSteps
from onebit.optim.flat_state import FlatState
from onebit.optim.gradients import Gradients
from onebit.optim.reducer import MomentumReducer
from onebit.optim.run import Run
from onebit.optim.state import Part

Timed = Literal["uncompressed", "1 bit", "local"]


@dataclass(frozen=True)
class Step:
    """The coming one: a full step, of which others are variations."""

    run: Run
    gradients: Gradients

    kind: ClassVar[Kind] = "full"
    timed_as: ClassVar[Timed] = "uncompressed"
    alone: ClassVar[bool] = False  # whether a rank leaves it out by itself, where its own gradients are not finite

    def average_and_check(self, squares: Tensor | None = None) -> Tensor:
        """Average gradients, where nobody else does, and find out if all are finite: int32 [1], not 0 where one is not
        on any rank, or on this one, as long as `gradients.ranks_agreed` is False. squares: see
        `Gradients.check_finite`."""
        if squares is not None or not self.gradients.were_checked(self.run.state.states):  # else `clip_grad_norm_` has
            self._check(self.run.state.states, squares, squares is not None or self._asks_first)
        return self.gradients.flags

    def _check(self, states: Sequence[FlatState], squares: Tensor | None, agree: bool) -> None:
        masks.clear_gradients(states)
        self._average(states)
        topology, hyper = self.run.setup.topology, self.gradients.write_hyper(self.run, clipped=False)
        ranks = topology.sender if self.alone else topology.everyone
        self.gradients.check_finite(states, ranks, hyper, squares, self._slices, agree)

    @property
    def _asks_first(self) -> bool:
        """Return whether ranks agree that all is finite before anything is sent."""
        return True

    @property
    def _slices(self) -> int:
        """The number of slices of the gradients, of which this rank looks at one."""
        return 1

    def _average(self, states: Sequence[FlatState]) -> None:
        if not self.gradients.averaged_in_backward:
            setup = self.run.setup
            self.gradients.average(states, setup.topology.data_parallel, setup.options.gradient_dtype)

    def add_squares(self, squares: Tensor) -> None:
        """Those of this rank's gradients become those of what it moves by."""
        self.run.setup.topology.add_parts(squares)

    def measure(self, squares: Tensor, flags: Tensor) -> None:
        """The step has ended, and was clipped: what the squares of its gradients say of them. See `MeanNorm`."""
        self.run.state.mean_norm.full_step(squares, flags, self.run.setup.topology.nodes)

    def of_mean(self, squares: Tensor) -> Tensor:
        """The square of the mean gradient, by those of what this step moves by."""
        nodes = self.run.setup.topology.nodes
        return squares if self.kind == "full" else self.run.state.mean_norm.of_mean(squares, nodes)

    def move(self, hyper: Tensor, flags: Tensor) -> None:
        """Exchange messages, then move every part, where flags is 0."""
        with masks.fixed_kept(self.run.state.states):
            self._exchange(hyper)
            self._move_parts(hyper, flags)

    def finish(self, hyper: Tensor, flags: Tensor) -> None:
        """The rest of `move`, with the replies of an exchange that has ended on other ranks, and not on this one."""
        with masks.fixed_kept(self.run.state.states):
            self._move_parts(hyper, flags)

    def shared(self) -> list[Tensor]:
        """What every rank has the same by now of a step that was taken: by this a process that belongs to no rank can
        take the step, too (`follow`)."""
        return [tensor for part in self.run.state.parts for tensor in self._shared(part)]

    def _shared(self, part: Part) -> list[Tensor]:
        """The averaged gradients."""
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in part.state.params]

    def follow(self, shared: Iterator[Tensor], hyper: Tensor, flags: Tensor) -> None:
        """Take the step of the process that has sent `shared`."""
        for part in self.run.state.parts:
            self._put(part, shared)
        for state in self.run.state.states:
            state.bind_tensors()
        self.finish(hyper, flags)

    def _put(self, part: Part, shared: Iterator[Tensor]) -> None:
        for p in part.state.params:
            p.grad = torch.empty_like(p).copy_(next(shared))

    def _move_parts(self, hyper: Tensor, flags: Tensor) -> None:
        """Move every part, and take back what has been exchanged if replies say so."""
        for part in self.run.state.parts:
            if part.reducer is None:
                self.run.setup.algorithm.full_step(part.state, hyper, flags)
            else:
                self._move(part, part.reducer, hyper, flags)
        under_way = self.run.state.under_way
        for undo in under_way.undo if under_way is not None and under_way.by_flags else ():
            undo.restore(flags)
        self.run.state.under_way = None

    def _exchange(self, hyper: Tensor) -> None:
        """All messages that parts move by."""

    def _move(self, part: Part, reducer: MomentumReducer, hyper: Tensor, flags: Tensor) -> None:
        """A part that is compressed in stage 2."""
        setup = self.run.setup
        setup.algorithm.spaced_full_step(part.state, reducer, hyper, flags, setup.options)

    def count(self, flags: Tensor) -> list[Callable[[], None]]:
        """It ends. What is due when all of it is over."""
        full, run = self.kind == "full", self.run
        due = run.warn_of_variance(flags) if full and run.state.stages.compressing else []
        run.count(flags, [] if full else run.state.limits, self.alone)
        return due

    @property
    def next_needs_no_mean(self) -> bool:
        """Return whether the step after this one has no use for averaged gradients, if this one was taken. If not, and
        it has, `step` averages them."""
        run = self.run
        return run.state.stages.compressing and run.setup.topology.node is None and run.kind(ahead=2) != "full"


class OneBitStep(Step):
    kind: ClassVar[Kind] = "1 bit"
    timed_as: ClassVar[Timed] = "1 bit"

    @property
    def _asks_first(self) -> bool:
        return not self.run.flags_travel

    @property
    def _slices(self) -> int:
        return self.run.setup.topology.slices

    def _average(self, states: Sequence[FlatState]) -> None:
        """What is not compressed over all ranks; of what is, this rank's slices over those of its node."""
        topology, wire = self.run.setup.topology, self.run.setup.options.gradient_dtype
        if self.run.state.uncompressed:
            self.gradients.average([s for s in states if not s.compressed], topology.data_parallel, wire)
        if topology.node is not None:
            self.gradients.average_slices([s for s in states if s.compressed], topology.node, wire)

    def add_squares(self, squares: Tensor) -> None:
        """The mean over all senders."""
        everyone = self.run.setup.topology.everyone
        everyone.all_sum(squares, "averaging gradient norms (all-reduce of one number)").wait()
        squares /= self.run.setup.topology.nodes

    def measure(self, squares: Tensor, flags: Tensor) -> None:
        self.run.state.mean_norm.compressed_step(squares, flags, self.run.setup.topology.nodes)

    def _exchange(self, hyper: Tensor) -> None:
        self.run.exchange(hyper, self.gradients.flags, self.gradients.ranks_agreed)

    def _shared(self, part: Part) -> list[Tensor]:
        """The replies; averaged gradients of what is not compressed."""
        return super()._shared(part) if part.reducer is None else [part.reducer.replies.buffer]

    def _put(self, part: Part, shared: Iterator[Tensor]) -> None:
        if part.reducer is None:
            super()._put(part, shared)
        else:
            part.reducer.keep_previous_momentum()
            part.reducer.replies.buffer.copy_(next(shared))

    def _move(self, part: Part, reducer: MomentumReducer, hyper: Tensor, flags: Tensor) -> None:
        self.run.setup.algorithm.compressed_step(part.state, reducer, hyper, flags)


class SentStep(OneBitStep):
    """A compressed step whose messages have left in backward, each chunk's with a flag of its own."""

    def average_and_check(self, squares: Tensor | None = None) -> Tensor:
        flags = self.gradients.flags.zero_()
        for state in self.run.state.compressed:
            state.bind_tensors()
        if apart := self.run.state.uncompressed:  # no rank moves before all have the means: one may die meanwhile
            self._check(apart, squares, agree=True)
        self.run.read_flags(flags)
        self.gradients.ranks_agreed = True
        return flags

    def _exchange(self, hyper: Tensor) -> None:
        """The replies are there."""


class LocalStep(Step):
    kind: ClassVar[Kind] = "local"
    timed_as: ClassVar[Timed] = "local"
    alone = True

    def measure(self, squares: Tensor, flags: Tensor) -> None:
        """Nothing: they are this rank's alone."""

    def _average(self, states: Sequence[FlatState]) -> None:
        node = self.run.setup.topology.node
        if node is not None and not self.gradients.node_mean:
            self.gradients.average(states, node, self.run.setup.options.gradient_dtype)

    def _move(self, part: Part, reducer: MomentumReducer, hyper: Tensor, flags: Tensor) -> None:
        self._local(part, reducer, hyper).move(hyper, flags)

    def _local(self, part: Part, reducer: MomentumReducer, hyper: Tensor) -> LocalSteps:
        step = self.run.state.stages.steps + 1
        part.local = part.local or self.run.setup.algorithm.local_steps(part.state, reducer, hyper, step)
        return part.local

    def _shared(self, part: Part) -> list[Tensor]:
        return []

    def follow(self, shared: Iterator[Tensor], hyper: Tensor, flags: Tensor) -> None:
        for part in self.run.state.parts:
            assert part.reducer is not None
            self._local(part, part.reducer, hyper).pass_over(hyper)


class SyncStep(LocalStep):
    kind: ClassVar[Kind] = "sync"
    timed_as: ClassVar[Timed] = "1 bit"

    def _exchange(self, hyper: Tensor) -> None:
        """Exchange what a rank owes after its own step."""
        for part in self.run.state.parts:
            assert part.reducer is not None
            super()._move(part, part.reducer, hyper, self.gradients.flags)
        self.run.exchange_local_steps(hyper)

    def _shared(self, part: Part) -> list[Tensor]:
        assert part.reducer is not None
        return [part.reducer.replies.buffer]

    def follow(self, shared: Iterator[Tensor], hyper: Tensor, flags: Tensor) -> None:
        super().follow(shared, hyper, flags)
        for part in self.run.state.parts:
            assert part.reducer is not None
            part.reducer.replies.buffer.copy_(next(shared))
            part.state.bind_tensors()
        self.finish(hyper, flags)

    def _move(self, part: Part, reducer: MomentumReducer, hyper: Tensor, flags: Tensor) -> None:
        assert part.local is not None
        part.local.synchronize(hyper, self.run.state.stages.steps + 1)


STEPS: dict[Kind, type[Step]] = {step.kind: step for step in (Step, OneBitStep, LocalStep, SyncStep)}
