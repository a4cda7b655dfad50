"""The variants that are compiled ahead of time, each pass on a workload of its own, against the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from onebit.kernels import cpu, gpu
from onebit.kernels.gpu import aot
from onebit.kernels.passes import PASSES
from onebit.kernels.tuning.workload import HYPER, Workload
from tests.kernels.agreement import ROUNDED
from tests.kernels.cases import HALF_PLACE
from tests.kernels.compare import assert_close_or_nan, tensors_of

NAMES = tuple(aot.every_variant())
SUMMED = ("squares", "sums", "scales", "average", "residual", "coefficient")  # words in the names of what has rounding
Around = Callable[[Workload], AbstractContextManager[object]]

__all__ = ["NAMES", "PASSES", "check"]


def check(each: str, name: str, around: Around) -> None:
    """One pass of a variant. What no sum is in is equal bit for bit."""
    ours, theirs = (aot.every_variant()[name] for _ in range(2))
    with around(ours):
        ours.passes(gpu)[each].run()
    theirs.passes(cpu)[each].run()
    found = tensors_of(ours)
    for what, wanted in tensors_of(theirs).items():
        assert_close_or_nan(found[what], wanted, *_tolerance(each, what, theirs))


def _tolerance(each: str, what: str, workload: Workload) -> tuple[float, float]:
    """Relatively, and of what size at least."""
    if each == "lamb_warmup" and what.startswith(("params", "master")):
        places = 0.0 if what == "master" else 2 * HALF_PLACE[workload.dtype]
        return 2 * ROUNDED + places, 10 * HYPER.lr
    if any(word in what for word in SUMMED):
        return ROUNDED, 0.2 if "residual" in what else 0.0  # a scale of what residuals are made of
    return 0.0, 0.0
