"""The parameters of one dtype and all that an optimizer keeps for them, in flat buffers.

    stage 1    exp_avg, exp_avg_sq             8 B an element
    stage 2    residual, d, momentum, E        4 + 4 + 1/8 + 4/N B, the first two in the place of stage 1's

At the freeze nothing is copied. With no message received yet the momentum of the first compressed step must still
come from exp_avg: c = beta1 m + (1 - beta1) g + e with e = 0 is the same sum as with m = 0 and e = beta1 m. So
exp_avg, times beta1, becomes the first residual.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from onebit import kernels
from onebit.collectives.chunking import candidates, choose_chunks
from onebit.collectives.exchange import Chunk, Exchange
from onebit.collectives.transport.protocol import Transport
from onebit.kernels.data.hyper import Hyper
from onebit.kernels.data.layout import Layout
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import Messages
from onebit.optim.options import Dead, Options


class Space:
    """Layout, pointers and state of the parameters of one dtype; in stage 2 also their exchange."""

    def __init__(
        self,
        params: Sequence[Tensor],
        groups: Sequence[int],
        options: Options,
        transport: Transport,
        chunks: int = 1,
    ) -> None:
        """With room for `chunks`, and for every number that might be chosen."""
        self.params, self.groups = list(params), list(groups)
        self.options, self.transport = options, transport
        self.device, self.dtype = params[0].device, params[0].dtype
        self.backend = kernels.backend(self.device)
        self.numels = [p.numel() for p in self.params]
        self.layout = self._cut(1)
        self.points = Pointers(self.layout, self.device, self.dtype, "parameter")
        self.grads = Pointers(self.layout, self.device, self.dtype, "gradient")
        self._versions: list[int] = []  # of parameters after a step of this space's
        self._room = max(self._cut(c).elements for c in [*self._possible_chunks(), chunks])
        self._first, self._second = self._zeros(), self._zeros()
        half = self.dtype != torch.float32 and options.master_weights
        self._master = self._zeros() if half else None
        self.sums = torch.zeros(self.layout.blocks, dtype=torch.float32, device=self.device)
        self.master_is_true = False  # whether it, and not the parameters, says where a run has come to
        self.exchange: Exchange | None = None
        self.gamma: Tensor | None = None  # fp32 [parameters]: what messages of each are multiplied by, if anything
        self.fold_again: Callable[[], None] | None = None  # after a load: puts m into a residual that was cleared

    @property
    def exp_avg(self) -> Tensor:
        """fp32 [elements], stage 1"""
        return self._first[: self.layout.elements]

    @property
    def exp_avg_sq(self) -> Tensor:
        """fp32 [elements], stage 1"""
        return self._second[: self.layout.elements]

    @property
    def d(self) -> Tensor:
        """fp32 [elements], stage 2: 1 / (sqrt(vhat_T) + eps)"""
        return self._second[: self.layout.elements]

    @property
    def master(self) -> Tensor | None:
        """fp32 [elements]: the parameters, where they themselves have 16 bits."""
        return None if self._master is None else self._master[: self.layout.elements]

    def bind_tensors(self) -> None:
        """To the parameters and gradients as they lie now. What was written to a 16-bit parameter since the last step
        (a mask, a clipped weight, other weights) is taken over into the master copy."""
        for i, (p, version) in enumerate(zip(self.params, self._versions, strict=False)):
            if self._master is not None and p._version != version:
                self.view(self._master, i).copy_(p.detach())
        self.points.bind_tensors(self.params)
        self.grads.bind_tensors([p.grad for p in self.params])

    def release(self) -> None:
        self.grads.release()
        self._versions = [p._version for p in self.params]

    def view(self, flat: Tensor, index: int) -> Tensor:
        """One parameter's part of a flat buffer, in the parameter's shape."""
        start = int(self.layout.first[index]) * self.layout.block_size
        return flat[start : start + self.numels[index]].view(self.params[index].shape)

    def views(self, index: int) -> dict[str, Tensor]:
        """What is kept for one parameter and has its shape."""
        names = ("residual", "denominator") if self.exchange else ("exp_avg", "exp_avg_sq")
        found = {names[0]: self.view(self._first, index), names[1]: self.view(self._second, index)}
        return found if self._master is None else {**found, "master": self.view(self._master, index)}

    def together(self) -> dict[str, Tensor]:
        """What parameters have together and every rank has the same."""
        if self.exchange is None:
            return {}
        found = {"the last message": self.exchange.replies.buffer}
        return found if self.exchange.live is None else {**found, "the live coordinates": self.exchange.live}

    def take(self, index: int, other: Space, index_there: int) -> None:
        """Go on with a parameter's state from another space, both in stage 1."""
        there = other.views(index_there)
        for name, value in self.views(index).items():
            if name in there:
                value.copy_(there[name])

    def group_blocks(self, groups: int) -> list[tuple[int, int]]:
        """Blocks [first, stop) of each param group."""
        ends = [*self.layout.first.tolist(), self.layout.used_blocks]
        return [(ends[bisect_left(self.groups, g)], ends[bisect_right(self.groups, g)]) for g in range(groups)]

    def all_reduce_momentum(self, hyper: Tensor, flags: Tensor, use: Callable[[Chunk], None] | None = None) -> Messages:
        """m = compressed_all_reduce(b1 m + (1-b1) g): m is what the last call received."""
        assert self.exchange is not None
        self.remember()
        return self.exchange.run(lambda chunk: self.compress(chunk, hyper, flags), use)

    def remember(self) -> None:
        """What the coming exchange overwrites and a step still needs: nothing, for Adam."""

    def compress(self, chunk: Chunk, hyper: Tensor, flags: Tensor) -> None:
        """One chunk's messages of b1 m + (1-b1) g."""
        assert self.exchange is not None
        live = self.exchange.live_in(chunk.span)
        self.backend.compress(
            chunk.span, self.grads, chunk.replies, chunk.residual, hyper, flags, chunk.sent, live=live,
            gamma=self.gamma,
        )  # fmt: skip

    def fold_momentum(self, index: int, m: Tensor, beta1: float) -> None:
        """m of the last step, where no message received holds it."""
        self.view(self._first, index).add_(m, alpha=beta1)

    def copy_parameters_to_master(self) -> None:
        if self._master is not None:
            for i, p in enumerate(self.params):
                self.view(self._master, i).copy_(p.detach())
        self.master_is_true = True

    def choose_chunks(self) -> int:
        """A collective call where "auto" has to be measured. Under a tensor scale the number of chunks is in the
        numerics (one scale a message), so that nothing measured may choose it."""
        if self.options.chunks != "auto":
            return self.options.chunks
        if self.options.scale == "tensor":
            return 1
        if self.options.overlap:  # what leaves early matters more than what a chunk costs
            return max(self._possible_chunks())
        return choose_chunks(
            self.transport, sum(self.numels), self.device, self.options.scale, self.options.norm, self.layout.block_size
        )

    def freeze(self, rows: Sequence[Hyper]) -> dict[int, int]:
        """Stage 2 begins, with the numbers of each group at this step. Of each parameter that has coordinates without
        a variance: how many."""
        chunks = self.choose_chunks()
        without = {}
        for i, group in enumerate(self.groups):
            self.view(self._first, i).mul_(rows[group].beta1)
            v = floored_(self.view(self._second, i), self.options.variance_floor)
            without[i] = freeze_variance_(v, rows[group], self.options.dead)
        self.begin_exchange(chunks)
        return {i: count for i, count in without.items() if count}

    def begin_exchange(self, chunks: int) -> None:
        """Cut for `chunks`, with the residual in the place of exp_avg and d in that of exp_avg_sq."""
        self.layout = self._cut(chunks)
        if self.layout.elements > self._room:
            raise AssertionError(f"{chunks} chunks were not planned for")
        self.exchange = Exchange(
            self.layout, self.transport, self.device, self.options.scale, self.options.norm, value=self.exp_avg
        )
        self.mark_live()

    def variance(self) -> Tensor | None:
        """What is kept of it: in stage 2 Adam has only d."""
        return None if self.exchange else self.exp_avg_sq

    def mark_live(self) -> None:
        """Where d is 0 a coordinate never moves, and stays out of every scale."""
        assert self.exchange is not None
        still = any(bool((self.view(self.d, i) == 0).any()) for i in range(len(self.params)) if self.numels[i])
        self.exchange.live = packed(self.d != 0) if still else None

    def _cut(self, chunks: int) -> Layout:
        return Layout(
            self.numels,
            groups=self.groups,
            block_size=self.options.block_size,
            ranks=self.transport.size,
            chunks=chunks,
        )

    def _possible_chunks(self) -> list[int]:
        if self.options.chunks != "auto":
            return [self.options.chunks]
        return candidates(sum(self.numels), self.transport.size, self.options.block_size)

    def _zeros(self) -> Tensor:
        return torch.zeros(self._room, dtype=torch.float32, device=self.device)


