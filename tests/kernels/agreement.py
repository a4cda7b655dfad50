"""A GPU's passes against the CPU's, which are held by a float64 oracle: what is equal bit for bit, what nearly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from onebit.kernels.data.layout import Span
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Messages
from onebit.kernels.passes import PASSES, StepLimit, StepSquares
from tests.kernels.cases import HALF_PLACE, Case
from tests.kernels.compare import assert_all_close, assert_close, assert_close_or_nan, numpy, tensors_of
from tests.kernels.world import World

ROUNDED = 1e-6  # another order of the same sum


OF_SUMS = ("squares", "sums")  # by name: what every pass leaves that is a sum
OF_MESSAGES = ("compress", "average", "quantize", "average_codes")  # see check_messages
OF_CODES = ("dequantize, 4 bits", "dequantize, 8 bits")
OTHERS = [each for each in PASSES if each not in (*OF_MESSAGES, "dequantize")]
COMPARED = [*OTHERS, "lamb_statistics, masked and scaled", *OF_CODES]


@dataclass(frozen=True)
class Otherwise:
    """Arguments of a pass in place of the world's, and what is done to the world before."""

    options: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[World], object] = lambda w: None


def spoil(world: World) -> None:
    """The first gradient of every parameter is NaN."""
    for g in world.g:
        if g is not None:
            g[:1] = np.nan


def flag_last_reply(world: World) -> None:
    """One message of many carries a flag: its shard stays as it is."""
    world.replies.flags[-1] = 1


def make_momentum_dense(world: World) -> None:
    """Whatever the case has."""
    world.momentum = world.flat(world.m)


NOT_FINITE = "scan, not finite"
# With less than they can be given, what few ask for, and what stops a step.
OTHERWISE = {
    NOT_FINITE: Otherwise(prepare=spoil),
    "adam_warmup, flagged": Otherwise(prepare=lambda w: w.flags.fill_(1)),
    "scan, no squares": Otherwise({"squares": None}),
    "adam_warmup, no sums": Otherwise({"sums": None}),
    "adam_update, no clip": Otherwise({"clip": None}),
    "adam_update, flagged": Otherwise(prepare=flag_last_reply),
    "lamb_statistics, denominator": Otherwise({"ratio": "denominator"}),
    "zero_one_full, no residual": Otherwise({"residual": None}),
    "zero_one_full, dense momentum": Otherwise(prepare=make_momentum_dense),
    "zero_one_update, no clip": Otherwise({"clip": None}),
    "zero_one_local, no residual": Otherwise({"residual": None, "clip": None}),
    "zero_one_sync, no clip": Otherwise({"clip": None}),
}
Around = Callable[[World], AbstractContextManager[object]]  # the passes run when it has ended, at the latest


def check_pass(each: str, case: Case, name: str, around: Around = nullcontext) -> None:
    """One of COMPARED or OTHERWISE. Every byte is equal but for sums, and what is divided by sums."""
    (of, _, way), how = each.partition(", "), OTHERWISE.get(each, Otherwise())
    inputs = {"masked": way.startswith("masked"), "zeros": of.startswith("zero_one")}
    inputs |= {"bits": int(way[0])} if of == "dequantize" else {}
    ours, theirs = (World(case, at, **inputs) for at in (name, "cpu"))
    for world in (ours, theirs):
        how.prepare(world)
    with around(ours):
        ours.run(of, **how.options)
    theirs.run(of, **how.options)
    by_norms, found = of == "lamb_warmup", tensors_of(ours)
    apart = ("params", "master", "anchor") if ours.cuts_off else ("params", "master") if by_norms else ()
    for what, want in tensors_of(theirs).items():
        if not what.startswith(apart) or (what == "anchor" and case.master):
            summed = what in OF_SUMS or (by_norms and "state" in what)
            assert_close_or_nan(found[what], want, ROUNDED if summed else 0.0)
    lr = [10 * h.lr if by_norms else np.abs(x) for h, x in zip(theirs.hypers, theirs.x, strict=True)]
    x = 2 * ROUNDED * by_norms + 2 * theirs.half_place * bool(apart)
    assert_all_close(ours.moved(), theirs.moved(), x, lr)
    assert not ours.state.counter.any()


def cancel(world: World) -> None:
    """Random numbers do not have sums that are 0 or -0, whose bit is that of a positive number."""
    for array in (*world.g, *world.m, *world.e):
        array[::3], array[1::3] = 0.0, -0.0
    world.scales64[:] = 0.0


def opposite(world: World, chunk: int, rank: int) -> Messages:
    """Messages of one scale, some of whose signs cancel; every other shard's last one has a flag."""
    received = world.received(chunk, rank)
    for row in range(received.rows):
        received.scales(row, world.layout.shard(chunk, rank)).fill_(0.5)
    received.flags[-1] = rank % 2
    return received


