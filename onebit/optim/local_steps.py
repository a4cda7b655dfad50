"""Local steps of 0/1 Adam (Lu et al. 2023, Algorithm 1): a rank moves by its own gradient, and now and then all agree.

local    m_i = b1 m_i + (1-b1) g_i;  x_i = x_i - lr (f mhat_i / (u + eps) + wd x_i);  e_i = e_i + w m_i
sync     U = compressed_all_reduce(e_i);  x = (product of 1 - lr wd) x_anchor - f U / (u + eps);  m_i = U / W

w = lr / (1 - b1^t), of each step, and W = max(sum of w, 3/4 of the W before). Residuals are in units of what
parameters move by: what a sync leaves out comes with the next one, whatever the learning rate is then. So U also has
what was left out when steps were larger, or more; by the sum of w alone m would grow with their ratio, and parameters
with it once the rate rises again.

f bounds the step (see `limit`): of a local step by the size of mhat_i / (u + eps), of a sync by that of U / W.

Weight decay acts on the anchor, which is x after the last sync. A rank whose gradient is not finite leaves its own step
out; the step counts, since no other rank knows.

State, beside that of compressed steps: anchor and m_i, 8 B an element. After a sync both follow from x and U: they are
not saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onebit.collectives.exchange import Chunk
from onebit.collectives.undo import Undo
from onebit.kernels.data.hyper import Hyper
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.passes import Compress, Floors, Gradients, Parameters, ZeroOneLength, ZeroOneLocal, ZeroOneSync
from onebit.optim.fields import LAST_MOMENTUM, LEAST_ROOT, RESIDUAL, ROOT_AT_ZERO, VARIANCE, Field
from onebit.optim.flat_state import FlatState
from onebit.optim.reducer import MomentumReducer
from onebit.optim.schedule import SyncSchedule

ANCHOR = Field("anchor", saved=False)
OWN_MOMENTUM = Field("own_momentum", saved=False)
FACTOR = Field("momentum_factor", per="parameter", values="non-negative", initial=1.0, required=False)
"""What the last message is multiplied by to be m: 1 until a sync, then 1 / W; 0 where there was no message yet."""

KEPT = 3 / 4  # of W, at least: what a message leaves out is a half to three quarters of what it was made of

FIELDS = (ANCHOR, OWN_MOMENTUM, FACTOR)


class LocalSteps:
    """Local steps of one flat state, from what its last exchange has left."""

    def __init__(self, state: FlatState, reducer: MomentumReducer, live: Tensor, syncs: SyncSchedule) -> None:
        """live: bool [elements], where elements take part. It is changed."""
        self.state, self._reducer, self._exchange = state, reducer, reducer.exchange
        device, parameters = state.device, len(state.params)
        self._syncs = syncs
        self.taken = 0  # steps since the last exchange
        self.weights = torch.zeros(parameters, dtype=torch.float32, device=device)  # the sum of w since the last sync
        self.decay = torch.ones(parameters, dtype=torch.float32, device=device)  # the product of 1 - lr wd
        self._groups = torch.tensor(state.groups, dtype=torch.int64, device=device)
        self._no_gradients = Pointers(state.layout, device, state.dtype, "gradient")
        self._no_gradients.bind_tensors([None] * parameters)
        self._no_flags = torch.zeros(1, dtype=torch.int32, device=device)
        self.limit = reducer.limit
        self._squares = torch.zeros(state.layout.blocks, dtype=torch.float32, device=device)
        has_replies, reducer.momentum_is_own = not reducer.momentum_is_own, False
        if has_replies:
            decoded = state[ANCHOR.name]  # which the first step writes anew
            for m, factor in zip(reducer.momentum(decoded), state[FACTOR.name], strict=True):
                m.mul_(factor)
            state[OWN_MOMENTUM.name].add_(decoded.masked_fill_(live.logical_not_(), 0))  # to what the freeze has put

    def use_units_of_steps(self, hyper: Tensor) -> None:
        """What compressed steps have left out, in units of m until now. Where the learning rate is 0 it is lost."""
        of_parameters = self._of_parameters(hyper)
        w = of_parameters.lr * of_parameters.bias1
        self._set_reference(w)
        self._exchange.materialize()
        for i in range(len(self.state.params)):
            for _, e in (*self.state.parts_of(RESIDUAL.name, i), *self._reducer.served(i)):
                e.mul_(w[i])

    def move(self, hyper: Tensor, flags: Tensor) -> None:
        """A step by this rank's own gradient, left out where flags is not 0."""
        self._begin()
        state, gradients = self.state, Gradients(self.state.gradients, hyper, flags)
        clip = None if self.limit is None else self.limit.of_squares(self._length(gradients))
        for span, _, residual in self._exchange.slices():
            state.backend.run(ZeroOneLocal(
                span, Parameters(state.parameters, state.part("master", span)), gradients,
                span.of(state[VARIANCE.name]), span.of(state[OWN_MOMENTUM.name]), residual, floors_of(state), clip,
            ))  # fmt: skip
        if self._exchange.residual.scale is not None:  # it has been computed anew
            self._exchange.residual.scale.masked_fill_(flags == 0, 0)
        self._count(hyper)

    def pass_over(self, hyper: Tensor) -> None:
        """A step that other ranks take, and this one does not: see `onebit.follow`."""
        self._begin()
        self._count(hyper)

    def _begin(self) -> None:
        if self.taken == 0:  # x as it is now: a user may have changed it
            parameters = range(len(self.state.params))
            anchors = [self.state.view(ANCHOR.name, i) for i in parameters]
            torch._foreach_copy_(anchors, [self.state.value(i) for i in parameters])

    def _length(self, gradients: Gradients) -> Tensor:
        """The sum over each block of (mhat / (u + eps))^2, m as the coming step has it: fp32 [blocks]."""
        state = self.state
        state.backend.run(ZeroOneLength(
            state.layout.all(), gradients, state[VARIANCE.name], state[OWN_MOMENTUM.name], floors_of(state),
            self._squares,
        ))  # fmt: skip
        return self._squares

    def _count(self, hyper: Tensor) -> None:
        of_parameters = self._of_parameters(hyper)
        self.weights += of_parameters.lr * of_parameters.bias1
        self.decay *= 1 - of_parameters.lr * of_parameters.weight_decay
        self.taken += 1

    def exchange(self, hyper: Tensor, undo: Undo | None = None) -> None:
        """All messages. undo: keeps what they change."""
        state, alone = self.state, torch.zeros_like(hyper)  # neither momentum nor gradient: residuals alone

        def compress(chunk: Chunk) -> None:
            if undo is not None:
                undo.save(chunk)
            live = self._exchange.live_in(chunk.slice)
            gradients = Gradients(self._no_gradients, alone, self._no_flags)
            state.backend.run(Compress(chunk.slice, gradients, chunk.arriving, chunk.residual, chunk.sent, live=live))

        self._exchange.run(compress, chunks=None if undo is None else undo.chunks)

    def synchronize(self, hyper: Tensor, step: int | None = None) -> None:
        """Give all ranks the same parameters, after the exchange. step: of the schedule, if it is one."""
        state, total = self.state, self._exchange.replies
        before = factor = state[FACTOR.name]
        self._set_reference(torch.maximum(self.weights, torch.where(before > 0, KEPT / before, 0)))
        farther = step is not None and self._syncs.is_farther(step)
        clip = None if self.limit is None else self.limit.of_sync(hyper, factor, farther)
        state.backend.run(ZeroOneSync(
            state.layout.all(), Parameters(state.parameters, state.get("master")), state[VARIANCE.name],
            state[OWN_MOMENTUM.name], state[ANCHOR.name], total, hyper, floors_of(state), self.decay, factor, clip,
        ))  # fmt: skip
        if LAST_MOMENTUM.name in state:
            state.remove(LAST_MOMENTUM.name)
        self.weights.zero_()
        self.decay.fill_(1)
        self.taken = 0

    @property
    def progress(self) -> Any:
        """What is the same on all ranks, in a form that JSON can hold."""
        return [self.taken, self.weights.tolist(), self.decay.tolist()]

    def go_on(self, progress: Any, before: LocalSteps | None = None) -> None:
        """Go on with another set of ranks, which were between two exchanges. before: this rank's own until now; None on
        a rank that joins, which has what all had after the last exchange."""
        state = self.state
        self.taken = int(progress[0])
        for own, values in ((self.weights, progress[1]), (self.decay, progress[2])):
            own.copy_(torch.tensor(values, dtype=torch.float32))
        for i in range(len(state.params)):
            anchor, m = state.view(ANCHOR.name, i), state.view(OWN_MOMENTUM.name, i)
            anchor.copy_(state.value(i) if before is None else before.state.view(ANCHOR.name, i))
            if before is not None:
                m.copy_(before.state.view(OWN_MOMENTUM.name, i))

    def last_parameters(self) -> list[Tensor]:
        """What they were after the last exchange, fp32."""
        return [self.state.view(ANCHOR.name, i) for i in range(len(self.state.params))]

    def _set_reference(self, w: Tensor) -> None:
        """W"""
        self.state[FACTOR.name].copy_(torch.where(w > 0, 1 / w, 0))

    def _of_parameters(self, hyper: Tensor) -> Any:
        """A `Hyper` with fp32 [parameters] for every number."""
        return Hyper(*hyper[self._groups].unbind(1))  # type: ignore[arg-type]


def floors_of(state: FlatState) -> Floors:
    return Floors(state[LEAST_ROOT.name], state[ROOT_AT_ZERO.name])