def packed(mask: Tensor) -> Tensor:
    """uint8 [elements / 8], as numpy.packbits(..., bitorder="little")."""
    bits = np.packbits(mask.cpu().numpy(), bitorder="little")
    return torch.from_numpy(bits).to(mask.device)


def floored_(v: Tensor, floor: float) -> Tensor:
    """v = max(v, floor mean(v)) in place where v is not 0, the mean over those.

    A coordinate shares its block's scale: with a variance far below the others' its steps would be the others' signs,
    magnified by its own d. Embeddings of rare words are such; exact zeros are `dead`.
    """
    live = int(torch.count_nonzero(v))
    if floor and live:
        lowest = floor * float(v.sum(dtype=torch.float64)) / live
        v.masked_fill_((v > 0) & (v < lowest), lowest)
    return v


def freeze_variance_(v: Tensor, h: Hyper, dead: Dead) -> int:
    """v = 1 / (sqrt(v) bias2 + eps) in place, bias2 = 1 / sqrt(1 - beta2^t); how many coordinates had no variance.

    Those get the value of the mean of the others ("floor"), or 0, with which they never move: always so where a
    parameter has no live coordinate to take a mean of.
    """
    without = v == 0
    count = int(without.sum())
    floor = 0.0
    if dead == "floor" and 0 < count < v.numel():
        mean = float(v.sum(dtype=torch.float64)) / (v.numel() - count)
        floor = 1 / (mean**0.5 * h.bias2 + h.eps)
    v.sqrt_().mul_(h.bias2).add_(h.eps).reciprocal_()
    if count:
        v.masked_fill_(without, floor)
    return count