def check_messages(
    case: Case, name: str, *, bits: int = 1, masked: bool = False, zeros: bool = False, around: Around = nullcontext
) -> None:
    """compress and average, or quantize and average_codes. Residuals are what scales leave out; with a tensor scale
    they are c, bit for bit."""
    ours, theirs = worlds = [World(case, of, bits=bits, masked=masked) for of in (name, "cpu")]
    first = "compress" if bits == 1 else "quantize"
    for world in worlds if zeros else ():
        cancel(world)
    places = [divmod(row, case.ranks) for row in range(ours.rows)]
    received = opposite if zeros else World.received
    with around(ours):
        ours.run(first)
        averaged = [ours.average(*place, received(ours, *place)) for place in places]
    theirs.run(first)
    whole = ours.layout.all()
    size = decoded_size(assert_same_messages(ours.sent, theirs.sent, whole), whole)
    for chunk in ours.chunks():
        found = ours.residuals[chunk.index], theirs.residuals[chunk.index]
        assert_same_residuals(*found, size[chunk.part], ours.interpreted)
    for place, (got, got_left) in zip(places, averaged, strict=True):
        want, want_left = theirs.average(*place, received(theirs, *place))
        shard = ours.layout.shard(*place)
        if want.flags.any():  # nothing else is written
            assert got.header.tolist() == want.header.tolist()
            continue
        size = decoded_size(assert_same_messages(got, want, shard), shard)
        assert_same_residuals(got_left, want_left, size, ours.interpreted)


def check_limit(case: Case, name: str, around: Around = nullcontext) -> None:
    """step_squares and step_limit, with all that they take and with less: every bit."""
    ours, theirs = (World(case, of) for of in (name, "cpu"))
    with around(ours):
        found = limits(ours)
    assert [numpy(each).tolist() for each in found] == [numpy(each).tolist() for each in limits(theirs)]


def limits(world: World) -> list[torch.Tensor]:
    """What they write."""
    layout, source, found = world.layout, np.random.default_rng(1), []
    numels = torch.tensor(world.case.numels, device=world.device)

    def filled(size: int, dtype: torch.dtype, values: np.ndarray | float = np.nan) -> torch.Tensor:
        tensor = torch.full((size,), float("nan"), dtype=dtype)
        tensor[: np.size(values)] = torch.from_numpy(np.asarray(values).astype(np.float32))
        return tensor.to(world.device)

    values = filled(layout.blocks, torch.float32, source.uniform(0, 1e6, layout.used_blocks))
    weight = filled(layout.parameters, torch.float32, source.uniform(0, 2, layout.parameters))
    for replies, weights, times, trusted in (
        (world.replies, weight, 1.5, 0.0),
        (None, weight, 1.5, 4.0),
        (None, None, 0.0, 0.0),
    ):
        squares, factor = (filled(layout.parameters, dtype) for dtype in (torch.float64, torch.float32))
        usual = filled(layout.parameters, torch.float32, source.normal(size=layout.parameters))
        shortened = torch.full((1,), -1, device=world.device)
        world.passes.run(StepSquares(layout.all(), values, replies, weights, squares))
        bounds = 0.5, times, trusted
        world.passes.run(StepLimit(layout.all(), squares, numels, replies, usual, *bounds, factor, shortened))
        found += [squares, usual, factor, shortened]
    return found


def assert_same_messages(ours: Messages, theirs: Messages, span: Span) -> np.ndarray:
    """Headers and bits bit for bit, scales to rounding where they are sums. Returns the scales."""
    assert ours.header.tolist() == theirs.header.tolist()
    assert ours.bits_of(span).tolist() == theirs.bits_of(span).tolist()
    scales = numpy(theirs.scales_of(span))
    assert_close(numpy(ours.scales_of(span)), scales, ROUNDED if theirs.format.bits == 1 else 0.0)
    return scales


def decoded_size(scales: np.ndarray, span: Span) -> np.ndarray:
    """The size that its block's scale decodes to, of every element; the largest of several scales."""
    return np.repeat(scales[0].reshape(span.count, -1).max(1), span.lengths())


def assert_same_residuals(ours: Residual, theirs: Residual, size: np.ndarray, cut: bool) -> None:
    """cut: whether ours are cut off to 16 bits where others round."""
    if theirs.value.dtype == torch.bfloat16:
        assert_close(numpy(ours.value), numpy(theirs.value), 2 * HALF_PLACE[torch.bfloat16] if cut else 0.0)
    elif theirs.scale is None:
        assert_close(numpy(ours.value), numpy(theirs.value), ROUNDED, size)
    else:
        assert numpy(ours.value).tolist() == numpy(theirs.value).tolist()
        assert_close(numpy(ours.scale), numpy(theirs.scale), ROUNDED)
        assert not ours.counter.any()
