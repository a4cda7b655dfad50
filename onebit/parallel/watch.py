"""Now and then: do all ranks still hold the same bits? A difference is an error on every rank, or is put right on all.

Ranks that hold the same parameters and average the same messages move alike, bit for bit. A bit that flips in one
rank's memory, or on its way to one rank, ends that, and nothing else would tell: each rank trains on, on a model of its
own. What is compared is all that must be equal, by a checksum of each tensor; residuals and buffers of the model are
each rank's own.

A check reads 4 + 4 + 1/8 bytes an element in stage 2 of 1-bit Adam, and sends 8 bytes a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onebit.collectives.agreement import Mismatch, all_gather_values, find_mismatches, listed
from onebit.collectives.transport.protocol import Transport
from onebit.warning import warn

if TYPE_CHECKING:
    from onebit.optim.optimizer import OneBitOptimizer

_PIECE = 2**20  # bytes of a rank's message in a repair: all ranks' messages are in memory at once
_COUNT = "the count of steps"


class DivergenceError(RuntimeError):
    """Ranks that must hold the same bits do not."""


class Watch:
    """Counts the calls of `step`, which are the same on all ranks, and looks after every `check_every` of them."""

    def __init__(self) -> None:
        self._steps = 0

    def look(self, optimizer: OneBitOptimizer) -> None:
        """At the end of a step. A collective call where a check is due."""
        every, transport = optimizer._options.check_every, optimizer._transport
        self._steps += 1
        if not every or self._steps % every or transport.size == 1:
            return
        tensors = dict(shared(optimizer))
        odd = find_mismatches(transport, list(tensors.values()), "comparing the ranks' state (all-gather)")
        if not odd:
            return
        names = list(tensors)
        told = f"after {optimizer.steps} steps the ranks do not hold the same bits: {_told(names, odd)}"
        hopeless = _hopeless(names, odd)
        if optimizer._options.on_divergence == "raise" or hopeless:
            advice = hopeless or 'Or go on with what most ranks hold: on_divergence="broadcast"'
            raise DivergenceError(f"{told}. Load the last checkpoint on all ranks. {advice}")
        for i, one in odd.items():
            repair(transport, tensors[names[i]], one)
        if transport.rank == 0:
            warn(f"{told}. They were given what most ranks hold. If it comes again, look at their memory and network")


def shared(optimizer: OneBitOptimizer) -> Iterator[tuple[str, Tensor]]:
    """All that is equal on every rank, by name: each parameter and its state, then what parameters have together."""
    for space in optimizer._spaces:
        for i, p in enumerate(space.params):
            name = optimizer._name(p)
            yield f"parameter {name}", p.detach()
            yield from ((f"{k} of parameter {name}", v) for k, v in space.views(i).items() if k != "residual")
    for space in optimizer._spaces:
        yield from ((f"{k} of all {space.dtype} parameters", v) for k, v in space.together().items())
    yield _COUNT, optimizer._counts


def repair(transport: Transport, tensor: Tensor, odd: Mismatch) -> None:
    """Give `tensor` on the odd ranks the bits of a usual one, in pieces: a collective call."""
    own = tensor.data.view(-1).view(torch.uint8)  # .data: what is written is no change by the user
    for piece in own.split(_PIECE):
        everyone = all_gather_values(transport, piece, "putting right what differs (all-gather)")
        if transport.rank in odd.ranks:
            piece.copy_(everyone[odd.usual])


def _told(names: Sequence[str], odd: Mapping[int, Mismatch]) -> str:
    first, *others = sorted(odd)
    text = f"{names[first]} has other values on {listed(odd[first].ranks)} than on rank {odd[first].usual}"
    if others:
        ranks = listed(sorted({rank for i in others for rank in odd[i].ranks}))
        text += f", and {len(others)} more tensors differ on {ranks} (the first is {names[others[0]]})"
    return text


def _hopeless(names: Sequence[str], odd: Mapping[int, Mismatch]) -> str:
    """Why no rank can be given what others hold, if so."""
    if not all(one.majority for one in odd.values()):
        return "No values are held by more than half of the ranks, which alone would tell who is right"
    if any(names[i] == _COUNT for i in odd):
        return "The ranks have not even taken the same steps"
    return ""
